"""A decode step on a tape: what it covers, and when it must be made anew. That it is right is the laws'."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from constate.core.cache import Cache
from constate.core.int8 import to_int8
from constate.core.mixer import Call, Mixer
from constate.core.model import Model
from constate.core.recording import Recording
from constate.core.state import State
from constate.kernels.dispatch import available
from constate.spans import Spans
from tests.models import MODELS, VOCAB, make, tokens
from tests.referee import same_logits, same_state

pytestmark = pytest.mark.skipif(
    not next(row.here for row in available("cpu") if row.backend == "native"), reason="no C compiler here"
)

PARTLY: tuple[str, ...] = ()
"""Models of which some mixer has no C form. Of all others a step is one call."""


def started(name: str, backend: str = "native", rows: int = 2) -> tuple[Model, Cache]:
    model = make(name, backend)
    cache = model.init_cache(rows)
    model(tokens(7 * rows), Spans.of([7] * rows), cache)
    return model, cache


def pieces(recording: Recording | None) -> int:
    assert recording is not None, "the step was not recorded"
    return len(recording.tape.pieces)


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(PARTLY)))
def test_the_whole_step_is_one_call(name: str) -> None:
    model, cache = started(name)
    model.step(tokens(2), cache)
    assert pieces(cache.recording) == 1


class Doubled(Mixer):
    """A mixer of a kind that no tape knows."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.full((1, 1), 2.0), requires_grad=False)

    def forward(self, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        return self.by * x


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_mixer_without_a_c_form_steps_between_pieces(name: str) -> None:
    def steps(backend: str) -> tuple[Tensor, Cache]:
        model = make(name, backend)
        first, second, *others = model.branches
        model.branches = (first, replace(second, mixer=Doubled()), *others)
        cache = model.init_cache(2)
        return torch.stack([model.step(t, cache) for t in tokens(8).split(2)]), cache

    (got, cache), (want, _) = steps("native"), steps("torch")
    same_logits(got, want)
    assert pieces(cache.recording) == 3


def test_other_backends_record_nothing() -> None:
    model, cache = started("llama", "torch")
    model.step(tokens(2), cache)
    assert cache.recording is None


@pytest.mark.parametrize("name", ["composed", "mamba2"])
def test_it_is_made_once_and_again_when_the_cache_moves(name: str) -> None:
    model, cache = started(name)
    model.step(tokens(2), cache)
    first = cache.recording
    model.step(tokens(2), cache)
    assert cache.recording is first
    assert cache.clone().recording is None and cache.select([1]).recording is None
    cache.drop(0)
    assert cache.recording is None
    model.step(tokens(1), cache)
    assert cache.recording is not first


def test_a_cache_that_grows_is_read_where_it_then_lies() -> None:
    model, cache = started("llama", rows=1)
    plain, other = started("llama", "torch", rows=1)
    for t in tokens(140, seed=3).split(1):  # through two grains of capacity
        same_logits(model.step(t, cache), plain.step(t, other))
    same_state(cache, other)


def test_a_state_that_was_put_in_by_hand_is_used() -> None:
    model, cache = started("mamba2", rows=1)
    model.step(tokens(1), cache)
    fresh = model.init_cache(1)
    for mine, other in zip(cache.states, fresh.states, strict=True):
        mine.assign(other)
    want = make("mamba2", "torch")
    same_logits(model.step(tokens(1), cache), want.step(tokens(1), want.init_cache(1)))


def _written(model: Model) -> None:
    for p in model.parameters():
        p.mul_(0.9)


def _replaced(model: Model) -> None:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p * 0.9, requires_grad=False))


def _moved(model: Model) -> None:
    for p in model.parameters():
        p.data = p.data * 0.9


@pytest.mark.parametrize("change", [_written, _replaced, _moved])
def test_weights_that_change_are_seen(change) -> None:
    model, cache = started("composed")
    model.step(tokens(2), cache)
    plain = make("composed", "torch")
    for m in (model, plain):
        change(m)
        m._fingerprint = None
    cache, other = model.init_cache(2), plain.init_cache(2)
    prompt = tokens(14)
    for m, c in ((model, cache), (plain, other)):
        m(prompt, Spans.of([7, 7]), c)
    same_logits(model.step(tokens(2), cache), plain.step(tokens(2), other))


@pytest.mark.parametrize("change", [_written, _replaced, _moved])
def test_weights_that_change_between_two_steps_are_seen(change) -> None:
    def moved(model: Model, cache: Cache) -> Tensor:
        model.step(tokens(2), cache)
        change(model)
        return model.step(tokens(2), cache)

    same_logits(moved(*started("composed")), moved(*started("composed", "torch")))


