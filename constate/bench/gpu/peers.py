"""The same calls by others: flash-linear-attention, mamba-ssm, causal-conv1d, PyTorch's own attention.

Each is called as its authors mean it to be: operands in its own layout, made before the clock starts. Knows
those packages' functions; what each leaves out beside ours is said where it does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.int8 import GROUP
from .scans import Call

Work = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """A call, and how the output that it returns, of whatever layout, becomes one like ours."""

    work: Work
    output: Callable[[Any], Tensor]


Make = Callable[[Mapping[str, Any]], Peer]
EXTENSIONS = ("selective_scan_cuda", "causal_conv1d_cuda")
CHUNK = 256  # of mamba-ssm's scan, its default


def known(name: str, case: str) -> bool:
    """Whether this peer computes this case, all at once or by steps."""
    return any((name, case) == which[:2] for which in MAKERS)


def peer(name: str, case: str, call: Call) -> Peer | None:
    """The call, by this peer; None where it has no such function. Raises whatever a package that is not here,
    or broken, raises."""
    return None if (name, case, call.op) not in MAKERS else MAKERS[name, case, call.op](call.given)


def prepare() -> None:
    """Lets mamba-ssm be imported where it was built without CUDA: its Triton kernels need no extension."""
    for name in EXTENSIONS:
        try:
            import_module(name)
        except ImportError:
            sys.modules[name] = ModuleType(name)


def _batch(given: Mapping[str, Any], step: bool) -> dict[str, Tensor]:
    """(n, ...) as (rows, time, ...): a token of each row, or one row of all."""
    named = ("q", "k", "v", "log_decay", "beta", "a", "b", "x", "log_a", "dt", "z")
    found = {name: given[name] for name in named if isinstance(given.get(name), Tensor)}
    return {name: x.unsqueeze(1 if step else 0) for name, x in found.items()}


def _fla(place: str, decay: str, **more: str) -> Make:
    """A function of fla.ops; `decay` is its name for ours, `more` maps other names. Shared key heads are
    repeated where it knows none. Its step returns a new state and leaves the old one."""

    def make(given: Mapping[str, Any]) -> Peer:
        step = "state" in given
        module, _, kind = place.rpartition("/")
        ops = import_module(f"fla.ops.{module or kind}")
        function = getattr(ops, f"fused_recurrent_{kind}" if step or kind == "hgrn" else f"chunk_{kind}")
        batch = _batch(given, step)
        renamed = {"log_decay": decay, **more}
        named = {renamed.get(name, name): x.contiguous() for name, x in batch.items()}
        if "q" in named and kind in ("simple_gla", "gla"):
            h = named["v"].shape[2]
            named |= {n: named[n].repeat_interleave(h // named[n].shape[2], dim=2) for n in ("q", "k")}
        options = {"scale": given["scale"]} if "scale" in given else {}
        options |= {"initial_state": given["state" if step else "initial"], "output_final_state": True}
        return Peer(lambda: function(**named, **options), lambda found: found[0].flatten(0, 1))

    return make


def _ssd(given: Mapping[str, Any]) -> Peer:
    """mamba-ssm's Mamba-2 scan: a rate of -1 a head and steps of -log_decay. It multiplies the values by the
    step sizes itself, so it is given them divided."""
    scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    batch = _batch(given, False)
    dt = -batch["log_decay"]
    x = (batch["v"] / dt[..., None]).to(batch["v"].dtype)
    rate = -torch.ones(dt.shape[-1], device=dt.device)
    start = given["initial"].transpose(-1, -2).contiguous()
    q, k, scale = (
        batch["q"] * given["scale"],
        batch["k"],
        {"initial_states": start, "return_final_states": True},
    )
    return Peer(lambda: scan(x, dt, rate, k, q, CHUNK, **scale), lambda found: found[0].squeeze(0))


def _ssd_step(given: Mapping[str, Any]) -> Peer:
    """Its one-token step, which serves both Mambas; the state is (rows, heads, head, state)."""
    step = import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    v, g = given["v"], given["log_decay"]
    rows, h, p = v.shape
    state = given["state"].transpose(-1, -2).contiguous()
    dt = (-g)[..., None].expand(rows, h, p)
    x = (v / dt).to(v.dtype)
    rate = -torch.ones(h, device=v.device)[:, None, None].expand(h, p, state.shape[-1])
    bias = torch.zeros(h, device=v.device)[:, None].expand(h, p)
    skip = torch.zeros(h, p, device=v.device)
    q = given["q"] * given["scale"]
    return Peer(
        lambda: step(state, x, dt, rate, given["k"], q, D=skip, dt_bias=bias, dt_softplus=False),
        lambda found: found,
    )


def _mamba(given: Mapping[str, Any]) -> Peer:
    """mamba-ssm's Mamba scan, which takes no initial state and leaves its own."""
    scan = import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    lined = {name: given[name].t().unsqueeze(0).contiguous() for name in ("x", "dt", "z", "b", "c")}
    x, dt, z, b, c = lined.values()
    how = {"delta_softplus": True, "return_last_state": True}
    return Peer(
        lambda: scan(x, dt, given["a"], b, c, given["d"], z, given["dt_bias"], **how),
        lambda found: found[0].squeeze(0).t(),
    )


