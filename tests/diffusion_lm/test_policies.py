"""Each unmasking policy as a function, and the order in which it fills a scripted model's places."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from constate.core.decode import Request
from constate.core.sampling import Sampling
from constate.diffusion_lm.draw import source
from constate.diffusion_lm.plan import Plan, counts, shares
from constate.diffusion_lm.policies import POLICIES, Look, entropies, late, top
from tests.oracle import Oracle, odds, order, run, written

VOCAB = 6
SURE = [0.5, 0.9, 0.3, 0.95, 0.6, 0.7, 0.4, 0.8]  # of eight places, each its own
FIRST = sorted(range(8), key=lambda i: -SURE[i])


def look(probabilities: list[list[float]], budget: int = 1, left: int = 4, **over: Any) -> Look:
    logits = torch.tensor(probabilities).log()
    return Look(logits, budget, left, source(3), over.pop("standing", torch.zeros(0)), **over)


def sure(budget: int = 1, left: int = 8, **over: Any) -> Look:
    rows = [torch.tensor(odds(VOCAB, i % VOCAB, p)).exp().tolist() for i, p in enumerate(SURE)]
    return look(rows, budget, left, **over)


# -- as functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", range(1, 9))
@pytest.mark.parametrize("policy", ["confidence", "margin", "entropy", "threshold", "entropy_bound"])
def test_the_surest_places_come_first(policy: str, budget: int):
    """With the rest spread evenly all scores agree. The last two have nothing beyond the budget to trust."""
    given = replace(sure(budget), threshold=1.0, bound=0.0)
    assert POLICIES[policy](given).fill == sorted(FIRST[:budget])


def test_the_scores_differ_where_they_should():
    """Place 0 has the likeliest token, 1 the widest margin, 2 the least entropy."""
    places = [
        [0.52, 0.47, 0.01, 0, 0, 0],
        [0.50, 0.10, 0.10, 0.10, 0.10, 0.10],
        [0.505, 0.495, 0, 0, 0, 0],
    ]
    given = look(places)
    assert [POLICIES[p](given).fill for p in ("confidence", "margin", "entropy")] == [[0], [1], [2]]


def test_measures_are_their_definitions():
    places = torch.rand(37, 50, generator=torch.Generator().manual_seed(1)) * 9
    places[:, 7] = -math.inf  # an id without mass adds nothing
    p = places.double().softmax(-1)
    assert torch.allclose(top(places).double(), p.amax(-1).log(), atol=1e-6)
    want = -(p * p.log()).nan_to_num(0.0).sum(-1)
    assert torch.allclose(entropies(places).double(), want, atol=1e-5)


@pytest.mark.parametrize("policy", ["confidence", "margin", "entropy", "threshold", "remask"])
def test_of_equals_the_lowest_place_comes_first(policy: str):
    """Also where they are equal but for the last bits."""
    places = torch.tensor([[0.1, 0.7, 0.2]]).log().repeat(9, 1)
    places += 1e-6 * torch.rand(9, 3, generator=torch.Generator().manual_seed(2))
    given = Look(places, 3, 3, source(0), torch.zeros(0), threshold=1.0)
    assert POLICIES[policy](given).fill == [0, 1, 2]


@pytest.mark.parametrize(("least", "fill"), [(0.0, 8), (0.35, 7), (0.65, 4), (0.95, 1), (0.96, 1), (1.0, 1)])
def test_threshold_takes_what_it_trusts_and_never_nothing(least: float, fill: int):
    """0.95 itself is trusted, to a float's width; above it nothing is, and the best place is taken."""
    assert POLICIES["threshold"](sure(threshold=least - 1e-6)).fill == sorted(FIRST[:fill])
    assert len(POLICIES["threshold"](sure(budget=3, threshold=1.0)).fill) == 3


def test_entropy_bound_sums_from_the_surest():
    given = sure()
    ranked = sorted(entropies(given.logits).tolist())
    for count in range(1, 9):
        for slack, fill in ((1e-3, count), (-1e-3, max(1, count - 1))):
            bound = sum(ranked[:count]) + slack
            chosen = POLICIES["entropy_bound"](replace(given, bound=bound)).fill
            assert chosen == sorted(FIRST[:fill])


