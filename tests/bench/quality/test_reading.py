"""Probes of a text: costs against one plain forward, places and second readings by hand, cloze by a model
that is made to know, drift against two runs."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import constate
from constate.bench.quality.asked import NAMES, rows
from constate.bench.quality.cloze import CHOICES, LEAST, WORDS, cloze, questions
from constate.bench.quality.drift import drift
from constate.bench.quality.positions import positions, repeat
from constate.bench.quality.reading import book, costs, first_id, windows
from constate.bench.quality.scorer import Scorer
from constate.core.model import Model
from constate.spans import Spans
from constate.training.text import Text

TEXT = "It was a dark night, and the lantern stood upon the table by the open window. " * 40


@pytest.fixture(scope="module")
def model() -> Model:
    return constate.load("tiny/hybrid")


@pytest.fixture
def page(tmp_path: Path) -> str:
    path = tmp_path / "page.txt"
    path.write_text(TEXT)
    return str(path)


@torch.no_grad()
@pytest.mark.parametrize("piece", [1, 7, 64, 512])
def test_a_text_costs_the_same_however_it_is_cut(model: Model, page: str, piece: int) -> None:
    ids = book(model, "tiny/hybrid", page).ids[:150]
    other = ids.flip(0)
    got = torch.cat(list(costs(model, [ids, other], start=0, piece=piece)), dim=1)
    for row, wanted in zip(got, (ids, other), strict=True):
        heard = torch.cat([torch.zeros(1, dtype=torch.int64), wanted[:-1]])
        said = model(heard, Spans.of([150])).double()
        torch.testing.assert_close(
            row.double(), F.cross_entropy(said, wanted, reduction="none"), rtol=1e-4, atol=1e-4
        )


def test_windows_are_spread_and_apart() -> None:
    text = Text("t", torch.arange(107), 107)
    got = windows(text, 10, 4)
    assert got[:, 0].tolist() == [0, 20, 50, 70] and got.shape == (4, 10)
    assert windows(text, 10, 99).shape == (10, 10)
    with pytest.raises(ValueError, match=r"t has 107 tokens; a window of 108"):
        windows(text, 108, 1)


@torch.no_grad()
def test_places_by_hand(model: Model, page: str) -> None:
    found = list(positions(model, "tiny/hybrid", page, length=50, most=3))
    read = book(model, "tiny/hybrid", page)
    assert [(r["first"], r["last"]) for r in found] == [(0, 15), (16, 31), (32, 49)]
    taken = windows(read, 50, 3)
    nats = []
    for wanted in taken:
        heard = torch.cat([torch.tensor([first_id(model)]), wanted[:-1]])
        nats.append(F.cross_entropy(model(heard, Spans.of([50])).double(), wanted, reduction="none"))
    each = torch.stack(nats) * len(read.ids) / read.nbytes / math.log(2)
    for row in found:
        assert row["score"] == pytest.approx(float(each[:, row["first"] : row["last"] + 1].mean()), rel=1e-4)
        assert row["low"] < row["score"] < row["high"] < row["chance"]
    assert sum(r["n"] for r in found) == 150


def test_a_second_reading_is_the_second(model: Model, page: str) -> None:
    row = repeat(model, "tiny/hybrid", page, length=40, most=5)
    first = list(positions(model, "tiny/hybrid", page, length=40, most=5))
    assert row["first_reading"] == pytest.approx(
        sum(r["score"] * r["n"] for r in first) / sum(r["n"] for r in first), rel=1e-4
    )
    assert row["score"] != row["first_reading"] and row["n"] == 200


def test_every_word_that_is_offered_was_read_before() -> None:
    from constate.bench.quality.texts import read

    asked = list(questions(read(None)[1], 50, 0))
    assert len(asked) == 50
    for question in asked:
        words = question.passage.split()
        assert len(words) + 1 >= WORDS and len(set(question.words)) == CHOICES
        for word in question.words:
            assert word in question.passage and len(word) >= LEAST
    assert asked == list(questions(read(None)[1], 50, 0))
    assert asked != list(questions(read(None)[1], 50, 1))


def test_cloze_is_won_by_who_knows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that finds one word likely, of however many tokens, answers exactly where that is right."""
    from constate.bench.quality import cloze as module
    from constate.bench.quality.texts import read

    asked = list(questions(read(None)[1], 6, 0))
    assert model.tokenizer is not None
    for knows in (0, 2):
        wanted = [model.tokenizer.encode(" " + q.words[knows], add_special_tokens=False).ids for q in asked]

        def said(self: Model, heard: Tensor, spans: Spans, wanted: list[list[int]] = wanted) -> Tensor:
            logits = torch.zeros(len(heard), self.vocab)
            for start, end in zip(spans.offsets, spans.offsets[1:], strict=False):
                row = heard[start:end].tolist()
                for word in wanted:
                    for i in range(len(word)):
                        if row[len(row) - i :] == word[:i]:
                            logits[end - 1, word[i]] += 5.0 if i else 1.0
                    for i in range(1, len(word)):
                        at = len(row) - i
                        if row[at:] == word[:i]:
                            for j in range(i):
                                logits[start + at - 1 + j, word[j]] += 9.0
            return logits

        monkeypatch.setattr(Model, "forward", said)
        chosen = [module._chosen(Scorer(model, "m"), q) for q in asked]
        assert chosen.count(knows) >= 5  # a word may begin as another does


