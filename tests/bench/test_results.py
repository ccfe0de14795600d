"""Records of measurements: a versioned schema, a line at once, nothing lost, nothing measured twice."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from constate.bench import place, results
from constate.bench.executor import Done, in_order, points
from constate.bench.ray import cluster
from constate.bench.results import SCHEMA, Results, read

OTHER = {"machine": {"cpu": "another"}, "versions": {"constate": "0"}, "revision": None}


def test_a_record_stands_by_itself(tmp_path: Path):
    path = tmp_path / "new" / "r.jsonl"
    made = Results(path).add("memory", {"length": 3}, [{"model": "m\u2028", "x": 1.5}])
    (line,) = path.read_text().splitlines()
    told = json.loads(line)
    assert list(told) == ["schema", "bench", "settings", "rows", "machine", "versions", "revision", "taken"]
    assert (told["schema"], told["rows"]) == (SCHEMA, [{"model": "m\u2028", "x": 1.5}])
    machine = ["cpu", "cores", "memory_bytes", "gpu", "gpu_memory_bytes", "driver", "system"]
    assert list(told["machine"]) == machine and told["machine"]["cores"] >= 1 and told["machine"]["cpu"]
    assert {"constate", "python", "torch", "triton", "transformers"} <= set(told["versions"])
    assert read(path) == [made]


def test_a_point_is_known_by_bench_settings_machine_and_versions(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    first = Results(path)
    first.add("memory", {"b": [1, 2], "a": 1}, [{"x": 1}])
    first.add("memory", {"a": 3}, [{"x": 3}], {**OTHER, "versions": place.here()["versions"]})
    first.add("memory", {"a": 4}, [{"x": 4}], OTHER)
    again = Results(path)
    found = again.done("memory", {"a": 1, "b": [1, 2]})
    assert found is not None and found.rows == [{"x": 1}]
    for bench, settings in (("speed", {"a": 1, "b": [1, 2]}), ("memory", {"a": 1}), ("memory", {"a": 3})):
        assert again.done(bench, settings) is None
    elsewhere = again.done("memory", {"a": 3}, anywhere=True)
    assert elsewhere is not None and elsewhere.machine == {"cpu": "another"}
    assert again.done("memory", {"a": 4}, anywhere=True) is None  # with other versions


def test_a_line_that_was_cut_off_costs_itself_alone(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    kept = Results(path)
    kept.add("memory", {"a": 1}, [])
    kept.add("memory", {"a": 2}, [])
    path.write_bytes(path.read_bytes()[:-20])
    assert [record.settings for record in read(path)] == [{"a": 1}]
    Results(path).add("memory", {"a": 3}, [])
    assert [record.settings for record in read(path)] == [{"a": 1}, {"a": 3}]


def test_files_of_several_machines_are_read_in_order(tmp_path: Path):
    for name, number in (("b", 1), ("a", 2)):
        Results(tmp_path / name).add("memory", {"n": number}, [], OTHER)
    assert [r.settings["n"] for r in read(tmp_path / "b", tmp_path / "a")] == [1, 2]


GOOD = (
    b'{"schema": "constate.bench.1", "bench": "memory", "settings": {}, "rows": [], "machine": {}, '
    b'"versions": {}}\n'
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"schema": "constate.bench.2", "bench": "memory"}\n', "line 1 has schema 'constate.bench.2'"),
        (b"\n[1, 2]\n", "line 2 is no record"),
        (b"model,length\n", "line 1 is no record"),
        (b'{"schema": "constate.bench.1", "bench": "memory"}\n', "calls itself"),
        (GOOD.replace(b'"rows": []', b'"rows": {"a": 1}'), "and is not: its rows"),
        (GOOD.replace(b'"rows": []', b'"rows": [1]'), "and is not: a row"),
        (GOOD.replace(b'"machine": {}', b'"machine": null'), "and is not: its machine"),
        # someone's own text without a last newline is no record that was cut off
        (b"my notes", "is no results file"),
        (b'{"model_type": "llama"}', "is no results file"),
        (GOOD + b"my notes", "is no results file"),
        (b"\xff\xfe\x00", "is no results file"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str):
    (path := tmp_path / "r.jsonl").write_bytes(content)
    for opened in (read, Results):
        with pytest.raises(ValueError, match=said) as refused:
            opened(path)
        assert "\n" not in str(refused.value)
    assert path.read_bytes() == content


def test_a_record_that_lacks_its_end_of_line_alone_is_kept(tmp_path: Path):
    """As an editor leaves the last one."""
    Results(path := tmp_path / "r.jsonl").add("memory", {"n": 1}, [])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert [r.settings["n"] for r in read(path)] == [1]
    again = Results(path)
    assert again.done("memory", {"n": 1}) is not None
    again.add("memory", {"n": 2}, [])
    assert [r.settings["n"] for r in read(path)] == [1, 2]


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="no such results file"):
        read(tmp_path / "absent")
    with pytest.raises(ValueError, match="no results file"):
        read(tmp_path)


def test_an_installed_copy_has_no_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Not even where it lies inside someone else's repository."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(place, "__file__", str(tmp_path / "lib" / "site" / "constate" / "bench" / "place.py"))
    assert place.revision() is None


def test_a_card_and_its_driver_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(place, "_said", lambda *_: "NVIDIA H200, 143771, 570.1\nNVIDIA H200, 143771, 570.1\n")
    told = place.machine()
    assert (told["gpu"], told["driver"]) == ("NVIDIA H200, NVIDIA H200", "570.1")
    assert told["gpu_memory_bytes"] == 143771 * 2**20


def test_without_proc_what_is_not_known_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(place, "MEMINFO", tmp_path / "absent")
    assert place.machine()["memory_bytes"] is None


def test_other_threads_do_not_write_among_results(capsys: pytest.CaptureFixture[str]):
    with redirect_stdout(cluster.OwnLines(sys.stdout)):
        print("a result")
        thread = Thread(target=print, args=("a worker was lost",))
        thread.start()
        thread.join()
    assert capsys.readouterr() == ("a result\n", "a worker was lost\n")


# -- where points run ---------------------------------------------------------------------------------


def test_local_points_come_in_order_and_one_by_one():
    seen: list[int] = []

    def work(task: int) -> int:
        seen.append(task)
        return -task

    for i, one in enumerate(points(work, [3, 1, 2])):
        assert (one.index, one.result, len(seen)) == (i, -seen[i], i + 1)
        assert one.place == place.here()


def test_early_results_wait_for_those_before_them():
    def one(index: int) -> Done[str]:
        return Done(index, "abc"[index], {})

    assert "".join(d.result for d in in_order(map(one, (2, 0, 1)))) == "abc"


def test_an_executor_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    def nothing(name: str) -> Any:
        return None

    with pytest.raises(ValueError, match="known are local, ray"):
        points(abs, [1], "abacus")
    monkeypatch.setattr("constate.bench.ray.cluster.find_spec", nothing)
    with pytest.raises(ValueError, match=r"pip install 'constate\[ray\]'"):
        points(abs, [1], "ray")
    assert results.SCHEMA == "constate.bench.1"
