"""Case L3: how many sequences fit is a sum, and what is planned is what is allocated."""

from __future__ import annotations

from typing import Any

import pytest

from constate.bench.capacity import Capacity, capacity, charge, sizes
from constate.bench.predict.paper import paper
from constate.core.cache import GRAIN
from tests.models import MODELS, make

ROWS, TOKENS, MUCH = 3, 130, 2**40


def planned(name: str, **over: Any):
    return paper({**MODELS[name].raw, **over}, dtype="float32")


@pytest.mark.parametrize("name", MODELS)
def test_planned_is_allocated(name: str):
    """Rings of windowed layers are whole from the start, so in the slot; keys and values come in blocks."""
    plan = capacity(planned(name), ROWS, TOKENS, MUCH)
    assert (plan.slots, plan.blocks, plan.warning) == (ROWS, 3 * ROWS, None)
    model = make(name)
    assert plan.nbytes == model.init_cache(ROWS, 3 * GRAIN).nbytes()
    grown = model.init_cache(ROWS)
    grown.reserve([TOKENS] * ROWS)
    assert plan.nbytes == grown.nbytes()
    assert (plan.block_bytes > 0) == (MODELS[name].slope > 0)


def test_a_short_request_is_charged_one_slot_and_one_block():
    assert [charge(n) for n in (0, 1, 12, GRAIN, GRAIN + 1)] == [(1, 0), (1, 1), (1, 1), (1, 1), (1, 2)]


def test_too_many_are_clamped_with_a_warning():
    about = planned("llama")
    slot, block = sizes(about)
    assert slot == 0
    memory = about.weight_bytes + 5 * 2 * block
    plan = capacity(about, 256, GRAIN + 1, memory)
    assert (plan.slots, plan.blocks) == (5, 10)
    assert about.weight_bytes + plan.nbytes <= memory
    assert plan.warning is not None and plan.warning.startswith("256 sequences of 65 tokens want")
    assert plan.warning.endswith("5 fit")


def test_where_not_one_fits_the_longest_that_would_is_told():
    about = planned("llama")
    _, block = sizes(about)
    with pytest.raises(ValueError, match=rf"one of {2 * GRAIN} tokens would fit"):
        capacity(about, 1, 1000, about.weight_bytes + 2 * block)
    with pytest.raises(ValueError, match="not even an empty one"):
        capacity(planned("mamba2"), 1, 1000, planned("mamba2").weight_bytes + 1)


def test_state_in_16_bits_is_half_a_slot():
    wide = planned("mamba2")
    narrow = paper(MODELS["mamba2"].raw, dtype="float32", state_dtype="bfloat16")
    assert sizes(wide)[0] - sizes(narrow)[0] == wide.held(1)["state"] // 2
    assert Capacity(2, 3, 10, 100).nbytes == 320