def test_random_places_are_all_equally_likely():
    noise, hits = source(5), torch.zeros(8)
    for _ in range(2000):
        fill = POLICIES["random"](replace(sure(budget=2), noise=noise)).fill
        assert len(fill) == len(set(fill)) == 2
        hits[fill] += 1
    assert hits.min() > 400 and hits.max() < 600  # 500 each, a deviation of 19


def test_ancestral_places_come_each_by_itself():
    """With four steps left each place comes with probability 1/4, where any does; at the last step all."""
    noise, sizes, hits = source(6), torch.zeros(9), torch.zeros(8)
    for _ in range(4000):
        fill = POLICIES["ancestral"](replace(sure(left=4), noise=noise)).fill
        sizes[len(fill)] += 1
        hits[fill] += 1
    chance = [math.comb(8, k) * 0.25**k * 0.75 ** (8 - k) for k in range(9)]
    chance[:2] = [0.0, chance[0] + chance[1]]  # none at all becomes one
    for k in range(9):
        assert abs(sizes[k] - 4000 * chance[k]) < 5 * math.sqrt(4000 * chance[k]) + 1
    assert abs(hits - hits.mean()).max() < 5 * math.sqrt(4000 * 0.26)
    assert POLICIES["ancestral"](sure(left=1)).fill == list(range(8))


def test_order_noise_makes_the_order_a_draw():
    """Gumbel noise on log-probabilities: the first place is drawn in proportion to them."""
    noise, hits = source(7), torch.zeros(8)
    for _ in range(4000):
        hits[POLICIES["confidence"](replace(sure(), noise=noise, blur=1.0)).fill] += 1
    want = torch.tensor(SURE) / sum(SURE) * 4000
    assert (abs(hits - want) < 5 * want.sqrt()).all()


def test_remasking_lets_the_filled_compete():
    """Four hold with probabilities 0.35, 0.92, 0.2, 0.99; two more are due of the eight masked."""
    standing = torch.tensor([0.35, 0.92, 0.2, 0.99]).log()
    fill, clear = POLICIES["remask"](sure(budget=2, standing=standing))
    # Of twelve the best six: 0.99 0.95 0.92 0.9 0.8 0.7
    assert (fill, clear) == ([1, 3, 5, 7], [0, 2])
    fill, clear = POLICIES["remask"](sure(budget=8, standing=standing))
    assert (fill, clear) == (list(range(8)), [])


def test_late_places_wait():
    """Token 0 ends the text; it is the likeliest at places 0 and 6."""
    given = sure(budget=3)
    assert late(POLICIES["confidence"], given, [0]).fill == [1, 3, 7]
    assert late(POLICIES["threshold"], replace(given, threshold=0.0), [0]).fill == [1, 2, 3, 4, 5, 7]
    assert late(POLICIES["confidence"], replace(given, budget=7), [0]).fill == [0, 1, 2, 3, 4, 5, 7]
    assert late(POLICIES["confidence"], given, []).fill == [1, 3, 7]
    standing = torch.tensor([0.35, 0.92]).log()
    assert late(POLICIES["remask"], replace(given, standing=standing), [0]) == ([1, 3, 5, 7], [0])


def test_a_look_is_not_changed():
    for policy in POLICIES.values():
        given = sure(budget=2, standing=torch.tensor([-0.1]))
        before = given.logits.clone()
        policy(given)
        late(policy, given, [0])
        assert torch.equal(before, given.logits)


# -- counts ------------------------------------------------------------------------------------------


