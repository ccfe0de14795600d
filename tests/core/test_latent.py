"""Latent attention: the absorbed form beside the expanded one, in float64 and by the published sizes.

That both are what the paper says stands in test_mixers.py, on packed rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.latent import LatentAttention, LatentSpec
from constate.core.mixer import Call
from constate.core.state import Latent
from constate.kernels.dispatch import available, select
from constate.spans import Spans
from tests import loops
from tests.models import LATENT, ROPE, spread
from tests.test_twins import changed

BACKENDS = [row.backend for row in available("cpu") if row.here]
D = 20
SETTINGS = {
    "rotated": {**LATENT, "q_rank": 9, "rope": ROPE},
    "not rotated": {**LATENT, "value_dim": 11},
    "a scale of its own": {**LATENT, "rope": ROPE, "scale": 0.7},
}


def build(settings: dict[str, Any]) -> LatentAttention:
    mixer = LatentAttention(D, LatentSpec(**{k: v for k, v in settings.items() if k != "type"}))
    spread(mixer, seed=7)
    return mixer.requires_grad_(False)


def call_of(new: int, past: int, backend: str = "torch") -> Call:
    return Call(Spans.of([new]), select(backend, "cpu"), (past,), torch.tensor([past]))


def pieces(mixer: LatentAttention, x: Tensor, lengths: tuple[int, ...], backend: str) -> Tensor:
    state, past, outputs = mixer.init_state(1, len(x)), 0, []
    for piece in x.split(list(lengths)):
        outputs.append(mixer(piece, call_of(len(piece), past, backend), state))
        past += len(piece)
    return torch.cat(outputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("expands", [True, False])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_each_form_is_the_float64_loop(settings: dict[str, Any], expands: bool, backend: str) -> None:
    """Whatever is cheaper: either form over a past, in pieces of every size."""
    mixer, x = build(settings), torch.randn(66, D)
    want = loops.latent(loops.params(mixer), x.double(), settings).y
    with changed(mixer, "_expands", lambda new, past: expands):
        got = pieces(mixer, x, (1, 2, 17, 0, 46), backend)
    worst = float((got.double() - want).abs().max())
    assert worst <= 1e-5 * max(1.0, float(want.abs().max())), f"off by {worst:.2e}"


def test_absorbing_is_exact() -> None:
    """q . (W c) == (W^T q) . c and W^UV (sum a c) == sum a (W^UV c): to the rounding of float64."""
    mixer = build(SETTINGS["rotated"]).double()
    x, call = torch.randn(40, D, dtype=torch.float64), call_of(40, 0)
    q, kv = mixer._enter(x, call)
    expanded = mixer._expanded(q, kv, call, call.spans, call.spans)
    absorbed = mixer._absorbed(q, kv, call, call.spans, call.spans)
    assert float((expanded - absorbed).abs().max()) < 1e-12


def test_the_faults_of_absorbing_are_seen() -> None:
    """W^UK and W^UV swapped, the scale of the latent's width, the shared key left out: each is far off."""
    settings = {**LATENT, "value_dim": LATENT["key_dim"], "rope": ROPE}
    mixer, x = build(settings), torch.randn(30, D)
    want = loops.latent(loops.params(mixer), x.double(), settings).y
    absorb, heads = mixer._absorb, mixer._heads()

    def without_key(q: Tensor) -> Tensor:
        return torch.cat([absorb(q)[..., : mixer.rank], torch.zeros(*q.shape[:2], mixer.shared)], dim=-1)

    faults = {
        "_heads": lambda: heads[::-1],
        "scale": (mixer.rank + mixer.shared) ** -0.5,
        "_absorb": without_key,
    }
    for name, fault in faults.items():
        with changed(mixer, "_expands", lambda new, past: False), changed(mixer, name, fault):
            off = float((pieces(mixer, x, (2, 28), "torch").double() - want).abs().max())
        assert off > 1e-2, f"{name}: off by {off:.1e} only"


def test_the_cheaper_form_is_taken() -> None:
    """DeepSeek-V3's sizes: a prompt expands, a few tokens behind a long text do not; cost says the same."""
    spec = LatentSpec(heads=128, rank=512, key_dim=128, rope_dim=64, value_dim=128, q_rank=1536)
    with torch.device("meta"):
        mixer = LatentAttention(7168, spec)
    assert mixer._expands(2, 0) and mixer._expands(512, 4096)
    assert not mixer._expands(1, 4096) and not mixer._expands(100, 100_000)

    def attention_and_latents(new: int, past: int, expands: bool) -> int:
        with changed(mixer, "_expands", lambda *_: expands):
            flops = mixer.cost(new, past).flops
        return flops["attention"] + flops["latent"]

    for new, past in ((1, 4096), (100, 100_000), (512, 4096), (512, 100_000), (512, 0), (8192, 0)):
        taken = mixer._expands(new, past)
        best, other = (attention_and_latents(new, past, form) for form in (taken, not taken))
        assert best < other, f"{new} after {past}: {best} FLOPs where the other form takes {other}"


def test_a_token_leaves_its_latent_and_one_key() -> None:
    """DeepSeek-V2: 60 layers of 512 + 64 numbers are 34,560 a token, where 128 heads' keys and values would
    be 60 x 128 x (192 + 128)."""
    spec = LatentSpec(heads=128, rank=512, key_dim=128, rope_dim=64, value_dim=128)
    with torch.device("meta"):
        mixer = LatentAttention(5120, spec)
        state = mixer.init_state(1, 7)
    assert isinstance(state, Latent) and 60 * state.kv.numel() == 7 * 34_560
    assert 60 * mixer.cost(0, 1).held["kv"] == 34_560 * 4
    assert mixer.cost(1, 99).read["kv"] == 100 * 576 * 4 and mixer.cost(1, 99).written["kv"] == 576 * 4


def test_a_bias_without_a_query_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="bias without q_rank"):
        build({**LATENT, "bias": True})
