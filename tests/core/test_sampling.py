"""Sampling against filters and sums written here as plain loops over Python floats."""

import json
import math
from itertools import product

import pytest
import torch

from constate.core.sampling import Sampling, choose, generator, pick

NAN, INF = math.nan, math.inf
LAST = 1 - 2**-53  # the largest uniform there is
UNIFORMS = [0.0, 1e-12, *(i / 23 for i in range(1, 23)), LAST]


def reference(logits: list[float], rule: Sampling, uniform: float, seen: set[int]) -> int:
    """The definition, id by id."""
    scores = list(logits)
    for i in seen:
        scores[i] *= rule.repetition_penalty if scores[i] < 0 else 1 / rule.repetition_penalty
    best = max(scores)
    if rule.temperature <= 1e-5:
        return scores.index(best)
    mass = {i: math.exp((s - best) / rule.temperature) for i, s in enumerate(scores)}
    ranked = sorted(mass, key=lambda i: (-mass[i], i))
    if rule.top_k:
        ranked = ranked[: rule.top_k]
    total, kept, below = sum(mass[i] for i in ranked), [], 0.0
    for i in ranked:
        if kept and rule.top_p < 1 and below >= rule.top_p * total:
            break
        kept.append(i)
        below += mass[i]
    kept = sorted(i for i in kept if mass[i] >= rule.min_p * mass[ranked[0]] and mass[i] > 0)
    target = uniform * sum(mass[i] for i in kept)
    for i in kept:
        target -= mass[i]
        if target < 0:
            return i
    return kept[-1]


BAD = [
    *(("temperature", v) for v in (-0.1, NAN, INF)),
    *(("top_k", v) for v in (-1, 2.5)),
    *(("top_p", v) for v in (-0.01, 1.01, NAN)),
    *(("min_p", v) for v in (-0.01, 1.01, NAN)),
    *(("repetition_penalty", v) for v in (0, -1.0, NAN, INF)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value}: .* wanted"):
        Sampling(**{name: value})


EDGES = {
    "equal": [2.5] * 8,
    "masked": [-INF, 1.0, -INF, 3.0, 3.0, -INF, -2.0, 0.0],
    "one left": [-INF] * 5 + [0.0] + [-INF] * 2,
    "huge": [0.0, -1.0, 1e4, 3.0, 1e4, -1e4, 2.0, 1.0],
    "mild": [0.3, -1.2, 2.2, 0.1, 2.1, -0.4, 0.0, 1.9],
}
RULES = [
    Sampling(t, k, p, m, penalty)
    for t, p, k, m, penalty in product(
        (0.0, 1e-6, 1e-3, 1.0, 50.0), (0.0, 1e-9, 0.6, 1.0), (0, 1, 3, 13), (0.0, 0.05, 1.0), (1.0, 1.7)
    )
]


@pytest.mark.parametrize("logits", EDGES.values(), ids=EDGES.keys())
def test_every_rule_on_every_edge_equals_the_definition(logits):
    """Case I1."""
    tensor, seen = torch.tensor(logits), {1, 3, 6}
    for rule, uniform in product(RULES, (0.0, 0.37, 0.81, LAST)):
        want = reference(logits, rule, uniform, seen)
        (got,), (logprob,) = choose(tensor[None], [rule], [uniform], [seen])
        assert got == want, (rule, uniform)
        assert json.loads(json.dumps(logprob, allow_nan=False)) <= 0
        raw = logits[got] - max(logits) - math.log(sum(math.exp(x - max(logits)) for x in logits))
        assert logprob == pytest.approx(raw, abs=1e-4)


@pytest.mark.parametrize(
    "rule", [Sampling(), Sampling(1e-5), Sampling(1.0, top_p=0.0), Sampling(9.0, top_k=1)]
)
@pytest.mark.parametrize("logits", EDGES.values(), ids=EDGES.keys())
def test_one_token_is_left_and_the_lowest_of_equals_wins(rule, logits):
    picks = {pick(torch.tensor(logits), rule, u, set()) for u in UNIFORMS}
    assert picks == {logits.index(max(logits))}


def test_a_batch_is_its_rows():
    """Rows of different rules side by side choose what each chooses alone, and the logits are untouched."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    rules = [
        Sampling(),
        Sampling(0.8, top_p=0.9),
        Sampling(repetition_penalty=5.0),
        Sampling(2.0),
        Sampling(1.0, 5),
    ]
    uniforms = [0.1, 0.5, 0.2, 0.99, 0.7]
    seen = [{3}, {4}, {int(logits[2].argmax())}, set(), {1, 2}]
    ids, logprobs = choose(logits, rules, uniforms, seen)
    for r in range(5):
        alone = choose(logits[r : r + 1], rules[r : r + 1], uniforms[r : r + 1], seen[r : r + 1])
        assert alone[0] == [ids[r]] == [reference(logits[r].tolist(), rules[r], uniforms[r], seen[r])]
        assert alone[1] == pytest.approx([logprobs[r]], abs=1e-6)
    assert ids[2] != int(logits[2].argmax()), "the penalty had nothing to do"
    assert torch.equal(logits, before)


def test_penalty_by_hand():
    """Positive logits are divided, negative multiplied, each id once; the log-probability stays raw."""
    logits = torch.tensor([[4.0, 3.0, -1.0, -1.5]])
    rule = Sampling(repetition_penalty=2.0)
    assert choose(logits, [rule], [0.0], [{0}])[0] == [1]
    assert choose(logits, [rule], [0.0], [[0, 0, 1, 1]])[0] == [0]
    both_negative = torch.tensor([[-1.0, -1.5]])
    assert choose(both_negative, [rule], [0.0], [{0}])[0] == [1]
    _, (logprob,) = choose(logits, [rule], [0.0], [{0}])
    assert logprob == pytest.approx(float(logits.double().log_softmax(-1)[0, 1]), abs=1e-6)


def test_draws_follow_the_distribution():
    """4,000 draws at temperature 0.7: every id's count within five standard deviations."""
    logits = [0.0, 1.0, -1.0, 0.5, 2.0]
    mass = [math.exp(x / 0.7) for x in logits]
    source, n, counts = generator(3), 4000, [0] * 5
    for _ in range(n):
        counts[pick(torch.tensor(logits), Sampling(0.7), source.random(), set())] += 1
    for count, m in zip(counts, mass, strict=True):
        p = m / sum(mass)
        assert abs(count - n * p) < 5 * math.sqrt(n * p * (1 - p))


def test_a_seed_is_a_sequence():
    source = generator(11)
    ten = [source.random() for _ in range(10)]
    later = generator(11, drawn=4)
    assert [later.random() for _ in range(6)] == ten[4:]
    assert len({generator(s).random() for s in (-1, 1, 0, 11, 12, 2**70)}) == 6


@pytest.mark.parametrize("bad", [[NAN, 0.0, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF]])
@pytest.mark.parametrize("rule", [Sampling(), Sampling(1.0), Sampling(1.0, 2, 0.5, 0.1, 1.2)])
def test_broken_logits_are_an_error_and_no_token(bad, rule):
    with pytest.raises(ValueError, match="logits hold NaN or infinity"):
        choose(torch.tensor([bad]), [rule], [0.5], [{0}])
