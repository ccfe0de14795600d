"""Faults that users of other diffusion repositories reported, as tests. The letters number the reports.

J4, the noise that cuts off rare tokens, is in test_draw.py; the exact cache of J8 in test_unmasking.py.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.decode import Request
from constate.core.sampling import Sampling
from constate.diffusion_lm.denoiser import denoiser
from constate.diffusion_lm.plan import Plan
from constate.diffusion_lm.policies import POLICIES
from constate.generation import generate, stream
from constate.spans import Spans
from tests.denoisers import DENOISERS, MASK, make
from tests.oracle import Oracle, odds, order, run, written
from tests.scripted import byte_bpe

BPE = byte_bpe()
VOCAB = BPE.get_vocab_size()

# -- J1: the order of unmasking at any temperature -------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0])
def test_j1_the_surer_place_comes_first_at_any_temperature(temperature: float):
    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        return odds(5, place, 0.6 if place == 1 else 0.9)

    for seed in range(25):
        request = Request((0,), 2, Sampling(temperature), seed)
        (commits,) = run(Oracle(rule, 5).any, [request])
        assert order(commits) == [(1,), (0,)]


def test_j1_tempered_is_a_named_choice_and_saturates():
    """At 0.02 both places look certain, and the lower one comes first."""

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        return odds(5, place, 0.6 if place == 1 else 0.9)

    for mode, want in (("clean", [(1,), (0,)]), ("tempered", [(0,), (1,)])):
        request = Request((0,), 2, Sampling(0.02), plan=Plan(confidence=mode))
        (commits,) = run(Oracle(rule, 5).any, [request])
        assert order(commits) == want
        assert mode in commits[-1].how["policy"]


# -- J2: end of text, late or never ----------------------------------------------------------------

ENDS = {0, 2, 3, 5, 6}


def mostly_over(canvas: tuple[int, ...], place: int) -> list[float]:
    return odds(9, 0, 0.99) if place - 1 in ENDS else odds(9, place, 0.5)


@pytest.mark.parametrize("policy", ["confidence", "margin", "entropy", "threshold"])
def test_j2_late_ends_wait_for_the_others(policy: str):
    # Heeded ends would end the row with the first of them.
    request = Request((4,), 8, plan=Plan(policy, eos="late"))
    (commits,) = run(Oracle(mostly_over, 9, eos=(0,)).any, [request])
    assert [p for c in commits for p in c.positions][:3] == [1, 4, 7]
    assert {p for p, t in enumerate(written(commits)) if t == 0} == ENDS
    (commits,) = run(Oracle(mostly_over, 9, eos=(0,)).any, [replace(request, plan=Plan(policy))])
    assert set([p for c in commits for p in c.positions][:5]) == ENDS


@pytest.mark.parametrize("policy", POLICIES)
def test_j2_suppressed_ends_never_appear(policy: str):
    for seed in range(10):
        request = Request((4,), 8, Sampling(1.5), seed, plan=Plan(policy, eos="never"))
        (commits,) = run(Oracle(mostly_over, 9, eos=(0,)).any, [request])
        assert len(written(commits)) == 8 and 0 not in written(commits)


# -- J3: rows that finish at different steps -------------------------------------------------------


@pytest.mark.parametrize("name", DENOISERS)
def test_j3_rows_that_finish_early_are_frozen(name: str):
    """The first has nothing to fill, the second nothing given, the third both."""
    model = make(name)
    requests = [Request((1, 2, 3), 0), Request((), 9), Request(tuple(range(7)), 14, plan=Plan(steps=5))]
    if denoiser(model).block:
        requests[2] = replace(requests[2], plan=Plan())
    rows = run(model, requests)
    for request, commits in zip(requests, rows, strict=True):
        (alone,) = run(model, [request])
        assert order(commits) == order(alone) and written(commits) == written(alone)
        assert commits[-1].calls == alone[-1].calls


# -- J5: shifted prediction ------------------------------------------------------------------------


class Knowing(Oracle):
    """A stack that knows the text: at place p its logits name the token at p, or, made from a model of the
    next token, at p + 1. The Denoiser may say otherwise."""

    def __init__(self, text: list[int], vocab: int, shifted: bool, said: bool):
        super().__init__(lambda canvas, place: [], vocab, shift=said)
        self.text, self.shifted = text, shifted

    def forward(self, tokens: Tensor, spans: Spans, *, at: Tensor) -> Tensor:
        named = [self.text[(p + self.shifted) % len(self.text)] for p in at.tolist()]
        return torch.tensor([odds(self.vocab, token, 0.9) for token in named])


@pytest.mark.parametrize("shifted", [False, True])
def test_j5_the_family_says_where_a_prediction_stands(shifted: bool):
    vocab = 97
    text = Random(1).choices(range(vocab), k=200)
    for said in (False, True):
        model: Any = Knowing(text, vocab, shifted, said)
        (commits,) = run(model, [Request(tuple(text[:4]), 196, plan=Plan(steps=20, block=196))])
        right = sum(a == b for a, b in zip(written(commits), text[4:], strict=True)) / 196
        assert right == 1.0 if said == shifted else right < 0.05


# -- J6: lengths, blocks and steps that do not divide ----------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("length", "block", "steps"), [(100, 32, 30), (7, 3, 3), (1, 5, 4), (33, 8, 200)])
def test_j6_what_does_not_divide_works(policy: str, length: int, block: int, steps: int):
    """No mask is left, places outside the current block never change, and the steps are kept."""
    seen: list[tuple[int, ...]] = []

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        if not seen or seen[-1] != canvas:
            seen.append(canvas)
        return odds(13, place % 13, 0.3 + 0.6 * Random(place).random())

    model = Oracle(rule, 13)
    request = Request((1, 2, 3), length, seed=1, plan=Plan(policy, steps=steps, block=block))
    (commits,) = run(model.any, [request])
    assert written(commits) == [place % 13 for place in range(3, 3 + length)]
    assert len(model.calls) <= min(steps, length)
    assert all(lengths == (3 + length,) for lengths in model.calls)
    assert all(canvas[:3] == (1, 2, 3) for canvas in seen)
    for before, after in pairwise(seen):
        changed = {(p - 3) // block for p in range(3 + length) if before[p] != after[p]}
        assert len(changed) == 1, "two blocks at a time"
        done = min(changed) * block + 3
        assert 13 not in before[3:done] and set(after[done + block :]) <= {13}


def test_j6_fewer_steps_than_blocks_is_an_error_before_any_call():
    model = Oracle(mostly_over, 9)
    with pytest.raises(ValueError, match="steps=3 for 4 blocks of places"):
        run(model.any, [Request((1,), 100, plan=Plan(steps=3))])
    assert model.calls == []


# -- J7: neighbours in a batch ---------------------------------------------------------------------


@pytest.mark.parametrize("name", DENOISERS)
def test_j7_neighbours_change_nothing(name: str):
    """Unequal prompts, one of which truly holds the end-of-text id: there are no pads, and lengths, never
    ids, say where a row ends."""
    model = make(name)
    model.eos_ids = frozenset({2})
    request = Request((5, 2, 2, 6), 7, Sampling(0.8), 3, eos=model.eos_ids)
    (alone,) = run(model, [request])
    dice = Random(4)
    for lengths in ((9,), (1, 3), (20, 4, 4)):
        others = [Request(tuple(dice.choices(range(MASK), k=n)), 7 + n % 3, seed=n) for n in lengths]
        rows = run(model, [*others, request, *others])
        assert written(rows[len(others)]) == written(alone)
        assert order(rows[len(others)]) == order(alone)


@pytest.mark.parametrize("name", DENOISERS)
def test_j7_a_prompt_with_the_mask_id_is_refused(name: str):
    model = make(name)
    for request in (Request((1, MASK, 2), 3), Request((1,), 3, after=(MASK,))):
        with pytest.raises(ValueError, match=f"prompt 1 holds the mask id {MASK}"):
            run(model, [Request((1,), 3), request])


def test_j7_a_published_model_never_writes_its_mask():
    """There the mask id is among the real ids, and the likeliest of all."""
    model = make("llada")
    model.vocab = MASK + 1
    with torch.no_grad():
        model.head.weight[MASK] = 9 * model.head.weight[:MASK].abs().amax(0)
        model.head.weight[MASK - 1] = -model.head.weight[MASK]
    for options in ({}, {"temperature": 3.0}):
        for result in generate(model, [[1, 2], [3]], max_new_tokens=12, **options):
            assert len(result.tokens) == 12 and MASK not in result.tokens


# -- J8: caches that are approximations, and an empty prompt ---------------------------------------


@pytest.mark.parametrize("way", ["prefix", "dual", "delayed"])
def test_j8_an_approximate_cache_says_so_in_the_result(way: str):
    model = make("llada")
    options: dict[str, Any] = {"max_new_tokens": 40, "block": 10}
    plain = generate(model, [[1, 2, 3]], **options)[0]
    cached = generate(model, [[1, 2, 3]], cache=way, **options)[0]
    always = generate(model, [[1, 2, 3]], cache=way, refresh=1, **options)[0]
    assert cached.usage.decoding["cache"].startswith(f"approximate ({way}")
    assert cached.usage.kv_bytes > 0
    assert (plain.usage.decoding["cache"], plain.usage.kv_bytes) == ("none", 0)
    assert always.tokens == plain.tokens and always.logprobs == plain.logprobs
    exact = generate(make("sdar"), [[1, 2, 3]], max_new_tokens=9)[0]
    assert exact.usage.decoding["cache"] == "exact"


@pytest.mark.parametrize("name", DENOISERS)
def test_j8_an_empty_prompt_runs(name: str):
    (result,) = generate(make(name), [[]], max_new_tokens=5)
    assert len(result.tokens) == 5 and result.usage.prompt_tokens == 0


# -- M1: the same endpoint, whole blocks in a stream, settings of each row its own -----------------

TALE = "né à 漢字, the hat and then that; the other cat"
TOLD = BPE.encode(TALE).ids


def teller(**options: Any) -> Any:
    """Says TALE after one token, each place as sure as it likes."""

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        at = place - 1
        return odds(VOCAB, TOLD[at] if at < len(TOLD) else 0, 0.3 + 0.6 * Random(at).random())

    return Oracle(rule, VOCAB, BPE, eos=(0,), **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_m1_a_diffusion_model_streams_through_the_same_call(policy: str):
    """In reading order, block by block: a block's text is out before the next is begun, and what was shown
    is never taken back."""
    size, shown, drafts = 6, "", {}
    events = list(stream(teller(), [[9]], max_new_tokens=60, policy=policy, block=size))
    for event in events:
        block = len(drafts) // size
        assert {p // size for p in event.positions} == {block}
        drafts.update(zip(event.positions, event.tokens, strict=True))
        shown += event.text
        reach = next(p for p in range(61) if p not in drafts)
        assert TALE.startswith(shown)
        if event.result is None:
            # All that can be read is shown, but for the start of an unfinished character.
            assert shown == BPE.decode(TOLD[:reach]).rstrip("\ufffd")
    result = events[-1].result
    assert result is not None
    assert (shown, result.text, result.finish_reason) == (TALE, TALE, "stop")
    assert result.tokens == [*TOLD, 0]
    assert result.usage.model_calls <= -(-(len(TOLD) + 1) // size) * size


def test_m1_drafts_come_before_they_can_be_read():
    """Places in any order: some events name tokens and show no text yet."""
    events = list(stream(teller(), [[9]], max_new_tokens=len(TOLD), block=len(TOLD)))
    assert [len(e.tokens) for e in events] == [1] * len(TOLD)
    assert any(not e.text and e.positions != (0,) for e in events)
    assert "".join(e.text for e in events) == TALE


def test_m1_settings_stay_with_their_rows():
    """Greedy, seeded and with a stop; the middle one ends first."""
    model = make("both sides")
    plans = [Plan(), Plan("ancestral", steps=4, guidance=0.5), Plan("margin", block=5)]
    requests = [
        Request((5, 6), 21, plan=plans[0]),
        Request((7,), 8, Sampling(1.0), 1, plan=plans[1]),
        Request((1, 2, 3, 4), 15, Sampling(0.6, top_k=5), 9, plan=plans[2]),
    ]

    def finished(row: int, tokens: Any) -> str | None:
        return "stop" if len(tokens) == 6 and row % 3 == 2 else None

    rows = run(model, requests, finished)
    alone = [run(model, [r], lambda row, tokens, i=i: finished(i, tokens))[0] for i, r in enumerate(requests)]
    assert [written(a) for a in rows] == [written(b) for b in alone]
    assert [len(written(a)) for a in rows] == [21, 8, 6]
    assert [a[-1].finish for a in rows] == ["length", "length", "stop"]
    assert rows[1][-1].calls < rows[2][-1].calls < rows[0][-1].calls


def test_stop_strings_end_a_row_as_they_would_in_order():
    """Cut at the first, wherever the places were filled; the tokens end with the one that completed it."""
    ended: dict[str, set[str]] = defaultdict(set)
    for policy in POLICIES:
        for stop in ("hat", "字, t", "that;", "zzz"):
            result = generate(teller(), [[9]], max_new_tokens=60, policy=policy, block=9, stop=stop)[0]
            want = TALE.split(stop)[0]
            assert result.text == want
            assert result.finish_reason == "stop"
            if stop in TALE:
                assert stop not in BPE.decode(result.tokens[:-1]) and stop in BPE.decode(result.tokens)
            ended[stop].add(str(result.tokens))
    assert all(len(tokens) == 1 for tokens in ended.values()), "the order of filling changed the result"
