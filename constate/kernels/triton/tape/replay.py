"""A list of calls over and over: one after the other, or, on a GPU, captured once as a CUDA graph.

A graph keeps the addresses that its kernels were given, so whoever makes the calls sees to it that they stay.
Knows streams and graphs; nothing of what is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Replay:
    """`reason` says why the calls are made one by one, None where a graph is replayed (or will be).

    The first time they are made one by one on the stream that the second captures: kernels are compiled and
    libraries have their workspaces by then, and every time is a step that counts, so that none is wasted on
    warming up. Whoever captures a step themselves gets the calls one by one.
    """

    def __init__(
        self, calls: Sequence[Callable[[], object]], device: torch.device, reason: str | None = None
    ):
        self.calls, self.device = calls, device
        self.reason = reason or (None if device.type == "cuda" else f"no graphs on {device.type}")
        self.graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> None:
        if self.reason is not None or torch.cuda.is_current_stream_capturing():
            self._each()
        elif self.graph is not None:
            self.graph.replay()
        elif self._stream is None:
            self._warm()
        else:
            self._capture(self._stream)

    def _each(self) -> None:
        for call in self.calls:
            call()

    def _warm(self) -> None:
        with torch.cuda.device(self.device):
            self._stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._each()
            current.wait_stream(self._stream)

    def _capture(self, stream: torch.cuda.Stream) -> None:
        """Capturing runs nothing: what was captured is then replayed for this step."""
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.device(self.device),
                # A capture that fails leaves its stream the current one: here the caller's comes back.
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                # Other threads may allocate meanwhile: their calls are none of this graph's.
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self._each()
        except RuntimeError as error:
            self.reason = f"the step could not be captured: {error}".splitlines()[0]
            torch.cuda.synchronize(self.device)
            self._each()
            return
        self.graph = graph
        graph.replay()
