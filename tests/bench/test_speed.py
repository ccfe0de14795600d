"""The speed bench: its arithmetic, its order and its check. Nothing here asserts a time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.bench import agreement, peers, shapes, speed, speed_rows, timings
from constate.bench.engine import Absent, Engine, Run, Stepwise
from constate.bench.engines import Ours
from constate.bench.hybrids import HYBRIDS
from constate.bench.machine import Machine
from constate.bench.results import Results
from constate.cli import main
from constate.core.model import Model
from constate.diffusion_lm.plan import Plan
from constate.loading import load
from constate.spans import Spans
from tests.models import HYBRIDS as TEN
from tests.models import MODELS

ROOT = Path(__file__).parents[2]
TINY = {
    "mamba2": {
        **{"model_type": "mamba2", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
        **{"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "tie_word_embeddings": True},
    },
    "llama": {
        **{"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"tie_word_embeddings": True, "rope_theta": 10000.0},
    },
}


# What transformers' own classes ask of a size: grouped products of 16 bytes, and heads that divide the width;
# and where their steps are not their forward: zamba2's least step size, recurrent_gemma's other widths.
AS_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "zamba2": {"tie_word_embeddings": True, "time_step_min": 1e-4},
    "kimi_linear": {"moe_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 32},
    "gemma3_text": {"num_attention_heads": 4},
    "deepseek_v3": {"moe_intermediate_size": 16},
}


@pytest.fixture
def model() -> Model:
    return shapes.random_model(TINY["mamba2"])


class Fake(Stepwise):
    """An engine that writes down when it was called and answers with fixed logits."""

    backend = dtype = "fake"

    def __init__(self, name: str, calls: list[str], best: int = 1, off: float = 0.0, priced: Any = None):
        self.name, self.calls, self.priced = name, calls, priced
        self.logits = torch.zeros(5)
        self.logits[best] = 1.0
        self.logits += off

    def prefill(self, tokens: Tensor) -> Tensor:
        self.calls.append(f"{self.name}{tokens.shape[1]}")
        return self.logits.expand(tokens.shape[0], -1)

    def step(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(tokens.shape[0], -1)


def test_rows_have_their_keys_and_prices(model: Model):
    rows = list(speed.speed(model, "m", prompt=20, new=2, rows=(1, 3), rounds=2))
    assert [row["rows"] for row in rows] == [1, 3]
    for row in rows:
        assert list(row) == list(speed_rows.KEYS)
        assert (row["engine"], row["prefill_ratio"], row["decode_ratio"]) == ("constate", 1.0, 1.0)
        assert (row["model_calls"], row["tokens_per_call"], row["decoding"]) == (2, 1.0, None)
        assert row["between_commits_s"] == row["itl_s"]
        assert row["bytes_per_token"] == model.cost(1, 21, row["rows"]).traffic // row["rows"]
        assert min(row["bandwidth_fraction"], row["flops_fraction"]) > 0


def test_engines_take_turns(model: Model, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    monkeypatch.setattr(speed, "Ours", lambda model, new: Fake("a", calls, priced=model))
    monkeypatch.setattr(peers, "PEERS", {"b": lambda ours, source, new: Fake("b", calls, priced=source)})
    rows = list(speed.speed(model, "m", prompt=100, new=1, rounds=3, against=["b"]))
    assert calls == ["a64", "b64"] * 2 + ["a100", "b100"] * 3, "compared, warmed up, timed"
    assert [row["engine"] for row in rows] == ["a", "b"]


def test_one_new_token_can_be_timed():
    """The warm-up writes no more than there is room for, which is what a recorded step was made for."""
    (row,) = speed.speed(load("tiny/mamba2"), "m", prompt=5, new=1, rounds=1)
    assert (row["new"], row["steps_timed"], row["error"]) == (1, 1, None)


def test_rates_are_plain_arithmetic(model: Model):
    machine = Machine(bandwidth=1e9, flops=1e10)
    rates = speed_rows.rates(model, ttft=0.5, itl=0.01, rows=2, prompt=100, new=10, machine=machine)
    assert rates["flops_per_token"] == model.cost(1, 105, 2).total_flops // 2
    assert rates["prefill_tokens_per_s"] == 400
    assert rates["decode_tokens_per_s"] == 200
    assert rates["bandwidth_fraction"] == pytest.approx(model.cost(1, 105, 2).traffic / 1e7)
    assert rates["flops_fraction"] == pytest.approx(model.cost(100, 0, 2).total_flops / 5e9)


@pytest.mark.parametrize(("peer", "said"), [({"best": 2}, "logits"), ({"off": 0.1}, "logits")])
def test_a_peer_that_computes_something_else_is_not_timed(peer: dict[str, Any], said: str):
    calls: list[str] = []
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    agreement.compare(Fake("a", calls), Fake("b", calls), tokens, 2)
    with pytest.raises(agreement.Disagreement, match=said):
        agreement.compare(Fake("a", calls), Fake("b", calls, **peer), tokens, 2)


def test_what_is_seen_before_timing_stands_in_the_row(model: Model, monkeypatch: pytest.MonkeyPatch):
    """Other tokens and logits than ours are told, and without --check timed all the same."""
    calls: list[str] = []
    made = {
        "same": lambda ours, source, new: Fake("same", calls, priced=source),
        "other": lambda ours, source, new: Fake("other", calls, best=2, priced=source),
    }
    monkeypatch.setattr(speed, "Ours", lambda model, new: Fake("a", calls, priced=model))
    monkeypatch.setattr(peers, "PEERS", made)
    rows = list(speed.speed(model, "m", prompt=9, new=2, rounds=1, against=list(made)))
    assert [(row["engine"], row["tokens_equal"], row["logits_differ"]) for row in rows] == [
        ("a", None, None),
        ("same", 1.0, 0.0),
        ("other", 0.0, 1.0),
    ]
    with pytest.raises(agreement.Disagreement, match="other"):
        next(speed.speed(model, "m", prompt=9, new=2, rounds=1, against=list(made), check=True))


class Clocked(Engine):
    """One that tells its own seconds, round by round."""

    backend = dtype = "clocked"

    def __init__(self, name: str, priced: Any, runs: list[tuple[float, list[float]]]):
        self.name, self.priced, self.runs = name, priced, iter([(0.0, [0.0]), (0.0, [0.0]), *runs])

    def write(self, tokens: Tensor, new: int) -> Run:
        return Run(*next(self.runs), torch.zeros(len(tokens), new + 1, dtype=torch.int64))


def test_percentiles_and_the_spread_of_ratios(model: Model, monkeypatch: pytest.MonkeyPatch):
    ours = Clocked("a", model, [(1.0, [0.1, 0.2]), (2.0, [0.3, 0.4]), (4.0, [0.5, 5.0])])
    peer = Clocked("b", model, [(3.0, [0.3, 0.3]), (2.0, [0.7, 0.7]), (8.0, [5.5, 5.5])])
    monkeypatch.setattr(speed, "Ours", lambda model, new: ours)
    monkeypatch.setattr(peers, "PEERS", {"b": lambda ours, source, new: peer})
    first, second = speed.speed(model, "m", prompt=9, new=2, rounds=3, against=["b"])
    assert (first["ttft_s"], first["itl_s"], first["steps_timed"]) == (2.0, pytest.approx(0.35), 6)
    assert (first["itl_p90_s"], first["itl_p99_s"]) == (5.0, 5.0)
    assert [second[f"prefill_ratio{end}"] for end in ("_low", "", "_high")] == [1.0, 2.0, 3.0]
    assert [second[f"decode_ratio{end}"] for end in ("_low", "", "_high")] == pytest.approx([2.0, 2.0, 2.0])


def test_nearest_rank():
    tens = [float(n) for n in range(10, 0, -1)]
    assert [speed_rows.percentile(tens, share) for share in (0.5, 0.9, 0.91, 0.99, 1.0)] == [5, 9, 10, 10, 10]
    assert speed_rows.percentile([7.0], 0.9) == 7.0


def test_one_that_tells_no_single_steps_has_no_percentiles(model: Model, monkeypatch: pytest.MonkeyPatch):
    whole = Clocked("b", model, [(1.0, [0.5])] * 2)
    monkeypatch.setattr(peers, "PEERS", {"b": lambda ours, source, new: whole})
    row = list(speed.speed(model, "m", prompt=9, new=4, rounds=2, against=["b"]))[1]
    assert (row["itl_s"], row["itl_p90_s"], row["itl_p99_s"], row["logits_differ"]) == (0.5, None, None, None)


def absent(ours: Model, source: Model, new: int) -> Engine:
    raise Absent("it is not here", "pip install it")


def broken(ours: Model, source: Model, new: int) -> Engine:
    raise RuntimeError("out of  memory\nand more")


class Falling(Fake):
    """One that fails in its second prefill: after the comparison, in the warm-up."""

    def prefill(self, tokens: Tensor) -> Tensor:
        if self.calls:
            raise RuntimeError("a kernel failed")
        return super().prefill(tokens)


def test_a_peer_that_is_absent_or_fails_has_a_row_that_says_so(model: Model, monkeypatch: pytest.MonkeyPatch):
    made = {"x": absent, "y": broken, "z": lambda ours, source, new: Falling("z", [], priced=source)}
    monkeypatch.setattr(peers, "PEERS", made)
    monkeypatch.setattr(speed, "Ours", lambda model, new: Fake("constate", [], priced=model))
    rows = list(speed.speed(model, "m", prompt=9, new=2, rows=(1, 2), rounds=2, against=list(made)))
    for count, found in ((1, rows[:4]), (2, rows[4:])):
        told = {row["engine"]: (row["error"], row["install"]) for row in found}
        assert told == {
            "constate": (None, None),
            "z": ("RuntimeError: a kernel failed", None),
            "x": ("it is not here", "pip install it"),
            "y": ("RuntimeError: out of memory and more", None),
        }
        for row in found:
            assert list(row) == list(speed_rows.KEYS)
            assert (row["rows"], row["prompt"], row["new"]) == (count, 9, 2)
            assert (row["ttft_s"] is None) == (row["engine"] != "constate"), "nothing is told of the rest"


def test_each_row_says_how_it_was_measured(model: Model):
    """Case L1: backend, dtypes, threads, graph and warm-up, and what the machine did at the start."""
    (row,) = speed.speed(model, "m", prompt=9, new=2, rounds=2)
    graph = "recorded" if row["backend"] == "native" else "plain"
    assert (row["backend"], row["graph"]) == (model.ops.backend, graph)
    assert (row["dtype"], row["state_dtype"], row["device"]) == ("float32", "float32", "cpu")
    assert (row["threads"], row["warmup"], row["rounds"]) == (torch.get_num_threads(), 1, 2)
    assert min(row["machine_bandwidth"], row["machine_flops"]) > 0
    plain = shapes.random_model(TINY["mamba2"], backend="torch", state_dtype="bfloat16")
    (row,) = speed.speed(plain, "m", prompt=9, new=2, rounds=1)
    assert (row["backend"], row["graph"], row["state_dtype"]) == ("torch", "plain", "bfloat16")


def test_a_row_beyond_the_models_positions_is_marked(model: Model):
    within, beyond = (next(speed.speed(model, "m", prompt=9, new=2, positions=n)) for n in (11, 10))
    assert (within["flags"], len(beyond["flags"])) == ([], 1)
    assert "10 positions" in beyond["flags"][0]


# -- points ----------------------------------------------------------------------------------------------


def test_points_are_kept_and_not_timed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timed: list[int] = []

    def fake(model: Model, name: str, *, prompt: int, **asked: Any) -> Any:
        timed.append(prompt)
        if prompt == 30:
            raise KeyboardInterrupt
        yield speed_rows.row(model=name, prompt=prompt, engine="constate")

    monkeypatch.setattr(timings, "speed", fake)
    points = [timings.Timing("tiny/mamba", n, 2, 1) for n in (10, 20, 30, 40)]
    kept = tmp_path / "speed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(timings.timings(points, Results(kept)))
    assert timed == [10, 20, 30]
    monkeypatch.setattr(
        timings, "speed", lambda *args, **asked: fake(*args, **{**asked, "prompt": asked["prompt"] + 1})
    )
    seen: list[int] = []
    rows = list(timings.timings(points, Results(kept), done=lambda point: seen.append(point.prompt)))
    assert [row["prompt"] for (row,) in rows] == [10, 20, 31, 41], "the first two as they were"
    assert seen == [10, 20, 30, 40]
    assert [record.settings["prompt"] for record in Results(kept).records] == [10, 20, 30, 40]
    other = timings.Timing("tiny/mamba", 10, 2, 1, load={"dtype": "bfloat16"})
    assert next(timings.timings([other], Results(kept)))[0]["prompt"] == 11, "another setting, another point"


def test_what_does_not_fit_is_refused_before_it_is_timed(monkeypatch: pytest.MonkeyPatch):
    """The transformer's keys and values; the recurrent one of the same prompt would fit."""
    monkeypatch.setattr("constate.loading.memory.available", lambda device: 64 * 2**20)
    monkeypatch.setattr(timings, "speed", lambda *args, **asked: iter(()))
    assert list(timings.timings([timings.Timing("tiny/mamba2", 100_000, 2, 4)])) == [[]]
    with pytest.raises(ValueError, match=r"largest length that fits is [\d,]+ tokens"):
        next(timings.timings([timings.Timing("tiny/transformer", 100_000, 2, 4)]))


