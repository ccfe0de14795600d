"""Faults that others' users reported, as tests: what the laws and the tests of each file do not already say.

The letters name the kinds of report. A: neighbours in a batch; B: going on from a state; C, D: whose state
it is, and files; F: numbers; G: memory; H: checkpoints; I: seeds; K: machines and layouts. Where there
once were pads there are packed rows here, and what was a mask is a span.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from constate.core.cache import Cache, read_header
from constate.core.decode import Request, autoregressive
from constate.core.mixer import Call
from constate.core.model import Model
from constate.core.sampling import Sampling
from constate.core.state import Conv, State, leaf
from constate.generation import generate
from constate.hybrid.composed import MIXERS
from constate.kernels.chunked import gated_linear
from constate.kernels.dispatch import select
from constate.loading import find, load, save
from constate.spans import Spans

from . import loops
from .backends import BACKENDS
from .kernels import hostile
from .kernels.calls import (
    LINEAR,
    RECURRENT_OPS,
    SCANS,
    behind,
    between,
    columns,
    copied,
    crossed,
    guarded,
    poisoned,
    run,
    same,
    scan,
    step,
)
from .kernels.memory import peak_bytes
from .laws import law_5, regroups
from .models import DELTA, GLA, HYBRIDS, KDA, MAMBA, MAMBA2, MODELS, VOCAB, make, spread, tokens
from .referee import referee, same_logits, same_state
from .routes import same_routes

FAST = [backend for backend in BACKENDS if backend != "reference"]
CONSTANT = tuple(name for name, entry in MODELS.items() if not entry.slope)


# -- A: neighbours ---------------------------------------------------------------------------------

PROMPTS = (1, 3, 7, 64, 65)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_unequal_prompts_read_nothing_of_each_other(name: str, backend: str) -> None:
    """Case A1: logits, greedy tokens and states of the lone runs, and not one bit from other ids beside."""
    model, judge, spans = make(name, backend), referee(name), Spans.of(PROMPTS)
    prompts = [tokens(n, seed=300 + n) for n in PROMPTS]
    cache = model.init_cache(len(prompts))
    logits = model(torch.cat(prompts), spans, cache)
    for r, (prompt, part) in enumerate(zip(prompts, spans.slices(), strict=True)):
        want = judge.read(prompt)
        same_logits(logits[part], want.logits, f"prompt of {len(prompt)}")
        same_state(cache.select([r]), want.cache, f"prompt of {len(prompt)}")
    for r, own in enumerate(spans.slices()):
        others = torch.cat([p if i == r else (p + 1 + i) % VOCAB for i, p in enumerate(prompts)])
        beside = model.init_cache(len(prompts))
        again = model(others, spans, beside)[own]
        if regroups(model):  # experts' groups are of other sizes then, and round otherwise
            same_logits(again, logits[own], f"prompt of {PROMPTS[r]}")
            same_state(beside.select([r]), cache.select([r]), f"state after {PROMPTS[r]}")
            continue
        assert torch.equal(again, logits[own]), f"prompt of {PROMPTS[r]}"
        pairs = zip(beside.select([r]).leaves(), cache.select([r]).leaves(), strict=True)
        assert all(torch.equal(a, b) for (_, a, _), (_, b, _) in pairs), f"state after {PROMPTS[r]}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_begin_in_a_later_piece(name: str, backend: str) -> None:
    """Case A3: in pieces of 4 of 14 places, rows that begin 0, 5 and 9 places late, as left pads had it."""
    model, places, late = make(name, backend), 14, (0, 5, 9)
    rows = [tokens(places - start, seed=210 + start) for start in late]
    cache, seen = model.init_cache(3), [[] for _ in late]
    for at in range(0, places, 4):
        pieces = [
            row[max(0, at - start) : max(0, at + 4 - start)] for row, start in zip(rows, late, strict=True)
        ]
        spans = Spans.of(map(len, pieces))
        logits = model(torch.cat(pieces), spans, cache)
        for parts, part in zip(seen, spans.slices(), strict=True):
            parts.append(logits[part])
    for r, row in enumerate(rows):
        want = referee(name).read(row)
        same_logits(torch.cat(seen[r]), want.logits, f"{late[r]} places late")
        same_state(cache.select([r]), want.cache, f"{late[r]} places late")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_waits_is_left_as_it_was(name: str, backend: str) -> None:
    """Case A4: 1, 1, 0, 0, 1, 1 for one row: what its neighbour reads meanwhile changes no bit of it."""
    model, own = make(name, backend), tokens(4, seed=220)
    cache = model.init_cache(2, capacity=40)  # of fixed size, so that no bit moves for want of room
    model(torch.cat([own[:2], tokens(3, seed=221)]), Spans.of([2, 3]), cache)
    before = cache.select([0])
    for n in (1, 17):
        model(tokens(n, seed=222), Spans.of([0, n]), cache)
    for (leaf_name, now, _), (_, then, _) in zip(cache.select([0]).leaves(), before.leaves(), strict=True):
        assert torch.equal(now, then), f"{leaf_name} moved while its row waited"
    logits = model(torch.cat([own[2:], tokens(2, seed=223)]), Spans.of([2, 2]), cache)
    want = referee(name).read(own)
    same_logits(logits[:2], want.logits[2:], "after waiting")
    same_state(cache.select([0]), want.cache, "after waiting")


NEUTRAL = {
    "linear": {"k": 0.0, "log_decay": 0.0},
    "linear, by channel": {"k": 0.0, "log_decay": 0.0},
    "linear, no decay": {"k": 0.0},
    "delta": {"beta": 0.0, "log_decay": 0.0},
    "selective": {"dt": -1e4},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", NEUTRAL)
def test_what_a_tail_is_filled_with_changes_nothing(kind: str, backend: str) -> None:
    """Cases A4 and B3: the neutral token in the middle and at the end, whatever else it carries, is none."""
    op, given = scan(kind, [86])
    real = torch.ones(86, dtype=torch.bool)
    real[[2, 3, 15, 16, 40]] = real[74:] = False
    without = {n: x[real] if isinstance(x, Tensor) and len(x) == 86 else x for n, x in given.items()}
    want = run(backend, op, {**without, "spans": Spans.of([int(real.sum())])})
    for name, value in NEUTRAL[kind].items():
        given[name][~real] = value
    o, final = run(backend, op, given)
    same([o[real], final], want, kind, 1e-6 if kind != "delta" else 1e-5)


# -- B: going on from a state ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("kind", LINEAR)
def test_tiles_equal_steps_from_a_state(kind: str, length: int, dtype: torch.dtype) -> None:
    """Case B2, for the linear scan (the others' own files have it): the final state is float32."""
    (op, given), (one, _) = scan(kind, [length]), step(kind, 1)
    given = {n: x.to(dtype) if n in ("q", "k", "v") else x for n, x in given.items()}
    state, outputs = given["initial"].clone(), []
    for t in range(length):
        token = {n: x[t : t + 1] if isinstance(x, Tensor) else x for n, x in given.items()}
        del token["spans"], token["initial"]
        outputs.append(getattr(select("reference"), one)(**token, state=state))
    o, final = run("torch", op, given)
    assert o.dtype == dtype and final.dtype == torch.float32
    hostile.assert_state(final, state)
    bound = 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps
    same([o], [torch.cat(outputs)], kind, bound)


@pytest.mark.parametrize("name", MODELS)
def test_every_length_then_a_step(name: str) -> None:
    """Case B3: for T = 1 to 130, forward over T and a step after T - 1 both are the token-by-token run."""
    model, judge, prompt = make(name), referee(name), tokens(131)
    for n in range(1, 131):
        cache = model.init_cache(1, capacity=131)
        logits = model(prompt[:n], Spans.of([n]), cache, at="last")
        same_logits(logits, judge.read(prompt[:n]).logits[-1:], f"forward over {n}")
        same_logits(model.step(prompt[n : n + 1], cache), judge.read(prompt[: n + 1]).logits[-1:], f"{n} + 1")
        if n % 8 in (0, 1, 7):
            same_state(cache, judge.read(prompt[: n + 1]).cache, f"{n} + 1")


# -- C, D: whose state, and files ------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_kept_on_the_model(name: str) -> None:
    """Case C4: no module has another attribute, buffer or weight after generating; two threads agree."""
    model = make(name)
    _ = model.fingerprint  # the one thing worth remembering, a function of the weights

    def everything() -> dict[str, Any]:
        held = {}
        for where, module in model.named_modules():
            for key, value in vars(module).items():
                held[f"{where}.{key}"] = value.copy() if isinstance(value, dict) else value
            held |= {f"{where}.{key}": t.clone() for key, t in module.named_parameters(recurse=False)}
            held |= {f"{where}.{key}": t.clone() for key, t in module.named_buffers(recurse=False)}
        return held

    def written(prompt: Tensor, seed: int) -> tuple[list[int], list[float]]:
        (result,) = generate(model, [prompt.tolist()], max_new_tokens=6, temperature=0.8, seed=seed)
        return result.tokens, result.logprobs

    before, a, b = everything(), (tokens(40, seed=230), 1), (tokens(9, seed=231), 2)
    first, other = written(*a), written(*b)
    assert written(*a) == first
    after = everything()
    assert after.keys() == before.keys()
    for key, value in after.items():
        equal = torch.equal(value, before[key]) if isinstance(value, Tensor) else value == before[key]
        assert equal, f"{key} changed"
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(written, *which) for which in (a, b, a, b)]
        assert [f.result() for f in both] == [first, other] * 2


