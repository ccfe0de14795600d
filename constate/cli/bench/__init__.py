"""`constate bench`: memory and speed, predicted and measured. A file a command."""

from __future__ import annotations

import typer

from . import memory, predict, speed

app = typer.Typer(help="Measure memory and speed, or predict them.", no_args_is_help=False)
app.command("memory")(memory.memory)
app.command("speed")(speed.speed)
app.command("predict")(predict.predict)
