"""When calls are captured, and what happens where they cannot be. CUDA is played by a fake here: what is said
of a graph is what is asked of PyTorch, not what a GPU makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from constate.kernels.triton.tape.replay import Replay


class Card:
    """What a GPU was asked to do. Capturing runs Python's side of the calls and nothing on the card, so that
    the calls only count for it outside of a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False):
        self.told: list[str] = []
        self.capturing = False
        card, on = self, monkeypatch.setattr

        class Stream:
            def wait_stream(self, other: Stream) -> None:
                card.told.append("wait")

        class Graph:
            def replay(self) -> None:
                card.told.append("replay")

        @contextmanager
        def graph(made: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
            assert capture_error_mode == "thread_local" and isinstance(stream, Stream)
            card.told.append("capture")
            card.capturing = True
            before, self.current = self.current, stream
            try:
                yield
                if fails:  # PyTorch's own then skips what makes the caller's stream the current one again
                    raise RuntimeError("operation not permitted when stream is capturing\nmore")
                self.current = before
            finally:
                card.capturing = False

        @contextmanager
        def current(stream: Stream) -> Iterator[None]:
            before, self.current = self.current, stream
            try:
                yield
            finally:
                self.current = before

        self.callers = self.current = Stream()
        on(torch.cuda, "Stream", Stream)
        on(torch.cuda, "CUDAGraph", Graph)
        on(torch.cuda, "graph", graph)
        on(torch.cuda, "current_stream", lambda device=None: self.current)
        on(torch.cuda, "stream", current)
        on(torch.cuda, "device", lambda device: nullcontext())
        on(torch.cuda, "synchronize", lambda device: None)
        on(torch.cuda, "is_current_stream_capturing", lambda: self.others)
        self.others = False

    def call(self) -> None:
        self.told.append("captured" if self.capturing else "call")


CUDA = torch.device("cuda", 0)


def test_the_first_step_warms_up_the_second_is_captured_and_all_others_replayed(monkeypatch: Any) -> None:
    card = Card(monkeypatch)
    replay = Replay([card.call, card.call], CUDA)
    replay()
    assert card.told == ["wait", "call", "call", "wait"] and replay.reason is None
    card.told.clear()
    replay()
    assert card.told == ["capture", "captured", "captured", "replay"]  # what was captured has not run
    card.told.clear()
    replay()
    assert card.told == ["replay"]


def test_a_capture_that_fails_leaves_a_reason_and_every_step_runs_once(monkeypatch: Any) -> None:
    card = Card(monkeypatch, fails=True)
    replay = Replay([card.call], CUDA)
    replay()
    card.told.clear()
    replay()
    assert card.told == ["capture", "captured", "call"] and card.current is card.callers
    assert replay.reason == (
        "the step could not be captured: operation not permitted when stream is capturing"
    )
    card.told.clear()
    replay()
    assert card.told == ["call"]


def test_what_is_not_to_be_captured_never_is(monkeypatch: Any) -> None:
    card = Card(monkeypatch)
    replay = Replay([card.call], CUDA, "a step of a mixer is Python's")
    for _ in range(3):
        replay()
    assert card.told == ["call"] * 3 and replay.reason == "a step of a mixer is Python's"


def test_whoever_captures_a_step_gets_its_calls(monkeypatch: Any) -> None:
    card = Card(monkeypatch)
    replay = Replay([card.call], CUDA)
    replay()
    replay()
    card.told.clear()
    card.others = True
    replay()
    assert card.told == ["call"]


def test_a_cpu_has_no_graphs() -> None:
    told: list[str] = []
    replay = Replay([lambda: told.append("call")], torch.device("cpu"))
    replay()
    replay()
    assert told == ["call"] * 2 and replay.reason == "no graphs on cpu"