def test_logits_are_the_callers_to_keep() -> None:
    model, cache = started("gated_deltanet")
    first = model.step(tokens(2), cache)
    kept = first.clone()
    model.step(tokens(2, seed=1), cache)
    assert torch.equal(first, kept)


def test_threads_do_not_change_a_bit() -> None:
    def run() -> Tensor:
        model, cache = started("composed", rows=3)
        return torch.stack([model.step(t, cache) for t in tokens(15, seed=2).split(3)])

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run()
        torch.set_num_threads(3)
        assert torch.equal(run(), alone)
    finally:
        torch.set_num_threads(before)


def test_two_threads_step_two_caches_of_one_model() -> None:
    model = make("composed", "native")

    def run(seed: int) -> Tensor:
        cache = model.init_cache(1)
        return torch.cat([model.step(t, cache) for t in tokens(60, seed=seed).split(1)])

    want = [run(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for got, alone in zip(pool.map(run, range(2)), want, strict=True):
                assert torch.equal(got, alone)


def test_copies_of_a_cache_leave_the_recording_behind() -> None:
    model, cache = started("llama")
    model.step(tokens(2), cache)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert twin.recording is None
        same_logits(model.step(tokens(2), twin), make("llama", "torch").step(tokens(2), cache.clone()))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_copied_model_is_a_model_of_its_own(backend: str) -> None:
    """It steps a cache of the original, and what is done to its weights is not done to the original's."""
    model, cache = started("llama", backend)
    model.step(tokens(2), cache)
    twin, other = copy.deepcopy(model), cache.clone()
    assert twin.head.weight is twin.embed.weight and twin.head.weight is not model.head.weight
    want = model.step(tokens(2), cache)
    assert torch.equal(twin.step(tokens(2), other), want)
    for p in twin.parameters():
        p.zero_()
    assert not twin.step(tokens(2), other).any()
    same_logits(model.step(tokens(2), cache.select([0, 1])), make("llama", "torch").step(tokens(2), cache))


@pytest.mark.parametrize("name", ["composed", "llama", "gated_deltanet", "mamba", "composed latent", "rwkv7"])
def test_bfloat16_weights_with_activations_in_float32(name: str) -> None:
    """Beside the same rounded weights in float32: clearly closer than PyTorch's operations in bfloat16,
    for it rounds only what the cache holds."""

    def steps(backend: str, *dtypes: torch.dtype) -> Tensor:
        model = make(name, backend)
        for dtype in dtypes:
            model.to_dtype(dtype)
        cache = model.init_cache(1)
        logits = [model.step(t, cache) for t in tokens(20).split(1)]
        assert (cache.recording is not None) == (backend == "native")
        return torch.cat(logits)

    want = steps("torch", torch.bfloat16, torch.float32)
    mine, theirs = ((steps(b, torch.bfloat16) - want).norm() / want.norm() for b in ("native", "torch"))
    assert mine < 0.7 * theirs < 0.1, f"{float(mine):.1e} and {float(theirs):.1e} of the logits' length"


@pytest.mark.parametrize("cast", ["bfloat16", "double", "half"])
@pytest.mark.parametrize("name", ["mamba", "gated_deltanet", "falcon_h1", "qwen3"])
def test_a_model_cast_by_pytorch_itself_steps_op_by_op(name: str, cast: str) -> None:
    """Its rates and norms are then no float32, which is what C would take them for."""

    def logits(backend: str) -> Tensor:
        model = getattr(make(name, backend), cast)()
        cache = model.init_cache(2)
        model(tokens(14), Spans.of([7, 7]), cache)
        stepped = [model.step(tokens(2, seed=i), cache) for i in range(3)]
        assert cache.recording is None
        return torch.cat(stepped)

    got, want = logits("native"), logits("torch")
    assert float((got - want).norm() / want.norm()) < 0.06


def test_a_narrow_state_steps_op_by_op() -> None:
    model = make("mamba2", "native")
    model.state_dtype = torch.bfloat16
    cache = model.init_cache(1)
    assert model.step(tokens(1), cache).shape == (1, VOCAB)
    assert cache.recording is None


@pytest.mark.parametrize("name", ["composed", "llama", "qwen3_next"])
def test_int8_weights_step_in_one_call_too(name: str) -> None:
    model = to_int8(make(name, "native"))
    cache = model.init_cache(2)
    model.step(tokens(2), cache)
    assert pieces(cache.recording) == 1