@pytest.mark.parametrize("same", [0.0, math.nan])
def test_who_prefers_no_word_is_not_right(model: Model, monkeypatch: pytest.MonkeyPatch, same: float) -> None:
    """The right word stands first and would win every tie, and all of a broken model's answers."""
    monkeypatch.setattr(Scorer, "after", lambda self, asked: [(same, False) for _ in asked])
    assert cloze(model, "tiny/hybrid", most=3)["score"] == 0.0


def test_few_windows_tell_little(model: Model, page: str) -> None:
    """Of two, Student's interval is 12.7 standard errors to each side."""
    row = next(positions(model, "tiny/hybrid", page, length=16, most=2))
    text = book(model, "tiny/hybrid", page)
    nats = torch.cat([*costs(model, list(windows(text, 16, 2)), start=0)], dim=1).double()
    half = 12.706 * float(nats.mean(1).std()) / math.sqrt(2) * len(text.ids) / text.nbytes / math.log(2)
    assert row["high"] - row["score"] == pytest.approx(half, rel=1e-3)


def test_a_text_without_such_a_passage_is_told(model: Model, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("The lantern stood. " * 90)
    with pytest.raises(ValueError, match="no passage"):
        cloze(model, "tiny/hybrid", str(tmp_path / "short.txt"))


@torch.no_grad()
def test_drift_is_that_of_the_state_alone(page: str) -> None:
    model = constate.load("tiny/mamba2")
    found = list(drift(model, "tiny/mamba2", page, length=300, dtypes=("bfloat16",)))
    assert [r["last"] for r in found] == [255, 299] and model.state_dtype == torch.float32
    assert all(0 < r["logits_off"] < 0.05 for r in found)
    assert found[0]["exact_score"] != found[0]["score"]
    narrow = constate.load("tiny/mamba2", state_dtype="bfloat16")
    ids, read = book(model, "m", page).ids[:300], book(model, "m", page)
    cache, nats = narrow.init_cache(1), []
    heard = torch.tensor([0])
    for token in ids.split(1):
        nats.append(float(F.cross_entropy(narrow.step(heard, cache).double(), token)))
        heard = token
    want = sum(nats[256:]) / 44 * len(read.ids) / read.nbytes / math.log(2)
    assert found[1]["score"] == pytest.approx(want, rel=1e-5)


def test_what_has_no_state_cannot_drift(page: str) -> None:
    with pytest.raises(ValueError, match="no recurrent state"):
        next(drift(constate.load("tiny/transformer"), "tiny/transformer", page, length=64))


def test_a_denoiser_and_a_model_without_text_are_told(page: str) -> None:
    denoiser, mute = constate.load("tiny/mdlm"), constate.load("tiny/mamba2")
    with pytest.raises(ValueError, match="masked diffusion"):
        list(rows("positions", denoiser, "tiny/mdlm", text=page))
    with pytest.raises(ValueError, match="which sees what follows: probe copy"):
        list(rows("copy", denoiser, "tiny/mdlm"))
    mute.tokenizer = None
    for name in ("positions", "repeat", "cloze", "drift", "bpb"):
        with pytest.raises(ValueError, match="no tokenizer"):
            list(rows(name, mute, "mute", text=page))


def test_beyond_its_positions_no_model_is_scored(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = constate.load("tiny/hybrid")
    object.__setattr__(model.config, "max_position_embeddings", 512)
    with pytest.raises(ValueError, match="made for 512 positions, and 1,024"):
        list(positions(model, "m", page))


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("bpb", "drift", "positions", "repeat", "cloze")]
)
def test_rows_of_several_seeds_end_in_their_mean(name: str, model: Model) -> None:
    settings = {"length": 16} if name != "recall" else {"pairs": 2}
    found = list(rows(name, model, "tiny/hybrid", seeds=2, settings=settings))
    assert len(found) == (15 if name == "passkey" else 3)
    for i in range(0, len(found), 3):
        one, two, both = found[i : i + 3]
        assert (one["seed"], two["seed"], both["seed"]) == (0, 1, None)
        assert both["score"] == pytest.approx((one["score"] + two["score"]) / 2)
        assert both["n"] == one["n"] + two["n"] and both["setting"] == one["setting"]


def test_a_setting_of_a_text_probe_is_told(model: Model) -> None:
    with pytest.raises(ValueError, match="has no setting 'pairs'; it has window, every"):
        list(rows("bpb", model, "m", settings={"pairs": 3}))
    with pytest.raises(ValueError, match="every 0; at least 1"):
        list(rows("bpb", model, "m", settings={"every": 0}))


def test_so_many_episodes_are_asked_as_were_wanted(model: Model) -> None:
    (row,) = rows("copy", model, "m", settings={"length": 5, "episodes": 7})
    assert row["n"] == 35 and row["setting"].startswith("5 of 32 symbols")
    with pytest.raises(ValueError, match="episodes 0; at least 1"):
        list(rows("copy", model, "m", settings={"episodes": 0}))


def test_settings_of_a_text_probe_are_heeded(model: Model, page: str) -> None:
    (row,) = rows("bpb", model, "m", text=page, settings={"window": 100})
    assert row["setting"] == "page.txt, windows of 100 tokens"
    found = list(rows("positions", model, "m", text=page, settings={"length": 40, "most": 2}))
    assert sum(r["n"] for r in found) == 80
    (row,) = rows("repeat", model, "m", text=page, settings={"length": 20, "most": 3})
    assert row["n"] == 60