def test_counts_and_shares():
    assert counts(32, 10) == [4, 4, *[3] * 8]
    assert counts(8, 16) == [1] * 8 + [0] * 8
    assert counts(0, 5) == [0] * 5
    assert shares([32, 32, 32, 4], 30) == [10, 9, 10, 1]
    for sizes in ([1], [5, 5, 1], [32] * 7, [3, 32, 32, 2]):
        for steps in range(len(sizes), 2 * sum(sizes)):
            given = shares(sizes, steps)
            assert sum(given) == steps and min(given) >= 1
            even = [steps * size / sum(sizes) for size in sizes]
            assert all(g <= max(1, e + 1) for g, e in zip(given, even, strict=True))
    with pytest.raises(ValueError, match="steps=2 for 3 blocks"):
        shares([5, 5, 1], 2)


# -- over a scripted model ----------------------------------------------------------------------------


def told(canvas: tuple[int, ...], place: int) -> list[float]:
    """Place p of the output holds p mod 5; the prompt has two tokens."""
    return odds(VOCAB, (place - 2) % 5, SURE[(place - 2) % 8])


def filled(length: int = 8, sampling: Sampling | None = None, seed: int = 0, **plan: Any):
    model = Oracle(told, VOCAB)
    request = Request((4, 4), length, sampling or Sampling(), seed, plan=Plan(**plan))
    (commits,) = run(model.any, [request])
    return commits, model


ORDERS = {
    "confidence": [(i,) for i in FIRST],
    "margin": [(i,) for i in FIRST],
    "entropy": [(i,) for i in FIRST],
    "remask": [tuple(range(8))],  # final when the block is full
}


@pytest.mark.parametrize("policy", ORDERS)
def test_the_order_over_a_whole_run(policy: str):
    commits, model = filled(policy=policy)
    assert order(commits) == ORDERS[policy]
    assert written(commits) == [0, 1, 2, 3, 4, 0, 1, 2]
    assert model.calls == [(10,)] * 8
    if policy == "remask":
        assert commits[-1].calls == 8
    else:
        assert model.asked == list(range(8, 0, -1))


def test_fixed_counts_a_step():
    commits, _ = filled(steps=3)
    assert order(commits) == [tuple(sorted(FIRST[a:b])) for a, b in ((0, 3), (3, 6), (6, 8))]
    assert [c.calls for c in commits] == [1, 2, 3]
    assert order(filled(steps=100)[0]) == ORDERS["confidence"]


def test_blocks_are_filled_in_turn():
    commits, model = filled(block=3)
    assert order(commits) == [(i,) for block in ((0, 1, 2), (3, 4, 5), (6, 7)) for i in FIRST if i in block]
    assert model.asked == [3, 2, 1, 3, 2, 1, 2, 1]


def test_the_trusted_go_at_once():
    commits, _ = filled(policy="threshold", threshold=0.65)
    assert order(commits) == [(1, 3, 5, 7), (4,), (0,), (6,), (2,)]
    commits, _ = filled(policy="threshold", threshold=1.0, steps=2)  # steps are a bound
    assert order(commits) == [tuple(sorted(FIRST[:4])), tuple(sorted(FIRST[4:]))]
    commits, _ = filled(policy="entropy_bound", entropy_bound=0.8)
    assert order(commits)[:3] == [(1, 3), (7,), (5,)]  # 0.28 + 0.49 nats; then 0.82 alone, and 1.09
    assert written(commits) == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize("policy", ["random", "ancestral"])
def test_chance_is_the_seed_s(policy: str):
    orders = {seed: order(filled(policy=policy, seed=seed)[0]) for seed in range(8)}
    assert len(set(map(tuple, orders.values()))) == 8
    assert order(filled(policy=policy, seed=3)[0]) == orders[3]
    commits, _ = filled(policy=policy, steps=3)
    assert len(commits) <= 3 and written(commits) == [0, 1, 2, 3, 4, 0, 1, 2]


