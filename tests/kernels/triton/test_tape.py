"""A decode step taped as Triton kernels: that it is the step of the ops, and in how few launches.

In the interpreter, for every model that the laws know. Beside it stands the step of PyTorch's ops.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import pytest
import torch
from torch import Tensor, nn

from constate.core.cache import Cache
from constate.core.int8 import to_int8
from constate.core.mixer import Call, Mixer
from constate.core.model import Model
from constate.core.state import State
from constate.kernels.native import tape as native
from constate.kernels.triton.launch import launches
from constate.kernels.triton.tape import Tape
from constate.kernels.triton.tape.drafts import Draft, activation
from constate.kernels.triton.tape.recorder import Recorder
from constate.kernels.triton.tape.works import Launched, Scan, Work
from constate.spans import Spans
from tests.models import MODELS, make, tokens
from tests.referee import same_logits, same_state


def started(
    name: str, *, taped: bool, rows: int = 2, dtypes: tuple[torch.dtype, ...] = ()
) -> tuple[Model, Cache]:
    """A model behind a prompt of PyTorch's; its steps are taped or op by op."""
    model = make(name, "torch")
    for dtype in dtypes:
        model.to_dtype(dtype)
    cache = model.init_cache(rows)
    lengths = [7, 4, 9][:rows]
    model(tokens(sum(lengths)), Spans.of(lengths), cache)
    if taped:
        model.ops = replace(model.ops, tape=Tape)
    return model, cache


def works(cache: Cache) -> list[Work]:
    assert cache.recording is not None, "the step was not recorded"
    return cache.recording.tape.works


def between_products(found: list[Work]) -> list[list[str]]:
    """Names of what is launched between each two products: not before the first, nor behind the last."""
    gaps: list[list[str]] = [[]]
    for work in found:
        gaps[-1].append(work.name)
        if work.product:
            gaps[-1].pop()
            gaps.append([])
    return gaps[1:-1]


def test_both_tapes_are_written_alike() -> None:
    """Mixers know one tape: every method of the C one is here, with the same parameters."""

    def offered(tape: type) -> dict[str, list[tuple[str, object, object]]]:
        public = {name: getattr(tape, name) for name in dir(tape) if not name.startswith("_")}
        return {
            name: [(p.name, p.kind, p.default) for p in signature(method).parameters.values()]
            for name, method in public.items()
            if callable(method)
        }

    ours, theirs = offered(Tape), offered(native.Tape)
    assert len(theirs) > 30
    assert {name: ours.get(name) for name in theirs} == theirs


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_taped_step_is_the_step_of_the_ops(name: str) -> None:
    (model, cache), (plain, other) = started(name, taped=True), started(name, taped=False)
    given = tokens(2, seed=1)
    with launches() as made:
        same_logits(model.step(given, cache), plain.step(given, other))
    same_state(cache, other)
    assert max(len(gap) for gap in between_products(works(cache))) <= 2, between_products(works(cache))
    own = [w for w in works(cache) if not w.product or w.name in ("heads", "experts_up", "experts_down")]
    assert len(made) == len(own)
    scans = [w for w in works(cache) if isinstance(w, Scan)]
    states = [t.data_ptr() for w in scans for t in w.writes if t is not w.o]
    assert len(states) == len(set(states)), "a state is read and written once"


@pytest.mark.parametrize("name", ["composed", "rwkv7", "qwen3_next", "composed latent"])
def test_narrow_weights_with_activations_in_float32(name: str) -> None:
    """Products take x rounded to the weights' dtype, as a GPU's do; all else is float32. Beside the same
    rounded weights in float32, no further off than PyTorch's operations in bfloat16; in as few launches."""

    def stepped(taped: bool, *dtypes: torch.dtype) -> Tensor:
        model, cache = started(name, taped=taped, dtypes=dtypes)
        logits = model.step(tokens(2, seed=1), cache)
        if taped:
            assert max(len(gap) for gap in between_products(works(cache))) <= 2
        return logits

    want = stepped(False, torch.bfloat16, torch.float32)
    mine, theirs = ((stepped(taped, torch.bfloat16) - want).norm() / want.norm() for taped in (True, False))
    assert mine < 1.2 * theirs < 0.1, f"{float(mine):.1e} and {float(theirs):.1e} of the logits' length"


def test_int8_weights_are_taped_too() -> None:
    logits = []
    for taped in (True, False):
        model = to_int8(make("mamba2", "torch"))
        model.ops = replace(model.ops, tape=Tape if taped else None)
        logits.append(model.step(tokens(1), model.init_cache(1)))
    same_logits(*logits)


