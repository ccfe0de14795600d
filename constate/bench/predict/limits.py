"""Where one cost overtakes another: lengths and numbers of rows at which the answer changes.

Pure arithmetic over models on paper, and a search where no formula holds for all of them. Knows no command.
"""

from __future__ import annotations

from collections.abc import Callable

from .hardware import Hardware
from .paper import Paper

FAR = 2**40  # tokens, beyond any context


def crossover(lean: Paper, growing: Paper, *, traffic: bool = True) -> int | None:
    """The least context at which a row of `growing` costs at least what a row of `lean` does: in bytes that
    a decode step moves (a recurrent state is read and written, keys and values are read), or where not
    `traffic` in bytes held. Weights are left out. None: it never does."""
    times = 2 if traffic else 1

    def cost(model: Paper, context: int) -> int:
        held = model.held(context)
        return held["kv"] + times * (held["state"] + held["conv"])

    return first(lambda context: cost(growing, context) >= cost(lean, context))


def weight_balance(model: Paper, context: int) -> float:
    """The number of rows whose states, keys and values take as long to move in a decode step as the
    weights: above it the cache is what a step waits for."""
    work = model.work(1, context, 1)
    each = sum(work.moved.values())
    return model.weight_bytes / each if each else float("inf")


def ceiling(model: Paper, context: int, machine: Hardware) -> float:
    """Tokens a second of decode that no number of rows exceeds, on a machine with memory for them all."""
    moved = sum(model.work(1, context, 1).moved.values())
    arithmetic = machine.rate(model.dtype) / (2 * model.active_params)
    return min(arithmetic, machine.bandwidth / moved if moved else float("inf"))


def attention_overtakes(model: Paper) -> int | None:
    """The length of prompt whose attention (and scans) computes more than the weights do."""

    def outweighs(length: int) -> bool:
        work = model.work(length, 0, 1)
        return work.mixing_flops >= work.weight_flops

    return first(outweighs, 2**31)


def largest_context(model: Paper, rows: int, memory: int) -> int | None:
    """The most tokens a row may keep for `rows` rows and the weights to fit into `memory` bytes; None where
    no number is too many, 0 where not even that of one token does."""
    slope = model.row_bytes(FAR + 1) - model.row_bytes(FAR)  # once every window is full
    if slope:
        start = model.row_bytes(FAR) - slope * FAR
        most = ((memory - model.weight_bytes) // rows - start) // slope
        if most > 0 and model.row_bytes(most) == start + slope * most:
            return most
    over = first(lambda context: model.total_bytes(context, rows) > memory)
    return None if over is None else max(0, over - 1)


def largest_rows(model: Paper, context: int, memory: int) -> int | None:
    """The most rows of `context` tokens that fit beside the weights; None where a row keeps nothing."""
    each = model.row_bytes(context)
    return max(0, memory - model.weight_bytes) // each if each else None


def first(holds: Callable[[int], bool], far: int = FAR) -> int | None:
    """The least n >= 0 at which `holds`, which once true stays true; None where it fails at `far`."""
    if not holds(far):
        return None
    low, high = -1, far  # fails at low, holds at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
