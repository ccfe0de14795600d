"""Faults that others' users reported of hybrids, over all ten families here: what the laws do not say.

Cases A1, A3, A4, B1, B3, C4 and F6's unwritten memory run over every model in test_laws.py and
tests/test_cases.py, H3, H4 and H7 in the latter, H6 in the twins and their odd points. The letters are those
of tests/test_cases.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from constate.core.architecture import read_config
from constate.core.attention import Attention
from constate.core.cache import Cache
from constate.core.decay import bounded_decay, softplus_decay
from constate.core.mixer import Call, Mixer
from constate.core.model import Model
from constate.core.rotary import Rotary
from constate.loading import find
from constate.spans import Spans
from tests import loops, test_cases
from tests.backends import BACKENDS
from tests.laws import regroups
from tests.models import HYBRIDS, MODELS, VOCAB, make, tokens
from tests.referee import referee, same_logits, same_state

CONVOLVED = tuple(name for name in HYBRIDS if MODELS[name].widths)
RECURRENT = tuple(name for name in HYBRIDS if MODELS[name].recurrent)


def test_the_laws_and_the_cases_walk_all_ten() -> None:
    assert set(HYBRIDS) <= MODELS.keys() and len(set(HYBRIDS)) == 10
    assert set(HYBRIDS) <= set(test_cases.CHECKPOINTS), "H3, H4 and H7"
    assert not set(HYBRIDS) - {entry.raw["model_type"] for entry in MODELS.values()}


# -- A: neighbours ----------------------------------------------------------------------------------


def mixers(model: Model) -> Iterator[tuple[str, Mixer]]:
    """Every mixer at whatever depth, with its path; not what a mixer calls by another way than forward."""
    return ((path, m) for path, m in model.named_modules() if isinstance(m, Mixer))


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_mixer_hears_where_rows_end(name: str) -> None:
    """Case A2, which once were layers that never got the mask: each mixer that runs is called with the spans
    of the pack, and so is each that stands inside another."""
    model, spans, heard = make(name), Spans.of([5, 0, 1, 9]), dict[str, Any]()
    for path, mixer in mixers(model):

        def hear(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            heard[path] = next(a.spans for a in (*args, *kwargs.values()) if isinstance(a, Call))

        mixer.register_forward_pre_hook(hear, with_kwargs=True)
    model(tokens(15), spans)
    assert set(heard.values()) == {spans}
    assert heard.keys() >= {path for path, m in mixers(model) if m in model.mixers()}
    held = [m for m in model.mixers() if any(leaf.kind for _, _, leaf in m.init_state(1, 1).leaves())]
    assert held, "no mixer remembers anything"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_neighbours_ids_are_not_read(name: str, backend: str) -> None:
    """Case A2: what stands beside a row in a pack, where pads stood, changes no bit of it; with experts,
    whose groups it does change, nothing beyond rounding. Over a past too, and in the step that follows."""
    model, spans = make(name, backend), Spans.of([7, 12, 3])
    row, more = tokens(12), tokens(3, seed=5)

    def run(seed: int) -> list[Tensor]:
        first, second = tokens(22, seed=seed), tokens(22, seed=seed + 1)
        for pack in (first, second):
            pack[7:19] = row
        cache = model.init_cache(3)
        logits = [model(pack, spans, cache)[7:19] for pack in (first, second)]
        steps = tokens(3, seed=seed + 2)
        steps[1] = more[1]
        return [*logits, model.step(steps, cache)[1:2]]

    for got, want in zip(run(300), run(400), strict=True):
        if regroups(model):
            same_logits(got, want, "row 1 beside others")
        else:
            assert torch.equal(got, want), "row 1 changed with its neighbours"


# -- B: going on from a state ------------------------------------------------------------------------


def warm(name: str, rows: int = 2) -> Cache:
    """A cache with other rows of the same lengths: recurrent states and histories that no text left."""
    judge = referee(name)
    cache = Cache.merge([judge.read(tokens(5 + 3 * r, seed=r)).cache for r in range(rows)])
    g = torch.Generator().manual_seed(3)
    for _, t, leaf in cache.leaves():
        if leaf.kind in ("state", "conv"):
            t.add_(0.5 * t.abs().mean() * torch.randn(t.shape, generator=g))
    return cache


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_tiles_equal_steps_from_states_that_no_text_left(name: str, length: int) -> None:
    """Case B2, of whole models: several tokens on top of a state are all read, and none of it is dropped."""
    model, judge, start = make(name), make(name, "reference"), warm(name)
    new = [tokens(length, seed=40 + r) for r in range(2)]
    cache, stepped = start.clone(), start.clone()
    logits = model(torch.cat(new), Spans.of([length] * 2), cache)
    want = torch.stack([judge.step(torch.stack([a, b]), stepped) for a, b in zip(*new, strict=True)], 1)
    same_logits(logits, want.flatten(0, 1), f"{length} tokens")
    same_state(cache, stepped, f"{length} tokens")
    assert all(t.dtype == torch.float32 for _, t, leaf in cache.leaves() if leaf.kind == "state")


@pytest.mark.parametrize("name", CONVOLVED)
@pytest.mark.parametrize("history", ["none", "random"])
def test_prompts_as_short_as_a_convolution(name: str, history: str) -> None:
    """Case B4: 1 to w + 1 tokens behind no history and behind one; what is kept are the last w - 1 inputs,
    old ones among them where the prompt is shorter."""
    model, judge = make(name), make(name, "reference")
    start = warm(name) if history == "random" else model.init_cache(2)
    for n in range(1, max(MODELS[name].widths) + 2):
        new = [tokens(n, seed=60 + r) for r in range(2)]
        cache, stepped = start.clone(), start.clone()
        logits = model(torch.cat(new), Spans.of([n, n]), cache)
        assert logits.shape == (2 * n, VOCAB)
        want = torch.stack([judge.step(torch.stack([a, b]), stepped) for a, b in zip(*new, strict=True)], 1)
        same_logits(logits, want.flatten(0, 1), f"{n} tokens, history {history}")
        same_state(cache, stepped, f"{n} tokens, history {history}")
        widths = {t.shape[1] + 1 for _, t, leaf in cache.leaves() if leaf.kind == "conv"}
        assert widths == set(MODELS[name].widths)


WIDTH = {
    "qwen3_next": "linear_conv_kernel_dim",
    "jamba": "mamba_d_conv",
    "zamba2": "mamba_d_conv",
    "falcon_h1": "mamba_d_conv",
    "nemotron_h": "conv_kernel",
    "kimi_linear": "linear_conv_kernel_dim",
    "recurrent_gemma": "conv1d_width",
}


@pytest.mark.parametrize("name", CONVOLVED)
def test_any_width_is_right_and_none_is_refused(name: str) -> None:
    """Case B4: widths of 2 and 5 are the float64 loop's, a width of 0 is refused."""
    for width in (2, 5):
        over: dict[str, Any] = {WIDTH[name]: width}
        model, prompt = make(name, **over), tokens(9)
        want = loops.model(model, prompt, {**MODELS[name].raw, **over})
        same_logits(model(prompt, Spans.of([9])), want, f"width {width}")
    none: dict[str, Any] = {WIDTH[name]: 0}
    with pytest.raises(ValueError, match=r"conv|width"):
        make(name, **none)


