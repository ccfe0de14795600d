"""The fault table: each planted fault turns the law named for it red; without it that law is green.

A law that no fault can break proves nothing. The faults are those that published code has had, planted in
one op, one mixer method or one method of the cache for the length of one check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from constate.core import attention as attention_module
from constate.core import cache as cache_module
from constate.core.attention import Attention
from constate.core.cache import Cache
from constate.core.experts import Experts
from constate.core.latent import LatentAttention
from constate.core.mixer import Call
from constate.core.model import Model
from constate.core.parallel import Parallel
from constate.core.short_conv import ShortConv
from constate.core.state import KV, Latent, Parts, State, Window
from constate.hybrid.zamba2 import Hybrid
from constate.linear_attn.gated_deltanet import GatedDeltaNet
from constate.linear_attn.hgrn2 import HGRN2
from constate.linear_attn.lightning import LightningAttention
from constate.linear_attn.rwkv7 import ChannelMix, TokenShift
from constate.spans import Spans
from constate.ssm.mamba2 import Mamba2
from constate.ssm.rg_lru import RGLRU
from tests.laws import LAWS
from tests.models import make
from tests.referee import referee

Op = Callable[..., Any]
Plant = Callable[[Model], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """What is wrong, the model it is planted in, the law that must see it."""

    what: str
    model: str
    law: int
    plant: Plant


def op(name: str, change: Callable[[Op], Op]) -> Plant:
    """One op of the model replaced by `change(op)`."""

    @contextmanager
    def plant(model: Model) -> Iterator[None]:
        right = model.ops
        model.ops = replace(right, **{name: change(getattr(right, name))})
        try:
            yield
        finally:
            model.ops = right

    return plant


def method(target: Any, name: str, change: Callable[[Op], Any]) -> Plant:
    """One attribute of a class or module replaced by `change(it)`."""
    return lambda _: patch.object(target, name, change(getattr(target, name)))


def state_after(change: Callable[[Tensor, Tensor | None], Tensor], at: int) -> Callable[[Op], Op]:
    """A scan whose final state is `change(final, initial)`; its initial state is argument `at`."""

    def wrap(scan: Op) -> Op:
        def faulty(*args: Any, **options: Any) -> Any:
            o, final = scan(*args, **options)
            return o, change(final, args[at])

        return faulty

    return wrap


def argument(at: int, change: Callable[[Any], Any]) -> Callable[[Op], Op]:
    """An op that sees `change(argument)` in place of its argument number `at`."""

    def wrap(fn: Op) -> Op:
        def faulty(*args: Any, **options: Any) -> Any:
            changed = list(args)
            changed[at] = change(changed[at])
            return fn(*changed, **options)

        return faulty

    return wrap


def one_span(scan: Op) -> Op:
    """The scan runs through all rows as if they were one: state leaks over a span's boundary."""

    def faulty(*args: Any, **options: Any) -> Any:
        *tensors, initial, spans = args
        o, final = scan(*args, **options)
        if spans.rows > 1:
            start = None if initial is None else initial[:1]
            o, _ = scan(*tensors, start, Spans.of([spans.total]), **options)
        return o, final

    return faulty


def one_context(attend: Op) -> Op:
    def faulty(q: Tensor, k: Tensor, v: Tensor, spans: Spans, context: Spans, **options: Any) -> Tensor:
        if spans.rows == 1:
            return attend(q, k, v, spans, context, **options)
        return attend(q, k, v, Spans.of([spans.total]), Spans.of([context.total]), **options)

    return faulty


def late(g: Tensor) -> Tensor:
    """Token t decays by what belongs to token t - 1."""
    return torch.cat([g[:1], g[:-1]])


def first_group(k: Tensor) -> Tensor:
    return k[:, :1].expand_as(k)


def interleaved(k: Tensor) -> Tensor:
    """Key heads in the order that makes query head j read key head j % hk."""
    return k.flip(1)


def unsummed(initial: Tensor | None) -> Tensor | None:
    return None if initial is None else F.pad(initial[..., :-1], (0, 1))


def padded(final: Tensor, _: Tensor | None) -> Tensor:
    """A pad whose key was set to zero before the map elu + 1, which makes ones of it."""
    return torch.cat([final[..., :-1], final[..., -1:] + 1], -1)


def bfloat16(final: Tensor, _: Tensor | None) -> Tensor:
    return final.bfloat16().float()


def wider(fn: Op) -> Op:
    def faulty(*args: Any, window: int | None = None, **options: Any) -> Tensor:
        return fn(*args, window=window and window + 1, **options)

    return faulty


