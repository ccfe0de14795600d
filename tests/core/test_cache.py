"""Rows, growth and files of a Cache, on a record of every kind of leaf. Knows no mixer.

That these agree with `step` is law 5's matter (tests/laws.py); here it is what they hold and refuse.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from constate.core.cache import GRAIN, Cache, read_header
from constate.core.state import (
    KV,
    Conv,
    ConvSSM,
    Matrix,
    Nothing,
    State,
    Window,
    in_float32,
    leaf,
    zip_leaves,
)

W = 4


@dataclass
class Nested(State):
    """A record of records, as a layer that calls two mixers has."""

    inner: ConvSSM
    several: tuple[Matrix, Nothing, Matrix]


class Model:
    """What Cache.load needs of a model: a layer of each kind of state."""

    def __init__(self, fingerprint: str = "one", dtype: torch.dtype = torch.float32):
        self.fingerprint, self.dtype = fingerprint, dtype

    def init_cache(self, rows: int, capacity: int | None = None) -> Cache:
        room = capacity or 0
        states = (
            ConvSSM(torch.zeros(rows, 3, 5), torch.zeros(rows, 2, 4, 3)),
            Nothing(),
            KV(*(torch.zeros(rows, room, 2, 3, dtype=self.dtype) for _ in "kv")),
            Window(*(torch.zeros(rows, W, 2, 3) for _ in "kv")),
            Conv(torch.zeros(rows, 0, 5)),
            Nested(
                ConvSSM(torch.zeros(rows, 1, 2), torch.zeros(rows, 2, 2)),
                (Matrix(torch.zeros(rows, 1, 2, 2)), Nothing(), Matrix(torch.zeros(rows, 1, 2, 2))),
            ),
        )
        past = torch.zeros(rows, dtype=torch.int64)
        return Cache(states, (0,) * rows, room, capacity is not None, self.fingerprint, past)


def filled(*lengths: int, capacity: int | None = None) -> Cache:
    """Random tensors, and rows that have read these many tokens."""
    cache = Model().init_cache(len(lengths), capacity)
    cache.reserve(lengths)
    cache.advance(lengths)
    for _, t, of in cache.leaves():
        if of.kind is not None:
            t.normal_()
    return cache


def row(cache: Cache, r: int) -> list[Tensor]:
    """All that row r holds: its tensors, growing ones as far as its tokens go."""
    return [t[r, : cache.lengths[r]] if of.grows else t[r] for _, t, of in cache.leaves()]


def same_rows(cache: Cache, rows: Sequence[list[Tensor]]) -> None:
    assert cache.rows == len(rows)
    for r, want in enumerate(rows):
        assert all(map(torch.equal, row(cache, r), want)), f"row {r} differs"
    assert cache.past.tolist() == list(cache.lengths), "host and device disagree on the lengths"
    assert all(len(t) == cache.rows for _, t, _ in cache.leaves())


def kv_of(cache: Cache) -> KV:
    state = cache.states[2]
    assert isinstance(state, KV)
    return state


def test_leaves_are_named_and_nested() -> None:
    names = [name for name, _, _ in Model().init_cache(1).leaves()]
    assert names[:2] == ["states.0.conv", "states.0.ssm"]
    assert "states.5.inner.conv" in names and "states.5.several.2.s" in names and names[-1] == "past"


def test_bytes_by_kind_are_what_is_held_and_what_is_used() -> None:
    cache = filled(3, 70)
    state = 4 * 2 * (2 * 4 * 3 + 2 * 2 + 2 * 2 * 2)
    conv = 4 * 2 * (3 * 5 + 1 * 2)
    capacity, token = 2 * GRAIN, 4 * 2 * 2 * 3  # 70 tokens round up to 128; k and v, two heads of three
    assert cache.capacity == capacity
    assert cache.bytes() == {"state": state, "conv": conv, "kv": 2 * token * (capacity + W)}
    assert cache.bytes(cache.lengths) == {"state": state, "conv": conv, "kv": token * (3 + 3 + 70 + W)}
    assert cache.nbytes() == sum(cache.bytes().values())
    assert cache.nbytes(used=True) == sum(cache.bytes(cache.lengths).values())


def test_select_forks_and_orders_and_copies() -> None:
    cache = filled(3, 9, 5)
    picked = cache.select([2, 0, 2])
    assert picked.lengths == (5, 3, 5)
    same_rows(picked, [row(cache, 2), row(cache, 0), row(cache, 2)])
    before = [t.clone() for _, t, _ in cache.leaves()]
    for _, t, _ in picked.leaves():
        t.zero_()
    assert all(map(torch.equal, before, (t for _, t, _ in cache.leaves())))
    for bad in (3, -1):
        with pytest.raises(IndexError, match="rows 0 to 2"):
            cache.select([bad])


def test_merge_pads_the_shorter_and_copies() -> None:
    a, b = filled(3, 9), filled(200)
    joined = Cache.merge([a, b])
    assert joined.lengths == (3, 9, 200) and joined.capacity == b.capacity and not joined.fixed
    same_rows(joined, [row(a, 0), row(a, 1), row(b, 0)])
    assert not kv_of(joined).k[0, a.capacity :].any(), "the padding holds something"
    kv_of(joined).k.zero_()
    assert kv_of(a).k.any() and kv_of(b).k.any()
    with pytest.raises(ValueError, match="at least one"):
        Cache.merge([])
    with pytest.raises(ValueError, match="different models"):
        Cache.merge([a, Model("two").init_cache(1)])


def test_write_touches_one_row_and_clears_its_tail() -> None:
    cache, other = filled(3, 90, 5), filled(7)
    kept = [row(cache, 0), row(cache, 2)]
    cache.write(1, other)
    assert cache.lengths == (3, 7, 5)
    same_rows(cache, [kept[0], row(other, 0), kept[1]])
    assert not kv_of(cache).k[1, other.capacity :].any(), "the last owner's keys are still there"
    cache.write(0, filled(300))
    assert cache.lengths == (300, 7, 5) and cache.capacity >= 300
    with pytest.raises(ValueError, match="2 rows"):
        cache.write(0, filled(1, 2))
    with pytest.raises(ValueError, match="different models"):
        cache.write(0, Model("two").init_cache(1))
    fixed = filled(3, 4, capacity=16)
    fixed.write(0, filled(16))
    with pytest.raises(ValueError, match="16 tokens a row and 17"):
        fixed.write(0, filled(17))


def test_drop_moves_the_last_row_into_the_hole() -> None:
    for r, left in ((0, (2, 1)), (1, (0, 2)), (2, (0, 1))):
        cache = filled(3, 9, 5)
        want = [[t.clone() for t in row(cache, i)] for i in left]
        cache.drop(r)
        same_rows(cache, want)
    with pytest.raises(IndexError, match="rows 0 to 1"):
        cache.drop(2)


def test_reserve_grows_by_grains_keeps_what_was_there_and_respects_a_fixed_capacity() -> None:
    cache = filled(3, 9)
    assert cache.capacity == GRAIN
    want = [[t.clone() for t in row(cache, r)] for r in range(2)]
    cache.reserve((1, GRAIN))
    assert cache.capacity == 2 * GRAIN
    same_rows(cache, want)
    assert not kv_of(cache).k[:, GRAIN:].any()
    fixed = filled(3, 9, capacity=10)
    fixed.reserve((0, 1))
    with pytest.raises(ValueError, match="made for 10 tokens a row and 11 are wanted"):
        fixed.reserve((0, 2))


def test_growing_costs_few_copies() -> None:
    """Capacity grows by half, so that n steps copy O(n) and not n squared tokens."""
    cache, grew = filled(1), 0
    for _ in range(3000):
        before = cache.capacity
        cache.reserve((1,))
        cache.advance((1,))
        grew += cache.capacity != before
    assert grew <= 12, f"the cache grew {grew} times in 3000 tokens"


def test_a_clone_shares_nothing() -> None:
    cache = filled(3, 9)
    clone = cache.clone()
    before = [t.clone() for _, t, _ in clone.leaves()]
    for _, t, _ in cache.leaves():
        t.zero_()
    cache.drop(0)
    cache.reserve((500,))
    assert clone.lengths == (3, 9)
    assert all(map(torch.equal, before, (t for _, t, _ in clone.leaves())))


def test_truncate_is_for_what_can_forget() -> None:
    cache = filled(3, 9)
    with pytest.raises(ValueError, match="cannot be shortened"):
        cache.truncate(1, 8)
    with pytest.raises(ValueError, match="the row holds 9 tokens"):
        cache.truncate(1, 10)
    cache.truncate(1, 9)
    assert cache.lengths == (3, 9)
    attention = Cache((cache.states[2], cache.states[3]), (3, 9), 64, False, "one", torch.tensor([3, 9]))
    attention.truncate(0, 1)  # the window of four is not full yet
    assert attention.lengths == (1, 9) and attention.past.tolist() == [1, 9]
    with pytest.raises(ValueError, match="overwritten window"):
        attention.truncate(1, 8)


def test_in_float32_is_the_state_itself_or_rounds_back() -> None:
    exact, rounded = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    with in_float32(exact) as state:
        assert state is exact
    with in_float32(rounded) as state:
        assert state.dtype == torch.float32
        state.add_(2.0)
    assert rounded.tolist() == [3.0, 3.0]


def test_states_of_different_shape_do_not_zip() -> None:
    with pytest.raises(ValueError, match="different fields"):
        list(zip_leaves([Conv(torch.zeros(1, 1, 1)), Matrix(torch.zeros(1, 1, 1, 1))]))


# -- files ------------------------------------------------------------------------------------------


def test_a_saved_cache_comes_back_bit_for_bit(tmp_path: Path) -> None:
    cache = filled(3, 90, 0)
    path = tmp_path / "state.safetensors"
    cache.save(path, note={"text": "It is"})
    assert read_header(path) == {"lengths": [3, 90, 0], "model": "one", "note": {"text": "It is"}}
    loaded = Cache.load(path, Model())
    assert loaded.lengths == (3, 90, 0) and not loaded.fixed
    same_rows(loaded, [row(cache, r) for r in range(3)])
    assert loaded.nbytes() < cache.nbytes(), "unused room was stored"
    loaded.reserve((1, 1, 1))


def test_a_file_that_lacks_or_misshapes_a_tensor_is_refused(tmp_path: Path) -> None:
    """Case D6: a missing tensor is an error, never zeros."""
    path = tmp_path / "state.safetensors"
    cache = filled(3)
    cache.save(path)
    metadata = {"format": "constate.cache.1", "header": json.dumps(read_header(path))}
    tensors = load_file(path)
    for name in tensors:
        save_file({k: t for k, t in tensors.items() if k != name}, path, metadata)
        with pytest.raises(ValueError, match=name):
            Cache.load(path, Model())
    save_file({**tensors, "states.9.s": torch.zeros(1)}, path, metadata)
    with pytest.raises(ValueError, match=r"states\.9\.s"):
        Cache.load(path, Model())
    save_file({**tensors, "states.0.ssm": tensors["states.0.ssm"].mT.contiguous()}, path, metadata)
    with pytest.raises(ValueError, match=r"states\.0\.ssm is \(1, 2, 3, 4\), not \(1, 2, 4, 3\)"):
        Cache.load(path, Model())


def test_what_is_no_state_or_another_models_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(ValueError, match="no such file"):
        Cache.load(path, Model())
    path.write_text("hello")
    with pytest.raises(ValueError, match="not a saved state"):
        Cache.load(path, Model())
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="is a safetensors file, but no"):
        Cache.load(path, Model())
    filled(3).save(path)
    with pytest.raises(ValueError, match="another model"):
        Cache.load(path, Model("two"))


def test_a_state_takes_the_dtypes_of_the_model_that_loads_it(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    cache = filled(3)
    cache.save(path)
    loaded = Cache.load(path, Model(dtype=torch.bfloat16))
    assert kv_of(loaded).k.dtype == torch.bfloat16
    assert torch.equal(kv_of(loaded).k[0], kv_of(cache).k[0, :3].bfloat16())


def test_leaf_kinds_are_counted_where_they_say() -> None:
    @dataclass
    class Odd(State):
        """count (rows,): bookkeeping; s (rows, 2) float32."""

        count: Tensor = leaf(None)
        s: Tensor = leaf("state")

    assert Odd(torch.zeros(3), torch.zeros(3, 2)).bytes() == {"state": 24, "conv": 0, "kv": 0}
