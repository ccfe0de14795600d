"""Training: what is read and what never is, the optimiser against a plain one, the score against a loop,
and a run that is interrupted against one that is not.

Models here are 32 wide and see a few thousand tokens; what the shipped ones learned is not tested here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from constate.core.model import Model
from constate.loading import load
from constate.spans import Spans
from constate.training import SHIPPED, Recipe, bits_per_byte, build, find, train
from constate.training import text as texts
from constate.training.batches import batch, place
from constate.training.optim import Muon, course, optimizers, orthogonal
from constate.training.recipes import MIXERS, MLP, STEPS, config

SMALL: Mapping[str, Any] = {
    "model_type": "composed",
    "vocab_size": 1024,
    "hidden_size": 32,
    "tie_word_embeddings": True,
    "embed_scale": 32**0.5,
    "eos_token_id": 0,
    "layers": [
        {
            "mixer": {"type": "gated_deltanet", "heads": 2, "key_dim": 8, "value_dim": 16},
            "mlp": {"width": 48},
        },
        {"mixer": {"type": "attention", "heads": 2, "head_dim": 16}, "mlp": None},
    ],
}


def small(steps: int = 20, **changes: Any) -> Recipe:
    return Recipe("small", {**SMALL, **changes}, steps)


# -- recipes --------------------------------------------------------------------------------------


def test_what_ships_differs_in_its_mixers_alone():
    models = {name: build(find(name)) for name in SHIPPED}
    params = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    sizes = {"gla_k4", "gla", "gla_k64"}  # of one family's state
    assert set(params) == {"hybrid", "mamba2", "transformer", "gated_deltanet", "mamba"} | sizes
    held = {name: models[name].cost().held["state"] for name in sizes}
    assert held == {"gla_k4": 8192, "gla": 32768, "gla_k64": 131072}
    assert max(params.values()) <= 1.05 * min(params.values()), params
    assert all(0.95e6 < n < 1.05e6 for n in params.values()), params
    shared = [
        {k: v for k, v in find(name).config.items() if k != "layers"} | {"steps": find(name).steps}
        for name in SHIPPED
    ]
    assert all(each == shared[0] for each in shared)
    assert STEPS * 2048 >= 2.5e6
    kinds = [layer["mixer"]["type"] for layer in find("hybrid").config["layers"]]
    assert kinds == ["gated_deltanet"] * 3 + ["attention"]


def test_any_pattern_is_a_recipe_and_every_layer_weighs_the_same():
    recipe = find("mamba, attention,mamba2")
    assert [layer["mixer"]["type"] for layer in recipe.config["layers"]] == ["mamba", "attention", "mamba2"]
    assert set(MIXERS) == set(MLP)
    layers = [sum(p.numel() for p in block.parameters()) for block in build(find(",".join(MIXERS))).blocks]
    assert max(layers) <= 1.05 * min(layers), layers


def test_a_recipe_from_a_file(tmp_path: Path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "mine", "config": dict(SMALL), "steps": 7}))
    assert find(file) == Recipe("mine", dict(SMALL), 7)
    file.write_text(json.dumps(dict(SMALL)))  # a bare config.json
    assert find(file) == Recipe("mine", dict(SMALL))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hybird", "'hybird' is not known; 'hybrid' is"),
        ("mamba,atention", "'atention' is not known; 'attention' is"),
        ("", "'' is not known"),
        ("absent.json", "absent.json: no such file"),
    ],
)
def test_an_unknown_recipe_is_refused(given: str, expected: str):
    with pytest.raises(ValueError, match=expected):
        find(given)


def test_a_recipe_file_with_an_unknown_key_is_refused(tmp_path: Path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"name": "mine", "layers": []}))
    with pytest.raises(ValueError, match="the file got an unexpected keyword argument 'layers'; wanted is a"):
        find(file)


def test_a_recipe_with_fewer_ids_than_the_tokenizer_is_refused(tmp_path: Path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**SMALL, "vocab_size": 512}))
    with pytest.raises(ValueError, match="vocab_size 512; the tokenizer has 1024 ids"):
        find(file)


# -- texts and the tokenizer ----------------------------------------------------------------------


def test_the_test_book_is_whole_and_not_in_what_is_trained_on():
    book, read = texts.shipped("northanger_abbey"), texts.shipped("austen")
    assert book.startswith("NORTHANGER ABBEY") and book.rstrip().endswith("modern British usage.")
    assert len(read) + len(book) == 4_024_958
    assert read.startswith("EMMA") and "\nPersuasion\n\n\nby" in read
    assert "Tilney" in book and "Tilney" not in read
    paragraphs = [part for part in book.split("\n\n") if len(part) > 80]
    assert len(paragraphs) > 500 and not any(part in read for part in paragraphs)


def test_the_shipped_tokenizer_comes_from_the_training_books_alone():
    again = texts.train_tokenizer(texts.shipped("austen"))
    assert json.loads(again.to_str()) == json.loads(texts.TOKENIZER.read_text(encoding="utf-8"))


def test_the_tokenizer_has_1024_ids_and_loses_nothing():
    tokenizer = texts.load_tokenizer()
    assert tokenizer.get_vocab_size() == 1024
    assert tokenizer.token_to_id("<|end|>") == texts.END_ID == 0
    for text in (texts.shipped("shakespeare")[:20_000], "naïve — 北京 🙂\x00\t\r\n  end "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_own_text_is_cut_at_a_line(tmp_path: Path):
    tokenizer, file = texts.load_tokenizer(), tmp_path / "own.txt"
    lines = "".join(f"line {i} — of the text\n" for i in range(2000))
    file.write_text(lines, encoding="utf-8")
    corpus = texts.own_text(file, tokenizer)
    assert corpus.train.ids[0] == corpus.train.ids[-1] == 0
    assert (corpus.held_out.ids != 0).all()
    parts = [tokenizer.decode(part.ids.tolist()) for part in (corpus.train, corpus.held_out)]
    assert "".join(parts) == lines and parts[0].endswith("\n")
    assert [part.nbytes for part in (corpus.train, corpus.held_out)] == [len(p.encode()) for p in parts]
    assert 0.04 < corpus.held_out.nbytes / len(lines.encode()) < 0.06


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), (b"\xff\xfe\x00", "not UTF-8"), (b"short\n" * 50, "at least 4,096 are wanted")],
)
def test_a_text_that_will_not_do_is_refused(tmp_path: Path, content: bytes | None, expected: str):
    file = tmp_path / "own.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        texts.own_text(file, texts.load_tokenizer())


# -- batches --------------------------------------------------------------------------------------


def test_three_steps_of_four_are_short_and_targets_follow_inputs():
    ids = torch.arange(50_000)
    for step in range(12):
        heard, wanted, spans = batch(ids, step)
        assert spans.lengths == ((1024,) * 2 if step % 4 == 3 else (256,) * 8)
        assert torch.equal(wanted, heard + 1)
        for row in spans.slices():
            assert (heard[row].diff() == 1).all()
        assert all(torch.equal(a, b) for a, b in zip(batch(ids, step)[:2], (heard, wanted), strict=True))
    assert not torch.equal(batch(ids, 0, seed=0)[0], batch(ids, 0, seed=1)[0])


def test_the_text_is_read_evenly():
    """Independent draws would leave 14% of the text unread after as many steps as read it twice over."""
    seen = torch.zeros(200_000, dtype=torch.int64)
    for step in range(2 * len(seen) // 2048):
        seen[batch(torch.arange(len(seen)), step)[1]] += 1
    assert (seen == 0).float().mean() < 0.02
    assert seen.max() <= 6


def test_a_place_is_always_in_the_text():
    assert {place(i, 2, seed) for i in range(100) for seed in range(3)} == {0, 1, 2}


# -- optimisers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (4, 128), (2, 1)])
@pytest.mark.parametrize("spread", [0, 6])
def test_orthogonal_is_newton_schulz(shape: tuple[int, int], spread: int):
    """Against the iteration on the matrix itself, in float64, also for singular values down to 1e-6 of the
    largest: there the rounding of x x' in float32, 1e-7, grows in four steps by up to 3.4445^8."""
    x = torch.randn(3, *shape)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s * torch.logspace(0, -spread, s.shape[-1])
    x = u * s[..., None, :] @ v
    want = x.double() / x.double().norm(dim=(1, 2), keepdim=True)
    for _ in range(5):
        square = want @ want.mT
        want = 3.4445 * want + (-4.7750 * square + 2.0315 * square @ square) @ want
    torch.testing.assert_close(orthogonal(x).double(), want, atol=2e-3 if spread else 2e-5, rtol=0)
    if not spread and shape[0] != shape[1]:
        values = torch.linalg.svdvals(orthogonal(x))
        assert values.min() > 0.6 and values.max() < 1.3


