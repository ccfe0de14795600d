"""Speed of models that decide several tokens a call, and the frontier of their policies. Holds no times."""

import math
from typing import Any

import pytest
import torch

from constate.bench import decoding, speed
from constate.bench.quality import unmasking
from constate.bench.shapes import random_model
from constate.bench.speed_rows import KEYS
from constate.diffusion_lm.plan import Plan
from constate.loading import load
from constate.training.text import load_tokenizer
from tests.denoisers import make


def test_rows_have_the_keys_of_every_speed():
    rows = list(
        speed.speed(make("both sides"), "m", prompt=9, new=12, rows=(1, 3), rounds=2, plan=Plan(steps=4))
    )
    assert [(row["rows"], row["engine"]) for row in rows] == [(1, "constate"), (3, "constate")]
    for row in rows:
        assert list(row) == list(KEYS)
        assert (row["model_calls"], row["tokens_per_call"]) == (4, 3.0)
        assert row["bytes_per_token"] is None and row["cache_differs"] == 0.0
        assert row["decoding"] == "policy confidence, clean, block 32, cache none"
        assert min(row["ttft_s"], row["between_commits_s"], row["itl_s"]) > 0


@pytest.mark.parametrize(
    ("name", "plan", "told", "differs"),
    [
        ("llada", Plan(cache="dual", block=8), "approximate (dual, anew with each block)", True),
        ("llada", Plan(cache="delayed", block=8, refresh=1), "none (delayed, anew at every call)", None),
        ("blocks", Plan(), "exact", False),
        ("blocks", Plan(cache="none"), "none", None),
    ],
)
def test_a_cache_stands_beside_none(name: str, plan: Plan, told: str, differs: bool | None):
    """In turns on the same prompts, with the share of tokens that differ; without one it stands alone."""
    rows = list(speed.speed(make(name), "m", prompt=9, new=24, rounds=1, plan=plan))
    assert rows[0]["decoding"].endswith(f"cache {told}")
    if differs is None:
        assert len(rows) == 1
        return
    assert [row["engine"] for row in rows] == ["constate", "constate, no cache"]
    assert rows[1]["decoding"].endswith("cache none")
    assert (rows[0]["cache_differs"] > 0) == differs
    assert (rows[0]["prefill_ratio"], rows[0]["decode_ratio"]) == (1.0, 1.0)