def test_the_command_keeps_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["bench", "speed", "--model", "tiny/mamba2", "--prompt", "8,16", "--new", "2", "--rounds", "1"]
    asked += ["--against", "transformers,vllm", "--out", str(tmp_path / "f.jsonl")]
    assert main([*asked, "--json"]) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["prompt"], row["engine"]) for row in rows] == [
        (n, engine) for n in (8, 16) for engine in ("constate", "transformers", "vllm")
    ]
    assert "composed" in rows[1]["error"] and "GPU" in rows[2]["error"]
    assert main([*asked, "--json"]) == 0
    assert capsys.readouterr().out == out, "to the last digit: nothing was timed again"
    assert main(asked) == 0
    assert "not timed" in capsys.readouterr().out


def test_our_engine_reads_in_pieces_as_one(model: Model, monkeypatch: pytest.MonkeyPatch):
    """Its logits are those of one plain forward, whatever the pieces."""
    tokens = torch.randint(0, 97, (2, 21))
    whole = model.forward(tokens.flatten(), Spans.of([21, 21]), at="last")
    monkeypatch.setattr("constate.bench.engines.PIECE", 8)
    engine = Ours(model, room=1)
    torch.testing.assert_close(engine.prefill(tokens), whole, atol=1e-4, rtol=0)
    longer = torch.cat([tokens, torch.tensor([[5], [6]])], 1)
    want = model.forward(longer.flatten(), Spans.of([22, 22]), at="last")
    torch.testing.assert_close(engine.step(torch.tensor([5, 6])), want, atol=1e-4, rtol=0)


