"""A model and its cache in careless hands: what is wrong is refused before a state has moved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from constate.core.cache import Cache
from constate.core.checkpoint import whole
from constate.spans import Spans

from ..models import make, tokens


def filled(name: str = "composed") -> tuple[Any, Cache]:
    model = make(name)
    cache = model.init_cache(2)
    model(tokens(9), Spans.of([5, 4]), cache)
    return model, cache


def unmoved(cache: Cache, before: Cache) -> None:
    assert cache.lengths == before.lengths
    for (name, now, _), (_, then, _) in zip(cache.leaves(), before.leaves(), strict=True):
        assert torch.equal(now, then), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16])
def test_ids_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    model, cache = filled()
    before = cache.clone()
    with pytest.raises(ValueError, match="token ids are wanted"):
        model(torch.ones(2, dtype=dtype), Spans.of([1, 1]))
    with pytest.raises(ValueError, match="token ids are wanted"):
        model.step(torch.ones(2, dtype=dtype), cache)
    unmoved(cache, before)


def test_a_list_of_ids_is_no_tensor() -> None:
    model, cache = filled()
    ids: Any = [1, 2]
    with pytest.raises(ValueError, match="tokens are a list; a flat torch tensor of ids is wanted"):
        model(ids, Spans.of([1, 1]))
    with pytest.raises(ValueError, match="tokens are a list"):
        model.step(ids, cache)


def test_int32_ids_are_ids() -> None:
    model, cache = filled()
    ids = tokens(2)
    assert torch.equal(model.step(ids.int(), cache.clone()), model.step(ids, cache))


@pytest.mark.parametrize(("lengths", "error"), [([2.7], TypeError), ("35", TypeError), ([-1], ValueError)])
def test_lengths_are_whole_numbers(lengths: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Spans.of(lengths)
    elements: Any = torch.tensor([3, 0])
    assert Spans.of(elements).lengths == (3, 0)


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_capacity_is_a_count(name: str) -> None:
    with pytest.raises(ValueError, match="capacity=-1"):
        make(name).init_cache(1, -1)
    with pytest.raises(TypeError):
        make(name).init_cache(1, 10.5)  # pyright: ignore[reportArgumentType]  # what is tested
    full = make(name).init_cache(1, 0)
    with pytest.raises(ValueError, match="0 tokens a row and 1 are wanted"):
        make(name).step(tokens(1), full)


def test_what_to_keep_is_counted_in_whole_tokens() -> None:
    model, cache = filled("llama")
    before = cache.clone()
    with pytest.raises(TypeError):
        model(tokens(4), Spans.of([2, 2]), cache, keep=[1.0, 1.0])
    unmoved(cache, before)


def test_rows_may_be_named_by_any_whole_number() -> None:
    """A list of tensors is one index a dimension to torch, and a list of bools a mask."""
    _, cache = filled()
    for rows in (torch.tensor([1, 0, 0]), [True, False, False]):
        picked = cache.select(rows)  # pyright: ignore[reportArgumentType]  # what is tested
        assert picked.lengths == (4, 5, 5)
        unmoved(picked, cache.select([1, 0, 0]))


def test_a_state_that_cannot_be_stored(tmp_path: Path) -> None:
    model, cache = filled()
    for place in (tmp_path, tmp_path / "absent" / "state"):
        with pytest.raises(OSError, match=str(place)):
            cache.save(place)
    assert not list(tmp_path.iterdir()) and not list(tmp_path.parent.glob("*.new"))
    with pytest.raises(ValueError, match=f"{tmp_path} is not a saved state"):
        Cache.load(tmp_path, model)


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    def broken(new: Path) -> None:
        new.write_text("half")
        raise OSError("no space left")

    whole(tmp_path / "a", lambda new: new.write_text("old"))
    with pytest.raises(OSError, match="no space"):
        whole(tmp_path / "a", broken)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old"}


@pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX's")
def test_a_stored_file_is_as_readable_as_any(tmp_path: Path) -> None:
    """safetensors makes files that their owner alone can read, of no use to whoever shares a checkpoint."""
    _, cache = filled()
    (tmp_path / "plain").touch()
    cache.save(tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("kind", ["step", "forward"])
@pytest.mark.parametrize("rows", [2, 3, 9])
def test_a_poisoned_row_stays_alone(kind: str, rows: int) -> None:
    """NaN in one row's state reaches no other, by not one bit, also once it has left."""
    model = make("composed")
    clean, lengths = model.init_cache(rows), [3 + r for r in range(rows)]
    model(tokens(sum(lengths)), Spans.of(lengths), clean)
    bad = clean.clone()
    for _, tensor, of in bad.leaves():
        if of.kind is not None:
            tensor[1] = torch.nan

    def same(others: list[int]) -> None:
        if kind == "step":
            ids = tokens(clean.rows, seed=3)
            a, b = model.step(ids, clean), model.step(ids, bad)
        else:
            spans = Spans.of([(2, 33, 1)[r % 3] for r in range(clean.rows)])
            ids = tokens(spans.total, seed=3)
            a, b = (model(ids, spans, cache, at="last") for cache in (clean, bad))
        assert torch.isfinite(b[others]).all() and torch.equal(a[others], b[others])

    same([r for r in range(rows) if r != 1])
    for cache in (clean, bad):
        cache.drop(1)
    same(list(range(rows - 1)))
