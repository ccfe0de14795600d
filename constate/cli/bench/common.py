"""Options that the commands of `constate bench` share."""

from __future__ import annotations

from typing import Annotated

import typer

Rows = Annotated[str, typer.Option(metavar="N,N,...", help="Sequences at once.")]