def _mamba_step(given: Mapping[str, Any]) -> Peer:
    step = import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    state = given["state"].clone()
    x, dt, a, b, c = (given[name] for name in ("x", "dt", "a", "b", "c"))
    how = {"D": given["d"], "z": given["z"], "dt_bias": given["dt_bias"], "dt_softplus": True}
    return Peer(lambda: step(state, x, dt, a, b, c, **how), lambda found: found)


def _conv(given: Mapping[str, Any]) -> Peer:
    conv = import_module("causal_conv1d").causal_conv1d_fn
    x, start = given["x"].unsqueeze(0).transpose(1, 2), given["initial"].transpose(1, 2)
    how = {"initial_states": start, "return_final_states": True, "activation": "silu"}
    return Peer(lambda: conv(x, given["weight"], given["bias"], **how), lambda found: found[0].squeeze(0).t())


def _conv_step(given: Mapping[str, Any]) -> Peer:
    update = import_module("causal_conv1d").causal_conv1d_update
    held = given["history"].clone().transpose(1, 2)
    return Peer(lambda: update(given["x"], held, given["weight"], given["bias"], "silu"), lambda found: found)


def _attention(given: Mapping[str, Any]) -> Peer:
    q, k, v = (given[name].unsqueeze(0).transpose(1, 2) for name in "qkv")
    return Peer(
        lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda found: found.squeeze(0).transpose(0, 1),
    )


def _attention_step(given: Mapping[str, Any]) -> Peer:
    q = given["q"].unsqueeze(2)
    k, v = (given[name].transpose(1, 2) for name in "kv")
    return Peer(
        lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True), lambda found: found.squeeze(2)
    )


def _product(given: Mapping[str, Any]) -> Peer:
    """The same product with a weight of the inputs' dtype, twice the bytes and more."""
    x, scales = given["x"], given["scales"].repeat_interleave(GROUP, 1)
    weight = (given["weight"] * scales).to(x.dtype)
    return Peer(lambda: torch.nn.functional.linear(x, weight), lambda found: found)


LINEAR, DELTA, LOW_RANK, CHANNELS = (
    (f"{op}_scan", f"{op}_step") for op in ("gated_linear", "gated_delta", "dplr_delta", "linear_recurrence")
)
MAKERS: Mapping[tuple[str, str, str], Make] = {
    **{("fla", "mamba2", op): _fla("simple_gla", "g") for op in LINEAR},
    ("fla", "gla", LINEAR[0]): _fla("gla", "g"),
    ("fla", "gla", LINEAR[1]): _fla("gla", "gk"),
    **{("fla", "gated_deltanet", op): _fla("gated_delta_rule", "g") for op in DELTA},
    **{("fla", "kda", op): _fla("kda", "g") for op in DELTA},
    **{("fla", "rwkv7", op): _fla("generalized_delta_rule/dplr_delta_rule", "gk") for op in LOW_RANK},
    **{("fla", "rg_lru", op): _fla("hgrn", "g", log_a="g") for op in CHANNELS},
    ("mamba_ssm", "mamba2", LINEAR[0]): _ssd,
    ("mamba_ssm", "mamba2", LINEAR[1]): _ssd_step,
    ("mamba_ssm", "mamba", "selective_scan"): _mamba,
    ("mamba_ssm", "mamba", "selective_step"): _mamba_step,
    ("causal_conv1d", "short_conv", "short_conv"): _conv,
    ("causal_conv1d", "short_conv", "short_conv_step"): _conv_step,
    ("pytorch", "attention", "attention"): _attention,
    ("pytorch", "attention", "attention_step"): _attention_step,
    ("pytorch", "int8", "linear"): _product,
}
