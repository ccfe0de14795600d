"""The trained denoisers that ship: what is written beside them is what they score, called a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from constate.bench.quality.texts import BOOK
from constate.core.model import Model
from constate.diffusion_lm.denoiser import Denoiser, denoiser
from constate.diffusion_lm.likelihood import bits_per_byte
from constate.diffusion_lm.streams import predict
from constate.loading import load
from constate.spans import Spans
from constate.training.recipes import find
from constate.training.text import ZOO, shipped

NAMES = {"mdlm": None, "block_diffusion": 8}
GAP = 0.45  # bits a byte that a bound may lie above the transformer's figure: they lie 0.37 and 0.38 above


@pytest.fixture(scope="module", params=NAMES)
def shipping(request: pytest.FixtureRequest) -> tuple[str, Model, dict[str, Any]]:
    quality = json.loads((ZOO / request.param / "quality.json").read_text())
    return request.param, load(f"tiny/{request.param}", backend="torch"), quality


def test_it_is_its_recipe(shipping: tuple[str, Model, dict[str, Any]]) -> None:
    name, model, quality = shipping
    assert denoiser(model) == Denoiser(1024, shift=True, block=NAMES[name])
    recipe = find(name)
    assert quality["start"] == recipe.start == "tiny/transformer"
    assert quality["trained_tokens"] == 2048 * recipe.steps
    assert quality["params"] == sum(p.numel() for p in model.parameters())
    rows = [json.loads(line) for line in (ZOO / name / "train.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == recipe.steps and rows[-1]["tokens"] == quality["trained_tokens"]
    assert model.vocab == 1024 and model.eos_ids == {0}


def test_the_bound_beside_the_transformers_figure(shipping: tuple[str, Model, dict[str, Any]]) -> None:
    name, _, quality = shipping
    book = quality["held_out"]["Northanger Abbey"]
    assert "bits_per_byte" not in book, "what is only a bound is not to be called anything else"
    assert book["standard_error"] < 0.02
    transformer = json.loads((ZOO / "transformer" / "quality.json").read_text())
    exact = transformer["held_out"]["Northanger Abbey"]["bits_per_byte"]
    assert exact < book["bits_per_byte_bound"] < exact + GAP, name


def test_a_sample_of_windows_scores_as_the_whole(shipping: tuple[str, Model, dict[str, Any]]) -> None:
    """Six windows spread over the book, which differ from each other by more than the draws do."""
    _, model, quality = shipping
    assert model.tokenizer is not None
    book = shipped(BOOK)
    ids = torch.tensor(model.tokenizer.encode(book).ids)
    bound = bits_per_byte(
        model, ids, len(book.encode()), window=256, start=0, every=1 + len(ids) // (6 * 256)
    )
    assert abs(bound.value - quality["held_out"]["Northanger Abbey"]["bits_per_byte_bound"]) < 0.25


@torch.no_grad()
def test_it_reads_what_is_to_the_right(shipping: tuple[str, Model, dict[str, Any]]) -> None:
    """A masked token in 40 stretches of the book, with the six that follow it and without."""
    _, model, _ = shipping
    assert model.tokenizer is not None
    ids = torch.tensor(model.tokenizer.encode(shipped(BOOK)[:60_000]).ids)
    clean, spans, place = ids[: 40 * 48], Spans.of([48] * 40), 41  # the second of a block of eight
    at = torch.arange(40) * 48 + place
    nats = []
    for shown in (6, 0):
        hidden = (spans.position == place) | (spans.position > place + shown)
        logits = predict(model, clean, torch.where(hidden, 1024, clean), spans, at)
        nats.append(float(F.cross_entropy(logits, clean[at])))
    assert nats[0] < nats[1] - 0.2, nats
