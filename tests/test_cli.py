"""The command line: what it prints where, and its exit statuses. How texts come about is tested elsewhere.

Commands run in this process through `main`, which returns the exit status; a process of its own starts
only where what is imported is the point.
"""

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from constate import __version__
from constate.cli import main
from constate.cli.options import count, counts, names, targets
from constate.cli.output import cell, seconds, size

ROOT = Path(__file__).parents[1]
USAGE = (
    "prompt_tokens new_tokens model_calls ttft_s itl_s tokens_per_s weight_bytes state_bytes conv_bytes "
    "kv_bytes backend"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer and random weights: a delta layer and an attention layer."""
    return checkpoint(tmp_path_factory.mktemp("cli"), seed=0)


def checkpoint(folder: Path, seed: int) -> Path:
    layers = [
        {"mixer": {"type": "gated_deltanet", "heads": 2, "key_dim": 8, "value_dim": 8}, "mlp": {"width": 32}},
        {"mixer": {"type": "attention", "heads": 2, "head_dim": 8}, "mlp": None},
    ]
    raw = {"model_type": "composed", "vocab_size": 1024, "hidden_size": 16, "layers": layers}
    return written(folder, {**raw, "tie_word_embeddings": False}, seed)


def written(folder: Path, raw: dict[str, Any], seed: int = 0) -> Path:
    from constate.bench.shapes import random_model
    from constate.loading import save
    from constate.training.text import END_ID, load_tokenizer

    model = random_model(raw, seed=seed)
    model.tokenizer, model.eos_ids = load_tokenizer(), frozenset({END_ID})
    save(model, folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    capsys.readouterr()
    status = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return status, out, err


def lines(capsys: pytest.CaptureFixture[str], *argv: object) -> list[dict[str, Any]]:
    """The objects that a command with --json prints, when it prints nothing else."""
    status, out, err = run(capsys, *argv, "--json")
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that refuses a wrong request."""
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("constate: ")
    return err


# -- what starts ------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from constate.cli import main; status = main(['--help']);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'safetensors', 'transformers'} & set(sys.modules);"
        "sys.exit(f'{status} {heavy}' if status or heavy else 0)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    for command in ("generate", "models", "doctor", "bench", "train", "quality", "compare"):
        assert command in child.stdout


def test_the_module_runs_the_same_command():
    argv = [sys.executable, "-m", "constate", "generate"]
    child = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr.startswith("constate: no prompt was given")


def test_nothing_asked_is_answered_with_help(capsys: pytest.CaptureFixture[str]):
    status, out, _ = run(capsys)
    assert status == 0 and "Usage: constate" in out


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


def test_an_interrupt_leaves_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("constate.loading.checkpoints", interrupted)
    status, out, err = run(capsys, "models")
    assert (status, out, err) == (130, "", "")


# -- counts, lists, units -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("64", 64), ("1k", 1024), ("8K", 8192), ("2m", 2 * 1024**2)]
)
def test_counts_are_binary(text: str, value: int):
    assert count(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1.5k", "k", "8g", "1k,2k"])
def test_what_is_no_count_is_refused(text: str):
    with pytest.raises(typer.BadParameter, match="no count"):
        count(text)


def test_lists_have_commas():
    assert counts("1k, 4k,16") == [1024, 4096, 16]
    assert names("transformers, fla") == ["transformers", "fla"]
    assert names(None) == []
    assert targets(["a", "b"], ["s"]) == [("a", False), ("b", False), ("s", True)]
    assert targets(None, None) == [("tiny/hybrid", False)]
    every = targets(["a"], ["hybrids", "s"])
    assert (len(every), every[0], every[-1]) == (12, ("a", False), ("s", True))
    assert ("qwen3_next-medium", True) in every


def test_units_are_read_off_the_keys():
    assert (size(1023), size(1024), size(3 * 1024**3 // 2)) == ("1,023 B", "1.0 KiB", "1.5 GiB")
    assert (seconds(2.5), seconds(0.0123)) == ("2.50 s", "12.30 ms")
    assert cell("state_bytes", 2048) == "2.0 KiB"
    assert cell("prefill_tokens_per_s", 1234.5) == "1,234"
    assert (cell("ok", False), cell("ok", None)) == ("NO", "–")


# -- generate -----------------------------------------------------------------------------------------


def test_json_has_its_keys_and_nothing_else_is_printed(capsys: pytest.CaptureFixture[str], folder: Path):
    rows = lines(capsys, "generate", "It is a truth", "She", "--model", folder, "--max-new-tokens", 5)
    assert [row["prompt"] for row in rows] == ["It is a truth", "She"]
    for row in rows:
        assert list(row) == ["model", "prompt", "text", "tokens", "finish_reason", "usage"]
        assert row["model"] == str(folder)
        assert set(USAGE.split()) <= set(row["usage"])
        assert row["usage"]["new_tokens"] == len(row["tokens"]) <= 5


def test_logprobs_where_asked(capsys: pytest.CaptureFixture[str], folder: Path):
    asked = ("generate", "She", "--model", folder, "--max-new-tokens", 3)
    row = lines(capsys, *asked, "--logprobs")[0]
    assert len(row["logprobs"]) == len(row["tokens"]) and max(row["logprobs"]) < 0
    assert "add --json" in refused(capsys, *asked, "--logprobs")


def test_plain_text_is_the_json_text(capsys: pytest.CaptureFixture[str], folder: Path):
    asked = (
        "generate",
        "She was",
        "--model",
        folder,
        "--max-new-tokens",
        12,
        "--temperature",
        1,
        "--seed",
        3,
    )
    row = lines(capsys, *asked)[0]
    text, backend = row["text"], row["usage"]["backend"]
    status, out, err = run(capsys, *asked)
    assert (status, out) == (0, text + "\n") and text
    assert backend in err and "12 tokens" in err


def test_several_texts_stand_apart(capsys: pytest.CaptureFixture[str], folder: Path):
    asked = ("generate", "She", "He", "--n", 2, "--temperature", 1, "--max-new-tokens", 4, "--model", folder)
    texts = [row["text"] for row in lines(capsys, *asked)]
    status, out, _ = run(capsys, *asked)
    assert status == 0 and len(texts) == 4
    heads = [f"── {prompt} · sample {j} of 2" for prompt in ("She", "He") for j in (1, 2)]
    blocks = [f"{head}\n{text}\n\n" for head, text in zip(heads, texts, strict=True)]
    assert out == "".join(blocks)


def test_every_option_arrives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
):
    """Each under the library's name: a flag that falls by the wayside would be a silent lie."""
    seen: dict[str, Any] = {}

    def write(model: object, prompts: Sequence[str], **options: Any) -> list[Any]:
        seen.update(options, prompts=prompts)
        return []

    def load(*given: str) -> None:
        seen["load"] = given

    monkeypatch.setattr("constate.generation.generate", write)
    monkeypatch.setattr("constate.loading.load", load)
    flags: Mapping[str, object] = {
        **{"max-new-tokens": "1k", "temperature": 0.5, "top-k": 7, "top-p": 0.9, "min-p": 0.1},
        **{"repetition-penalty": 1.2, "seed": 11, "n": 3, "save-state": "s", "load-state": "l"},
        **{"model": folder, "device": "cpu", "dtype": "bfloat16", "state-dtype": "float16"},
        **{"backend": "reference", "weights": "int8"},
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", value)]
    planned: Mapping[str, Any] = {
        **{"policy": "threshold", "steps": 9, "block": 8, "threshold": 0.7, "entropy_bound": 0.3},
        **{"confidence": "tempered", "order_noise": 0.2, "cache": "dual", "refresh": 4, "guidance": 0.5},
        **{"eos": "late", "min_new_tokens": 3},
    }
    given += [text for name, value in planned.items() for text in (f"--{name.replace('_', '-')}", value)]
    switches = ("--infill", "then", "--ignore-eos", "--chat", "--stop", "a", "--stop", "\n\n")
    assert lines(capsys, "generate", "p", "q", *given, *switches) == []
    assert seen == {
        **{"prompts": ["p", "q"], "max_new_tokens": 1024, "temperature": 0.5, "top_k": 7, "top_p": 0.9},
        **{"min_p": 0.1, "repetition_penalty": 1.2, "seed": 11, "n": 3, "stop": ["a", "\n\n"]},
        **{"ignore_eos": True, "chat": True, "save_state": Path("s"), "load_state": Path("l")},
        "load": (str(folder), "cpu", "bfloat16", "reference", "float16", "int8"),
        "infill": "then",
        **planned,
    }
    seen.clear()
    assert lines(capsys, "generate", "p", "q", "--infill", "a", "--infill", "b", "--model", folder) == []
    assert seen["infill"] == ["a", "b"] and not planned.keys() & seen.keys()


def test_prompts_from_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
):
    (tmp_path / "prompts").write_text("She\n\n  It is \n", encoding="utf-8")
    asked = ("generate", "--model", folder, "--max-new-tokens", 2)
    rows = lines(capsys, *asked, "He", "--file", tmp_path / "prompts")
    assert [row["prompt"] for row in rows] == ["He", "She", "  It is "]
    # An editor's mark before the text is none of it, and what other systems break lines at is no line's end.
    (tmp_path / "marked").write_bytes("\ufeffShe\x0c\u2028was\r\nIt".encode())
    marked = lines(capsys, *asked, "--file", tmp_path / "marked")
    assert [row["prompt"] for row in marked] == ["She\x0c\u2028was", "It"]
    monkeypatch.setattr("sys.stdin", io.StringIO("They\n"))
    assert [row["prompt"] for row in lines(capsys, *asked, "--file", "-")] == ["They"]
    assert "no such file" in refused(capsys, *asked, "--file", tmp_path / "absent")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert "not UTF-8" in refused(capsys, *asked, "--file", tmp_path / "bytes")


def test_a_state_goes_on_exactly(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path):
    asked = ("generate", "--model", folder, "--temperature", 1, "--seed", 5, "--ignore-eos")
    whole = lines(capsys, *asked, "She was", "It", "--max-new-tokens", 9)
    state = tmp_path / "state"
    first = lines(capsys, *asked, "She was", "It", "--max-new-tokens", 4, "--save-state", state)
    then = lines(capsys, *asked, "--load-state", state, "--max-new-tokens", 5)
    for row, a, b in zip(whole, first, then, strict=True):
        assert a["tokens"] + b["tokens"] == row["tokens"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", ""], "empty"),
        (["generate", "a", "--temperature", "-1"], "temperature"),
        (["generate", "a", "--top-p", "1.5"], "top_p"),
        (["generate", "a", "--stop", ""], "stop"),
        (["generate", "a", "--chat"], "chat template"),
        (["generate", "a", "--dtype", "float8"], "float8"),
        (["generate", "a", "--backend", "abacus"], "abacus"),
        (["generate", "a", "--backend", "fla"], "fla"),
        (["generate", "a", "--device", "abacus"], "abacus"),
        (["generate", "a", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["generate", "a", "--load-state", "absent.state"], "absent.state"),
        (["generate", "a", "--save-state", "absent/folder/state"], "absent"),
        (["generate", "a", "--save-state", "."], "no file"),
        (["generate", "a", "--load-state", "."], "not a saved state"),
        (["generate", "a", "--steps", "4"], "one token after another"),
        (["generate", "a", "--infill", "b"], "one token after another"),
        (["generate", "a", "--policy", "oracle"], "confidence, margin"),
        (["generate", "a", "--steps", "0"], "steps=0"),
        (["generate", "a", "--policy", "threshold", "--threshold", "1.5"], "threshold=1.5"),
        (["bench", "speed", "--steps", "4"], "one token after another"),
        (["quality", "unmasking"], "one token after another"),
        (["quality", "bpb", "--rows", "4"], "--rows is for the probe unmasking"),
        (["quality", "bpb", "--set", "window=\u00b2"], "window=\u00b2: a name, = and a whole number"),
        (["quality", "bpb", "--set", "window=--5"], "window=--5: a name, = and a whole number"),
        (["quality", "parity", "--set", "length=99999999999999999999"], "below a billion"),
        (["quality", "recall", "--set", "pairs=2", "--set", "pairs=3"], "pairs is 2 already"),
        (["quality", "bpb", "--text", ""], "--text : neither"),
        (["quality", "recall", "--seeds", "0"], "--seeds 0: at least 1 is wanted"),
        (["quality", "all", "--text", "absent.txt"], "--text absent.txt: neither"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, argv: list[str], said: str
):
    assert said in refused(capsys, *argv, "--model", folder)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generat", "a"], "generat"),
        (["generate", "a", "--temprature", "1"], "--temprature"),
        (["generate", "a", "--model", "tiny/nobody"], "tiny/nobody"),
        (["generate", "a", "--model", "./absent"], "absent"),
        (["quality", "telepathy"], "bpb"),
        (["train", "telepathy", "--out", "absent"], "telepathy"),
        (["bench", "speed", "--shape", "colossus"], "mamba2-130m"),
        (["bench", "memory", "--lengths", "1k,x"], "'x'"),
        (["bench", "memory", "--shape", "colossus"], "mamba2-130m"),
        (["bench", "speed", "--shape", "mamba2-130m", "--device", "abacus"], "abacus"),
        (["doctor", "--device", "abacus"], "abacus"),
    ],
)
def test_what_does_not_exist_is_named(capsys: pytest.CaptureFixture[str], argv: list[str], said: str):
    assert said in refused(capsys, *argv)


def test_a_state_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
):
    other = checkpoint(tmp_path / "other", seed=1)
    state = tmp_path / "state"
    lines(capsys, "generate", "She", "--model", other, "--max-new-tokens", 2, "--save-state", state)
    assert "another model" in refused(capsys, "generate", "a", "--model", folder, "--load-state", state)


# -- the other commands -------------------------------------------------------------------------------


def test_models_lists_every_architecture(capsys: pytest.CaptureFixture[str]):
    rows = {row["model_type"]: row for row in lines(capsys, "models")}
    assert {"mamba2", "llama", "composed"} <= set(rows)
    for row in rows.values():
        assert list(row) == ["model_type", "family", "file", "checkpoints"]
        assert (ROOT / "constate" / row["file"]).is_file()
    shipped = [name for row in rows.values() for name in row["checkpoints"]]
    zoo = sorted((ROOT / "constate" / "zoo").glob("*/config.json"))
    assert sorted(shipped) == [f"tiny/{path.parent.name}" for path in zoo]


def test_a_table_names_what_json_does(capsys: pytest.CaptureFixture[str]):
    status, out, err = run(capsys, "models")
    assert (status, err) == (0, "")
    assert "model type" in out and "ssm/mamba2.py" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_doctor_says_that_a_device_is_not_here(capsys: pytest.CaptureFixture[str]):
    rows = lines(capsys, "doctor", "--device", "cuda")
    assert rows and all(row["ok"] is None and "CUDA" in row["reason"] for row in rows)


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (None, 0), (False, 1)])
def test_doctor_fails_only_for_what_ran_and_was_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ok: bool | None, status: int
):
    row = {"op": "short_conv", "backend": "torch", "ok": ok, "max_error": 0.0, "reason": "planted"}
    monkeypatch.setattr("constate.bench.doctor.doctor", lambda device: [row])
    got, out, _ = run(capsys, "doctor", "--json")
    assert got == status
    assert json.loads(out) == row