def test_muon_is_momentum_then_orthogonal_whatever_shares_its_shape():
    """In float64: what a nearly singular square does with float32's rounding differs between machines."""
    shapes = [(8, 4), (8, 4), (4, 8), (8, 8)]
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    want = [p.detach().clone() for p in params]
    kept = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    muon = Muon(params, lr=0.1, momentum=0.9, weight_decay=0.5)
    for _ in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p)
            kept[i] = 0.9 * kept[i] + 0.1 * p.grad
            ahead = 0.1 * p.grad + 0.9 * kept[i]
            rows, columns = shapes[i]
            step = 0.1 * math.sqrt(max(1, rows / columns)) * orthogonal(ahead[None])[0]
            want[i] = want[i] * (1 - 0.1 * 0.5) - step
        muon.step()
    for p, expected in zip(params, want, strict=True):
        torch.testing.assert_close(p.detach(), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_parameter_has_one_optimizer(name: str):
    model = build(find(name))
    chosen = {
        kind: {id(p) for group in optimizer.param_groups for p in group["params"]}
        for kind, optimizer in optimizers(model).items()
    }
    linear = {id(m.weight) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
    assert chosen["muon"] == linear
    assert chosen["adamw"] == {id(p) for p in model.parameters()} - linear
    assert id(model.embed.weight) in chosen["adamw"]


def test_the_course_of_the_learning_rate():
    rates = [course(step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 30) and rates[29] == 1.0
    assert set(rates[29:401]) == {1.0}
    falling = rates[401:980]
    assert all(a - b == pytest.approx(1 / 600) for a, b in pairwise(falling))
    assert rates[-1] == 0.02


def test_starting_weights():
    model, again, other = build(small()), build(small()), build(replace(small(), seed=1))
    for (name, p), q, r in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert torch.equal(p, r) == ("norm" in name), name
    state = model.state_dict()
    assert state["embed.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["blocks.0.mlp.gate_up.weight"].std().item() == pytest.approx(0.5 * 32**-0.5, rel=0.1)
    # Two blocks: what is added to the residual stream is half as large.
    assert state["blocks.0.mlp.down.weight"].std().item() == pytest.approx(0.25 * 48**-0.5, rel=0.1)
    assert state["blocks.1.mixer.out.weight"].std().item() == pytest.approx(0.25 * 32**-0.5, rel=0.1)


def test_building_leaves_the_callers_generator_alone():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    build(small())
    assert torch.equal(torch.rand(3), want)


# -- the score ------------------------------------------------------------------------------------


def score_by_loop(model: Model, tokens: Tensor, nbytes: int, window: int) -> float:
    """Every window alone, its log-probabilities in float64, one token after the other."""
    nats = 0.0
    for begin in range(0, len(tokens), window):
        for end in range(begin, min(begin + window, len(tokens))):
            context = [int(tokens[begin - 1]) if begin else 0, *tokens[begin:end].tolist()]
            logits = model(torch.tensor(context), Spans.of([len(context)]), at="last")[0].double()
            nats -= logits.log_softmax(-1)[tokens[end]].item()
    return nats / math.log(2) / nbytes


@torch.no_grad()
def test_bits_per_byte_scores_every_token_once():
    model = build(small())
    model.embed.weight.mul_(20)  # logits far from uniform, so that every token matters
    tokens = torch.randint(1, 1024, (31,))
    for window in (1, 8, 40):
        got = bits_per_byte(model, tokens, 200, window=window)
        assert got == pytest.approx(score_by_loop(model, tokens, 200, window), rel=1e-5)


@torch.no_grad()
def test_bits_per_byte_of_a_uniform_model():
    model = build(small())
    model.embed.weight.zero_()
    tokens = torch.randint(1024, (3000,))
    assert bits_per_byte(model, tokens, 6000) == pytest.approx(10 * 3000 / 6000, rel=1e-6)
    assert bits_per_byte(model, tokens, 6000, window=64, every=7) == pytest.approx(5.0, rel=1e-6)
    with pytest.raises(ValueError, match="a text is wanted"):
        bits_per_byte(model, tokens[:0], 10)


# -- the run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "page.txt"
    file.write_text(texts.shipped("austen")[:60_000], encoding="utf-8")
    return file


def test_an_interrupted_training_ends_as_the_uninterrupted_one(page: Path, tmp_path: Path):
    whole = list(train(small(), tmp_path / "whole", text=page))
    first = train(small(), tmp_path / "cut", text=page, save_every=0)
    assert next(first)["step"] == 10
    del first
    assert (tmp_path / "cut" / "resume.safetensors").exists()
    rest = list(train(small(), tmp_path / "cut", text=page))

    assert [r["step"] for r in rest] == [20]
    ours, theirs = (load_file(tmp_path / f / "model.safetensors") for f in ("cut", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    told = [[{**r, "cpu_s": 0} for r in log] for log in (logged(tmp_path / "cut"), whole)]
    assert told[0] == told[1]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def test_what_a_training_reports_and_leaves(page: Path, tmp_path: Path):
    reports = list(train(small(25), tmp_path, text=page))
    assert [r["step"] for r in reports] == [10, 20, 25]
    assert [r["tokens"] for r in reports] == [2048 * r["step"] for r in reports]
    assert reports[0]["loss"] < math.log(1024) + 0.5
    assert reports[-1]["loss"] < reports[0]["loss"] - 0.1
    assert logged(tmp_path) == reports
    corpus = texts.own_text(page, texts.load_tokenizer())
    per_byte = len(corpus.train.ids) / corpus.train.nbytes / math.log(2)
    assert all(r["bpb"] == pytest.approx(r["loss"] * per_byte, abs=1e-3) for r in reports)

    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "train.jsonl", "quality.json"}
    stored = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16, torch.float32}
    assert all(t.dtype == torch.bfloat16 for name, t in stored.items() if name.endswith("proj.weight"))
    quality = json.loads((tmp_path / "quality.json").read_text())
    score = quality["held_out"]["the end of page.txt"]["bits_per_byte"]
    loaded = load(tmp_path)
    assert loaded.eos_ids == {0} and loaded.tokenizer is not None
    held_out = corpus.held_out
    assert score == bits_per_byte(loaded, held_out.ids, held_out.nbytes)
    assert reports[-1]["held_out_bpb"] == pytest.approx(score, abs=1e-4)
    assert quality["params"] == sum(p.numel() for p in loaded.parameters())

    with pytest.raises(ValueError, match="holds a finished training"):
        train(small(25), tmp_path, text=page)


def test_a_folder_of_another_training_is_refused(page: Path, tmp_path: Path):
    next(train(small(), tmp_path, text=page, save_every=0))
    for other in (small(31), small(norm_eps=1e-6), replace(small(), seed=3)):
        with pytest.raises(ValueError, match="an unfinished training of small, 20 steps"):
            train(other, tmp_path, text=page)
    (tmp_path / "resume.safetensors").unlink()
    train(small(31), tmp_path, text=page)


def test_faults_come_before_the_first_step(page: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="'hybird' is not known"):
        train("hybird", tmp_path / "a")
    with pytest.raises(ValueError, match="steps 0; at least 1"):
        train("hybrid", tmp_path / "a", text=page, steps=0)
    with pytest.raises(ValueError, match="only configs of model_type 'composed'"):
        train(small(model_type="llama"), tmp_path / "a", text=page)
    assert not (tmp_path / "a").exists()


def test_a_loss_that_is_not_finite_ends_the_run(page: Path, tmp_path: Path):
    with pytest.raises(FloatingPointError, match="small: the loss is nan at step 0"):
        next(train(small(embed_scale=math.inf), tmp_path, text=page))


def test_every_mixer_learns(page: Path):
    """One batch, twelve updates of one layer: the loss must fall by a nat."""
    ids = texts.own_text(page, texts.load_tokenizer()).train.ids[: 4 * 65]
    rows = ids.view(4, 65)
    heard, wanted, spans = rows[:, :-1].flatten(), rows[:, 1:].flatten(), Spans.of([64] * 4)
    for name in MIXERS:
        model = build(Recipe(name, config((name,))))
        chosen, losses = optimizers(model), []
        for _ in range(12):
            model.zero_grad()
            loss = F.cross_entropy(model(heard, spans), wanted)
            loss.backward()
            losses.append(loss.item())
            for optimizer in chosen.values():
                optimizer.step()
        assert losses[-1] < losses[0] - 1, (name, losses)
