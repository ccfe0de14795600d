"""Dtypes of models and states: what stays float32, what drifts, what is clamped (cases F1, F2, F3)."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from constate.core.decay import inverse_softplus
from constate.core.mixer import Call
from constate.core.model import Model
from constate.core.state import ConvSSM
from constate.hybrid.composed import ARCHITECTURE, Config
from constate.kernels.dispatch import available, select
from constate.kernels.native.tape import Tape
from constate.spans import Spans
from constate.ssm.mamba2 import Mamba2, Mamba2Spec
from tests import loops
from tests.models import MODELS, RECURRENT, VOCAB, make, tokens, with_ops
from tests.referee import referee, same_state

STEPS = 4096
KEPT = {"a_log", "dt_bias", "d", "bounds", "kappa_scale", "rate_share", "bonus", "rate", "correction"}
LIMITS = [(None, 5.0067153), ((0.0, math.inf), 5.0067153), ((0.001, 0.1), 0.1), ((6.0, 7.0), 6.0)]
RATES = ("decay.bias", "rate.bias", "share.bias", "decay_proj.bias")  # behind them stands a sigmoid


def one_layer(mixer: dict[str, Any], d: int = 24) -> Model:
    return ARCHITECTURE.build(Config(VOCAB, d, ({"mixer": mixer, "mlp": None},))).requires_grad_(False)


def slow(d: int, spec: Mamba2Spec) -> Mamba2:
    """A mixer in bfloat16 whose every step decays by 0.999."""
    mixer = Mamba2(d, spec).requires_grad_(False)
    mixer.in_proj.weight[-spec.heads :] = 0  # what makes dt
    mixer.dt_bias.copy_(inverse_softplus(torch.full((spec.heads,), 0.05)))
    mixer.a_log.fill_(math.log(-math.log(0.999) / 0.05))
    for name, p in mixer.named_parameters():
        if name not in mixer.float32 and name != "norm.weight":
            p.data = p.data.bfloat16()
    return mixer


def test_a_long_slow_state_drifts_only_if_it_is_stored_in_less() -> None:
    """Case F1: bfloat16 weights, decay 0.999, 4096 steps, beside a float64 loop over the same weights."""
    d, spec = 16, Mamba2Spec(heads=1, head_dim=12, state_size=8, conv=2)
    mixer = slow(d, spec)
    x = torch.randn(STEPS, d).bfloat16()
    want = loops.mamba2(loops.params(mixer), x.double(), asdict(spec)).ssm
    call = Call(Spans.ones(1), select("torch", "cpu"), (0,), torch.zeros(1, dtype=torch.int64))

    def run(dtype: torch.dtype) -> tuple[float, int]:
        state = mixer.init_state(1, 0, dtype)
        assert isinstance(state, ConvSSM) and state.ssm.dtype == dtype
        for token in x:
            mixer.step(token[None], call, state)
        return float((state.ssm[0].double() - want).norm() / want.norm()), state.bytes()["state"]

    (exact, nbytes), (rounded, half) = run(torch.float32), run(torch.bfloat16)
    assert exact <= 1e-2, f"float32 state: relative error {exact:.1e}"
    assert rounded > 1e-2, f"bfloat16 state: {rounded:.1e}; the case shows nothing"
    assert half * 2 == nbytes
    assert make("mamba2").state_dtype == torch.float32, "float32 is the default"


def left(model: Model, *, step: bool) -> Tensor:
    """What is left of a state of ones, in every layer, after a token that adds nothing."""
    cache = model.init_cache(1)
    states = [t for _, t, leaf in cache.leaves() if leaf.kind == "state"]
    for state in states:
        state.fill_(1)
    if step:
        model.step(tokens(1), cache)
    else:
        model(tokens(1), Spans.of([1]), cache)
    assert (cache.recording is not None) == (step and model.ops.tape is not None)
    return torch.cat([state.flatten() for state in states])


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2", "gated_deltanet", "kda"])
def test_a_bfloat16_model_decays_by_its_exact_rates(kind: str, backend: str) -> None:
    """Case F2: A = -15.9 and dt = 0.01 leave exp(-0.159), forward, by an op and in a recorded step; with
    either rounded to bfloat16 it is 9e-5 off or more."""
    heads = {"heads": 2, "key_dim": 12, "value_dim": 8}
    settings = {
        "mamba": {"inner": 48, "state_size": 6},
        "mamba2": {"heads": 4, "head_dim": 12, "state_size": 8, "groups": 2},
        "gated_deltanet": heads,
        "kda": {**heads, "rank": 5},
    }[kind]
    model = one_layer({"type": kind, **settings}).to_dtype(torch.bfloat16)
    model.ops = select(backend, "cpu")
    mixer: Any = model.blocks[0].mixer  # pyright: ignore[reportAttributeAccessIssue]  # named by Block
    for p in mixer.parameters():
        p.zero_()
    mixer.a_log.fill_(math.log(15.9))
    mixer.dt_bias.copy_(inverse_softplus(torch.full_like(mixer.dt_bias, 0.01)))
    for step in (False, True):
        assert float((left(model, step=step) - math.exp(-0.159)).abs().max()) < 1e-5, f"step {step}"


@pytest.mark.parametrize("backend", ["reference", "torch", "native", "triton"])
@pytest.mark.parametrize(("limit", "want"), LIMITS)
def test_what_a_clamped_step_leaves(limit: tuple[float, float] | None, want: float, backend: str) -> None:
    """Case F3, on every backend and in a recorded step: with A = -1 a state of ones becomes exp(-dt)."""
    over: dict[str, Any] = {} if limit is None else {"time_step_limit": list(limit)}
    model = make("mamba2", backend, **over)
    for block in model.blocks:
        mixer: Any = block.mixer  # pyright: ignore[reportAttributeAccessIssue]  # named by Block
        for p in mixer.parameters():
            p.zero_()
        mixer.in_proj.bias[-mixer.h :] = 2.0
        mixer.dt_bias.fill_(3.0)
    for step in (False, True):
        assert left(model, step=step).tolist() == pytest.approx([math.exp(-want)] * 2 * 8 * 12 * 8, rel=1e-5)


def test_a_recorded_step_does_not_drift() -> None:
    """Case F1 in the C step: 4096 tokens at a decay of 0.999, weights in bfloat16."""
    if not next(row.here for row in available("cpu") if row.backend == "native"):
        pytest.skip("no C compiler here")
    d, spec = 16, Mamba2Spec(heads=1, head_dim=12, state_size=8, conv=2)
    mixer = slow(d, spec)
    x, state = torch.randn(STEPS, d).bfloat16(), mixer.init_state(1, 0)
    want = loops.mamba2(loops.params(mixer), x.double(), asdict(spec)).ssm
    tape = Tape(1, torch.zeros(1, dtype=torch.int64))
    given = tape.vector(d)
    mixer.record(tape, given, state)
    for token in x:
        given.copy_(token)
        tape.run()
    assert isinstance(state, ConvSSM)
    assert float((state.ssm[0].double() - want).norm() / want.norm()) <= 1e-2


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
def test_a_state_that_never_decays_counts_to_4096(backend: str) -> None:
    """Adding 1 to 256 in bfloat16 gives 256."""
    step = select(backend, "cpu").gated_linear_step
    one, state = torch.ones(1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1)
    for _ in range(STEPS):
        step(one, one, one, None, state)
    assert state.item() == STEPS


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_bfloat16_state_works_in_forward_and_step_and_halves_its_bytes(name: str, backend: str) -> None:
    model = make(name, backend)
    model.state_dtype = torch.bfloat16
    cache, full = model.init_cache(2), make(name).init_cache(2)
    assert cache.bytes()["state"] * 2 == full.bytes()["state"]
    assert cache.bytes()["conv"] == full.bytes()["conv"]
    model(tokens(40), Spans.of([30, 10]), cache)
    for i in range(5):
        logits = model.step(tokens(2, seed=i), cache)
        assert bool(torch.isfinite(logits).all())
    recurrent = [t for _, t, leaf in cache.leaves() if leaf.kind == "state"]
    assert recurrent and all(t.dtype == torch.bfloat16 for t in recurrent)
    want = (
        referee(name).read([*tokens(40)[:30].tolist(), *(int(tokens(2, seed=i)[0]) for i in range(5))]).cache
    )
    with pytest.raises(AssertionError):  # it is an approximation, and the judge sees that
        same_state(cache.select([0]), want)


@pytest.mark.parametrize("name", MODELS)
def test_decays_and_skips_stay_float32_in_a_bfloat16_model(name: str) -> None:
    """Case F2: A_log, dt_bias and D are never rounded; norms stay too."""
    model, exact = make(name).to_dtype(torch.bfloat16), dict(make(name).named_parameters())
    for full, p in model.named_parameters():
        normed = "norm" in full or "_post." in full
        if full.rsplit(".", 1)[-1] in KEPT or normed or full.endswith(RATES):
            assert p.dtype == torch.float32 and torch.equal(p, exact[full]), full
        else:
            assert p.dtype == torch.bfloat16, full


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "gated_deltanet"])
def test_log_probabilities_of_a_bfloat16_model(kind: str) -> None:
    """Case F2: A = -15.9 and dt = 0.01, within 2e-2 of float32; forward and step decay by the same A."""
    settings = {
        "mamba": {"inner": 48, "state_size": 6},
        "mamba2": {"heads": 4, "head_dim": 12, "state_size": 8, "groups": 2},
        "gated_deltanet": {"heads": 2, "key_dim": 12, "value_dim": 8},
    }[kind]
    model = one_layer({"type": kind, **settings})
    mixer: Any = model.blocks[0].mixer  # pyright: ignore[reportAttributeAccessIssue]  # named by Block
    mixer.a_log.fill_(math.log(15.9))
    mixer.dt_bias.copy_(inverse_softplus(torch.full_like(mixer.dt_bias, 0.01)))
    prompt, spans = tokens(60), Spans.of([60])
    model.to_dtype(torch.bfloat16)
    for p in model.parameters():  # the same numbers in both
        p.data = p.data.float()
    exact = F.log_softmax(model(prompt, spans), -1)
    model.to_dtype(torch.bfloat16)
    seen: dict[str, Tensor] = {}
    ops, at = model.ops, 2 if kind == "mamba" else 3

    def spy(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen[name] = args[at]
            return getattr(ops, name)(*args, **options)

        return call

    op = {"mamba": "selective", "mamba2": "gated_linear", "gated_deltanet": "gated_delta"}[kind]
    with_ops(model, **{name: spy(name) for name in (f"{op}_scan", f"{op}_step")})
    rounded = F.log_softmax(model(prompt, spans), -1)
    assert float((rounded - exact).abs().max()) <= 2e-2
    model.step(prompt[:1], model.init_cache(1))
    scanned, stepped = seen[f"{op}_scan"], seen[f"{op}_step"]
    assert scanned.dtype == stepped.dtype == torch.float32
    assert torch.equal(scanned[:1], stepped[:1]), "forward and step decay differently"
    if kind == "mamba":
        assert float((scanned + 15.9).abs().max()) < 1e-5


@pytest.mark.parametrize(("limit", "want"), LIMITS)
def test_the_step_size_is_clamped_only_where_the_config_says_so(
    limit: tuple[float, float] | None, want: float
) -> None:
    """Case F3: a pre-activation of 5 is softplus(5) = 5.0067, once, unless time_step_limit is less."""
    over: dict[str, Any] = {} if limit is None else {"time_step_limit": list(limit)}
    model = make("mamba2", "torch", **over)
    seen: list[Tensor] = []
    for block in model.blocks:
        mixer: Any = block.mixer  # pyright: ignore[reportAttributeAccessIssue]  # named by Block
        mixer.in_proj.weight[-mixer.h :] = 0
        mixer.in_proj.bias[-mixer.h :] = 2.0
        mixer.dt_bias.fill_(3.0)
        mixer.a_log.zero_()  # then the log-decay is -dt
    scan, step = model.ops.gated_linear_scan, model.ops.gated_linear_step

    def scanned(*args: Any, **options: Any) -> Any:
        seen.append(args[3])
        return scan(*args, **options)

    def stepped(*args: Any, **options: Any) -> Any:
        seen.append(args[3])
        return step(*args, **options)

    with_ops(model, gated_linear_scan=scanned, gated_linear_step=stepped)
    cache = model.init_cache(1)
    model(tokens(3), Spans.of([3]), cache)
    model.step(tokens(1), cache)
    assert len(seen) == 4
    for decay in seen:
        assert (-decay).flatten().tolist() == pytest.approx([want] * decay.numel(), abs=1e-5)
