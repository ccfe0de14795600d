"""What a harness is told: each likelihood against a plain run of that row alone, for models of every kind;
and, where lm-eval is installed, its own evaluation of the tasks that ship."""

import math
from importlib.util import find_spec

import pytest
import torch

import constate
from constate.bench.quality import lmeval
from constate.bench.quality.cloze import cloze
from constate.bench.quality.scorer import Scorer
from constate.bench.quality.texts import read
from constate.core.model import Model
from constate.spans import Spans

NAMES = ("tiny/transformer", "tiny/mamba", "tiny/mamba2", "tiny/gla", "tiny/gated_deltanet", "tiny/hybrid")
PAIRS = [("It was a", " dark night."), ("", "She"), ("Her mother and her sisters were at the", " door")]


def _alone(model: Model, context: list[int], more: list[int]) -> tuple[float, bool]:
    """Token by token through the state, in float64 sums."""
    cache, total, greedy = model.init_cache(1), 0.0, True
    with torch.no_grad():
        for heard, wanted in zip([*context, *more[:-1]], [*context[1:], *more], strict=True):
            said = model.step(torch.tensor([heard]), cache)[0].double()
            if cache.lengths[0] >= len(context):
                total += float(said.log_softmax(-1)[wanted])
                greedy &= int(said.argmax()) == wanted
    return total, greedy


@pytest.mark.parametrize("name", NAMES)
def test_likelihoods_of_unequal_lengths_are_those_of_lone_rows(name: str) -> None:
    scorer = Scorer(constate.load(name), name)
    pairs = [(scorer.ids(context), scorer.ids(more)) for context, more in PAIRS]
    likeliest = _greedy(scorer.model, pairs[0][0], 3)
    pairs.append((pairs[0][0], likeliest))
    for got, (context, more) in zip(scorer.after(pairs), pairs, strict=True):
        want = _alone(scorer.model, context or [scorer.start], more)
        assert got[0] == pytest.approx(want[0], rel=1e-4) and got[1] is want[1]
    assert list(scorer.after(pairs))[-1][1] is True


def _greedy(model: Model, context: list[int], count: int) -> list[int]:
    result = constate.generate(model, [context], max_new_tokens=count, ignore_eos=True)[0]
    return list(result.tokens)


def test_groups_hold_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(constate.load("tiny/gla"), "tiny/gla")
    pairs = [
        (scorer.ids("It was a dark"), scorer.ids(word)) for word in (" night", " and stormy", "er", " day")
    ]
    whole = list(scorer.after(pairs))
    monkeypatch.setattr("constate.bench.quality.scorer.PACKED", 9)
    for (mine, _), (want, _) in zip(scorer.after(pairs), whole, strict=True):
        assert mine == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", ["tiny/mamba2", "tiny/hybrid"])
def test_a_whole_text_is_read_through_the_state(name: str) -> None:
    """Longer than a piece, and no window: the sum of every token given all before it."""
    scorer = Scorer(constate.load(name), name)
    text = read(None)[1][:3000]
    ids = scorer.ids(text)
    assert len(ids) > 600
    with torch.no_grad():
        said = scorer.model(torch.tensor([scorer.start, *ids[:-1]]), Spans.of([len(ids)])).double()
    want = float(said.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].sum())
    assert scorer.whole(text) == pytest.approx(want, rel=1e-5)


def test_a_denoisers_likelihood_is_a_bound_and_never_greedy() -> None:
    scorer = Scorer(constate.load("tiny/mdlm"), "tiny/mdlm")
    assert scorer.bound
    right, wrong = scorer.after(
        [(scorer.ids("It was a"), scorer.ids(" very")), (scorer.ids("It was a"), scorer.ids("qzx"))]
    )
    assert right[0] > wrong[0] and not right[1]
    size = len(text := read(None)[1][:2000])
    assert 1.0 < -scorer.whole(text) / math.log(2) / size < 5.0


def test_stops_are_honoured_and_left_out() -> None:
    scorer = Scorer(constate.load("tiny/hybrid"), "tiny/hybrid")
    plain = scorer.until(["It was"], [], 40)[0]
    stop = plain[10:13]
    short = scorer.until(["It was", "She"], [stop], 40)
    assert short[0] == plain[: plain.index(stop)] and stop not in short[1]
    assert short[1] == scorer.until(["She"], [stop], 40)[0]


def test_what_cannot_be_asked_is_told() -> None:
    model = constate.load("tiny/gla")
    with pytest.raises(ValueError, match="empty continuation"):
        list(Scorer(model, "tiny/gla").after([([1], [])]))
    model.tokenizer = None
    with pytest.raises(ValueError, match="no tokenizer"):
        Scorer(model, "tiny/gla")


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is here")
def test_without_the_harness_the_way_to_it_is_told() -> None:
    with pytest.raises(ValueError, match=r"pip install 'constate\[lmeval\]'"):
        next(lmeval.evaluate("tiny/gla"))


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra lmeval is not installed")
@pytest.mark.filterwarnings("ignore")  # the harness's own, and those of its many dependencies
def test_the_harness_finds_what_the_probes_find() -> None:
    found = {(r["task"], r["metric"]): r for r in lmeval.evaluate("tiny/mamba2")}
    assert {task for task, _ in found} == set(lmeval.TASKS)
    mine = cloze(constate.load("tiny/mamba2"), "tiny/mamba2", most=100)
    assert found["constate_cloze", "acc"]["score"] == pytest.approx(mine["score"], abs=0.011)
    assert 1.4 < found["constate_bpb", "bits_per_byte"]["score"] < 1.9


def test_a_task_that_does_not_ship_is_told() -> None:
    with pytest.raises(ValueError, match="those that do are constate_bpb"):
        next(lmeval.evaluate("tiny/gla", ["hellaswag"]))
