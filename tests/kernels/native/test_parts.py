"""What a tape writes for single families, beside the mixers' own steps in PyTorch and float64 formulas: sizes
around every vector's width, one row and more than a product takes at once, gates at their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from constate.core.experts import Experts, ExpertsSpec, Router
from constate.core.latent import LatentAttention, LatentSpec
from constate.core.mixer import Call, Mixer
from constate.core.state import State
from constate.kernels.dispatch import available, select
from constate.kernels.native.tape import Tape
from constate.linear_attn.delta_net import DeltaNet, DeltaNetSpec
from constate.linear_attn.gla import GLA, GLASpec
from constate.linear_attn.hgrn2 import HGRN2, HGRN2Spec
from constate.linear_attn.kda import KDA, KDASpec
from constate.linear_attn.linear_attn import LinearAttention, LinearAttentionSpec
from constate.linear_attn.retnet import Retention, RetentionSpec
from constate.linear_attn.rwkv7 import ChannelMix, RWKV7Spec, TimeMix
from constate.spans import Spans
from constate.ssm.rg_lru import LEAST, RGLRU, RGLRUSpec
from tests.kernels import hostile

pytestmark = pytest.mark.skipif(
    not next(row.here for row in available("cpu") if row.backend == "native"), reason="no C compiler here"
)

D = 37
ROPE = {"rope_type": "default", "rope_theta": 100.0}
MIXERS: dict[str, Callable[[], Mixer]] = {
    "rg_lru": lambda: RGLRU(D, RGLRUSpec(width=66, heads=2)),
    "rg_lru, one block": lambda: RGLRU(D, RGLRUSpec(width=17, heads=1, conv=1)),
    "latent": lambda: LatentAttention(D, LatentSpec(5, 33, 17, 18, 19, q_rank=21, rope=ROPE)),
    "latent, unturned": lambda: LatentAttention(D, LatentSpec(1, 70, 65, 3, 66)),
    "time mix": lambda: TimeMix(D, RWKV7Spec(3, 17, 33, decay_rank=5, rate_rank=3, gate_rank=18)),
    "channel mix": lambda: ChannelMix(D, 67),
    "hgrn2": lambda: HGRN2(D, HGRN2Spec(3, 17, 33, conv=2, bound=0.3)),
    "hgrn2, unbounded": lambda: HGRN2(D, HGRN2Spec(2, 16, 1)),
    "gla": lambda: GLA(D, GLASpec(6, 17, 9, kv_heads=2, decay_min=-0.5)),
    "retnet": lambda: Retention(D, RetentionSpec(4, 18, 17, kv_heads=1)),
    "kda": lambda: KDA(D, KDASpec(2, 17, 18, rank=5, value_heads=4)),
    "kda, bounded": lambda: KDA(D, KDASpec(1, 33, 7, rank=5, bound=-6.0)),
    **{
        f"linear {kind}": lambda kind=kind: LinearAttention(
            D, LinearAttentionSpec(4, 9, 17, 2, kind, unit_q=kind == "relu", normaliser=kind != "identity")
        )
        for kind in ("elu", "relu", "identity", "taylor")
    },
    **{
        f"delta {act} {norm}": lambda act=act, norm=norm: DeltaNet(
            D, DeltaNetSpec(2, 17, 18, conv=3, act=act, qk_norm=norm, rate=act != "relu", negative=True)
        )
        for act in ("silu", "relu", "elu", "identity")
        for norm in ("l2", "sum")
    },
    "delta without a convolution": lambda: DeltaNet(D, DeltaNetSpec(2, 17, 18, conv=0, gate=True)),
    "experts": lambda: Experts(D, ExpertsSpec(7, 2, 19, shared=11, shared_gate=True)),
    "experts, all of them": lambda: Experts(D, ExpertsSpec(5, 5, 18, gated=False, act="relu2", scale=2.5)),
    "experts in groups": lambda: Experts(
        D,
        ExpertsSpec(12, 3, 5, scores="sigmoid", groups=4, kept_groups=2, correction=True, normalise=False),
    ),
    "experts in a latent": lambda: Experts(D, ExpertsSpec(6, 2, 33, latent=17, shared=9, act="gelu")),
    "one expert": lambda: Experts(D, ExpertsSpec(1, 1, 65)),
}


def drawn(name: str) -> Mixer:
    torch.manual_seed(0)
    mixer = MIXERS[name]().requires_grad_(False)
    source = hostile.generator(1)
    for p in mixer.parameters():  # biases and norms too
        p += 0.3 * torch.randn(p.shape, generator=source)
    return mixer


def steps(mixer: Mixer, rows: int, count: int) -> Iterator[tuple[Tensor, Tensor, State, State]]:
    """Outputs and states of a tape and of the mixer's own steps, token by token, rows of several lengths."""
    lengths = [row % 3 for row in range(rows)]
    past = torch.tensor(lengths)
    mine, theirs = (mixer.init_state(rows, 16) for _ in range(2))
    x, ops = torch.zeros(rows, D), select("torch")
    tape = Tape(rows, past)
    said = mixer.record(tape, x, mine)
    assert said is not None
    for t in range(count):
        x.copy_(hostile.normal(64, D, seed=t)[:rows])
        call = Call(Spans.ones(rows), ops, tuple(n + t for n in lengths), past)
        tape.run()
        yield said, mixer.step(x.clone(), call, theirs), mine, theirs
        past += 1
    assert len(tape.pieces) == 1


@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("name", MIXERS)
def test_a_tape_says_what_the_step_says(name: str, rows: int) -> None:
    for got, want, mine, theirs in steps(drawn(name), rows, 3 if rows == 50 else 5):
        hostile.assert_output(got, want)
        for (what, held, _), (_, right, _) in zip(mine.leaves(), theirs.leaves(), strict=True):
            hostile.assert_output(held, right, what)


