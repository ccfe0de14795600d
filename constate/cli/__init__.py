"""The command `constate`: what is asked on the command line becomes calls of the library.

Knows how a command is spelled and how its results are printed, and nothing of how they are computed.
Nothing here imports torch before a command runs, so that `--help` is quick.

Exit status: 0 done, 1 a check failed, 2 the request was wrong, with one line on standard error that says
what was given and what was wanted. Results go to standard output, all else to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from . import bench, compare, convert, doctor, generate, gpu, models, quality, train

app = typer.Typer(
    name="constate",
    help="Language models whose memory does not grow: write text with them, weigh, time and train them.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("models")(models.models)
app.command("convert")(convert.convert)
app.command("doctor")(doctor.doctor)
app.command("train")(train.train)
app.command("quality")(quality.quality)
app.command("compare")(compare.compare)
app.add_typer(bench.app, name="bench")
bench.app.command("gpu")(gpu.gpu)

WRONG = 2


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def constate(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (None: this process's) and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        return app(given, prog_name="constate", standalone_mode=False) or 0
    except typer.TyperException as error:
        return _refuse(error.format_message())
    except (ValueError, OSError) as error:  # the library's way to say that a request is wrong
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130


def _refuse(message: str) -> int:
    print("constate:", " ".join(message.split()), file=sys.stderr)
    return WRONG