@dataclass
class ThreeConvs(State):
    """q, k, v (rows, 3, 2), three histories; s (rows, 1, 2, 2): four tensors a layer, as KDA has."""

    q: Tensor = leaf("conv")
    k: Tensor = leaf("conv")
    v: Tensor = leaf("conv")
    s: Tensor = leaf("state")


class Layers:
    """What Cache.load needs of a model: one-tensor layers next to four-tensor layers."""

    fingerprint = "layers"

    def init_cache(self, rows: int, capacity: int | None = None) -> Cache:
        def four() -> ThreeConvs:
            q, k, v = (torch.zeros(rows, 3, 2) for _ in "qkv")
            return ThreeConvs(q, k, v, torch.zeros(rows, 1, 2, 2))

        states = (four(), Conv(torch.zeros(rows, 3, 2)), Conv(torch.zeros(rows, 3, 2)), four())
        past = torch.zeros(rows, dtype=torch.int64)
        return Cache(states, (0,) * rows, 0, False, self.fingerprint, past)


def without_one(path: Path) -> Iterator[str]:
    """The file once for each of its tensors, written back without it; its name."""
    metadata = {"format": "constate.cache.1", "header": json.dumps(read_header(path))}
    held = load_file(path)
    for name in held:
        save_file({k: t for k, t in held.items() if k != name}, path, metadata)
        yield name


