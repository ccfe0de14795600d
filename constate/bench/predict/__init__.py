"""What a model costs, on paper: from a config alone, for machines by name.

    paper(config("llama-2-13b"), convention="lecture").total_bytes(1024, rows=16)

`published` knows configs, `paper` sums what a model holds and moves, `hardware` what machines do, `roofline`
joins the two, `limits` finds where one cost overtakes another, `rows` are those of `constate bench predict`.
"""

from .hardware import NAMED, Hardware, hardware, this_machine
from .limits import crossover, largest_context, largest_rows
from .paper import CONVENTIONS, Paper, Work, paper
from .published import config, names, positions
from .roofline import Bound, bound
from .rows import PHASES, predict

__all__ = [
    "CONVENTIONS",
    "NAMED",
    "PHASES",
    "Bound",
    "Hardware",
    "Paper",
    "Work",
    "bound",
    "config",
    "crossover",
    "hardware",
    "largest_context",
    "largest_rows",
    "names",
    "paper",
    "positions",
    "predict",
    "this_machine",
]
