"""Masked diffusion through generate, stream and the command: text, infill, usage, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from constate.bench.shapes import random_model
from constate.cli import main
from constate.diffusion_lm.plan import counts
from constate.diffusion_lm.policies import POLICIES
from constate.generation import generate, stream
from constate.loading import save
from constate.training.text import load_tokenizer
from tests.denoisers import make
from tests.oracle import Oracle, odds
from tests.scripted import Scripted, byte_bpe, chaotic

BPE = byte_bpe()
VOCAB = BPE.get_vocab_size()


def copying(**options: Any) -> Any:
    """Fills every place with what stands opposite: the token as far from the right end as it is from the
    left. So an infill shows which text is given on which side."""

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        other = canvas[len(canvas) - 1 - place]
        return odds(VOCAB, other if other < VOCAB else 5, 0.9)

    return Oracle(rule, VOCAB, BPE, eos=(0,), **options)


# -- infill ----------------------------------------------------------------------------------------


def test_infill_is_given_on_the_right_of_each_prompt():
    right = BPE.encode(" hat").ids
    results = generate(copying(), [[3], [4]], infill=[[7, 8, 9], " hat"], max_new_tokens=2)
    assert [r.tokens for r in results] == [[8, 7], [5, 5] if len(right) == 1 else right[::-1][1:3]]
    assert [r.usage.prompt_tokens for r in results] == [4, 1 + len(right)]
    assert [r.finish_reason for r in results] == ["length"] * 2
    for shared in ([7, 8, 9], [[7, 8, 9]] * 2):
        assert [r.tokens for r in generate(copying(), [[3], [4]], infill=shared, max_new_tokens=2)] == [
            [8, 7]
        ] * 2
    # Nothing given there is no infill.
    assert (
        generate(copying(), "the", infill="", max_new_tokens=3)[0].text
        == generate(copying(), "the", max_new_tokens=3)[0].text
    )


def test_infill_streams_and_samples():
    events = list(stream(copying(), [[3]], infill=[7, 8, 9, 10], max_new_tokens=3, n=2, temperature=1.0))
    texts = {i: "".join(e.text for e in events if e.index == i) for i in (0, 1)}
    results = {e.index: e.result for e in events if e.result}
    assert all(result.text == texts[i] and len(result.tokens) == 3 for i, result in results.items())


# -- rows and usage --------------------------------------------------------------------------------

FIVE = ["t", "the cat and", "é漢" * 3, "", "the other hat; " * 2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["both sides", "blocks, shifted"])
def test_five_unequal_prompts_equal_five_lone_runs(name: str, policy: str):
    model = make(name)
    prompts = [[b % 90 for b in text.encode()] for text in FIVE]
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 3,
        "policy": policy,
    }
    results = generate(model, prompts, **options)
    alone = [generate(model, [prompt], **options)[0] for prompt in prompts]
    assert [r.tokens for r in results] == [r.tokens for r in alone]
    for a, b in zip(results, alone, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-3)
    assert max(r.usage.model_calls for r in results) <= max(r.usage.model_calls for r in alone)


def test_usage_has_the_units_of_all_models():
    (result,) = generate(copying(), [[3, 4]], max_new_tokens=12, steps=4, block=6)
    usage = json.loads(json.dumps(asdict(result.usage), allow_nan=False))
    for name in ("ttft_s", "itl_s", "between_commits_s", "tokens_per_s"):
        assert usage.pop(name) > 0
    assert usage == {
        "prompt_tokens": 2,
        "new_tokens": 12,
        "model_calls": 4,
        "weight_bytes": 1234,
        "state_bytes": 0,
        "conv_bytes": 0,
        "kv_bytes": 0,
        "kv_bytes_used": 0,
        "backend": "scripted",
        "dtype": "float32",
        "tokens_per_call": 3.0,
        "decoding": {"policy": "confidence, clean", "block": "6", "cache": "none"},
    }
    held = generate(make("blocks"), [[3, 4]], max_new_tokens=9)[0].usage
    assert held.kv_bytes >= held.kv_bytes_used > 0


def test_an_event_names_the_places_of_its_tokens():
    events = list(stream(copying(), [[3]], max_new_tokens=6, policy="random", seed=2))
    assert sorted(p for e in events for p in e.positions) == list(range(6))
    assert [p for e in events for p in e.positions] != list(range(6))
    assert [len(e.tokens) for e in events] == [1] * 6


# -- what is refused -------------------------------------------------------------------------------

BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("a", {"steps": 0}, "steps=0"),
    ("a", {"policy": "threshold", "threshold": 1.01}, "threshold=1.01"),
    ("a", {"policy": "threshold", "threshold": float("nan")}, "threshold=nan"),
    ("a", {"policy": "best"}, "policy='best' is not known"),
    ("a", {"steps": 2, "block": 8}, "steps=2 for 8 blocks"),
    ("a", {"cache": "exact"}, "every key changes"),
    ("a", {"infill": ["x", "y"]}, "infill: 2 texts for 1 prompts"),
    ("a", {"infill": b"x"}, "infill=b'x': text or a token list"),
    ("a", {"infill": 5}, "infill=5: text or a token list"),
    ([[VOCAB]], {}, f"token id {VOCAB} is outside the vocabulary"),
    ("a", {"save_state": "state"}, "no state to go on from"),
]


@pytest.mark.parametrize(("prompts", "options", "said"), BAD, ids=lambda v: str(v)[:30])
def test_a_wrong_request_is_refused_before_any_work(prompts: Any, options: dict[str, Any], said: str):
    model = copying()
    with pytest.raises(ValueError, match=said) as caught:
        stream(model, prompts, **options)
    assert "\n" not in str(caught.value)
    assert model.calls == []


def test_a_model_without_a_mask_id_is_refused():
    model = copying(mask=None)
    with pytest.raises(ValueError, match="mask_token_id"):
        stream(model, "a")
    assert model.calls == []


def test_options_of_diffusion_are_not_silently_ignored():
    for options in ({"steps": 4}, {"infill": "x"}, {"cache": "dual"}, {"min_new_tokens": 2}):
        model: Any = Scripted(chaotic(VOCAB), VOCAB, BPE)
        with pytest.raises(ValueError, match="one token after another"):
            stream(model, "a", **options)
        assert model.calls == []
    model = Scripted(chaotic(VOCAB), VOCAB, BPE)
    assert len(generate(model, "a", max_new_tokens=2, steps=None, policy=None)[0].tokens) == 2


def test_steps_beyond_the_places_take_no_room(monkeypatch: pytest.MonkeyPatch):
    """A budget of 10^12 calls is one place a call, and no list of so many counts."""
    asked: list[int] = []

    def spy(masks: int, steps: int) -> list[int]:
        asked.append(steps)
        return counts(masks, min(steps, 99))

    monkeypatch.setattr("constate.diffusion_lm.row.counts", spy)
    (result,) = generate(copying(), "the", max_new_tokens=5, steps=10**12)
    assert result.usage.model_calls == 5 and max(asked) <= 5


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_no_threshold_hangs(value: float):
    (result,) = generate(copying(), "the", max_new_tokens=5, policy="threshold", threshold=value)
    assert len(result.tokens) == 5 and result.usage.model_calls <= 5


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    attention = {"type": "attention", "heads": 2, "head_dim": 8}
    raw: dict[str, Any] = {"model_type": "composed_diffusion", "vocab_size": 1025, "hidden_size": 16}
    raw |= {"layers": [{"mixer": attention, "mlp": None}], "mask_token_id": 1024, "shift": True}
    model = random_model({**raw, "tie_word_embeddings": False})
    model.vocab, model.tokenizer, model.eos_ids = 1024, load_tokenizer(), frozenset({0})
    place = tmp_path_factory.mktemp("denoiser")
    save(model, place)
    return place


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_writes_and_fills(capsys: pytest.CaptureFixture[str], folder: Path):
    asked = (
        "generate",
        "It is a truth",
        "--model",
        folder,
        "--max-new-tokens",
        8,
        "--steps",
        4,
        "--eos",
        "never",
    )
    status, out, err = run(capsys, *asked, "--json")
    row = json.loads(out)
    assert (status, err) == (0, "")
    assert row["usage"]["model_calls"] == 4 and len(row["tokens"]) == 8
    assert row["usage"]["decoding"]["cache"] == "none"
    status, out, err = run(capsys, *asked)
    assert (status, out) == (0, row["text"] + "\n")
    assert "4 calls (policy confidence, clean, block 32, cache none)" in err
    status, out, _ = run(capsys, *asked, "--infill", " universally", "--cache", "dual", "--json")
    assert status == 0
    row = json.loads(out)
    assert row["usage"]["prompt_tokens"] > 5
    assert row["usage"]["decoding"]["cache"].startswith("approximate (dual")
    status, out, _ = run(capsys, "generate", "", "--model", folder, "--max-new-tokens", 3, "--json")
    assert status == 0 and json.loads(out)["usage"]["prompt_tokens"] == 0


def test_the_bench_sets_it_beside_one_token_after_another(capsys: pytest.CaptureFixture[str], folder: Path):
    asked = ("bench", "speed", "--model", folder, "--model", "tiny/transformer", "--prompt", 12, "--new", 8)
    status, out, err = run(capsys, *asked, "--rounds", 1, "--steps", 2, "--json")
    assert (status, err) == (0, "")
    mine, other = map(json.loads, out.splitlines())
    assert (mine["tokens_per_call"], other["tokens_per_call"]) == (4.0, 1.0)
    assert mine["decoding"].startswith("policy confidence") and other["decoding"] is None
    assert mine.keys() == other.keys() and min(mine["itl_s"], other["itl_s"]) > 0


def test_the_command_draws_the_frontier(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
):
    some = [("random, 8 a call", 8, {"policy": "random"})]
    monkeypatch.setattr("constate.bench.quality.unmasking.plans", lambda: iter(some))
    asked = ("quality", "unmasking", "--model", folder, "--rows", 1, "--new", 16, "--cache", "prefix")
    status, out, err = run(capsys, *asked, "--json")
    assert (status, err) == (0, "")
    book, row = map(json.loads, out.splitlines())
    assert book["setting"] == "northanger_abbey itself"
    assert row["model_calls"] == 2 and row["cache_differs"] is not None
    status, out, _ = run(capsys, *asked)
    assert status == 0 and "random, 8 a call" in out
    # No call fills more than a block, so that there is no such row then.
    status, out, err = run(capsys, *asked[:-2], "--block", 4, "--json")
    assert (status, err, len(out.splitlines())) == (0, "", 1)
