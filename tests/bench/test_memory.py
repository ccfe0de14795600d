"""The memory bench: its predictions equal what a cache holds, and its child measures what it says."""

import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from constate.bench import memory, peak
from constate.bench.engines import Ours
from constate.bench.shapes import random_model
from constate.core.model import Model
from constate.loading import save
from tests.bench.test_speed import TINY

KEYS = (
    "model length rows weight_bytes kv_bytes state_bytes conv_bytes predicted_bytes measured_peak_bytes "
    "peak_above_model_bytes method backend dtype"
)


@pytest.fixture(params=sorted(TINY))
def model(request: pytest.FixtureRequest) -> Model:
    return random_model(TINY[request.param])


@pytest.mark.parametrize("rows", [1, 3])
def test_predicted_is_what_a_cache_holds(model: Model, rows: int):
    said = memory.predict(model, 70, rows)
    engine = Ours(model, memory.NEW)
    peak.write(engine, torch.zeros(rows, 70, dtype=torch.int64), memory.NEW)
    held = engine.cache.bytes()
    assert (said["state_bytes"], said["conv_bytes"], said["kv_bytes"]) == (
        held["state"],
        held["conv"],
        held["kv"],
    )
    assert said["predicted_bytes"] == engine.cache.nbytes() + model.weight_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_meter_sees_memory_that_came_and_went():
    meter = peak.Resident()
    size = 32 * 2**20
    with mmap.mmap(-1, size) as block:
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
    assert size <= meter.rise() + 2**20 < size + 16 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_point_is_measured_in_a_fresh_process(tmp_path: Path):
    model = random_model(TINY["llama"])
    save(model, tmp_path)
    row = next(memory.memory(model, str(tmp_path), [2048], 2, dtype="float32"))
    assert list(row) == KEYS.split()
    assert row["weight_bytes"] == model.weight_bytes
    assert row["measured_peak_bytes"] == row["weight_bytes"] + row["peak_above_model_bytes"]
    # 2 rows, 2,052 places, 2 layers, k and v, 2 heads of 8, float32: the cache lies within the peak.
    assert row["kv_bytes"] == 2 * 2052 * 2 * 2 * 2 * 8 * 4
    assert row["peak_above_model_bytes"] > row["kv_bytes"]


def test_what_fails_in_the_child_is_told(tmp_path: Path):
    model = random_model(TINY["llama"])
    with pytest.raises(ValueError, match=r"at 16 tokens: .*absent"):
        next(memory.memory(model, str(tmp_path / "absent"), [16]))


@pytest.mark.parametrize("wrong", [{"lengths": [0]}, {"lengths": [8], "rows": 0}])
def test_nothing_is_no_point(model: Model, wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="at least 1"):
        next(memory.memory(model, "m", **wrong))
