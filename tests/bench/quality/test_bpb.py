"""Bits a byte: windows, whole texts through the state, intervals, against loops over plain forwards."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import constate
from constate.bench.compare.evidence import of_book
from constate.bench.quality import bpb as module
from constate.bench.quality.bpb import bpb
from constate.bench.quality.reading import costs
from constate.bench.quality.texts import met
from constate.core.model import Model
from constate.spans import Spans

NAME = "tiny/gated_deltanet"
TEXT = "It was a dark night, and the lantern stood upon the table by the open window; no one spoke. " * 30


@pytest.fixture(scope="module")
def model() -> Model:
    return constate.load(NAME)


@pytest.fixture
def page(tmp_path: Path) -> str:
    path = tmp_path / "page.txt"
    path.write_text(TEXT)
    return str(path)


@torch.no_grad()
def nats(model: Model, heard: Tensor, wanted: Tensor) -> Tensor:
    said = model.forward(heard, Spans.of([len(heard)])).double()
    return F.cross_entropy(said, wanted, reduction="none")


def tokens(model: Model) -> Tensor:
    assert model.tokenizer is not None
    return torch.tensor(model.tokenizer.encode(TEXT).ids)


def test_a_whole_text_costs_what_one_long_window_does(model: Model, page: str) -> None:
    ids = tokens(model)
    row = bpb(model, NAME, page, window=0)
    want = nats(model, torch.cat([torch.tensor([0]), ids[:-1]]), ids).sum() / len(TEXT) / math.log(2)
    assert row["score"] == pytest.approx(float(want), rel=1e-5)
    assert row["n"] == len(TEXT) and row["setting"] == "page.txt, read whole" and not row["bound"]
    assert abs(bpb(model, NAME, page, window=64)["score"] - row["score"]) > 1e-3


def test_one_window_in_some_by_hand(model: Model, page: str) -> None:
    ids = tokens(model)
    row = bpb(model, NAME, page, window=64, every=3)
    before = torch.cat([torch.tensor([0]), ids[:-1]])
    read = [slice(at, at + 64) for at in range(0, len(ids), 192)]
    found = torch.cat([nats(model, before[each], ids[each]) for each in read])
    scale = len(ids) / len(TEXT) / math.log(2)
    assert row["score"] == pytest.approx(float(found.mean()) * scale, rel=1e-5)
    assert row["n"] == len(TEXT) * len(found) // len(ids) and row["setting"].endswith("64 tokens, one in 3")


def test_the_interval_is_that_of_stretches(model: Model, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the textbook: stretches equally long have the standard error of their means."""
    monkeypatch.setattr(module, "WINDOW", 50)
    ids = tokens(model)
    cut = len(ids) // 50 * 50
    path = Path(page)
    assert model.tokenizer is not None
    path.write_text(model.tokenizer.decode(ids[:cut].tolist()))
    row = bpb(model, NAME, page, window=50)
    before = torch.cat([torch.tensor([0]), ids[: cut - 1]])
    means = torch.stack([nats(model, before[i : i + 50], ids[i : i + 50]).mean() for i in range(0, cut, 50)])
    scale = cut / len(path.read_bytes()) / math.log(2)
    half = 1.959964 * float(means.std()) / math.sqrt(len(means)) * scale
    assert row["high"] - row["score"] == pytest.approx(half, rel=1e-4)
    assert row["score"] - row["low"] == pytest.approx(half, rel=1e-4)
    assert bpb(model, NAME, page, window=cut)["low"] is not None
    monkeypatch.setattr(module, "WINDOW", cut)
    assert bpb(model, NAME, page, window=cut)["low"] is None, "one stretch has no spread"


class Largest(TorchDispatchMode):
    """Watches the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else [made]:
            if isinstance(one, Tensor):
                self.numbers = max(self.numbers, one.untyped_storage().nbytes())
        return made


def test_a_text_is_read_in_memory_that_does_not_grow_with_it() -> None:
    model, most = constate.load(NAME, backend="torch"), []
    for length in (1024, 8192):
        ids = torch.randint(1024, (length,), generator=torch.Generator().manual_seed(0))
        with Largest() as watched:
            read = sum(len(piece[0]) for piece in costs(model, [ids], start=0))
        assert read == length
        most.append(watched.numbers)
    assert most[0] == most[1]


def test_few_stretches_tell_little(model: Model, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, Student's interval is 12.7 standard errors to each side."""
    ids = tokens(model)
    assert model.tokenizer is not None
    Path(page).write_text(model.tokenizer.decode(ids[:200].tolist()))
    row = {}
    for stretch in (100, 200):
        monkeypatch.setattr(module, "WINDOW", stretch)
        row[stretch] = bpb(model, NAME, page, window=50)
    before = torch.cat([torch.tensor([0]), ids[:199]])
    found = torch.cat([nats(model, before[i : i + 50], ids[i : i + 50]) for i in range(0, 200, 50)])
    scale = 200 / len(Path(page).read_bytes()) / math.log(2)
    half = 12.706 * float(found.view(2, 100).mean(1).std()) / math.sqrt(2) * scale
    assert row[100]["high"] - row[100]["score"] == pytest.approx(half, rel=1e-3)
    assert row[200]["low"] is None


@pytest.mark.parametrize("title", ["shakespeare", "northanger_abbey, windows of 1024 tokens"])
def test_a_file_does_not_pass_for_a_text_that_ships(model: Model, tmp_path: Path, title: str) -> None:
    path = tmp_path / title
    path.write_text(TEXT)
    row = bpb(model, NAME, str(path))
    assert row["setting"].startswith(f"./{title}, ") and row["contaminated"] is None
    assert not of_book(row)


def test_who_has_read_what() -> None:
    assert met("tiny/mamba2", "shakespeare") is False and met("smollm2", "northanger_abbey") is True
    assert met("tiny/mine", "shakespeare") is None, "not the zoo's"
    assert met("./mine", "shakespeare") is None and met("tiny/mamba2", "page.txt") is None


def test_what_cannot_be_scored_is_told(model: Model, page: str) -> None:
    Path(page).write_text("")
    with pytest.raises(ValueError, match=r"page\.txt is empty"):
        bpb(model, NAME, page)
    Path(page).write_text(TEXT)
    with pytest.raises(ValueError, match="every 3 is of windows, and window 0 reads the whole text"):
        bpb(model, NAME, page, window=0, every=3)
    with pytest.raises(ValueError, match="--text : neither"):
        bpb(model, NAME, "")
    with pytest.raises(ValueError, match="holds no state: a window is wanted"):
        bpb(constate.load("tiny/mdlm"), "tiny/mdlm", page, window=0)
