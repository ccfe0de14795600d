"""Every mixer as a float64 loop over tokens and heads, written from its paper; and whole models of them.

Nothing here is shared with the package but the names of parameters: each function takes them as a mapping
of float64 tensors, one row x (t, d) and the fields of the mixer's spec, and returns y (t, d) and, for
recurrences, the convolution's history and the state afterwards. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Params = Mapping[str, Tensor]


class Row(NamedTuple):
    """y (t, d); conv (w - 1, channels), oldest first; ssm, the recurrent state."""

    y: Tensor
    conv: Tensor
    ssm: Tensor


def params(module: nn.Module) -> Params:
    return {name: p.detach().double() for name, p in module.named_parameters()}


def linear(p: Params, name: str, x: Tensor) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def conv(p: Params, x: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor]:
    """silu(bias + sum_j w_j x_{t-w+1+j}), and the last w - 1 inputs."""
    weight = p["conv.weight"]
    w = weight.shape[1]
    past = torch.zeros(w - 1, x.shape[1], dtype=x.dtype) if history is None else history
    seen = torch.cat([past, x])
    bias = p.get("conv.bias", torch.zeros(x.shape[1], dtype=x.dtype))
    rows = [bias + sum(weight[:, j] * seen[t + j] for j in range(w)) for t in range(len(x))]
    y = torch.stack(rows) if rows else x
    return silu(y), seen[len(seen) - (w - 1) :]


def mamba(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Gu & Dao 2023, algorithm 2: A (channels, s), dt, B and C selected by the input."""
    rank, s = spec["rank"], spec["state_size"]
    inner = spec["inner"]
    u = linear(p, "in_proj", x)
    u, z = u[:, :inner], u[:, inner:]
    u, history = conv(p, u, None if state is None else state[0])
    low, b, c = linear(p, "x_proj", u).split([rank, s, s], dim=-1)
    dt = softplus(linear(p, "dt_proj", low) + p["dt_bias"])
    a = -p["a_log"].exp()
    h = torch.zeros(inner, s, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros_like(u)
    for t in range(len(x)):
        for ch in range(inner):
            h[ch] = (dt[t, ch] * a[ch]).exp() * h[ch] + dt[t, ch] * u[t, ch] * b[t]
        y[t] = h @ c[t] + p["d"] * u[t]
    return Row(linear(p, "out_proj", y * silu(z)), history, h)


def mamba2(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Dao & Gu 2024, section 7: one decay a head, B and C by group, norm of the gated value by group."""
    h, dim, s, g = spec["heads"], spec["head_dim"], spec["state_size"], spec.get("groups", 1)
    inner = h * dim
    low, high = spec.get("dt_limit", (0.0, math.inf))
    z, xbc, dt = linear(p, "in_proj", x).split([inner, inner + 2 * g * s, h], dim=-1)
    xbc, history = conv(p, xbc, None if state is None else state[0])
    u, b, c = xbc.split([inner, g * s, g * s], dim=-1)
    dt = softplus(dt + p["dt_bias"]).clamp(low, high)
    ssm = torch.zeros(h, s, dim, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), inner, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            group = slice((j // (h // g)) * s, (j // (h // g) + 1) * s)
            own = slice(j * dim, (j + 1) * dim)
            decay = torch.exp(-dt[t, j] * p["a_log"][j].exp())
            ssm[j] = decay * ssm[j] + dt[t, j] * torch.outer(b[t, group], u[t, own])
            y[t, own] = c[t, group] @ ssm[j] + p["d"][j] * u[t, own]
    y = (y * silu(z)).unflatten(-1, (g, -1))
    eps = spec.get("norm_eps", 1e-5)
    y = rms(y, p["norm.weight"].unflatten(-1, (g, -1)), eps).flatten(-2)
    return Row(linear(p, "out_proj", y), history, ssm)


def gla(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Yang et al. 2023, equation 3 and section 4.4: a decay for every key channel."""
    h, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    sizes = [2 * h * dk + h * dv, h * dv, spec.get("rank", 16)]
    qkv, gate, low = linear(p, "in_proj", x).split(sizes, dim=-1)
    history = torch.zeros(0, qkv.shape[1], dtype=x.dtype)
    if spec.get("conv"):
        qkv, history = conv(p, qkv, None if state is None else state[0])
    q, k, v = qkv.split([h * dk, h * dk, h * dv], dim=-1)
    alpha = (1 / (1 + torch.exp(-linear(p, "decay_proj", low)))) ** (1 / spec.get("temperature", 16.0))
    s = torch.zeros(h, dk, dv, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            key, value = slice(j * dk, (j + 1) * dk), slice(j * dv, (j + 1) * dv)
            s[j] = torch.diag(alpha[t, key]) @ s[j] + torch.outer(k[t, key], v[t, value])
            y[t, j] = s[j].T @ q[t, key] / math.sqrt(dk)
    return Row(_gated(p, y, gate, spec), history, s)


def gated_deltanet(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Yang et al. 2024, equation 10: S <- alpha (I - beta k k^T) S + beta k v^T with unit keys."""
    hk, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    h = spec.get("value_heads") or hk
    sizes = [2 * hk * dk + h * dv, h * dv, h, h]
    qkv, gate, b, a = linear(p, "in_proj", x).split(sizes, dim=-1)
    qkv, history = conv(p, qkv, None if state is None else state[0])
    q, k, v = qkv.split([hk * dk, hk * dk, h * dv], dim=-1)
    beta = (2 if spec.get("negative") else 1) / (1 + torch.exp(-b))
    alpha = torch.exp(-p["a_log"].exp() * softplus(a + p["dt_bias"]))
    s = torch.zeros(h, dk, dv, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    eye = torch.eye(dk, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            shared = j // (h // hk)
            key = _unit(k[t, shared * dk : (shared + 1) * dk])
            query = _unit(q[t, shared * dk : (shared + 1) * dk])
            erase = eye - beta[t, j] * torch.outer(key, key)
            s[j] = alpha[t, j] * erase @ s[j] + beta[t, j] * torch.outer(key, v[t, j * dv : (j + 1) * dv])
            y[t, j] = s[j].T @ query / math.sqrt(dk)
    return Row(_gated(p, y, gate, spec), history, s)


def attention(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Softmax over the positions that a token sees; rotary as a complex turn of each pair of channels."""
    h, hk, dim = spec["heads"], spec.get("kv_heads") or spec["heads"], spec["head_dim"]
    q, k, v = linear(p, "qkv", x).unflatten(-1, (-1, dim)).split([h, hk, hk], dim=1)
    if spec.get("rope") is not None:
        q, k = _turned(q, spec["rope"]), _turned(k, spec["rope"])
    y = torch.zeros(len(x), h, dim, dtype=x.dtype)
    for t in range(len(x)):
        start = 0 if spec.get("window") is None else max(0, t - spec["window"] + 1)
        for j in range(h):
            shared = j // (h // hk)
            weights = torch.softmax(k[start : t + 1, shared] @ q[t, j] / math.sqrt(dim), 0)
            y[t, j] = weights @ v[start : t + 1, shared]
    return Row(linear(p, "out", y.flatten(1)), x[:0], x[:0])


MIXERS: Mapping[str, Callable[..., Row]] = {
    "mamba": mamba,
    "mamba2": mamba2,
    "gla": gla,
    "gated_deltanet": gated_deltanet,
    "attention": attention,
}


def model(module: nn.Module, tokens: Tensor, raw: Mapping[str, Any]) -> Tensor:
    """Logits (t, vocab) of a whole model of ours, given its config.json."""
    p = params(module)
    layers, eps, scale = _layers(raw)
    x = p["embed.weight"][tokens] * scale
    for i, (kind, spec, mlp) in enumerate(layers):
        at = f"blocks.{i}."
        own = {name.removeprefix(at + "mixer."): t for name, t in p.items() if name.startswith(at + "mixer.")}
        x = x + MIXERS[kind](own, rms(x, p[at + "mixer_norm.weight"], eps), spec).y
        if mlp:
            gate, up = linear(p, at + "mlp.gate_up", rms(x, p[at + "mlp_norm.weight"], eps)).chunk(2, dim=-1)
            x = x + linear(p, at + "mlp.down", silu(gate) * up)
    return rms(x, p["norm.weight"], eps) @ p.get("head.weight", p["embed.weight"]).T


def _layers(raw: Mapping[str, Any]) -> tuple[list[tuple[str, Mapping[str, Any], bool]], float, float]:
    """(mixer, its spec, whether an MLP follows) of each layer; the norms' eps; the embedding's scale."""
    if raw["model_type"] == "composed":
        layers = [(layer["mixer"]["type"], layer["mixer"], bool(layer["mlp"])) for layer in raw["layers"]]
        return layers, raw["norm_eps"], raw.get("embed_scale", 1.0)
    if raw["model_type"] == "mamba2":
        spec = {
            "heads": raw["num_heads"],
            "head_dim": raw["head_dim"],
            "state_size": raw["state_size"],
            "groups": raw["n_groups"],
            "conv": raw["conv_kernel"],
        }
        return [("mamba2", spec, False)] * raw["num_hidden_layers"], 1e-5, 1.0
    if raw["model_type"] == "llama":
        spec = {
            "heads": raw["num_attention_heads"],
            "kv_heads": raw["num_key_value_heads"],
            "head_dim": raw["head_dim"],
            "rope": raw["rope_parameters"],
        }
        return [("attention", spec, True)] * raw["num_hidden_layers"], 1e-6, 1.0
    raise KeyError(f"{raw['model_type']}: say in tests/loops.py which layers it has")


def _gated(p: Params, y: Tensor, gate: Tensor, spec: Mapping[str, Any]) -> Tensor:
    """Norm a head, then gate, then out."""
    y = rms(y, p["norm.weight"], spec.get("norm_eps", 1e-5)).flatten(1)
    return linear(p, "out_proj", y * silu(gate))


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()


def _turned(x: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """x (t, h, k): channels i and i + dim / 2 are one complex number, turned by position * frequency."""
    dim = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    half = dim // 2
    frequency = rope.get("rope_theta", 10000.0) ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:dim]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag, x[..., dim:]], dim=-1)
