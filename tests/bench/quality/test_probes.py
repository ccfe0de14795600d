"""Probes ask what they say: each episode beside a plain loop that answers it, and the chance level of who
guesses."""

import math
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from constate.bench.quality.probes import PROBES, Probe, probe
from constate.bench.quality.probes.copying import Copy
from constate.bench.quality.probes.episodes import SILENT, chance
from constate.bench.quality.probes.passkey import Passkey
from constate.bench.quality.probes.recall import Recall
from constate.bench.quality.probes.tracking import S3, Parity

ALL: list[Probe] = [probe(name) for name in PROBES]


@given(st.integers(1, 20), st.integers(0, 30), st.integers(0, 2**20))
def test_a_key_is_asked_for_once_and_its_value_is_the_one_behind_it(pairs: int, room: int, seed: int) -> None:
    asked = Recall(pairs, vocab=2 * pairs + 8, length=4 * pairs + room)
    drawn = asked.draw(3, seed)
    assert drawn.tokens.shape == (3, 4 * pairs + room)
    for tokens, wanted in zip(drawn.tokens.tolist(), drawn.wanted.tolist(), strict=True):
        told = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(told) == pairs and 0 not in told
        places = [t for t, answer in enumerate(wanted) if answer != SILENT]
        assert sorted(tokens[t] for t in places) == sorted(told)
        assert all(wanted[t] == told[tokens[t]] for t in places)
        assert min(places) >= 2 * pairs
        assert all(tokens[t] == 0 for t in range(2 * pairs, len(tokens)) if t not in places)


def test_what_is_copied_is_the_string_behind_the_mark() -> None:
    asked = Copy(9, vocab=5)
    drawn = asked.draw(4, 3)
    for tokens, wanted in zip(drawn.tokens.tolist(), drawn.wanted.tolist(), strict=True):
        assert tokens[9] == 5 and tokens.count(5) == 1
        assert wanted[:9] == [SILENT] * 9 and wanted[9:] == tokens[:9]
        assert tokens[10:] == tokens[:8]  # each answer is then heard


def test_copying_wants_the_bits_of_its_strings() -> None:
    """Counting strings: as many as a state must tell apart."""
    asked = Copy(4, vocab=3)
    assert asked.bits == pytest.approx(math.log2(3**4))


@pytest.mark.parametrize(("depth", "place"), [(0, 0), (50, 8), (100, 17), (-1, None)])
def test_a_passkey_stands_where_it_is_wanted(depth: int, place: int | None) -> None:
    asked = Passkey(20, depth=depth, keys=7, filler=3)
    drawn = asked.draw(50, 1)
    places = set()
    for tokens, wanted in zip(drawn.tokens.tolist(), drawn.wanted.tolist(), strict=True):
        marks = [t for t, token in enumerate(tokens) if token == 10]
        assert len(marks) == 2 and marks[1] == 19
        assert wanted[19] == tokens[marks[0] + 1] < 7
        assert wanted[:19] == [SILENT] * 19
        assert all(7 <= token < 10 for t, token in enumerate(tokens) if t not in (*marks, marks[0] + 1))
        places.add(marks[0])
    assert places == {place} if place is not None else len(places) > 10


def test_parity_is_that_of_all_bits_so_far() -> None:
    drawn = Parity(33).draw(5, 2)
    for tokens, wanted in zip(drawn.tokens.tolist(), drawn.wanted.tolist(), strict=True):
        assert wanted == [sum(tokens[: t + 1]) % 2 for t in range(33)]


def test_s3_is_the_product_of_permutation_matrices() -> None:
    group = [torch.eye(3)[list(p)].T for p in permutations(range(3))]  # P e_i = e_{p(i)}
    drawn = S3(17).draw(6, 4)
    for tokens, wanted in zip(drawn.tokens.tolist(), drawn.wanted.tolist(), strict=True):
        product = torch.eye(3)
        for token, answer in zip(tokens, wanted, strict=True):
            product = group[token] @ product
            assert torch.equal(product, group[answer])
    assert not torch.equal(group[1] @ group[3], group[3] @ group[1])  # the order matters


@pytest.mark.parametrize("asked", ALL, ids=lambda p: p.name)
def test_a_seed_names_its_episodes(asked: Probe) -> None:
    one, again, other = asked.draw(8, 5), asked.draw(8, 5), asked.draw(8, 6)
    assert torch.equal(one.tokens, again.tokens) and torch.equal(one.wanted, again.wanted)
    assert not torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("asked", ALL, ids=lambda p: p.name)
def test_answers_are_spread_as_chance_says(asked: Probe) -> None:
    """So that no model does better than chance by saying always the same."""
    drawn = asked.draw(2000, 7)
    answers = drawn.wanted[drawn.asked]
    assert set(answers.tolist()) == set(asked.answers)
    assert drawn.tokens.min() >= 0 and drawn.tokens.max() < asked.ids
    most = answers.bincount().max().item() / len(answers)
    assert most < chance(asked) + 4 * math.sqrt(chance(asked) / 2000)


@pytest.mark.parametrize("asked", ALL, ids=lambda p: p.name)
def test_a_training_ends_with_the_probe_itself(asked: Probe) -> None:
    stages = asked.easier()
    assert stages[-1] == asked
    assert all(stage.ids == asked.ids and stage.answers == asked.answers for stage in stages)
    assert asked.longer(3).draw(2, 0).tokens.shape[1] > asked.draw(2, 0).tokens.shape[1]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("recal", {}, "recal"),
        ("recall", {"pair": 3}, "pairs"),
        ("recall", {"pairs": 64}, "63"),
        ("recall", {"pairs": 0}, "at least 1"),
        ("recall", {"pairs": 8, "length": 31}, "at least 32"),
        ("copy", {"vocab": 1}, "at least 2"),
        ("passkey", {"depth": 101}, "100"),
        ("passkey", {"length": 3}, "at least 4"),
        ("parity", {"length": 0}, "at least 1"),
    ],
)
def test_a_wrong_setting_is_told(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        probe(name, **settings)