# -- F: numbers ----------------------------------------------------------------------------------------

# Query heads and key/value heads: of their own width where head_dim says so, else a part of hidden_size.
FREE, PARTS, ALL = ((6, 2), (4, 4), (3, 1)), ((4, 2), (4, 4), (4, 1)), ((4, 4), (1, 1), (2, 2))
HEADS = {
    "qwen3_next": FREE,
    "jamba": PARTS,
    "zamba2": ((4, 4), (2, 2)),
    "falcon_h1": FREE,
    "nemotron_h": FREE,
    "kimi_linear": ALL,
    "recurrent_gemma": PARTS,
    "minimax": FREE,
    "gemma3_text": FREE,
    "deepseek_v3": ALL,
}


@pytest.mark.parametrize(("name", "heads"), [(name, heads) for name in HYBRIDS for heads in HEADS[name]])
def test_every_way_of_sharing_key_heads(name: str, heads: tuple[int, int]) -> None:
    """Case F6: (6, 2), (4, 4), (3, 1) or as near as a family comes, beside the loop, which picks each head's
    key by itself; forward and step."""
    over: dict[str, Any] = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    model, prompt = make(name, **over), tokens(12)
    want = loops.model(model, prompt, {**MODELS[name].raw, **over})
    cache = model.init_cache(1)
    got = [model(prompt[:8], Spans.of([8]), cache), *(model.step(t[None], cache) for t in prompt[8:])]
    same_logits(torch.cat(got), want, f"heads {heads}")