def test_train_reports_and_leaves_a_checkpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def run_training(recipe: str, out: Path, **options: Any):
        seen.update(options, recipe=recipe, out=out)
        yield {"step": 10, "tokens": 20480, "loss": 5.0, "bpb": 3.1}
        yield {"step": 20, "tokens": 40960, "loss": 4.0, "bpb": 2.5, "held_out_bpb": 2.6}

    seen: dict[str, Any] = {}
    monkeypatch.setattr("constate.training.train", run_training)
    asked = ("train", "mamba,attention", "--out", tmp_path, "--text", "book", "--steps", "1k")
    rows = lines(capsys, *asked)
    assert [row["step"] for row in rows] == [10, 20]
    assert seen == {
        **{"recipe": "mamba,attention", "out": tmp_path, "text": Path("book")},
        **{"steps": 1024, "threads": None},
    }
    status, out, err = run(capsys, *asked)
    assert status == 0 and out.count("\n") == 2 and "held out 2.600" in out
    assert "constate generate --model" in err


def test_quality_scores_a_file(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path):
    text = "She was not of an age to be easily pleased.\n" * 3
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    row = lines(capsys, "quality", "bpb", "--model", folder, "--text", tmp_path / "book.txt")[0]
    keys = [
        "probe",
        "model",
        "seed",
        "setting",
        "score",
        "chance",
        "n",
        "low",
        "high",
        "params",
        "dtype",
        "bound",
        "contaminated",
    ]
    assert set(row) == {*keys, "state_bytes", "conv_bytes", "kv_bytes"} and row["bound"] is False
    assert row["n"] == len(text) and row["setting"].startswith("book.txt")
    # Near-flat random logits: about what equal odds for each of the ids would give.
    assert row["score"] == pytest.approx(row["chance"], rel=0.1)
    assert "--text absent" in refused(capsys, "quality", "bpb", "--model", folder, "--text", "absent")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    raw = {"model_type": "llama", "vocab_size": 1024, "max_position_embeddings": 64, **sizes}
    short = written(tmp_path / "short", raw)
    for probe in ("bpb", "positions", "repeat"):
        assert "made for 64 positions" in refused(capsys, "quality", probe, "--model", short)