def test_remasking_rewrites_what_fell_behind():
    """Place 0 is filled first, with the wrong token; once place 1 is known it falls behind and is masked,
    and the model then knows better."""

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        if place == 1:
            return odds(VOCAB, 3, 0.9) if canvas[2] == 2 else odds(VOCAB, 1, 0.6)
        if canvas[1] != VOCAB:
            return odds(VOCAB, 2, 0.95 if place == 2 else 0.7)
        return odds(VOCAB, 2, 0.5)

    def go(policy: str):
        model = Oracle(rule, VOCAB)
        (commits,) = run(model.any, [Request((4,), 3, plan=Plan(policy=policy))])
        return written(commits), model.calls

    assert go("confidence") == ([1, 2, 2], [(4,)] * 3)
    # 1: place 0, at 0.6. 2: places 1 and 2 offer 0.95 and 0.7, two are to hold: place 0 goes.
    # 3: place 0 again, now the token 3.
    assert go("remask") == ([3, 2, 2], [(4,)] * 3)


def test_the_log_probability_is_that_at_the_commit():
    commits, _ = filled(sampling=Sampling(0.7, top_k=3))
    for commit in commits:
        for place, token, logprob in zip(commit.positions, commit.tokens, commit.logprobs, strict=True):
            want = torch.tensor(told((), place + 2)).log_softmax(-1)[token].item()
            assert logprob == pytest.approx(want, abs=1e-5)


def test_confidence_is_clean_unless_asked():
    """Tempered at 0.1, all eight places but one look certain, and the order is left to right."""
    cold = Sampling(0.1)
    assert order(filled(sampling=cold)[0]) == ORDERS["confidence"]
    tempered = order(filled(sampling=Sampling(0.02), confidence="tempered")[0])
    assert tempered == [(i,) for i in range(8)]
    assert order(filled(confidence="tempered")[0]) == ORDERS["confidence"]  # greedy: nothing is tempered


def test_what_was_chosen_is_told():
    commits, _ = filled(policy="threshold", eos="late", block=4)
    assert commits[-1].how == {
        "policy": "threshold, 0.9, clean, end of text late",
        "block": "4",
        "cache": "none",
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"policy": "oracle"}, "policy='oracle' is not known; one of confidence"),
    ({"cache": "magic"}, "cache='magic' is not known"),
    ({"confidence": "warm"}, "confidence='warm'"),
    ({"eos": "soon"}, "eos='soon'"),
    ({"steps": 0}, "steps=0: at least 1"),
    ({"steps": 2.5}, "steps=2.5: a whole number"),
    ({"block": 0}, "block=0: at least 1"),
    ({"refresh": 0, "cache": "dual"}, "refresh=0: at least 1"),
    ({"min_new_tokens": -1}, "min_new_tokens=-1"),
    ({"policy": "threshold", "threshold": 1.5}, "threshold=1.5"),
    ({"policy": "threshold", "threshold": -0.1}, "threshold=-0.1"),
    ({"policy": "threshold", "threshold": math.nan}, "threshold=nan"),
    ({"policy": "entropy_bound", "entropy_bound": math.inf}, "entropy_bound=inf"),
    ({"order_noise": -1.0}, "order_noise=-1.0"),
    ({"guidance": math.nan}, "guidance=nan"),
    ({"threshold": 0.5}, "threshold is the policy 'threshold'"),
    ({"entropy_bound": 0.5, "policy": "threshold"}, "entropy_bound is the policy"),
    ({"order_noise": 0.5, "policy": "random"}, "order_noise blurs"),
    ({"refresh": 3}, "refresh is for an approximate cache"),
    ({"policy": "remask", "cache": "delayed"}, "needs another"),
]


@pytest.mark.parametrize(("plan", "said"), BAD, ids=str)
def test_a_plan_that_makes_no_sense_is_refused(plan: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Plan(**plan)


def test_a_model_s_answers_are_only_asked_where_masked():
    """The scripted model fails where it is asked about a place that is given or filled."""

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        assert canvas[place] == VOCAB
        return told(canvas, place)

    for policy in POLICIES:
        plan = Plan(policy=policy, block=3)
        (commits,) = run(Oracle(rule, VOCAB).any, [Request((4, 4), 8, plan=plan)])
        assert sorted(t for c in commits for t in c.tokens) == sorted([0, 1, 2, 3, 4, 0, 1, 2])