@pytest.mark.parametrize("name", MIXERS)
def test_threads_and_neighbours_change_no_bit(name: str) -> None:
    """Rows of several lengths: a row's experts, too, are summed in its own order."""

    def outputs(rows: int) -> Tensor:
        return torch.stack([got.clone()[:2] for got, *_ in steps(drawn(name), rows, 3)])

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want, many = outputs(2), outputs(50)  # more than are one piece of an expert's
        torch.set_num_threads(3)
        assert torch.equal(outputs(2), want)
        assert torch.equal(outputs(5), want[:, :2])
        assert torch.equal(outputs(50), many)
    finally:
        torch.set_num_threads(before)


def test_products_of_heads() -> None:
    """Both orders, heads that lie apart, a bias, bfloat16."""
    x = hostile.normal(3, 2 * 40, seed=1)
    for size, out in ((1, 1), (33, 65), (40, 130), (16, 64)):
        for dtype in (torch.float32, torch.bfloat16):
            whole = hostile.normal(2, out + 3, size, seed=2).to(dtype)
            bias = hostile.normal(2, out, seed=3)
            part = whole[:, 2 : out + 2]
            for weight, first in ((part, True), (part.mT.contiguous(), False)):
                y, tape = torch.full((3, 2 * out + 1), 7.0), Tape(3, torch.zeros(3, dtype=torch.int64))
                tape.heads(weight, x, 40, y, out, bias=bias, outputs_first=first)
                tape.run()
                given = x.view(3, 2, 40)[..., :size].double()
                want = torch.einsum("nhi,hoi->nho", given, part.double()) + bias
                hostile.assert_output(y[:, :-1], want.flatten(1))
                assert (y[:, -1] == 7).all()


def test_forget_gates_at_their_ends() -> None:
    """Their logarithm and what they leave over keep their digits where one of both is almost nothing."""
    x = torch.tensor([[-200.0, -80.0, -9.0, -0.1, 0.0, 0.1, 9.0, 17.0, 80.0, 200.0]])
    for bound in (None, 1e-30, 1e-3, 0.5, 0.99):
        tape, b = Tape(1, torch.zeros(1, dtype=torch.int64)), bound or 0.0
        decay, key = tape.forget(x, None if bound is None else torch.full((10,), bound))
        tape.run()
        wide = x.double()
        want = logsigmoid(wide) if bound is None else (b + (1 - b) * wide.sigmoid()).log()
        hostile.assert_output(decay, want)
        assert (decay <= 0).all()
        assert torch.allclose(key.double(), (1 - b) * (-wide).sigmoid(), rtol=1e-5, atol=1e-37)


def test_a_real_gate_near_one_keeps_the_root_of_what_is_lost() -> None:
    """sqrt(1 - a^2) for log a from -1e-7 to -50, to its last digits. A row's first token enters whole."""
    rate = -torch.logspace(-7, 1.7, 40)
    gates, x = torch.full((2, 80), 90.0), torch.ones(2, 40)
    tape = Tape(2, torch.tensor([0, 3]))
    fed, log_a = tape.real_gate(gates, x, rate, 1, LEAST)
    tape.run()
    assert torch.equal(log_a, rate.expand(2, -1)) and torch.equal(fed[0], x[0])
    want = (-(2 * rate.double()).expm1()).clamp(min=LEAST).sqrt()
    assert torch.allclose(fed[1].double(), want, rtol=1e-5)


def chosen(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    spec, tape = router.spec, Tape(x.shape[0], torch.zeros(x.shape[0], dtype=torch.int64))
    logits = tape.vector(spec.experts)
    tape.matrix(router.weight, x, logits)
    choice = tape.choose(
        logits,
        spec.per_token,
        correction=router.correction,
        groups=spec.groups,
        kept_groups=spec.kept_groups,
        sigmoid=spec.scores == "sigmoid",
        normalise=spec.normalise,
        scale=spec.scale,
    )
    tape.run()
    pairs = choice.chosen.flatten()
    assert torch.equal(choice.order.flatten(), pairs.argsort(stable=True))
    assert torch.equal(choice.order.flatten()[choice.place.flatten()], torch.arange(pairs.numel()))
    return choice.chosen, choice.weights


SIZES = ((1, 1, 1, 1), (8, 3, 1, 1), (60, 6, 4, 2), (256, 8, 8, 4), (16, 4, 8, 2))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_routers_choose_and_weigh_alike(scores: Literal["softmax", "sigmoid"]) -> None:
    for rows in (1, 2, 33):
        for experts, each, groups, kept in (
            (1, 1, 1, 1),
            (8, 3, 1, 1),
            (60, 6, 4, 2),
            (256, 8, 8, 4),
            (16, 4, 8, 2),
        ):
            spec = ExpertsSpec(
                experts, each, 1, scores=scores, groups=groups, kept_groups=kept, correction=True, scale=1.7
            )
            torch.manual_seed(experts)
            router = Router(D, spec).requires_grad_(False)
            assert router.correction is not None
            router.correction.add_(hostile.normal(experts, seed=3, scale=0.2))
            x = hostile.normal(rows, D, seed=rows, scale=3.0)
            (which, weights), (want, right) = chosen(router, x), router(x)
            assert torch.equal(which, want)
            hostile.assert_output(weights, right)


def test_equal_scores_choose_different_experts() -> None:
    router = Router(D, ExpertsSpec(9, 4, 1)).requires_grad_(False)
    router.weight.zero_()
    for x in (torch.ones(2, D), torch.full((2, D), torch.nan)):
        which, _ = chosen(router, x)
        assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 9 for row in which.tolist())
