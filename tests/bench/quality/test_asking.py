"""Asking a model: an oracle is always right, a guesser at chance, ids that a vocabulary lacks are told."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import constate
from constate.bench.quality import families
from constate.bench.quality.asking import answered, ask, last_part, vocabulary
from constate.bench.quality.probes import PROBES, Episodes, Probe, probe
from constate.bench.quality.probes.passkey import Passkey
from constate.core.model import Model
from constate.spans import Spans

ALL = [probe(name) for name in PROBES]


class Knowing:
    """In a model's place: says of each row what `answers` maps its ids to, right or always one off."""

    def __init__(self, asked: Probe, off: int, ids: Tensor, drawn: Episodes):
        self.asked, self.off, self.ids, self.drawn = asked, off, ids, drawn

    def __call__(self, heard: Tensor, spans: Spans) -> Tensor:
        drawn = self.drawn
        assert torch.equal(heard, self.ids[drawn.tokens].flatten())
        right = drawn.wanted.flatten().clamp_min(self.asked.answers.start)
        said = (right - self.asked.answers.start + self.off) % len(self.asked.answers)
        logits = torch.zeros(len(heard), int(self.ids.max()) + 2)
        logits[:, -1] = 9.0  # what is no answer is not chosen, however likely
        logits[torch.arange(len(heard)), self.ids[said + self.asked.answers.start]] = 1.0
        return logits


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("asked", ALL, ids=lambda p: p.name)
def test_who_knows_is_right_and_who_errs_is_not(asked: Probe, off: int) -> None:
    ids = torch.randperm(asked.ids) * 3
    drawn = asked.draw(7, 0)
    model: Any = Knowing(asked, off, ids, drawn)
    hits, count = answered(model, drawn, asked.answers, ids)
    assert torch.equal(count, drawn.asked.sum(1))
    assert torch.equal(hits, count if off == 0 else torch.zeros_like(count))


def test_the_last_part_of_answers() -> None:
    asked = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    want = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    assert torch.equal(last_part(asked, 0.5), want)
    assert torch.equal(last_part(asked, 1.0), asked)


@pytest.mark.parametrize("asked", ALL, ids=lambda p: p.name)
def test_an_untrained_model_guesses(asked: Probe) -> None:
    torch.manual_seed(1)
    model = families.build("linear", asked.ids, 4)
    row = ask(model, "untrained", asked, episodes=64)
    assert row["n"] == int(asked.draw(64, 1_000_000).asked.sum())
    assert abs(row["score"] - row["chance"]) < 0.12 and row["low"] <= row["score"] <= row["high"]
    assert row["chance"] == 1 / len(asked.answers)


def test_rows_alone_answer_as_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    asked = probe("recall")
    model = families.build("delta_net", asked.ids, 4)
    whole = ask(model, "m", asked, episodes=12)
    monkeypatch.setattr("constate.bench.quality.asking.PACKED", asked.draw(1, 0).tokens.numel() * 5)
    parts = ask(model, "m", asked, episodes=12)
    assert whole["n"] == parts["n"]  # other episodes of the same kind, as many of them


def _tiny() -> Model:
    return constate.load("tiny/mamba2")


def test_a_checkpoint_reads_ids_of_its_own_vocabulary() -> None:
    model, asked = _tiny(), probe("passkey", length=32)
    ids = vocabulary(model, "tiny/mamba2", asked, 3)
    assert len(set(ids.tolist())) == asked.ids and not set(ids.tolist()) & set(model.eos_ids)
    assert torch.equal(ids, vocabulary(model, "tiny/mamba2", asked, 3))
    assert not torch.equal(ids, vocabulary(model, "tiny/mamba2", asked, 4))
    row = ask(model, "tiny/mamba2", asked, episodes=8)
    assert row["state_bytes"] == model.cost().held["state"] and row["n"] == 8


def test_a_vocabulary_that_cannot_hold_the_probe_is_told() -> None:
    with pytest.raises(ValueError, match=r"uses 3001 ids and tiny/mamba2 has 1023"):
        ask(_tiny(), "tiny/mamba2", probe("copy", vocab=3000))


def test_held_bytes_are_those_of_the_whole_episode() -> None:
    """Attention's keys and values by hand: 2 x 64 float32 numbers a token and layer."""
    asked = Passkey(48)
    model = families.build("attention", asked.ids, 4)
    row = ask(model, "m", asked, episodes=2)
    assert row["kv_bytes"] == 48 * 4 * 2 * 64 * 4
    assert ask(model, "m", replace(asked, length=96), episodes=2)["kv_bytes"] == 2 * row["kv_bytes"]
