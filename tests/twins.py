"""transformers' model and ours from one folder: how a twin is made, and what must hold for every family.

A family's test file says which configs are hostile and which odd points there are. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from constate.core.model import Model
from constate.core.weights import export
from constate.loading import load
from constate.spans import Spans
from tests.referee import same_logits
from tests.test_twins import LENGTHS, VOCAB, Removal, _spread, changed, ids

__all__ = ["LENGTHS", "VOCAB", "Removal", "Twin", "Twins", "changed", "ids", "moved"]
__all__ += ["same_decoding", "same_export", "same_forward"]

Removals = Callable[[Model], list[Removal]]


@dataclass(frozen=True)
class Twin:
    """transformers' model, and ours, read from the folder that it wrote."""

    theirs: Any
    ours: Model
    folder: Path

    @torch.no_grad()
    def whole(self, prompt: Tensor) -> Tensor:
        """Their logits of a prompt, without a cache."""
        return self.theirs(prompt[None], use_cache=False).logits[0].float()


class Twins:
    """Twins by name, each made once: `configs` gives a model_type and the settings of transformers' config.
    `finish` moves what `_spread` leaves where it hides a fault."""

    def __init__(
        self,
        configs: dict[str, tuple[str, dict[str, Any]]],
        factory: pytest.TempPathFactory,
        finish: Callable[[Any], None] = lambda model: None,
    ):
        self.configs, self.factory, self.finish = configs, factory, finish
        self.made: dict[str, Twin] = {}

    def __call__(self, name: str) -> Twin:
        if name not in self.made:
            transformers = pytest.importorskip("transformers")
            kind, settings = self.configs[name]
            config = transformers.AutoConfig.for_model(kind, **settings)
            torch.manual_seed(0)
            theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                _spread(theirs)
                self.finish(theirs)
            folder = self.factory.mktemp("twin")
            theirs.save_pretrained(folder)
            self.made[name] = Twin(theirs, load(folder, backend="torch"), folder)
        return self.made[name]


def same_forward(twin: Twin, lengths: Sequence[int] = LENGTHS, pieces: int = 50) -> None:
    """Our forward, whole and in pieces, beside their whole one."""
    for n in lengths:
        want = twin.whole(ids(n))
        same_logits(twin.ours(ids(n), Spans.of([n])), want, f"{n} tokens")
        cache = twin.ours.init_cache(1)
        got = [twin.ours(piece, Spans.of([len(piece)]), cache) for piece in ids(n).split(pieces)]
        same_logits(torch.cat(got), want, f"{n} tokens in pieces of {pieces}")


def same_decoding(
    twin: Twin, *, cached: bool = True, lengths: Sequence[int] = LENGTHS, steps: int = 8
) -> None:
    """Greedy steps after a prompt; beside their whole forward and, `cached`, beside their steps."""
    for n in lengths:
        prompt, cache = ids(n, seed=n), twin.ours.init_cache(1)
        logits = twin.ours(prompt, Spans.of([n]), cache, at="last")
        with torch.no_grad():
            their = twin.theirs(prompt[None], use_cache=True) if cached else None
            for i in range(steps):
                if their is not None:
                    same_logits(logits, their.logits[:, -1].float(), f"{n} tokens, step {i}")
                token = logits.argmax(-1)
                prompt = torch.cat([prompt, token])
                if their is not None:
                    kept = {"past_key_values": their["past_key_values"]}
                    their = twin.theirs(token[None], use_cache=True, **kept)
                logits = twin.ours.step(token, cache)
                if their is None:
                    same_logits(logits, twin.whole(prompt)[-1:], f"{n} tokens, step {i}, whole")
        same_logits(logits, twin.whole(prompt)[-1:], f"{n} tokens and {steps} more")


def same_export(twin: Twin, without: Sequence[str] = ()) -> None:
    """Our parameters written back are the file's tensors: the same names, bit for bit. `without` are endings
    of names that hold nothing but what the config says."""
    files = twin.folder.glob("*.safetensors")
    stored = {k: t for f in files for k, t in load_file(f).items() if not k.endswith(tuple(without))}
    architecture = twin.ours.architecture
    assert architecture is not None
    written = export(architecture.weights(twin.ours.config), dict(twin.ours.named_parameters()))
    assert written.keys() == stored.keys(), sorted(written.keys() ^ stored.keys())
    for name, tensor in stored.items():
        assert torch.equal(written[name], tensor), f"{name} is not what it was"


@torch.no_grad()
def moved(twin: Twin, removals: Removals, n: int = 60) -> float:
    """How far our logits leave theirs, at the most, when `removals` are made; they must agree without."""
    prompt = ids(n)
    want = twin.whole(prompt)
    taken = removals(twin.ours)
    assert taken, "nothing was removed"
    with ExitStack() as stack:
        for owner, name, value in taken:
            stack.enter_context(changed(owner, name, value))
        far = float((twin.ours(prompt, Spans.of([n])) - want).abs().max())
    same_logits(twin.ours(prompt, Spans.of([n])), want, "put back")
    return far