def restarted(_: Any) -> property:
    return property(lambda call: call.spans.position)


def softplus_twice(scan: Op) -> Op:
    def faulty(x: Tensor, dt: Tensor, *args: Any, dt_bias: Tensor, **options: Any) -> Any:
        return scan(x, F.softplus(dt + dt_bias), *args, dt_bias=torch.zeros_like(dt_bias), **options)

    return faulty


def without(name: str) -> Callable[[Op], Op]:
    return lambda fn: lambda *args, **options: fn(*args, **{**options, name: None})


def unshifted(step: Op) -> Op:
    """The convolution's step answers and leaves its history as it was."""
    return lambda x, weight, bias, history, **options: step(x, weight, bias, history.clone(), **options)


def stale(forward: Op) -> Op:
    def faulty(self: ShortConv, x: Tensor, call: Call, history: Tensor | None = None) -> Tensor:
        return forward(self, x, call, None if history is None else history.clone())

    return faulty


def newest_first(final: Tensor, _: Tensor | None) -> Tensor:
    return final.flip(1)


def emptied(scan: Op) -> Op:
    """A row that brings no token loses its state."""

    def faulty(*args: Any, **options: Any) -> Any:
        o, final = scan(*args, **options)
        empty = [r for r, n in enumerate(args[-1].lengths) if not n]
        final = final.clone()
        final[empty] = 0
        return o, final

    return faulty


def reads_the_decayed(step: Op) -> Op:
    def faulty(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, *rest: Any, **options: Any) -> Any:
        return step(q, k, v, g, a * g.exp(), *rest, **options)

    return faulty


def erases_before_decay(step: Op) -> Op:
    def faulty(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **options: Any
    ) -> Tensor:
        # (v - S^T k) in place of (v - (exp(g) S)^T k): the same as a step on v less the difference.
        group = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
        lost = 1 - g.exp().view(*v.shape[:2], -1, 1)
        recalled = (lost * state * group[..., None]).sum(-2)
        return step(q, k, v - recalled, g, beta, state, **options)

    return faulty


def by_head(scan: Op) -> Op:
    """One decay for all channels of a head, their mean."""

    def faulty(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any, **options: Any) -> Any:
        return scan(q, k, v, g.exp().mean(-1).log(), *rest, **options)

    return faulty


def one_late(step: Op) -> Op:
    """The step's token is seen by the next step, not by its own."""
    return lambda q, k, v, lengths, longest, **options: step(
        q, k, v, (lengths - 1).clamp(min=1), max(1, longest - 1), **options
    )


def short_ring(absorb: Op) -> Op:
    """The tokens that a piece still sees of the ring are one too few."""

    def faulty(state: Window, k: Tensor, v: Tensor, call: Call) -> Any:
        keys, values, context = absorb(state, k, v, call)
        rows = [
            slice(part.start + 1 if m > n else part.start, part.stop)
            for part, m, n in zip(context.slices(), context.lengths, call.spans.lengths, strict=True)
        ]
        spans = Spans.of(part.stop - part.start for part in rows)
        return torch.cat([keys[part] for part in rows]), torch.cat([values[part] for part in rows]), spans

    return faulty


def shallow(_: Op) -> Op:
    return lambda self: self.map(lambda name, t, leaf: t)


def sorted_rows(select: Op) -> Op:
    return lambda self, rows: select(self, sorted(rows))


def forgets_lengths(write: Op) -> Op:
    def faulty(self: Cache, row: int, other: Cache) -> None:
        lengths = self.lengths
        write(self, row, other)
        self.lengths = lengths

    return faulty


def aliases(write: Op) -> Op:
    """A row that was written stays tied to where it came from."""

    def faulty(self: Cache, row: int, other: Cache) -> None:
        write(self, row, other)
        ours = {name: t for name, t, _ in self.leaves()}
        other.assign(other.map(lambda name, t, leaf: ours[name][row : row + 1]))

    return faulty


def nothing_moves(drop: Op) -> Op:
    """drop cuts the last row off, whichever was meant."""
    return lambda self, row: drop(self, self.rows - 1)


def unpadded(grown: Op) -> Op:
    """A cache that grows loses its newest token."""

    def faulty(tensor: Tensor, capacity: int) -> Tensor:
        wide = grown(tensor, capacity)
        if tensor.shape[1] < capacity and tensor.shape[1]:
            wide[:, tensor.shape[1] - 1] = 0
        return wide

    return faulty


def zeros_for_conv(load: Op) -> Op:
    """Case D6: what a file lacks is taken for zeros."""

    def faulty(path: Any, model: Any) -> Cache:
        cache = load(path, model)
        for _, t, leaf in cache.leaves():
            if leaf.kind == "conv":
                t.zero_()
        return cache

    return faulty