@pytest.mark.parametrize("heads", [(3, 2), (33, 2)])
@pytest.mark.parametrize("name", HYBRIDS)
def test_heads_that_cannot_be_shared_are_refused_at_load(name: str, heads: tuple[int, int]) -> None:
    """Case F6."""
    with pytest.raises(ValueError, match=r"\b(3|33)\b|as many key/value heads"):
        make(name, num_attention_heads=heads[0], num_key_value_heads=heads[1])


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)])
def test_value_heads_of_the_delta_rule(heads: tuple[int, int]) -> None:
    """Case F6: value heads beside key heads, in qwen3_next, whose file names them so."""
    over: dict[str, Any] = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}
    model, prompt = make("qwen3_next", **over), tokens(12)
    want = loops.model(model, prompt, {**MODELS["qwen3_next"].raw, **over})
    same_logits(model(prompt, Spans.of([12])), want, f"heads {heads}")
    with pytest.raises(ValueError, match="linear_num_value_heads 3 is no multiple"):
        make("qwen3_next", linear_num_key_heads=2, linear_num_value_heads=3)


def test_the_two_forms_of_a_gate_in_closed_form() -> None:
    """Case F7: at zero -log 2 and half the bound; the bounded form never passes its bound, the other does. A
    key that would choose another form is refused, not guessed."""
    zero = torch.zeros(1)
    assert float(softplus_decay(zero, zero, zero)) == pytest.approx(-0.693147, abs=1e-6)
    assert float(bounded_decay(zero, zero, zero, -5.0)) == -2.5
    far = torch.full((1,), 60.0)
    assert float(softplus_decay(far, zero, zero)) == -60.0
    assert float(bounded_decay(far, zero, zero, -5.0)) == -5.0
    rate = torch.full((1,), 3.0).log()
    x, bias = torch.full((1,), 0.4), torch.full((1,), 0.1)
    assert float(bounded_decay(x, rate, bias, -5.0)) == pytest.approx(-5 / (1 + 2.718281828**-1.5))
    with pytest.raises(ValueError, match=r"gate_lower_bound = -5.0 is not understood"):
        make("kimi_linear", gate_lower_bound=-5.0)


# -- H: checkpoints ------------------------------------------------------------------------------------

GROUPS = {"zamba2": "mamba_ngroups", "falcon_h1": "mamba_n_groups", "nemotron_h": "n_groups"}