def test_transformers_holds_the_same_weights():
    """In a process of its own: transformers is slow to import, and hides what is imported with it."""
    code = f"""
from constate.bench import shapes, speed
for name, raw in {TINY!r}.items():
    model = shapes.random_model(raw)
    options = dict(prompt=19, new=3, rows=(2,), rounds=1, against=["transformers"], check=True)
    rows = list(speed.speed(model, name, **options))
    assert [row["engine"] for row in rows] == ["constate", "transformers"], rows
    assert rows[1]["prefill_ratio"] > 0 and "transformers" in rows[1]["backend"]
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0, child.stderr


def test_transformers_holds_each_hybrid() -> None:
    """The ten, tiny, whose files name experts one by one, tie blocks or leave out what the config says; and
    steps on a cache that one of them never hands back."""
    tiny = {name: {**MODELS[name].raw, **AS_TRANSFORMERS.get(name, {})} for name in MODELS if name in TEN}
    code = f"""
from constate.bench import shapes, speed
for name, raw in {tiny!r}.items():
    options = dict(prompt=11, new=2, rows=(2,), rounds=1, against=["transformers"], check=True)
    rows = list(speed.speed(shapes.random_model(raw), name, **options))
    assert [row["engine"] for row in rows] == ["constate", "transformers"], rows
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    assert len(tiny) == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"against": ["abacus"]}, "abacus"),
        ({"rows": (0,)}, "at least 1"),
        ({"rounds": 0}, "at least 1"),
        ({"plan": Plan(steps=4)}, "one token after another"),
    ],
)
def test_a_wrong_request_is_refused(model: Model, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        next(speed.speed(model, "m", **options))


def test_the_check_is_for_float32_alone():
    model = shapes.random_model(TINY["mamba2"], dtype="bfloat16")
    with pytest.raises(ValueError, match="float32"):
        next(speed.speed(model, "m", check=True))


def test_named_shapes_are_the_published_ones():
    """Parameter counts as the model cards give them, counted on paper alone: no weights are made."""
    from constate.core.architecture import read_config
    from constate.loading import find

    counts = {}
    for name, raw in shapes.SHAPES.items():
        architecture = find(raw["model_type"]).architecture
        with torch.device("meta"):
            model = architecture.build(read_config(architecture.Config, raw))
        counts[name] = sum(p.numel() for p in model.parameters())
    assert counts["llama-135m"] == 134_515_008
    assert counts["mamba-130m"] == 129_135_360
    assert counts["gated-delta-144m"] == 144_490_968  # as transformers counts its own
    assert counts["llada-130m"] == 134_105_856
    assert counts["mamba2-130m"] == pytest.approx(129e6, rel=0.01)
    assert len(HYBRIDS) == 10 and all(50e6 < counts[name] < 150e6 for name in HYBRIDS)


def test_the_same_seed_draws_the_same_weights():
    a, b = (shapes.random_model(TINY["llama"], seed=s).state_dict() for s in (3, 3))
    assert all(torch.equal(a[name], b[name]) for name in a)
    c = shapes.random_model(TINY["llama"], seed=4).state_dict()
    assert not torch.equal(a["embed.weight"], c["embed.weight"])