def any_model(load: Op) -> Op:
    def faulty(path: Any, model: Any) -> Cache:
        with patch.object(type(model), "fingerprint", cache_module.read_header(path)["model"]):
            return load(path, model)

    return faulty


def one_state_for_all(forward: Op) -> Op:
    """Layers that share a block share its keys and values too."""

    def faulty(self: Hybrid, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        if isinstance(state, Parts):
            first = next(s for s in call.layers if isinstance(s, Parts))
            state = Parts((first.parts[0], state.parts[1]))
        return forward(self, x, call, state)

    return faulty


def neighbours_embedding(beside: Op) -> Op:
    """The embedding that a shared block reads is that of the next token."""

    def faulty(self: Hybrid, x: Tensor, call: Call) -> Tensor:
        right = call.shared["embedding"]
        call.shared["embedding"] = right.roll(-1, 0)
        try:
            return beside(self, x, call)
        finally:
            call.shared["embedding"] = right

    return faulty


def forgets_an_arm(forward: Op) -> Op:
    """Of two mixers side by side only the first keeps what it has read."""

    def faulty(self: Parallel, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        if isinstance(state, Parts):
            state = Parts((state.parts[0], state.parts[1].clone()))
        return forward(self, x, call, state)

    return faulty


def without_one_arm(cost: Op) -> Op:
    def faulty(self: Parallel, new: int, past: int) -> Any:
        return self.arms[0][0].cost(new, past)

    return faulty


def swapped_products(heads: Op) -> Op:
    """The absorbed form with W^UV's last head's rows where the first head's should stand, and so on."""
    return lambda self: tuple(w.flip(0) for w in heads(self))


def past_unturned(forward: Op) -> Op:
    """The latents of a piece are kept with the shared key as it was before it was rotated."""

    def faulty(self: LatentAttention, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        y = forward(self, x, call, state)
        if isinstance(state, Latent) and self.rotary is not None:
            with patch.object(self, "rotary", None):
                raw = self._enter(x, call)[1]
            for row, (span, past) in enumerate(zip(call.spans.slices(), call.lengths, strict=True)):
                state.kv[row, past : past + span.stop - span.start] = raw[span]
        return y

    return faulty


def lends_what_is_held(forward: Op) -> Op:
    """Readers of a ring see only what it holds after a piece, in the order of its slots."""

    def faulty(self: Attention, x: Tensor, call: Call, state: State | None = None) -> Tensor:
        y = forward(self, x, call, state)
        if self.lends is not None and isinstance(state, Window):
            k, v, context = call.shared["kv", self.lends]
            held = torch.cat([state.k[row] for row in range(len(context.lengths))])
            if len(held) <= len(k):
                k = torch.cat([k[: len(k) - len(held)], held])
            call.shared["kv", self.lends] = k, v, context
        return y

    return faulty


def lends_before_it_writes(step: Op) -> Op:
    """Readers do not see the token of this step."""

    def faulty(self: Attention, x: Tensor, call: Call, state: State) -> Tensor:
        before = state.clone()
        y = step(self, x, call, state)
        if self.lends is not None:
            assert isinstance(before, KV | Window)
            call.shared["kv", self.lends] = before.k, before.v, call.context
        return y

    return faulty


def first_layers_slopes(log_decay: Op) -> Op:
    """Made once a call for all layers, whatever their share."""

    def faulty(self: LightningAttention, call: Call) -> Tensor:
        if call.spans.longest > 1:
            return log_decay(self, call)
        return call.shared.setdefault("slopes", log_decay(self, call))

    return faulty


def unpriced(kind: str) -> Callable[[Op], Op]:
    def wrap(cost: Op) -> Op:
        def faulty(self: Any, new: int, past: int) -> Any:
            priced = cost(self, new, past)
            return replace(priced, held={k: n for k, n in priced.held.items() if k != kind})

        return faulty

    return wrap


def as_full(cost: Op) -> Op:
    """A window priced as if it kept every token."""

    def faulty(self: Attention, new: int, past: int) -> Any:
        window, self.window = self.window, None
        try:
            return cost(self, new, past)
        finally:
            self.window = window

    return faulty


def full(answers: Op) -> Op:
    """An expert answers so many tokens and no more, as with a capacity: it depends on who asked before."""

    def faulty(self: Experts, x: Tensor, chosen: Tensor) -> Tensor:
        earlier = F.one_hot(chosen, self.spec.experts).sum(1).cumsum(0).gather(1, chosen)
        return answers(self, x, chosen) * (earlier <= 12).unsqueeze(-1)

    return faulty


def ranked(answers: Op) -> Op:
    """The answers of a token's experts come back in the experts' order and meet weights in another."""
    return lambda self, x, chosen: answers(self, x, chosen.sort(-1).values)


SCANS = (
    ("gated_linear_scan", 4, "composed gla"),
    ("gated_delta_scan", 5, "composed gated_deltanet"),
    ("selective_scan", 5, "composed mamba"),
    ("dplr_delta_scan", 6, "composed rwkv7"),
    ("gated_delta_scan", 5, "composed kda"),
    ("linear_recurrence_scan", 2, "composed rg_lru"),
)

FAULTS = (
    # the state of a scan, in each op
    *(Fault(f"{s}: a bfloat16 state", m, 2, op(s, state_after(bfloat16, at))) for s, at, m in SCANS),
    *(Fault(f"{s}: starts from nothing", m, 2, op(s, argument(at, lambda _: None))) for s, at, m in SCANS),
    *(Fault(f"{s}: rows run together", m, 3, op(s, one_span)) for s, _, m in SCANS),
    *(Fault(f"{s}: an empty row is emptied", m, 3, op(s, emptied)) for s, _, m in SCANS),
    *(
        Fault(f"{s}: a tail decays the state", m, 1, op(s, state_after(lambda f, _: f * 0.999, at)))
        for s, at, m in SCANS
    ),
    Fault(
        "dk and dv swapped",
        "composed gated_deltanet",
        2,
        op(
            "gated_delta_scan",
            state_after(lambda f, _: f.mT.contiguous() if f.shape[-1] == f.shape[-2] else f, 5),
        ),
    ),
    # decays
    Fault("linear decay one token late", "mamba2", 7, op("gated_linear_scan", argument(3, late))),
    Fault("vector decay one token late", "composed gla", 1, op("gated_linear_scan", argument(3, late))),
    Fault(
        "delta decay one token late", "composed gated_deltanet", 7, op("gated_delta_scan", argument(3, late))
    ),
    Fault(
        "erases before it decays", "composed gated_deltanet", 1, op("gated_delta_step", erases_before_decay)
    ),
    Fault(
        "delta decay a channel, one token late", "composed kda", 7, op("gated_delta_scan", argument(3, late))
    ),
    Fault("delta decay a head, not a channel", "composed kda", 7, op("gated_delta_scan", by_head)),
    Fault(
        "erases before it decays, by channel", "composed kda", 1, op("gated_delta_step", erases_before_decay)
    ),
    Fault(
        "a recurrence decays one token late",
        "composed rg_lru",
        7,
        op("linear_recurrence_scan", argument(1, late)),
    ),
    Fault("every piece starts unscaled", "composed rg_lru", 2, method(Call, "positions", restarted)),
    Fault(
        "the state of RG-LRU is not priced", "recurrent_gemma", 6, method(RGLRU, "cost", unpriced("state"))
    ),
    Fault("channel decay one token late", "rwkv7", 7, op("dplr_delta_scan", argument(3, late))),
    Fault("the erase reads the decayed state", "rwkv7", 1, op("dplr_delta_step", reads_the_decayed)),
    Fault("softplus twice", "composed mamba", 7, op("selective_scan", softplus_twice)),
    Fault("the skip is left out", "composed mamba", 7, op("selective_scan", without("d"))),
    Fault("the gate is left out", "composed mamba", 1, op("selective_step", without("z"))),
    # heads
    Fault("groups ignored", "mamba2", 7, op("gated_linear_scan", argument(1, first_group))),
    Fault(
        "value heads read the first key head",
        "composed gated_deltanet",
        7,
        op("gated_delta_scan", argument(1, first_group)),
    ),
    Fault("query heads read key heads in turn", "llama", 7, op("attention", argument(1, interleaved))),
    # the key sum of normalised linear attention, the last column of its state (case A4)
    Fault("the key sum is not carried", "linear_attn", 2, op("gated_linear_scan", argument(4, unsummed))),
    Fault("pads enter the key sum", "linear_attn", 1, op("gated_linear_scan", state_after(padded, 4))),
    Fault("a bound is left out", "hgrn2", 7, method(HGRN2, "_bound", lambda _: lambda self, call: None)),
    # short convolution
    Fault("the history is dropped", "mamba2", 2, op("short_conv", argument(3, lambda _: None))),
    Fault("the history is not written", "mamba2", 2, method(ShortConv, "forward", stale)),
    Fault(
        "the history is reversed",
        "composed gated_deltanet",
        2,
        op("short_conv", state_after(newest_first, 3)),
    ),
    Fault("the history is not shifted", "composed mamba", 1, op("short_conv_step", unshifted)),
    Fault("the token shift's history is not written", "rwkv7", 2, method(TokenShift, "forward", stale)),
    Fault("a row sees another row's token", "composed rwkv7", 3, op("short_conv", one_span)),
    Fault("the convolution runs over rows", "composed mamba2", 3, op("short_conv", one_span)),
    # attention
    Fault("a window one too wide", "composed window", 1, op("attention", wider)),
    Fault(
        "the ring is one short", "composed window", 2, method(attention_module, "absorb_window", short_ring)
    ),
    Fault("attention runs over rows", "composed attention", 3, op("attention", one_context)),
    Fault("positions restart in a piece", "llama", 2, method(Call, "positions", restarted)),
    Fault("retention's positions restart in a piece", "retnet", 2, method(Call, "positions", restarted)),
    Fault("a token does not see itself", "llama", 1, op("attention_step", one_late)),
    Fault("growing loses a token", "llama", 1, method(cache_module, "grown", unpadded)),
    Fault(
        "absorbed products of other heads",
        "composed latent",
        1,
        method(LatentAttention, "_heads", swapped_products),
    ),
    Fault(
        "the kept key is not turned", "composed latent", 2, method(LatentAttention, "forward", past_unturned)
    ),
    Fault("latents of rows run together", "composed latent", 3, op("attention", one_context)),
    Fault("latents are not priced", "deepseek_v3", 6, method(LatentAttention, "cost", unpriced("kv"))),
    Fault(
        "a ring is lent as it is held",
        "composed cross-layer",
        2,
        method(Attention, "forward", lends_what_is_held),
    ),
    Fault(
        "lent before it is written",
        "composed cross-layer",
        1,
        method(Attention, "step", lends_before_it_writes),
    ),
    Fault(
        "slopes of the first layer in steps",
        "minimax",
        1,
        method(LightningAttention, "log_decay", first_layers_slopes),
    ),
    # experts
    Fault("an expert is full", "qwen3_next", 3, method(Experts, "_grouped", full)),
    Fault("answers meet other experts' weights", "nemotron_h", 7, method(Experts, "_grouped", ranked)),
    # rows and files
    Fault("a shallow clone", "composed", 4, method(State, "clone", shallow)),
    Fault("zeros for a missing tensor", "composed gla", 4, method(Cache, "load", zeros_for_conv)),
    Fault("another model's file is read", "composed mamba", 4, method(Cache, "load", any_model)),
    Fault("select sorts its rows", "composed", 5, method(Cache, "select", sorted_rows)),
    Fault("write forgets the length", "llama", 5, method(Cache, "write", forgets_lengths)),
    Fault("write aliases its source", "composed mamba2", 5, method(Cache, "write", aliases)),
    Fault("drop moves nothing", "composed", 5, method(Cache, "drop", nothing_moves)),
    # mixers that hold several
    Fault("an arm's state is not written", "falcon_h1", 2, method(Parallel, "forward", forgets_an_arm)),
    Fault("shared blocks share a state", "zamba2", 2, method(Hybrid, "forward", one_state_for_all)),
    Fault(
        "the embedding beside x is a neighbour's",
        "zamba2",
        3,
        method(Hybrid, "_beside", neighbours_embedding),
    ),
    # prices
    Fault("an arm is not priced", "falcon_h1", 6, method(Parallel, "cost", without_one_arm)),
    Fault("the history is not priced", "mamba2", 6, method(Mamba2, "cost", unpriced("conv"))),
    Fault(
        "the channel mix's history is not priced", "rwkv7", 6, method(ChannelMix, "cost", unpriced("conv"))
    ),
    Fault("the state is not priced", "composed", 6, method(GatedDeltaNet, "cost", unpriced("state"))),
    Fault("a window priced as growing", "composed window", 6, method(Attention, "cost", as_full)),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"law {f.law}: {f.what}")
def test_fault_turns_its_law_red(fault: Fault) -> None:
    model = sound(fault.model, fault.law)
    with fault.plant(model), pytest.raises((AssertionError, pytest.fail.Exception)):
        LAWS[fault.law](model, referee(fault.model))


@cache
def sound(name: str, law: int) -> Model:
    """The model, for which the law is green: the referee has read all it needs while nothing is wrong."""
    model = make(name)
    LAWS[law](model, referee(name))
    return model


def test_every_law_has_a_fault() -> None:
    assert {fault.law for fault in FAULTS} == set(LAWS)