@pytest.mark.parametrize("kept", [True, False])
def test_quality_that_is_interrupted_says_what_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool
):
    def rows(probe: str, *_: Any, **__: Any) -> list[dict[str, Any]]:
        if probe == "cloze":
            raise KeyboardInterrupt
        if probe == "positions":
            raise ValueError("nothing to read")
        return [{"probe": probe, "score": math.nan}]

    monkeypatch.setattr("constate.bench.quality.sheet.rows", rows)
    file = tmp_path / "scores.jsonl"
    argv = ["quality", "all", "--model", "tiny/gla", "--json", *(["--out", file] if kept else [])]
    status, out, err = run(capsys, *argv)
    told = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert status == 130 and [row["score"] for row in told] == [None, None], "bpb and repeat"
    where = f"are in {file}, and the same command goes on" if kept else "were asked, and none is kept"
    assert f"interrupted: 2 of 11 questions {where}" in err
    assert not kept or len(file.read_text().splitlines()) == 2


def test_a_closed_pipe_is_no_traceback(folder: Path):
    """`constate models --json | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "constate", "models", "--json"]
    child = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert child.returncode == 1
    assert child.stderr == ""


def test_a_table_in_a_pipe_keeps_every_number_on_one_line(capsys: pytest.CaptureFixture[str]):
    from constate.cli.output import table

    columns = [f"column{i}" for i in range(30)]
    table([dict.fromkeys(columns, 13_015_864_320)], columns)
    row = next(line for line in capsys.readouterr().out.splitlines() if "320" in line)
    assert row.count("13,015,864,320") == 30


def test_what_a_peer_chose_is_set_beside_what_ours_was_stored_in():
    from constate.cli.bench.speed import _remarks

    ours = {"model": "m", "engine": "constate", "dtype": "int8", "flags": [], "tokens_equal": None}
    peer = {**ours, "engine": "transformers", "dtype": "float32", "tokens_equal": 0.78}
    said = ["of m transformers in float32 chose 78% of the tokens that we chose in int8"]
    assert list(_remarks([{**ours, "dtype": "float32"}, {**peer, "tokens_equal": 1.0}, ours, peer])) == said
