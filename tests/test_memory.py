"""How memory grows with tokens: linear in one piece, constant in pieces of bounded size (cases G2, G3).

Peaks are what PyTorch's profiler sees allocated during a call, beside weights and whatever came before.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from constate.core.cache import Cache
from constate.core.model import Model
from constate.spans import Spans
from constate.ssm.mamba import Mamba, MambaSpec
from tests.backends import BACKENDS
from tests.kernels.memory import peak_bytes
from tests.models import FULL_ATTENTION, MODELS, make, tokens

CONSTANT = tuple(name for name, entry in MODELS.items() if not entry.slope)
FAST = [backend for backend in BACKENDS if backend != "reference"]
PIECE = 256


def widest(model: Model) -> int:
    """Bytes a token of the widest activation."""
    return 4 * max(
        m.out_features for m in model.modules() if isinstance(m, nn.Linear) and m is not model.head
    )


def one_shot(model: Model, n: int) -> int:
    prompt, cache = tokens(n), model.init_cache(1, capacity=n)
    return peak_bytes(lambda: model(prompt, Spans.of([n]), cache, at="last"))


def in_pieces(model: Model, n: int) -> tuple[int, Cache]:
    """Peak of reading n tokens PIECE at a time, the cache and all that it grew by included."""
    prompt, kept = tokens(n), []

    def run() -> None:
        cache = model.init_cache(1)
        for piece in prompt.split(PIECE):
            model(piece, Spans.of([len(piece)]), cache, at="last")
        kept.append(cache)

    return peak_bytes(run), kept[0]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", MODELS)
def test_one_shot_is_linear_with_a_small_constant(name: str, backend: str) -> None:
    """Case G2: no T x T tensor, no temporary a token for ever: peak <= a + b T."""
    model = make(name, backend)
    lengths = (2048, 4096) if name in FULL_ATTENTION or backend == "native" else (2048, 4096, 16384)
    peaks = [one_shot(model, n) for n in lengths]
    assert peaks[1] / peaks[0] <= 2.2, f"2k and 4k tokens: {peaks}"
    per_token = (peaks[-1] - peaks[0]) / (lengths[-1] - lengths[0])
    assert per_token <= 6 * widest(model), (
        f"{per_token:.0f} bytes a token, the widest activation has {widest(model)}"
    )
    assert peaks[0] <= 2048 * 6 * widest(model) + (8 << 20), f"constant part: {peaks[0]} bytes at 2k tokens"


@pytest.mark.parametrize("name", CONSTANT)
def test_pieces_take_constant_memory(name: str) -> None:
    """Case G3: reading eight times the tokens in pieces peaks within 5%, and the state is as large."""
    model = make(name, "torch")
    near, short = in_pieces(model, 2048)
    far, long = in_pieces(model, 16384)
    assert abs(far / near - 1) < 0.05, f"{near} bytes at 2k tokens, {far} at 16k"
    assert long.nbytes() == short.nbytes()


def test_pieces_take_constant_memory_at_64k() -> None:
    model = make("composed mamba2", "torch")
    near, short = in_pieces(model, 8192)
    far, long = in_pieces(model, 65536)
    assert abs(far / near - 1) < 0.05, f"{near} bytes at 8k tokens, {far} at 64k"
    assert long.nbytes() == short.nbytes() == model.init_cache(1).nbytes()


def test_state_is_the_same_at_1_and_at_100k_tokens() -> None:
    for name in CONSTANT:
        model = make(name)
        assert sum(model.cost(0, 5).held.values()) == sum(model.cost(0, 100_000).held.values())


def test_mamba_130m_holds_what_its_paper_gives() -> None:
    """Case G3's check value: 24 layers of 1536 channels, 16 states and width 4."""
    with torch.device("meta"):
        mixer = Mamba(768, MambaSpec(inner=1536, state_size=16))
        held = mixer.init_state(1, 0).bytes()
    assert 24 * held["state"] == 2_359_296
    assert 24 * held["conv"] == 442_368
    assert mixer.cost(0, 1000).held == {"state": held["state"], "conv": held["conv"]}
