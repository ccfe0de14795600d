"""A model's decode step written onto a tape, for one cache: prepared once, replayed for every token.

What a mixer's `record` writes runs as C, or on a GPU as Triton kernels and one CUDA graph; a mixer without
one runs its own step between two pieces of tape.
A recording holds addresses of the cache's tensors and copies of what was computed from parameters: it is
good for as long as both stay what they were, which `fits` tells. The residual stream and all activations
are float32, whatever the weights are stored as. Knows blocks and norms; no mixer, and no tape's inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..spans import Spans
from .mixer import Call
from .norms import LayerNorm, RMSNorm
from .state import State

if TYPE_CHECKING:
    from .cache import Cache
    from .model import Branch, Model


class Recording:
    """`step` of `model` over `cache`."""

    def __init__(self, model: Model, cache: Cache):
        begin = model.ops.tape
        assert begin is not None, f"backend {model.ops.backend} records no step"
        self.ops, self.spans = model.ops, Spans.ones(cache.rows, cache.past.device)
        self.weights = [
            (module._parameters, name, p, p.data_ptr(), _version(p))
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False)
        ]
        self.tensors = list(_tensors(cache))
        self.tape = begin(cache.rows, cache.past)
        self.x = self.tape.vector(model.embed.embedding_dim)
        if model.embed_shared:
            self.tape.shared["embedding"] = self.tape.vector(model.embed.embedding_dim)
        branch: Branch | None = None
        y = said = self.x
        for following, state in zip(model.branches, cache.states, strict=True):
            y, branch = self._norm(following.norm, branch, y, said), following
            said = self._post(branch.post, branch.mixer.written(self.tape, y, state))
        self.logits = model.head.record(self.tape, self._norm(model.norm, branch, y, said))

    def fits(self, model: Model) -> bool:
        """Whether this was recorded from these weights, as they are now, and from the cache's memory."""
        return (
            self.ops is model.ops
            and all(getattr(owner, name) is t for owner, name, t in self.tensors)
            and all(
                owner.get(name) is p and p.data_ptr() == address and _version(p) == version
                for owner, name, p, address, version in self.weights
            )
        )

    @property
    def reason(self) -> str | None:
        """Why a step is not the replay of one CUDA graph; None where it is, from the third step on."""
        return self.tape.reason

    def step(self, model: Model, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits (rows, vocab) of one token a row; the states move on, the cache's lengths do not."""
        self.tape.call = call = Call(self.spans, self.ops, cache.lengths, cache.past, cache.states)
        self.x.copy_(model.enter(tokens, call))
        if model.embed_shared:
            self.tape.shared["embedding"].copy_(self.x)
        self.tape.run()
        return model.scaled(self.logits.clone())

    def _norm(self, norm: nn.Module, branch: Branch | None, y: Tensor, said: Tensor) -> Tensor:
        """Add to the stream what the branch before said of y, and norm the sum."""
        tape, x, added = self.tape, self.x, {}
        if branch is not None:
            added = {"keep": branch.keep, "kept": y if branch.from_norm else x, "scale": branch.scale}
        if isinstance(norm, RMSNorm | LayerNorm):
            return norm.record(tape, x, said if added else None, **added)
        if added:
            tape.add(x, said, **added)
        if isinstance(norm, nn.Identity):
            return x  # which nobody changes before the branch has said something of it
        normed = tape.vector(x.shape[1])
        tape.between(lambda: normed.copy_(norm(x)), x, normed)
        return normed

    def _post(self, norm: nn.Module | None, said: Tensor) -> Tensor:
        if norm is None:
            return said
        if isinstance(norm, RMSNorm | LayerNorm):
            return norm.record(self.tape, said)
        self.tape.between(lambda: said.copy_(norm(said)), said)
        return said

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copy of a cache records anew: its memory is elsewhere."""
        return type(None), ()


def recorded(model: Model, cache: Cache) -> Recording | None:
    """The recording of this cache, made now if there is none that fits; None where the backend has no tape,
    or for a dtype that it does not read."""
    tape = model.ops.tape
    if tape is None or model.state_dtype != torch.float32 or torch.compiler.is_compiling():
        return None
    if cache.recording is None or not cache.recording.fits(model):
        # Memory that is made in inference mode could not be written to in a later step outside of it.
        with torch.inference_mode(False), torch.no_grad():
            cache.recording = Recording(model, cache) if _readable(model, tape.dtypes) else None
    return cache.recording


def _readable(model: Model, dtypes: Collection[torch.dtype]) -> bool:
    """Whether a tape's kernels read the weights as they are, matrices in one of `dtypes`: what modules
    declare float32 is no longer so in a model that PyTorch's own `.bfloat16()` or `.double()` has cast."""
    declared = ((m, name) for m in model.modules() for name in getattr(type(m), "float32", ()))
    held = (m._parameters.get(name) for m, name in declared)
    exact = all(p is None or p.dtype in (torch.float32, torch.int8) for p in held)
    return exact and model.dtype in dtypes


def _version(p: Tensor) -> int:
    """How often PyTorch saw the tensor written to: not through `.data`, and never where it was made in
    inference mode. After such a write a new cache is right, and an older one steps by the old rates."""
    return 0 if p.is_inference() else p._version


def _tensors(state: State) -> Iterator[tuple[State, str, Tensor]]:
    """Every tensor of a state, and the record that holds it under which name."""
    for f in fields(state):
        value: Any = getattr(state, f.name)
        if isinstance(value, Tensor):
            yield state, f.name, value
        for child in value if isinstance(value, tuple) else (value,):
            if isinstance(child, State):
                yield from _tensors(child)
