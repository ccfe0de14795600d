"""Training denoisers: what is masked, what the loss is, where the weights start, and a run that is cut.

Models are 32 wide, as in test_training.py; what the shipped ones learned is in tests/diffusion_lm.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from constate.bench.quality.bpb import bpb
from constate.core.attention import Attention
from constate.diffusion_lm.denoiser import Denoiser, denoiser
from constate.diffusion_lm.likelihood import bits_per_byte
from constate.loading import load
from constate.spans import Spans
from constate.training import Recipe, build, find, train
from constate.training import text as texts
from constate.training.batches import batch
from constate.training.diffusion import drawn, masked_loss
from constate.training.init import start_from
from constate.training.optim import optimizers
from constate.training.recipes import config, masked

MASK = 1024
ROPE = {"rope_theta": 100.0}
SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "tie_word_embeddings": True,
    "embed_scale": 32**0.5,
    "eos_token_id": 0,
    "layers": [{"mixer": {"type": "attention", "heads": 2, "head_dim": 16, "rope": ROPE}, "mlp": None}],
}


def small(block: int | None = None, steps: int = 12) -> Recipe:
    return Recipe("small", masked(SMALL, block), steps)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "page.txt"
    file.write_text(texts.shipped("austen")[:60_000], encoding="utf-8")
    return file


def test_the_two_recipes_are_the_transformer_seeing_more() -> None:
    mdlm, blocks = find("mdlm"), find("block_diffusion")
    assert {**mdlm.config, "block": 8} == blocks.config
    assert mdlm.start == blocks.start == "tiny/transformer"
    told = {k: v for k, v in mdlm.config.items() if k not in ("mask_token_id", "shift", "block")}
    plain = config(("attention",) * 4)
    assert told == plain | {"model_type": "composed_diffusion", "vocab_size": 1025}
    models = [build(recipe) for recipe in (mdlm, blocks)]
    assert [denoiser(model) for model in models] == [
        Denoiser(MASK, shift=True),
        Denoiser(MASK, shift=True, block=8),
    ]
    counts = [sum(p.numel() for p in model.parameters()) for model in (*models, load("tiny/transformer"))]
    assert counts[0] == counts[1] == counts[2] + 128


@torch.no_grad()
def test_they_start_as_the_transformer() -> None:
    """Its logits, once they see no further than it does; the mask starts as the mean of what is known."""
    model, trained = build(find("mdlm")), load("tiny/transformer", backend="torch")
    for mixer in model.mixers():
        if isinstance(mixer, Attention):
            mixer.block = 1
    ids = torch.arange(40) * 17 % 1024
    got = model(ids, Spans.of([40]))
    assert torch.equal(got[:, :1024], trained(ids, Spans.of([40])))
    assert torch.allclose(model.embed.weight[MASK], trained.embed.weight.mean(0))


def test_other_layers_are_no_start() -> None:
    trained = build(Recipe("causal", {**SMALL, "model_type": "composed"}))
    start_from(build(small()), trained)
    for over, odd in (
        ({"hidden_size": 16}, "embed.weight"),
        ({"layers": SMALL["layers"] * 2}, r"blocks\.1"),
        ({"vocab_size": 1200}, "embed.weight"),
    ):
        other = build(Recipe("causal", {**SMALL, **over, "model_type": "composed"}))
        with pytest.raises(ValueError, match=f"other layers: .*{odd}"):
            start_from(build(small()), other)


@pytest.mark.parametrize("over", [{"vocab_size": 1024}, {"mask_token_id": 5}])
def test_a_recipe_whose_mask_is_text_is_refused(over: dict[str, int], tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(masked(SMALL, None)))
    assert find(file).config["mask_token_id"] == MASK
    file.write_text(json.dumps(masked(SMALL, None) | over))
    with pytest.raises(ValueError, match="the mask is one beyond them"):
        find(file)


@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize("step", [0, 3])  # 8 rows of 256; 2 rows of 1,024
def test_what_a_step_masks(step: int, block: int | None) -> None:
    _, _, spans = batch(torch.arange(5000), step)
    mask = drawn(spans, block, 0, step)
    assert torch.equal(mask, drawn(spans, block, 0, step))
    assert not torch.equal(mask, drawn(spans, block, 0, step + 4))
    assert not torch.equal(mask, drawn(spans, block, 1, step))
    assert not mask[spans.position == 0].any()
    size = block or spans.lengths[0]
    shares = mask.view(-1, size).float().mean(1).sort().values
    # Shares are drawn one from each of as many equal parts of (0, 1) as there are groups.
    even = (torch.arange(len(shares)) + 0.5) / len(shares)
    slack = 1 / len(shares) + 2 / math.sqrt(size)
    assert float((shares - even).abs().max()) < slack
    assert abs(float(mask.float().mean()) - 0.5) < (0.05 if len(shares) > 2 else 0.25)


def test_a_tiny_batch_masks_something() -> None:
    for seed in range(20):
        assert drawn(Spans.of([2]), None, seed, 0).tolist() == [False, True]


@torch.no_grad()
def test_the_loss_is_the_mean_over_masked_places() -> None:
    ids = torch.randint(1, 1024, (3000,))
    model = build(small())
    clean, _, spans = batch(ids, 3, 0)
    mask = drawn(spans, None, 0, 3)
    logits = model(torch.where(mask, MASK, clean), spans)[:, :MASK].double().log_softmax(-1)
    at = mask.nonzero().flatten()  # the place before predicts it; a row's first is never masked
    want = -logits[at - 1, clean[at]].mean()
    assert float(masked_loss(model, ids, 3, 0)) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("block", [None, 8])
def test_it_learns(block: int | None, page: Path) -> None:
    ids = texts.own_text(page, texts.load_tokenizer()).train.ids
    model = build(small(block))
    chosen, losses = optimizers(model), []
    for _ in range(12):
        model.zero_grad()
        loss = masked_loss(model, ids, 0, 0)
        loss.backward()
        losses.append(loss.item())
        for optimizer in chosen.values():
            optimizer.step()
    assert losses[-1] < losses[0] - 0.5, losses


def test_an_interrupted_training_ends_as_the_uninterrupted_one(page: Path, tmp_path: Path) -> None:
    whole = list(train(small(8), tmp_path / "whole", text=page))
    first = train(small(8), tmp_path / "cut", text=page, save_every=0)
    assert next(first)["step"] == 10
    del first
    rest = list(train(small(8), tmp_path / "cut", text=page))
    assert [r["step"] for r in rest] == [12]
    ours, theirs = (load_file(tmp_path / f / "model.safetensors") for f in ("cut", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    # What is left behind says that its scores are bounds.
    assert "held_out_bpb" not in whole[-1]
    quality = json.loads((tmp_path / "whole" / "quality.json").read_text())
    score = quality["held_out"]["the end of page.txt"]
    assert set(score) == {"bits_per_byte_bound", "standard_error", "bytes"}
    assert whole[-1]["held_out_bpb_bound"] == pytest.approx(score["bits_per_byte_bound"], abs=1e-4)
    loaded = load(tmp_path / "whole")
    held_out = texts.own_text(page, texts.load_tokenizer()).held_out
    again = bits_per_byte(loaded, held_out.ids, held_out.nbytes, window=1024, start=0)
    assert score["bits_per_byte_bound"] == again.value and score["standard_error"] == again.error

    file = tmp_path / "held_out.txt"
    file.write_text(texts.load_tokenizer().decode(held_out.ids.tolist()), encoding="utf-8")
    row = bpb(loaded, "small", str(file))
    assert row["bound"] and "an upper bound, from 4 draws" in row["setting"]
    assert row["score"] == pytest.approx(again.value) and row["low"] < row["score"] < row["high"]
    assert row["high"] - row["low"] == pytest.approx(2 * 1.959964 * again.error)
    causal = bpb(load("tiny/transformer"), "tiny/transformer", str(file))
    assert not causal["bound"] and causal["low"] < causal["score"] < causal["high"]
