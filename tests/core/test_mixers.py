"""Each mixer beside the float64 loop of its paper: packed rows, random initial states, odd head counts.

The laws say that a mixer agrees with itself; here it must agree with what was published.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.attention import Attention, AttentionSpec
from constate.core.mixer import Call, Mixer
from constate.core.short_conv import ShortConv
from constate.core.state import ConvSSM, Matrix, State
from constate.hybrid.composed import MIXERS
from constate.kernels.dispatch import available, select
from constate.spans import Spans
from constate.ssm.rg_lru import RGLRU
from tests import loops
from tests.models import (
    ATTENTION,
    DELTA,
    DELTA_NET,
    GLA,
    HGRN2,
    KDA,
    LATENT,
    LIGHTNING,
    LINEAR,
    MAMBA,
    MAMBA2,
    MODELS,
    RETNET,
    RG_LRU,
    ROPE,
    RWKV7,
    SQUARE,
    WINDOW,
    make,
    spread,
    tokens,
)
from tests.referee import referee, same_logits

BACKENDS = [row.backend for row in available("cpu") if row.here]
D = 20
LENGTHS = (1, 17, 0, 66, 3)

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": MAMBA,
    "mamba, wide rank, bias": {**MAMBA, "rank": 7, "bias": True, "conv": 2},
    "mamba, no conv bias": {**MAMBA, "conv_bias": False},
    "mamba, dt, B and C normed": {**MAMBA, "norm_eps": 1e-2},
    "mamba2": MAMBA2,
    "mamba2, a group a head": {**MAMBA2, "groups": 4, "bias": True, "conv_bias": False},
    "mamba2, limits": {**MAMBA2, "dt_limit": [0.01, 0.2], "norm_eps": 1e-2},
    "gla": GLA,
    "gla, convolution": {**GLA, "conv": 4, "heads": 3},
    "gla, heads 6 and 2, bounded": {**GLA, "heads": 6, "kv_heads": 2, "decay_min": -4},
    "gla, no gate": {**GLA, "gate": False},
    "hgrn2": HGRN2,
    "hgrn2, convolution, bound": {**HGRN2, "conv": 3, "bound": 0.1},
    "linear_attn, elu": LINEAR,
    "linear_attn, relu": {**LINEAR, "feature_map": "relu", "unit_q": True, "norm_eps": 1e-3},
    "linear_attn, identity": {**LINEAR, "kv_heads": 4, "feature_map": "identity", "normaliser": False},
    "linear_attn, taylor": {**LINEAR, "feature_map": "taylor", "output_norm": False},
    "linear_attn, taylor, not divided": {**LINEAR, "feature_map": "taylor", "normaliser": False},
    "retnet": {**RETNET, "heads": 6},
    "retnet, a key a head, no gate": {**RETNET, "kv_heads": None, "gate": False, "norm_eps": 1e-2},
    "mamba, norms with weights": {**MAMBA, "norm_eps": 1e-2, "norm_weight": True},
    "mamba2, only gated, scaled": {**MAMBA2, "norm": False, "scales": [0.9, 1.1, 0.7, 1.3, 0.6]},
    "mamba2, normed before its gate": {**MAMBA2, "norm_before": True, "bias": True, "out_bias": False},
    "lightning": LIGHTNING,
    "lightning, heads 3, a late layer": {**LIGHTNING, "heads": 3, "share": 0.1, "norm_eps": 1e-3},
    "gated_deltanet, heads 2 and 4": DELTA,
    "gated_deltanet, heads 1 and 3": {**DELTA, "heads": 1, "value_heads": 3, "conv": 4},
    "gated_deltanet, heads 2 and 2, square": {**SQUARE, "negative": True},
    "gated_deltanet, no gate": {**DELTA, "gate": False},
    "delta_net": {**DELTA_NET, "gate": True, "negative": True},
    "delta_net, elu and sums": {**DELTA_NET, "act": "elu", "qk_norm": "sum", "heads": 3},
    "delta_net, relu, no rates": {**DELTA_NET, "act": "relu", "conv": 4, "rate": False},
    "delta_net, no convolution": {**DELTA_NET, "act": "identity", "conv": 0},
    "kda": KDA,
    "kda, heads 3 and 3, square": {**KDA, "heads": 3, "value_heads": None, "value_dim": 12, "conv": 1},
    "kda, bounded": {**KDA, "bound": -5.0, "conv": 4, "norm_eps": 1e-2},
    "rg_lru": RG_LRU,
    "rg_lru, one block": {**RG_LRU, "heads": 1, "conv": 4, "act": "silu"},
    "rwkv7": RWKV7,
    "rwkv7, heads 4, square": {**RWKV7, "heads": 4, "value_dim": 8, "norm_eps": 64e-5},
}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "heads 6 and 2": {**ATTENTION, "heads": 6, "rope": ROPE},
    "heads 4 and 4": {**ATTENTION, "kv_heads": 4},
    "heads 3 and 1, bias": {**ATTENTION, "heads": 3, "kv_heads": 1, "bias": True, "out_bias": True},
    "partial rotary": {**ATTENTION, "rope": {**ROPE, "partial_rotary_factor": 0.25}},
    "window": {**ATTENTION, "window": WINDOW, "rope": ROPE},
    "window of one": {**ATTENTION, "window": 1},
    "norm of q and k": {**ATTENTION, "qk_norm": True, "norm_eps": 1e-2, "rope": ROPE, "window": WINDOW},
    "scaled": {**ATTENTION, "scale": 0.7, "rope": ROPE},
    "latent": {**LATENT, "rope": ROPE},
    "latent, queries too": {**LATENT, "q_rank": 9, "rope": ROPE, "bias": True, "norm_eps": 1e-2},
    "latent, not rotated": {**LATENT, "heads": 2, "value_dim": 11, "scale": 0.4},
    "latent, one head, high rank": {**LATENT, "heads": 1, "rank": 30, "rope_dim": 6, "rope": ROPE},
}


def build(settings: dict[str, Any]) -> Mixer:
    kind, spec = MIXERS[settings["type"]]
    mixer = kind(D, spec(**{k: v for k, v in settings.items() if k != "type"}))
    spread(mixer, seed=7)
    return mixer.requires_grad_(False)


def call_of(backend: str, new: tuple[int, ...], past: tuple[int, ...]) -> Call:
    return Call(Spans.of(new), select(backend, "cpu"), past, torch.tensor(past))


def held(state: State) -> dict[str, Tensor]:
    """A recurrence's tensors under the names of loops.Row."""
    if isinstance(state, Matrix):
        return {"ssm": state.s}
    assert isinstance(state, ConvSSM)
    return {"conv": state.conv, "ssm": state.ssm}


