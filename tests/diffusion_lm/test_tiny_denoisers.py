"""The trained denoisers that ship: text, infill, batches and caches on weights that know a language."""

from typing import Any

import pytest

from constate.bench.decoding import differs
from constate.core.model import Model
from constate.generation import generate
from constate.loading import load

NAMES = ("tiny/mdlm", "tiny/block_diffusion")
FIVE = ["It is a truth", "She", "", "Mr. Darcy was not of an age to be easily pleased, and", "The\n\nCHAPTER"]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Model:
    return load(request.param)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}], ids=["greedy", "seeded"]
)
def test_five_unequal_prompts_equal_five_lone_runs(model: Model, options: dict[str, Any]):
    options = {"max_new_tokens": 24, "steps": 12, **options}
    results = generate(model, FIVE, **options)
    alone = [generate(model, prompt, **options)[0] for prompt in FIVE]
    assert [r.text for r in results] == [r.text for r in alone]
    assert [r.tokens for r in results] == [r.tokens for r in alone]
    longest = max(r.usage.model_calls for r in alone)
    assert max(r.usage.model_calls for r in results) <= longest <= 12
    assert sum(bool(r.text.strip()) for r in results) >= 4


def test_it_fills_gaps_better_with_the_text_on_both_sides():
    """One place of a book that it has not read, 96 times: with the right side it knows far more of them."""
    from constate.bench.quality.texts import read

    model = load("tiny/mdlm")
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(read(None)[1], add_special_tokens=False).ids
    cuts = range(1000, 100_000, 100_000 // 96)
    left, right = [ids[c - 40 : c] for c in cuts], [ids[c + 1 : c + 41] for c in cuts]
    known = []
    for infill in (right, None):
        results = generate(model, left, infill=infill, max_new_tokens=1, ignore_eos=True)
        known.append(sum(r.tokens[0] == ids[c] for r, c in zip(results, cuts, strict=True)) / len(cuts))
    assert known[0] > 0.3 and known[0] > known[1] + 0.08


def test_the_exact_cache_changes_no_token():
    """Case J8, on real text."""
    model = load("tiny/block_diffusion")
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": 5, "eos": "never"}
    cached, plain = (generate(model, FIVE, cache=way, **options) for way in ("exact", "none"))
    assert [r.tokens for r in cached] == [r.tokens for r in plain]
    for a, b in zip(cached, plain, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-3)


@pytest.mark.parametrize("way", ["prefix", "dual", "delayed"])
def test_an_approximate_cache_is_measured(way: str):
    model = load("tiny/mdlm")
    options: dict[str, Any] = {"max_new_tokens": 32, "block": 8, "eos": "never"}
    plain = generate(model, FIVE, **options)
    always = generate(model, FIVE, cache=way, refresh=1, **options)
    seldom = generate(model, FIVE, cache=way, **options)
    assert differs([r.tokens for r in plain], [r.tokens for r in always]) == 0
    assert differs([r.tokens for r in plain], [r.tokens for r in seldom]) > 0
    assert all("approximate" in r.usage.decoding["cache"] for r in seldom)