class Doubled(Mixer):
    """A mixer of a kind that no tape knows."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.full((1, 1), 2.0), requires_grad=False)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        return self.by * x


def test_a_mixer_without_a_taped_form_steps_in_its_place_and_no_graph_is_made() -> None:
    def steps(taped: bool) -> tuple[Tensor, Cache]:
        model = make("mamba2", "torch")
        first, second = model.branches
        model.branches = (first, replace(second, mixer=Doubled()))
        model.ops = replace(model.ops, tape=Tape if taped else None)
        cache = model.init_cache(2)
        return torch.stack([model.step(t, cache) for t in tokens(4).split(2)]), cache

    (got, cache), (want, _) = steps(True), steps(False)
    same_logits(got, want)
    assert cache.recording is not None and len(cache.recording.tape.pieces) == 3
    assert "Python" in str(cache.recording.reason)


def test_a_cache_that_grows_is_read_where_it_then_lies() -> None:
    (model, cache), (plain, other) = (started("llama", taped=t, rows=1) for t in (True, False))
    first = None
    for t in tokens(2, seed=3).split(1):
        same_logits(model.step(t, cache), plain.step(t, other))
        first = first or cache.recording
    for m, c in ((model, cache), (plain, other)):
        m(tokens(60, seed=4), Spans.of([60]), c)  # through a grain of capacity
    same_logits(model.step(tokens(1), cache), plain.step(tokens(1), other))
    assert cache.recording is not None and cache.recording is not first
    assert cache.recording.reason == "no graphs on cpu"
    same_state(cache, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_recorded_in_inference_mode_serves_outside_of_it(dtype: torch.dtype) -> None:
    model, _ = started("composed", taped=True, dtypes=(dtype,))
    plain, _ = started("composed", taped=False, dtypes=(dtype,))
    cache, other = (m.init_cache(2, 8) for m in (model, plain))
    for given, mode in zip(tokens(6).split(2), (True, False, True), strict=True):
        with torch.inference_mode(mode), torch.no_grad():
            got = model.step(given, cache)
        want = plain.step(given, other)
        if dtype == torch.float32:
            same_logits(got.clone(), want)


def test_what_pytorch_makes_by_default_is_not_what_is_summed_in() -> None:
    (model, cache), (plain, other) = started("llama", taped=True), started("llama", taped=False)
    want = plain.step(tokens(2), other)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = model.step(tokens(2), cache)
    finally:
        torch.set_default_dtype(torch.float32)
    same_logits(got, want)


def test_no_kernel_is_compiled_anew_for_a_cache_of_more_room() -> None:
    described = []
    for capacity in (64, 128):
        tape = recorder()
        k, v = (torch.zeros(2, capacity, 2, 16) for _ in range(2))
        tape.enter(filled(tape, 128), k, v, 4, turns=tape.turns((0.5, 0.25), 1.0))
        drafts = [draft for work in tape.works for draft in work.drafts]
        described.append([draft.made(tape.past)[0] for draft in drafts])
    assert described[0] == described[1] and len(described[0]) == 3


# -- what is joined ------------------------------------------------------------------------------


def recorder(rows: int = 2) -> Tape:
    return Tape(rows, torch.zeros(rows, dtype=torch.int64))


def names(tape: Recorder) -> list[str]:
    return [work.name for work in tape.works]


def filled(tape: Recorder, width: int) -> Tensor:
    return tape.vector(width).copy_(torch.randn(tape.rows, width))


def test_a_job_that_reads_a_part_of_anothers_result_is_put_behind_that_part() -> None:
    tape = recorder()
    x = filled(tape, 48)
    y = tape.activate("silu", x)
    tape.unit(y[:, 16:32], 2)
    tape.run()
    want = torch.nn.functional.silu(x)
    length = (want[:, 16:32].unflatten(1, (2, 8)).square().sum(-1, keepdim=True) + 1e-6).sqrt()
    want[:, 16:32] = (want[:, 16:32].unflatten(1, (2, 8)) / length).flatten(1)
    torch.testing.assert_close(y, want)
    assert names(tape) == ["jobs"] and len(tape.works[0].drafts) == 3


def test_what_somebody_else_reads_is_stored() -> None:
    tape = recorder()
    x = filled(tape, 16)
    y = tape.activate("silu", x)
    once, twice = (tape.gated_norm(y, None, None, 1e-5, groups=n) for n in (1, 4))
    tape.run()
    want = torch.nn.functional.silu(x)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(once, torch.nn.functional.rms_norm(want, (16,), None, 1e-5))
    parts = torch.nn.functional.rms_norm(want.view(2, 4, 4), (4,), None, 1e-5)
    torch.testing.assert_close(twice, parts.flatten(1))
    assert names(tape) == ["jobs", "jobs"]


def test_a_job_stays_behind_what_writes_its_input_or_reads_its_output() -> None:
    tape = recorder()
    x, y = filled(tape, 16), filled(tape, 16)
    before = x.clone()
    copy = tape.activate("identity", x)
    tape.add(x, y)  # x changes after it was copied
    tape.run()
    torch.testing.assert_close(copy, before)
    torch.testing.assert_close(x, before + y)
    assert names(tape) == ["jobs", "jobs"]


def test_jobs_of_one_kind_cannot_be_one_job() -> None:
    x = torch.zeros(2, 8)
    once = activation(x, "silu", torch.zeros(2, 8))
    assert once.then(activation(x, "silu", torch.zeros(2, 8))) is None
    assert once.then(Draft({"x": x, "o": x}, 4, {"norm": "rms", "eps": 1e-6})) is not None
    assert once.columns(2, 6) is not None
    assert Draft({"x": x, "o": x}, 4, {"norm": "rms", "eps": 1e-6}).columns(2, 6) is None


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_last_program_of_a_group_leaves_for_it(groups: int) -> None:
    """Twice, since the counters of the first time must be zeros again; with heads cut in blocks of values."""
    torch.manual_seed(groups)
    tape, h, dk, dv = recorder(), 4, 48, 40
    q, k, v, gate = (filled(tape, h * n) for n in (dk, dk, dv, dv))
    state, weight = torch.randn(2, h, dk, dv), torch.rand(h * dv)
    held = state.clone()
    o = tape.gated_linear(q, k, v, None, state, heads=h, scale=0.3)
    y = tape.gated_norm(o, gate, weight, 1e-5, groups=groups, gate_first=True)
    for _ in range(2):
        tape.run()
        held += torch.einsum("bhk,bhv->bhkv", k.view(2, h, dk), v.view(2, h, dv))
        said = 0.3 * torch.einsum("bhk,bhkv->bhv", q.view(2, h, dk), held).flatten(1)
        want = (said * torch.nn.functional.silu(gate)).unflatten(1, (groups, -1))
        want = want * (want.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        torch.testing.assert_close(y, want.flatten(1) * weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, held, rtol=1e-5, atol=1e-5)
    assert names(tape) == ["gated_linear"]


def test_nothing_moves_across_a_step_that_is_pythons() -> None:
    tape = recorder()
    x = filled(tape, 16)
    y = tape.activate("silu", x)
    tape.between(lambda: y.mul_(2), y)
    _, z = tape.activate("tanh", x), tape.activate("sigmoid", y)
    tape.run()
    torch.testing.assert_close(z, (2 * torch.nn.functional.silu(x)).sigmoid())
    assert names(tape) == ["jobs", "a mixer", "jobs"]
    assert [len(work.drafts) for work in tape.works] == [1, 0, 2]


def test_a_launch_that_is_forgotten_shows() -> None:
    assert recorder().vector(4).isnan().all()


def test_what_is_recorded_is_only_what_the_tape_has() -> None:
    tape = recorder()
    tape.activate("silu", filled(tape, 4))
    assert all(isinstance(work, Launched) for work in tape.works)


@pytest.mark.parametrize("addends", [True, False])
@pytest.mark.parametrize("added", [False, True])
def test_narrow_products_sum_in_float32_whatever_pytorch_has(monkeypatch, addends: bool, added: bool) -> None:
    """As on GPUs, whose older PyTorch takes no float32 addend beside narrow factors."""

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

    def addmm(c: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        if not addends:
            raise RuntimeError("self and mat2 must have the same dtype")
        return out.copy_(c + a.to(out_dtype) @ b.to(out_dtype))

    tape, weight = recorder(), torch.randn(5, 8, dtype=torch.bfloat16)
    x, y, wide = filled(tape, 8), filled(tape, 5), tape.vector(5)
    bias, before = torch.randn(5), y.clone()
    tape.matrix(weight, x, wide if added else y, bias=None if added else bias)
    if added:
        tape.add(y, wide)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    tape.run()
    said = x.bfloat16().float() @ weight.float().mT
    torch.testing.assert_close(y, said + (before if added else bias))
    assert names(tape) == ["jobs", "product"]