def test_layers_of_one_and_of_four_tensors_come_back_in_their_places(tmp_path: Path) -> None:
    """Case D6: none is restored as zeros or shifted to its neighbour; all alike in shape, to invite it."""
    cache = Layers().init_cache(2)
    for _, t, of in cache.leaves():
        if of.kind:
            t.normal_()
    cache.advance([5, 2])
    cache.save(tmp_path / "s")
    loaded = Cache.load(tmp_path / "s", Layers())
    pairs = list(zip(loaded.leaves(), cache.leaves(), strict=True))
    assert len(pairs) == 4 + 1 + 1 + 4 + 1  # and the lengths
    for (name, got, _), (same_name, want, _) in pairs:
        assert name == same_name and torch.equal(got, want) and got.data_ptr() != want.data_ptr(), name
    for name in without_one(tmp_path / "s"):
        with pytest.raises(ValueError, match=name):
            Cache.load(tmp_path / "s", Layers())


@pytest.mark.parametrize("name", MODELS)
def test_a_file_without_any_one_tensor_of_a_model_is_refused(name: str, tmp_path: Path) -> None:
    """Case D6, for what each architecture really holds."""
    model = make(name)
    cache = model.init_cache(2)
    model(tokens(9), Spans.of([6, 3]), cache)
    cache.save(tmp_path / "s")
    assert set(load_file(tmp_path / "s")) == {n for n, _, _ in cache.leaves()}
    for missing in without_one(tmp_path / "s"):
        with pytest.raises(ValueError, match=f"missing .*{missing}"):
            Cache.load(tmp_path / "s", model)