def inner_rows(model: Model) -> int:
    """Rows of the first in-projection of a Mamba-2 layer."""
    named = ((n, p) for n, p in model.named_parameters() if n.endswith("in_proj.weight"))
    return next(len(p) for _, p in named)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_b_and_c_are_the_files(name: str, groups: int) -> None:
    """Case H2: an in-projection of 2 inner + 2 groups N + heads rows, and a run that is the loop's, which
    picks each head's group and norms each group by itself."""
    heads = {"nemotron_h": "mamba_num_heads", "zamba2": "n_mamba_heads", "falcon_h1": "mamba_n_heads"}[name]
    over: dict[str, Any] = {GROUPS[name]: groups, heads: 4}
    if name == "nemotron_h":
        over["mamba_head_dim"] = 12
    raw = {**MODELS[name].raw, **over}
    inner = {"nemotron_h": 4 * 12, "zamba2": 2 * 32, "falcon_h1": 48}[name]
    states = raw["ssm_state_size" if name == "nemotron_h" else "mamba_d_state"]
    model, prompt = make(name, **over), tokens(12)
    assert inner_rows(model) == 2 * inner + 2 * groups * states + 4
    same_logits(model(prompt, Spans.of([12])), loops.model(model, prompt, raw), f"{groups} groups")


def test_the_published_in_projection_has_its_groups() -> None:
    """Case H2: Nemotron-H-8B's has 18,560 rows with its 8 groups; one group would give 16,768."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("nemotron_h", layers_block_type=["linear_attention"])
    architecture = find("nemotron_h").architecture
    with torch.device("meta"):
        model = architecture.build(read_config(architecture.Config, config.to_dict()))
    assert inner_rows(model) == 18_560


def counted_from(start: int) -> property:
    """`Call.positions` whose first is `start`."""
    return property(lambda call: call.past[call.spans.row] + call.spans.position + start)


UNTURNED = (
    *((name, {}) for name in ("jamba", "nemotron_h", "kimi_linear")),
    ("zamba2", {"use_mem_rope": False}),
)
TURNED = tuple(name for name in HYBRIDS if name not in dict(UNTURNED) or name == "zamba2")


@pytest.mark.parametrize(("name", "over"), UNTURNED)
def test_models_without_positions_have_none(
    name: str, over: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case H5: a shift of 1000 changes no bit."""
    model, prompt = make(name, **over), tokens(20)
    here = model(prompt, Spans.of([12, 8]))
    monkeypatch.setattr(Call, "positions", counted_from(1000))
    assert torch.equal(model(prompt, Spans.of([12, 8])), here)


@pytest.mark.parametrize("name", TURNED)
def test_models_with_positions_see_distances_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case H5: a shift of 1000 changes rounding, and something; without the turning logits are others. (Not
    from position 0, where RG-LRU begins afresh.)"""
    model, prompt = make(name), tokens(20)

    def run(start: int) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(Call, "positions", counted_from(start))
            return model(prompt, Spans.of([20]))

    here, there = run(1), run(1001)
    moved = float((there - here).abs().max())
    assert 0 < moved < 1e-2 * float(here.abs().max()), moved
    monkeypatch.setattr(Rotary, "rotate", lambda self, x, call: x)
    assert float((run(1) - here).abs().max()) > 1e-1


@pytest.mark.parametrize("name", TURNED)
def test_an_unknown_rotary_scaling_is_refused(name: str) -> None:
    """Case H5."""
    for kind in ("dynamic", "spiral"):
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, "factor": 2.0}
        if name == "gemma3_text":
            rope = {"full_attention": rope}
        with pytest.raises(ValueError, match=f"rope_type {kind!r}"):
            make(name, rope_parameters=rope)


@pytest.mark.parametrize(("name", "share"), [("qwen3_next", 0.5), ("recurrent_gemma", 0.25)])
def test_a_part_of_a_head_is_turned(name: str, share: float) -> None:
    """Case H5: the first channels, and no other."""
    model = make(name)
    turned = [(m.rotary, m.dim) for m in model.modules() if isinstance(m, Attention)]
    assert turned
    for rotary, dim in turned:
        assert rotary is not None and rotary.dim == share * dim
        x, spans = torch.randn(9, 2, dim), Spans.of([9])
        call = Call(spans, model.ops, (0,), torch.zeros(1, dtype=torch.int64))
        still = (rotary.rotate(x, call) == x)[1:].flatten(0, 1).all(0)
        assert still.tolist() == [i >= rotary.dim for i in range(dim)]
