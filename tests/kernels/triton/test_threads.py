"""What the interpreter cannot go wrong with: a program has many threads, and a launch no order of programs.

A block of fewer entries than a program has threads is held by several of them, which all load it: what is
written in place, and summed up over threads afterwards, has to be read by all before. And whatever one
program writes no other of its launch reads, so that the order in which they run does not show.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from constate.kernels.triton.selective import selective_step
from constate.kernels.triton.tape import Tape
from tests.kernels.triton.test_tape import recorder, started
from tests.models import tokens
from tests.referee import same_logits, same_state

Event = tuple[str, set[int]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Loads and stores, with the addresses that they touch, and barriers, of all programs in their order."""
    seen: list[Event] = []

    def watched(name: str, kind: str) -> None:
        plain: Callable[..., object] = getattr(InterpreterBuilder, name)

        def call(self, *given):
            touched: set[int] = set()
            if given:
                at, mask = (x.data.reshape(-1) for x in (given[0], given[1 if kind == "load" else 2]))
                touched = set(at[mask.astype(bool)].tolist())
            seen.append((kind, touched))
            return plain(self, *given)

        monkeypatch.setattr(InterpreterBuilder, name, call)

    watched("create_masked_load", "load")
    watched("create_masked_store", "store")
    watched("create_barrier", "barrier")
    return seen


def read_by_all_before_they_are_written(events: list[Event], memory: Tensor) -> bool:
    """Whether a barrier stands between the first load and the first store of each number of `memory`."""
    open_, closed, stored = set(), set(), set()
    every = set(range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, memory.itemsize))
    for kind, touched in events:
        if kind == "load":
            open_ |= (touched & every) - closed
        elif kind == "barrier":
            closed |= open_
            open_ = set()
        elif touched & open_:
            return False
        else:
            stored |= touched & every
    assert stored == every, "all of it is written"
    return True


def test_a_history_is_read_by_all_threads_before_it_moves(events: list[Event]) -> None:
    """A head of 16 channels behind the convolution, normed: its squares are summed up over threads."""
    tape, history = recorder(), torch.randn(2, 3, 32)
    y = tape.short_conv(tape.vector(32).fill_(1.0), torch.ones(32, 4), None, history, silu=True)
    tape.unit(y, 2)
    tape.run()
    assert [work.name for work in tape.works] == ["jobs"], "one job"
    assert read_by_all_before_they_are_written(events, history)


def test_a_stream_is_read_by_all_threads_before_a_sum_takes_its_place(events: list[Event]) -> None:
    tape = recorder()
    x, y = (tape.vector(32).fill_(1.0) for _ in range(2))
    tape.add_norm(x, y, torch.ones(32), 1e-5)
    tape.run()
    assert read_by_all_before_they_are_written(events, x)


def test_few_states_are_read_by_all_threads_before_they_are_written(events: list[Event]) -> None:
    x, b, state = torch.ones(2, 32), torch.ones(2, 2), torch.ones(2, 32, 2)
    selective_step(x, x, -torch.ones(32, 2), b, b, state)
    assert read_by_all_before_they_are_written(events, state)


@pytest.mark.parametrize("name", ["composed", "qwen3_next", "rwkv7", "llama", "mamba2", "composed latent"])
def test_programs_of_a_launch_run_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last first, twice: also who arrives last is then another."""
    plain = InterpreterBuilder.set_grid_idx

    def backwards(self, *at):
        plain(self, *(n - 1 - i for n, i in zip(self.grid_dim, at, strict=True)))

    (model, cache), (other, same) = started(name, taped=True), started(name, taped=False)
    assert model.ops.tape is Tape
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", backwards)
    for given in tokens(4, seed=1).split(2):
        same_logits(model.step(given, cache), other.step(given, same))
    same_state(cache, same)