# -- F: numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("how", ["scan", "step"])
@pytest.mark.parametrize("kind", ["linear", "linear, by channel", "delta", "selective"])
def test_a_slow_state_does_not_drift_over_4096_tokens(kind: str, how: str, backend: str) -> None:
    """Case F1: bfloat16 activations, decay 0.999 a token; the state within 1e-2 of a float64 loop's."""
    n = 4096
    op, given = scan(kind, [n], heads=(1, 2), dims=(4, 3))
    given = {k: x.bfloat16() if isinstance(x, Tensor) and len(x) == n else x for k, x in given.items()}
    first = torch.zeros_like(given.pop("initial"))
    if kind == "selective":  # softplus(0) is log 2
        given |= {"dt": torch.zeros_like(given["dt"]), "dt_bias": None}
        given["a"] = torch.full_like(given["a"], math.log(0.999) / math.log(2))
    else:
        given["log_decay"] = torch.full(given["log_decay"].shape, math.log(0.999))
    want = torch.zeros(first.shape[1:], dtype=torch.float64)
    for t in range(n):
        now = {k: x[t].double() for k, x in given.items() if isinstance(x, Tensor) and len(x) == n}
        if kind == "selective":
            want = 0.999 * want + math.log(2) * torch.outer(now["x"], now["b"])
            continue
        key, value = now["k"][0], now["v"]
        if kind == "delta":
            value = now["beta"][:, None] * (value - 0.999 * torch.einsum("hkv,k->hv", want, key))
        want = 0.999 * want + torch.einsum("k,hv->hkv", key, value)
    if how == "scan":
        first = run(backend, op, {**given, "initial": first})[1]
    else:
        del given["spans"]
        step_of = getattr(select(backend), f"{op.removesuffix('_scan')}_step")
        for t in range(n):
            tokens_ = {k: x[t : t + 1] for k, x in given.items() if isinstance(x, Tensor) and len(x) == n}
            step_of(**{**given, **tokens_}, state=first)
    error = float((first[0].double() - want).norm() / want.norm())
    assert error <= 1e-2, f"relative error {error:.1e}"


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("kind", ["linear", "linear, by channel", "selective"])
@pytest.mark.parametrize("how", ["scan", "step"])
def test_every_accumulator_counts_to_4096(kind: str, how: str, backend: str) -> None:
    """Case F1: adding 1 to 256 in bfloat16 gives 256."""
    ones, fixed, given = torch.ones(4096, 1, dtype=torch.bfloat16), {}, {}
    if kind == "selective":  # softplus(32) is 32 exactly, and 32 / 32 is 1
        op, state, fixed = "selective", torch.zeros(1, 1, 1), {"a": torch.zeros(1, 1)}
        given = {"x": ones, "dt": 32 * ones, "b": ones / 32, "c": ones}
    else:
        op, state = "gated_linear", torch.zeros(1, 1, 1, 1)
        given |= dict.fromkeys(("q", "k", "v"), ones[..., None])
        given["log_decay"] = torch.zeros(4096, 1) if kind == "linear" else torch.zeros(4096, 1, 1)
    ops = select(backend)
    if how == "scan":
        _, state = getattr(ops, f"{op}_scan")(**given, **fixed, initial=None, spans=Spans.of([4096]))
    else:
        for t in range(4096):
            getattr(ops, f"{op}_step")(**{k: x[t : t + 1] for k, x in given.items()}, **fixed, state=state)
    assert state.item() == 4096


