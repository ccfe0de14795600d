"""Work on a Ray cluster: a local one with two workers, one of which is killed.

The cluster runs in a process of its own (`python -m tests.bench.ray_run`), whose warnings and threads are not
the tests'.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from constate.bench.results import read
from constate.generation import generate
from constate.loading import load

ROOT = Path(__file__).parents[2]
pytest.importorskip("ray", reason="ray is not installed")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run of ray_run.py says of everything."""
    folder = tmp_path_factory.mktemp("ray")
    command = [sys.executable, "-m", "tests.bench.ray_run", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return {**json.loads(run.stdout.splitlines()[-1]), "folder": folder}


def test_a_point_whose_worker_was_killed_runs_again(told: dict[str, Any]):
    """Both workers hold a task when one is killed; all results are there, in order, and each task was begun
    once more than it was killed."""
    assert told["swept"] == [0, 1, 4, 9, 16, 25]
    assert told["killed"] in told["begun"]["2"]
    assert {task: len(pids) for task, pids in told["begun"].items()} == {
        **{str(task): 1 for task in range(6)},
        "2": 2,
    }


def test_what_work_raises_is_raised_here(told: dict[str, Any]):
    assert told["raised"] == "ValueError: task 1 is wrong"


def test_a_worker_that_is_always_lost_is_told(told: dict[str, Any]):
    assert told["lost"].startswith("ValueError: ray: its worker was lost 2 times")


def test_memory_is_measured_on_workers_and_merged_into_one_file(told: dict[str, Any]):
    records = read(told["folder"] / "memory.jsonl")
    assert sorted(record.settings["length"] for record in records) == [64, 128]
    assert [row["length"] for row in told["memory"]] == [64, 128]
    for row in told["memory"]:
        assert row["measured_peak_bytes"] > row["weight_bytes"]
    assert told["again"] == told["memory"]  # read, not measured


def test_copies_write_what_one_model_writes_in_order(told: dict[str, Any]):
    """A copy was killed while it wrote; its prompts were written again."""
    from tests.bench.ray_run import PROMPTS, WRITING

    alone = generate(load("tiny/mamba2"), PROMPTS, **WRITING)
    assert [(r["prompt"], r["text"]) for r in told["written"]] == [(r.prompt, r.text) for r in alone]
    assert told["copy_killed"]