def close(got: Tensor, want: Tensor, what: str) -> None:
    """Within 1e-5 of max(1, largest entry): one mixer has little room to lose digits in."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, wanted {tuple(want.shape)}"
    if want.numel():
        worst = float((got.double() - want).abs().max())
        assert worst <= 1e-5 * max(1.0, float(want.abs().max())), f"{what}: off by {worst:.2e}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_mixer_is_what_its_paper_says(settings: dict[str, Any], backend: str) -> None:
    mixer = build(settings)
    p, loop = loops.params(mixer), loops.MIXERS[settings["type"]]
    x = torch.randn(sum(LENGTHS), D)
    state = mixer.init_state(len(LENGTHS), 0)
    for tensor in held(state).values():
        tensor.normal_()
        if settings["type"] == "linear_attn":  # sums of features that are not negative
            tensor.abs_()
    none = torch.empty(len(LENGTHS), 0)
    initial = [
        (held(state).get("conv", none)[r].double(), held(state)["ssm"][r].double())
        for r in range(len(LENGTHS))
    ]
    zeros = (0,) * len(LENGTHS)
    y = mixer(x, call_of(backend, LENGTHS, zeros), state)
    fresh = mixer(x, call_of(backend, LENGTHS, zeros))
    one = torch.randn(len(LENGTHS), D)
    stepped_state = state.clone()
    stepped = mixer.step(one, call_of(backend, (1,) * len(LENGTHS), LENGTHS), stepped_state)
    for r, part in enumerate(Spans.of(LENGTHS).slices()):
        want = loop(p, x[part].double(), settings, initial[r])
        close(y[part], want.y, f"y of row {r}")
        for name, tensor in held(state).items():
            close(tensor[r], getattr(want, name), f"{name} of row {r}")
        close(fresh[part], loop(p, x[part].double(), settings).y, f"y of row {r} from nothing")
        settled = {**settings, "past": LENGTHS[r]}
        after = loop(p, one[r : r + 1].double(), settled, (want.conv, want.ssm))
        close(stepped[r : r + 1], after.y, f"step of row {r}")
        for name, tensor in held(stepped_state).items():
            close(tensor[r], getattr(after, name), f"{name} of row {r} after the step")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_is_what_its_paper_says(settings: dict[str, Any], backend: str) -> None:
    mixer = build(settings)
    p = loops.params(mixer)
    pasts = (4, 0, 12, 2, 5)
    rows = [torch.randn(past + n + 1, D) for past, n in zip(pasts, LENGTHS, strict=True)]
    state = mixer.init_state(len(rows), 80)
    zeros = (0,) * len(rows)
    before = mixer(
        torch.cat([row[:past] for row, past in zip(rows, pasts, strict=True)]),
        call_of(backend, pasts, zeros),
        state,
    )
    new = torch.cat([row[past:-1] for row, past in zip(rows, pasts, strict=True)])
    y = mixer(new, call_of(backend, LENGTHS, pasts), state)
    ends = tuple(past + n for past, n in zip(pasts, LENGTHS, strict=True))
    stepped = mixer.step(
        torch.stack([row[-1] for row in rows]), call_of(backend, (1,) * len(rows), ends), state
    )
    first, second = Spans.of(pasts).slices(), Spans.of(LENGTHS).slices()
    for r, row in enumerate(rows):
        want = loops.MIXERS[settings["type"]](p, row.double(), settings).y
        close(before[first[r]], want[: pasts[r]], f"row {r}, first piece")
        close(y[second[r]], want[pasts[r] : -1], f"row {r}, second piece")
        close(stepped[r], want[-1], f"row {r}, step")


@pytest.mark.parametrize("name", MODELS)
def test_the_referee_is_right(name: str) -> None:
    """The laws' judge is our own step; here a whole model is a float64 loop."""
    prompt = tokens(40)
    want = loops.model(make(name), prompt, MODELS[name].raw)
    same_logits(referee(name).read(prompt).logits, want, name)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({**DELTA, "heads": 2, "value_heads": 3}, "3 value heads cannot share 2 key heads"),
        ({**DELTA, "heads": 2, "value_heads": 33}, "33 value heads cannot share 2 key heads"),
        ({**MAMBA2, "heads": 3}, "3 heads cannot share 2 groups"),
        ({**ATTENTION, "heads": 3}, "3 query heads cannot share 2 key/value heads"),
        ({**ATTENTION, "heads": 33}, "33 query heads cannot share 2 key/value heads"),
        ({**ATTENTION, "window": 0}, "window 0"),
        ({**MAMBA, "conv": 0}, "width 0"),
        ({**GLA, "heads": 3, "kv_heads": 2}, "3 query heads cannot share 2 key/value heads"),
        ({**LINEAR, "heads": 3}, "3 query heads cannot share 2 key/value heads"),
        ({**LINEAR, "feature_map": "hedgehog"}, "feature map 'hedgehog' is not known"),
        ({**HGRN2, "bound": 1.0}, "bound 1.0"),
        ({**KDA, "bound": 5.0}, "bound 5.0: the least log of a decay is negative"),
        ({**KDA, "value_heads": 3}, "3 value heads cannot share 2 key heads"),
        ({**KDA, "conv": 0}, "conv 0"),
        ({**RG_LRU, "heads": 5}, "48 channels do not fall into 5 equal blocks"),
        ({**RG_LRU, "act": "mish"}, "activation 'mish'"),
        ({**MAMBA2, "act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_sizes_that_do_not_fit_raise_at_build(settings: dict[str, Any], fact: str) -> None:
    """Case F6."""
    with pytest.raises(ValueError, match=fact):
        build(settings)


def test_llama_heads_that_do_not_fit_raise_at_build() -> None:
    with pytest.raises(ValueError, match="num_attention_heads 5 is not a multiple"):
        make("llama", num_attention_heads=5)
    with pytest.raises(ValueError, match="must be equal"):
        make("mamba2", num_heads=7)


def test_a_recurrence_that_forgets_nothing_still_has_a_gradient() -> None:
    """RG-LRU's recurrence gate shut: a is 1, and the root of 1 - a^2 has no slope."""
    mixer = build(RG_LRU).requires_grad_(True)
    assert isinstance(mixer, RGLRU)
    with torch.no_grad():
        mixer.gates.zero_()
        mixer.gate_bias.fill_(-200.0)
    x = torch.randn(9, D, requires_grad=True)
    mixer(x, call_of("torch", (4, 5), (0, 0))).sum().backward()
    assert all(bool(torch.isfinite(t.grad).all()) for t in (x, *mixer.parameters()) if t.grad is not None)
    assert mixer.rate.grad is not None and x.grad is not None


# -- the short convolution's edges (case B4) --------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("history", ["none", "zeros", "random", "float32 beside bfloat16"])
def test_short_convolution_edges(width: int, history: str, backend: str) -> None:
    """Case B4: prompts of 1 to w + 1 tokens, each way a history can come."""
    conv = ShortConv(6, width, bias=True).requires_grad_(False)
    spread(conv, seed=3)
    p = {f"conv.{name}": t for name, t in loops.params(conv).items()}
    for n in range(1, width + 2):
        x, past = torch.randn(n, 6), None if history == "none" else torch.zeros(1, width - 1, 6)
        if past is not None and history != "zeros":
            past.normal_()
        if "bfloat16" in history:
            x = x.bfloat16()
        want, kept = loops.conv(p, x.double(), None if past is None else past[0].double())
        got = conv(x, call_of(backend, (n,), (0,)), past)
        assert got.dtype == x.dtype and got.shape == x.shape
        bound = 1e-2 if "bfloat16" in history else 1e-5
        assert float((got.double() - want).abs().max()) <= bound * max(1.0, float(want.abs().max()))
        if past is not None:
            assert past.dtype == torch.float32 and torch.equal(past[0].double(), kept)


def test_attention_without_positions_ignores_them_and_rotary_turns_by_distance() -> None:
    """Case H5: shifting every position by 1000 changes nothing, with rotary only to rounding."""
    x = torch.randn(9, D)
    for rope, bound in ((None, 0.0), (ROPE, 1e-3)):
        mixer = Attention(D, AttentionSpec(heads=4, head_dim=8, kv_heads=2, rope=rope))
        here, there = call_of("torch", (9,), (0,)), call_of("torch", (9,), (0,))
        there.__dict__["positions"] = here.positions + 1000
        moved = float((mixer(x, here) - mixer(x, there)).detach().abs().max())
        assert moved <= bound, f"rope {rope}: a shift of 1000 moves the output by {moved}"