@pytest.mark.parametrize("name", MODELS)
def test_a_model_loaded_in_bfloat16_keeps_its_rates_and_states(name: str, tmp_path: Path) -> None:
    """Cases F1 and F2, through the file: the state is float32 unless asked, a_log, dt_bias and d exact."""
    model = folder_of(name, tmp_path)
    loaded = load(tmp_path, dtype="bfloat16")
    exact = dict(model.named_parameters())
    rounded = {n for n, p in loaded.named_parameters() if p.dtype == torch.bfloat16}
    assert "embed.weight" in rounded
    for n, p in loaded.named_parameters():
        want = exact[n].bfloat16() if n in rounded else exact[n]
        assert torch.equal(p, want), n
        assert n.rsplit(".", 1)[-1] not in ("a_log", "dt_bias", "d") or n not in rounded, n
    kinds = {leaf.kind: t.dtype for _, t, leaf in loaded.init_cache(1).leaves()}
    assert kinds.get("state", torch.float32) == torch.float32
    assert {kinds.get(k, torch.bfloat16) for k in ("conv", "kv")} == {torch.bfloat16}
    half = load(tmp_path, dtype="bfloat16", state_dtype="bfloat16").init_cache(1).bytes()
    assert half["state"] * 2 == loaded.init_cache(1).bytes()["state"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", [MAMBA, MAMBA2, DELTA, GLA, KDA], ids=lambda s: s["type"])
def test_a_mixer_with_rates_beyond_reason(settings: dict[str, Any], backend: str) -> None:
    """Case F4: log-decays from -1e-8 to -1e7 beside each other; finite, and what the float64 loop says."""
    kind, spec = MIXERS[settings["type"]]
    mixer = kind(20, spec(**{k: v for k, v in settings.items() if k != "type"}))
    spread(mixer, seed=3)
    mixer.requires_grad_(False)
    if hasattr(mixer, "a_log"):
        mixer.a_log.copy_(torch.linspace(-16, 16, mixer.a_log.numel()).view_as(mixer.a_log))
    else:
        mixer.decay_proj.bias.copy_(torch.linspace(-400, 40, mixer.decay_proj.bias.numel()))
    x, lengths = torch.randn(100, 20), (64, 1, 35)
    spans, state = Spans.of(lengths), mixer.init_state(3, 0)
    call = Call(spans, select(backend, "cpu"), (0, 0, 0), torch.zeros(3, dtype=torch.int64))
    y, stepped = mixer(x, call, state), state.clone()
    past = torch.tensor(lengths)
    steps = [(mixer.step(x[:3], Call(Spans.ones(3), call.ops, lengths, past), stepped), stepped)]
    if call.ops.tape is not None:
        tape, written = call.ops.tape(3, past), state.clone()
        given = tape.vector(20)
        said = mixer.record(tape, given, written)
        given.copy_(x[:3])
        tape.run()
        steps.append((said, written))
    p, loop = loops.params(mixer), loops.MIXERS[settings["type"]]
    for r, part in enumerate(spans.slices()):
        want = loop(p, x[part].double(), settings)
        after = loop(p, x[r : r + 1].double(), settings, (want.conv, want.ssm))
        same([y[part].double(), state.ssm[r].double()], [want.y, want.ssm], f"row {r}", 2e-5)
        for said, then in steps:
            got = [said[r : r + 1].double(), then.ssm[r].double()]
            same(got, [after.y, after.ssm], f"a step of row {r}", 2e-5)


def test_all_forgotten_leaves_the_token_itself() -> None:
    """Case F4: with every log-decay at -inf the output is scale (q . k) v, here of the selective scan with
    its skip: (delta x) (b . c) + d x, gated. The linear and delta scans' own files have theirs."""
    for backend in BACKENDS:
        op, given = scan("selective", [200])
        given["a"], given["dt"] = torch.full_like(given["a"], -torch.inf), given["dt"].abs()
        o, _ = run(backend, op, given)
        x, dt, z, b, c, d = (given[name].double() for name in ("x", "dt", "z", "b", "c", "d"))
        delta = torch.log1p((dt + given["dt_bias"]).exp())
        want = (delta * x * (b * c).sum(-1, keepdim=True) + d * x) * z * z.sigmoid()
        hostile.assert_output(o, want)


TAILS = ([1], [15], [16], [17], [200], [15, 0, 17, 1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SCANS)
def test_nothing_is_read_past_the_end(kind: str, backend: str) -> None:
    """Case F5: guard bands of NaN round every tensor never reach an output, a state or a neighbour."""
    for call in (*(scan(kind, lengths) for lengths in TAILS), step(kind, 5)):
        op, given = call
        want = run("reference", op, copied(given))
        for guard in (behind, guarded, between):
            same(run(backend, op, copied(given, guard)), want, f"{op}, {guard.__name__}", 5e-5)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("how", ["step", "scan"])
@pytest.mark.parametrize("kind", [*RECURRENT_OPS, "conv"])
def test_nothing_is_written_past_the_end(kind: str, how: str, backend: str) -> None:
    """Case F5: the band round a state that is updated in place, and round all that is only read."""
    op, given = step(kind, 5) if how == "step" else scan(kind, [17, 1])
    for guard in (guarded, between):
        held = copied(given, guard)
        bases = {n: x._base for n, x in held.items() if isinstance(x, Tensor)}
        run(backend, op, held)
        for name, base in bases.items():
            assert base is not None
            assert int(base.isnan().sum()) == base.numel() - held[name].numel(), f"beside {name}"


@pytest.mark.parametrize("size", [16, 40, 50, 64, 256])
def test_any_tile_length(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case F5: also those that are no power of two, and longer than the row."""
    monkeypatch.setattr(gated_linear, "SMALL_TILE", size)
    for lengths in TAILS:
        for kind in ("linear", "linear, no decay"):
            op, given = scan(kind, lengths)
            same(run("torch", op, given), run("reference", op, given), f"tiles of {size}", 5e-5)


@pytest.mark.parametrize("size", [16, 40, 50, 64, 256])
def test_a_published_chunk_size_changes_no_number(size: int) -> None:
    """Case F5: how a checkpoint was trained to be cut is not part of its maths."""
    plain, spans = make("mamba2"), Spans.of([17])
    assert torch.equal(make("mamba2", chunk_size=size)(tokens(17), spans), plain(tokens(17), spans))


@pytest.fixture
def unwritten() -> Iterator[None]:
    with poisoned():
        yield


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3), (2, 6), (4, 4)])
@pytest.mark.parametrize("kind", [*LINEAR, "delta", "attention", "attention, window"])
def test_every_head_of_an_output_is_written(
    kind: str, heads: tuple[int, int], backend: str, unwritten: None
) -> None:
    """Case F6: outputs start as NaN and come back whole, for each way of sharing key heads."""
    for op, given in (scan(kind, [17, 0, 1, 40], heads=heads), step(kind, 3, heads=heads)):
        want = run("reference", op, copied(given))
        same(run(backend, op, given), want, op, 5e-5)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_leaves_no_place_unwritten(name: str, backend: str, unwritten: None) -> None:
    """Case F6: logits, states and a cache that grows, with NaN in all memory that nobody wrote."""
    model, judge = make(name, backend), referee(name)
    rows = [tokens(n, seed=240 + n) for n in (70, 1, 33)]
    cache = model.init_cache(3)
    logits = model(torch.cat(rows), Spans.of([70, 1, 33]), cache, at="last")
    same_logits(logits, torch.cat([judge.read(row).logits[-1:] for row in rows]), "forward")
    cache.drop(1)
    stepped = model.step(torch.tensor([5, 6]), cache)
    want = [judge.read([*rows[0].tolist(), 5]), judge.read([*rows[2].tolist(), 6])]
    same_logits(stepped, torch.cat([w.logits[-1:] for w in want]), "step")
    for r, reading in enumerate(want):
        same_state(cache.select([r]), reading.cache, f"row {r}")
    law_5(model, judge)


# -- G: memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONSTANT)
def test_generating_after_a_long_prompt_takes_what_a_short_one_takes(name: str) -> None:
    """Case G3, by the call that users make: peaks within 5%, and what is held is equal."""
    model = make(name)

    def peak(n: int) -> tuple[int, int]:
        prompt, used = tokens(n).tolist(), []
        most = peak_bytes(lambda: used.extend(generate(model, [prompt], max_new_tokens=2)))
        return most, used[0].usage.state_bytes + used[0].usage.conv_bytes + used[0].usage.kv_bytes

    (near, short), (far, long) = peak(2048), peak(8192)
    assert abs(far / near - 1) < 0.05, f"{near} bytes at 2k tokens, {far} at 8k"
    assert long == short


# -- H: checkpoints --------------------------------------------------------------------------------

CHECKPOINTS = ("composed", "mamba2", "llama", *HYBRIDS)


def folder_of(name: str, folder: Path, words: int = 0, **over: Any) -> Model:
    """The model, and written to `folder`; with `words` a tokenizer of as many."""
    model = make(name, **over)
    model.architecture = find(MODELS[name].raw["model_type"]).architecture
    if words:
        model.tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, "w0"))
    save(model, folder)
    return model


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tied_and_untied_heads_of_real_architectures(name: str, tmp_path: Path) -> None:
    """Case H3: tied+absent and tied+equal load, tied+different and untied+absent are refused by name."""
    model = folder_of(name, tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    absent = load_file(file)
    embedding = next(n for n in absent if "embed" in n)
    head = "head.weight" if name == "composed" else "lm_head.weight"
    spans, ids = Spans.of([9]), tokens(9)
    assert head not in absent
    assert torch.equal(load(tmp_path, backend="torch")(ids, spans), model(ids, spans))
    save_file({**absent, head: absent[embedding].clone()}, file)
    assert torch.equal(load(tmp_path, backend="torch")(ids, spans), model(ids, spans))
    save_file({**absent, head: absent[embedding] + 1e-3}, file)
    with pytest.raises(ValueError, match="different"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert not torch.equal(load(tmp_path, backend="torch")(ids, spans), model(ids, spans))
    save_file(absent, file)
    with pytest.raises(ValueError, match=rf"missing: head\.weight|missing.*{head}"):
        load(tmp_path)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_padding_rows_of_a_real_checkpoint_are_never_written(name: str, tmp_path: Path) -> None:
    """Case H4: 97 words, 104 rows, and the seven extra rows win every arg-max."""
    model = make(name, vocab_size=104)
    model.head.weight[VOCAB:] = 40 * model.head.weight[:7]
    model.architecture = find(MODELS[name].raw["model_type"]).architecture
    model.tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0"))
    save(model, tmp_path)
    loaded, prompt = load(tmp_path), [3, 1, 4, 1, 5]
    assert (loaded.vocab, loaded.head.out_features) == (VOCAB, 104)
    raw = loaded(torch.tensor(prompt), Spans.of([5]), at="last")[0]
    assert int(raw.argmax()) >= VOCAB
    for options in ({}, {"temperature": 5.0}, {"temperature": 1.0, "top_k": 104, "repetition_penalty": 2.0}):
        results = generate(loaded, [prompt], n=3, max_new_tokens=20, **options)
        assert max(max(r.tokens) for r in results) < VOCAB
        for r in results:  # the log-probabilities of 97 ids sum to one, not those of 104
            want = raw[:VOCAB].double().log_softmax(0)[r.tokens[0]]
            assert r.logprobs[0] == pytest.approx(float(want), abs=1e-4)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_real_checkpoint_stops_at_an_id_that_only_one_file_names(name: str, tmp_path: Path) -> None:
    """Case H7: config.json names one id, generation_config.json that and another, the tokenizer a third."""
    model, prompt = folder_of(name, tmp_path, words=VOCAB), [3, 1, 4]
    model.vocab = VOCAB
    warm = {"max_new_tokens": 12, "temperature": 4.0, "seed": 3}  # greedily a scaled embedding repeats itself
    (free,) = generate(model, [prompt], **warm)
    at = next(i for i in range(1, 12) if free.tokens[i] not in free.tokens[:i])
    unused = [i for i in range(VOCAB) if i not in free.tokens]
    ends = (unused[0], [unused[0], free.tokens[at]], f"w{unused[1]}")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": ends[0]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[1]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends[2]}))
    loaded = load(tmp_path)
    assert loaded.eos_ids == {*unused[:2], free.tokens[at]}
    (result,) = generate(loaded, [prompt], **warm)
    assert (result.tokens, result.finish_reason) == (free.tokens[: at + 1], "stop")
    assert result.text == "".join(f" w{i}" for i in free.tokens[:at])
    (whole,) = generate(loaded, [prompt], ignore_eos=True, **warm)
    assert (whole.tokens, whole.finish_reason) == (free.tokens, "length")


# -- I: seeds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_seeded_prompts_in_any_order_and_company(name: str) -> None:
    """Case I2, of real models: six prompts with seeds of their own, permuted, in batches of 1, 2 and 6."""
    model, rule = make(name), Sampling(0.9, top_p=0.95)
    requests = [
        Request(tuple(tokens(n, seed=250 + n).tolist()), 8, rule, seed=n) for n in (1, 2, 9, 17, 40, 66)
    ]

    def texts(batch: Sequence[int]) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {i: [] for i in batch}
        for commit in autoregressive(model, [requests[i] for i in batch], lambda row, out: None):
            rows[batch[commit.row]].extend(commit.tokens)
        return rows

    alone = {i: texts([i])[i] for i in range(6)}
    assert len({tuple(text) for text in alone.values()}) == 6
    for seed, size in ((1, 2), (2, 2), (3, 6), (4, 6)):
        order = Random(seed).sample(range(6), 6)
        for start in range(0, 6, size):
            for i, text in texts(order[start : start + size]).items():
                assert text == alone[i], f"prompt {i} in batches of {size}"


# -- K: machines and layouts -----------------------------------------------------------------------

ABSENT = "sys.modules['triton'] = None"
NO_DRIVER = """
class Broken(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        raise RuntimeError('0 active drivers ([]). There should only be one.')
for name in ('triton', 'triton.language', 'triton.runtime', 'triton.compiler'):
    sys.modules[name] = Broken(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
"""
EVERY_FAMILY = """
import contextlib, importlib.machinery, io, sys, types
{triton}
import torch, constate
from constate.cli import main
from constate.bench.speed import speed
from constate.kernels.dispatch import BackendUnavailable, available, select
from tests.models import MODELS, VOCAB, make
for name in MODELS:
    for dtype in (torch.float32, torch.bfloat16):
        model = make(name).to_dtype(dtype)
        for result in constate.generate(model, [[1, 2, 3] * 9, [4]], max_new_tokens=5):
            assert len(result.tokens) == 5, name
            assert result.usage.backend == model.ops.backend == 'torch', name
(row,) = speed(make('mamba2'), 'm', prompt=4, new=2, rows=(1,), against=(), rounds=1, check=False)
assert row['backend'] == 'torch', row
try:
    select('triton', 'cpu')
except BackendUnavailable as error:
    assert 'triton' in str(error) and 'cpu' in str(error) and 'torch' in str(error), error
else:
    raise AssertionError('triton was given')
assert [row.backend for row in available('cpu') if row.here] == ['reference', 'torch', 'native']
with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(io.StringIO()):
    main(['generate', 'It is', '--model', 'tiny/hybrid', '--max-new-tokens', '3'])
assert told.getvalue().count(' native ') == 1, told.getvalue()
print('wrote')
"""


@pytest.mark.parametrize("triton", [ABSENT, NO_DRIVER], ids=["absent", "no driver"])
def test_every_family_writes_without_triton(triton: str) -> None:
    """Case K2: in float32 and bfloat16; usage, bench and command line tell the backend; triton raises."""
    script = EVERY_FAMILY.format(triton=triton)
    options = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, *options, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "wrote"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_bfloat16_model_says_nearly_what_the_float32_one_says(name: str, backend: str) -> None:
    """Case K2: not only that it runs. Bound by what rounding the weights alone does, and a little more.
    Where two scores are that near, a rounded router may send a token elsewhere: it follows the exact one."""
    exact, prompt, spans = make(name, backend), tokens(33, seed=260), Spans.of([33])
    rounded = make(name, backend).to_dtype(torch.bfloat16)
    with same_routes(exact, rounded):
        want = exact(prompt, spans)
        got = rounded(prompt, spans, cache := rounded.init_cache(1))
    assert got.dtype == torch.float32
    error = float((got - want).norm() / want.norm())
    assert error < 0.2, f"relative error {error:.2f}"
    assert bool(torch.isfinite(rounded.step(prompt[:1], cache)).all())


ODD = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_heads": 2,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "expand": 2,
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_projection_that_no_vector_width_divides(backend: str) -> None:
    """Case K4: 2 * 128 + 2 * 128 + 2 = 514 rows, two heads; forward, pieces and steps are the loop's."""
    model = make("mamba2", backend, **ODD)
    shapes = {p.shape[0] for n, p in model.named_parameters() if n.endswith("mixer.in_proj.weight")}
    assert shapes == {514}
    prompt, raw = tokens(21), {**MODELS["mamba2"].raw, **ODD}
    want = loops.model(model, prompt, raw)
    same_logits(model(prompt, Spans.of([21])), want, "forward")
    cache = model.init_cache(1)
    parts = [model(piece, Spans.of([len(piece)]), cache) for piece in prompt[:20].split([7, 13])]
    same_logits(torch.cat([*parts, model.step(prompt[20:], cache)]), want, "pieces and a step")


WIDTHS = ((48, 80), (80, 48), (96, 100), (100, 96))


@pytest.mark.parametrize("dims", WIDTHS, ids=str)
@pytest.mark.parametrize("kind", SCANS)
def test_any_head_width_and_any_layout(kind: str, dims: tuple[int, int]) -> None:
    """Case K4: widths of 48, 80, 96 and 100; transposed and sliced inputs equal contiguous ones."""
    for op, given in (scan(kind, [33, 1, 5], dims=dims), step(kind, 3, dims=dims)):
        want = run("reference", op, copied(given))
        got = run("torch", op, copied(given))
        same(got, want, f"{op} of {dims}", 5e-5)
        for layout in (columns, crossed, between):
            for backend in BACKENDS if dims == WIDTHS[0] else FAST:
                again = run(backend, op, copied(given, layout))
                same(again, got if backend == "torch" else want, f"{op}, {layout.__name__}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", SCANS)
def test_expanded_inputs(kind: str, axis: int, backend: str) -> None:
    """Case K4: one tensor at a time the same along an axis, without memory of its own for that."""
    for op, given in (scan(kind, [33, 1, 5]), scan(kind, [20, 20]), scan(kind, [1, 1]), step(kind, 3)):
        for name, x in given.items():
            updated = name in ("state", "history", "lengths")  # written in place, or not a matter of values
            if not isinstance(x, Tensor) or updated or not -x.ndim <= axis < x.ndim:
                continue
            flat = x.narrow(axis, 0, 1).expand_as(x)
            want = run(backend, op, copied({**given, name: flat.contiguous()}))
            held = {k: y.clone() if isinstance(y, Tensor) else y for k, y in given.items() if k != name}
            same(run(backend, op, {**held, name: flat}), want, f"{op}, {name} expanded")


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_any_layout(name: str) -> None:
    """Case K4: a column of a matrix, every second of a list, one id for all."""
    model, spans = make(name), Spans.of([8])
    column, second, one = tokens(24).view(8, 3)[:, 1], tokens(16)[::2], tokens(1).expand(8)
    for ids in (column, second, one):
        assert torch.equal(model(ids, spans), model(ids.contiguous(), spans))
        steps = [model.step(i, model.init_cache(8)) for i in (ids, ids.contiguous())]
        assert torch.equal(*steps)