def test_a_share_of_differing_tokens_is_counted():
    assert decoding.differs([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.25


def test_what_has_no_meaning_is_refused():
    model = make("llada")
    given: Any
    for given in ({"against": ["transformers"]}, {"check": True}):
        with pytest.raises(ValueError, match="no peer is set beside such a model"):
            next(speed.speed(model, "m", **given))


# -- the frontier ----------------------------------------------------------------------------------------


def tiny(block: int | None = None) -> Any:
    attention = {"type": "attention", "heads": 2, "head_dim": 8}
    raw: dict[str, Any] = {"model_type": "composed_diffusion", "vocab_size": 1025, "hidden_size": 16}
    raw |= {"layers": [{"mixer": attention, "mlp": None}], "mask_token_id": 1024, "block": block}
    model = random_model({**raw, "tie_word_embeddings": False})
    model.vocab, model.tokenizer, model.eos_ids = 1024, load_tokenizer(), frozenset({0})
    return model


@pytest.mark.parametrize("given", [{}, {"cache": "prefix", "refresh": 3}], ids=str)
@pytest.mark.parametrize("block", [None, 8])
def test_the_frontier_has_a_row_for_each_budget(
    monkeypatch: pytest.MonkeyPatch, block: int | None, given: dict[str, Any]
):
    if block and given:
        pytest.skip("a block-causal model's cache is exact")
    some = [
        ("confidence, 4 a call", 4, {"policy": "confidence"}),
        ("threshold 0.9", None, {"policy": "threshold", "threshold": 0.9}),
    ]
    monkeypatch.setattr(unmasking, "plans", lambda: iter(some))
    model, judge = tiny(block), load("tiny/transformer")
    rows = list(unmasking.unmasking(model, "m", judge, rows=2, new=24, **given))
    assert len(rows) == 3
    keys = "probe model seed setting score chance n low high params state_bytes"
    assert all(list(row)[:11] == keys.split() for row in rows)
    book, counted, trusting = rows
    assert book["score"] is None and book["distinct_4"] > 0.9 and book["generated_bpb"] < 3.5
    assert counted["model_calls"] <= 24 / 4 + 2 and counted["tokens_per_call"] >= 3
    assert trusting["model_calls"] == 24  # nothing is ever trusted, and one a call is the least
    for row in rows[1:]:
        assert 0 <= row["low"] <= row["score"] <= row["high"] <= 1 and row["n"] == 32 * 8
        assert row["generated_bpb"] > book["generated_bpb"], "noise is likelier than the book"
        assert 0 < row["distinct_4"] <= 1
        assert ("both sides" in row["setting"]) == (block is None)
        assert (row["cache_differs"] is None) == (not given)
        assert row["decoding"]["cache"].startswith("approximate" if given else "exact" if block else "none")


def test_a_model_that_knows_the_book_fills_its_gaps(monkeypatch: pytest.MonkeyPatch):
    """The accuracy is counted against the right places: what `generate` returns is the book's own gaps."""
    model = tiny()
    ids = model.tokenizer.encode(unmasking.read(None)[1]).ids
    real = unmasking.generate
    flaw = {"every": 0}

    def write(model: Any, prompts: list[list[int]], **options: Any) -> Any:
        results = real(model, prompts, **options)
        for prompt, result in zip(prompts, results, strict=True):
            at = next(i for i in range(len(ids)) if ids[i : i + len(prompt)] == prompt) + len(prompt)
            result.tokens[:] = ids[at : at + len(result.tokens)]
            if flaw["every"]:
                result.tokens[:: flaw["every"]] = [-1] * len(result.tokens[:: flaw["every"]])
                result.tokens[:] = [0 if t == -1 else t for t in result.tokens]
        return results

    monkeypatch.setattr(unmasking, "generate", write)
    monkeypatch.setattr(unmasking, "plans", lambda: iter([("random", 16, {"policy": "random"})]))
    for every, score in ((0, 1.0), (4, 0.75)):
        flaw["every"] = every
        book, row = unmasking.unmasking(model, "m", load("tiny/transformer"), rows=2, new=32)
        assert row["score"] == score
        if not every:  # and the text is the book's own
            assert row["generated_bpb"] == pytest.approx(book["generated_bpb"])
            assert row["distinct_4"] == book["distinct_4"]


def test_distinct_grams_are_a_share():
    assert unmasking.distinct([1, 2, 3, 4, 5]) == 1.0
    assert unmasking.distinct([7] * 20) == 1 / 17
    assert unmasking.distinct([1, 2] * 10) == 2 / 17


def test_the_whole_frontier_is_legal():
    """Every plan can be made, and no two are alike."""
    names = []
    for name, each, options in unmasking.plans():
        Plan(**options)
        names.append(name)
        assert (each is None) == (options["policy"] in ("threshold", "entropy_bound"))
    assert len(set(names)) == len(names) == 36


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("She was not of an age to be easily pleased.")
    with pytest.raises(ValueError, match="more text is wanted"):
        next(unmasking.unmasking(tiny(), "m", tiny(), text=str(tmp_path / "short.txt")))


def test_bits_of_a_text_are_the_judge_s():
    model = tiny()
    with torch.no_grad():
        model.head.weight.zero_()
    text = model.tokenizer.encode("She was not of an age to be easily pleased.").ids
    found = unmasking.judged(model, model, [text, text])
    size = len(model.tokenizer.decode(text).encode())
    assert found["generated_bpb"] == pytest.approx(len(text) * math.log2(1025) / size, rel=1e-4)
