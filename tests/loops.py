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


def conv(
    p: Params, x: Tensor, history: Tensor | None, act: Callable[[Tensor], Tensor] = silu
) -> tuple[Tensor, Tensor]:
    """act(bias + sum_j w_j x_{t-w+1+j}), and the last w - 1 inputs."""
    weight = p["conv.weight"]
    w = weight.shape[1]
    past = torch.zeros(w - 1, x.shape[1], dtype=x.dtype) if history is None else history
    seen = torch.cat([past, x])
    bias = p.get("conv.bias", torch.zeros(x.shape[1], dtype=x.dtype))
    rows = [bias + sum(weight[:, j] * seen[t + j] for j in range(w)) for t in range(len(x))]
    y = torch.stack(rows) if rows else x
    return act(y), seen[len(seen) - (w - 1) :]


def mamba(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Gu & Dao 2023, algorithm 2: A (channels, s), dt, B and C selected by the input."""
    rank, s = spec["rank"], spec["state_size"]
    inner = spec["inner"]
    u = linear(p, "in_proj", x)
    u, z = u[:, :inner], u[:, inner:]
    u, history = conv(p, u, None if state is None else state[0])
    low, b, c = linear(p, "x_proj", u).split([rank, s, s], dim=-1)
    if spec.get("norm_weight"):  # Jamba (Lieber et al. 2024)
        named = (("dt", low), ("b", b), ("c", c))
        low, b, c = (rms(t, p[f"norms.{name}.weight"], spec["norm_eps"]) for name, t in named)
    elif spec.get("norm_eps") is not None:  # Falcon Mamba (Zuo et al. 2024, section 3.2)
        low, b, c = (rms(t, torch.ones(t.shape[-1], dtype=t.dtype), spec["norm_eps"]) for t in (low, b, c))
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
    """Dao & Gu 2024, section 7: one decay a head, B and C by group, norm of the gated value by group (or of
    the value before its gate, or none)."""
    h, dim, s, g = spec["heads"], spec["head_dim"], spec["state_size"], spec.get("groups", 1)
    inner = h * dim
    low, high = spec.get("dt_limit", (0.0, math.inf))
    z, u, b, c, dt = linear(p, "in_proj", x).split([inner, inner, g * s, g * s, h], dim=-1)
    z, u, b, c, dt = (t * m for t, m in zip((z, u, b, c, dt), spec.get("scales") or [1] * 5, strict=True))
    xbc = torch.cat([u, b, c], dim=-1)
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
    before = spec.get("norm_before", False)
    y = y if before else y * silu(z)
    if spec.get("norm", True):
        y, weight = y.unflatten(-1, (g, -1)), p["norm.weight"].unflatten(-1, (g, -1))
        y = rms(y, weight, spec.get("norm_eps", 1e-5)).flatten(-2)
    return Row(linear(p, "out_proj", y * silu(z) if before else y), history, ssm)


def gla(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Yang et al. 2023, equation 3 and section 4.4: a decay for every key channel."""
    h, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    hk = spec.get("kv_heads") or h
    gated = spec.get("gate", True)
    sizes = [h * dk + hk * (dk + dv), h * dv if gated else 0, spec.get("rank", 16)]
    qkv, gate, low = linear(p, "in_proj", x).split(sizes, dim=-1)
    history = torch.zeros(0, qkv.shape[1], dtype=x.dtype)
    if spec.get("conv"):
        qkv, history = conv(p, qkv, None if state is None else state[0])
    q, k, v = qkv.split([h * dk, hk * dk, hk * dv], dim=-1)
    alpha = (1 / (1 + torch.exp(-linear(p, "decay_proj", low)))) ** (1 / spec.get("temperature", 16.0))
    if spec.get("decay_min") is not None:
        alpha = torch.maximum(alpha, torch.tensor(spec["decay_min"], dtype=x.dtype).exp())
    s = torch.zeros(h, dk, dv, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            shared = j // (h // hk)
            key, value = slice(shared * dk, (shared + 1) * dk), slice(shared * dv, (shared + 1) * dv)
            s[j] = torch.diag(alpha[t, key]) @ s[j] + torch.outer(k[t, key], v[t, value])
            y[t, j] = s[j].T @ q[t, j * dk : (j + 1) * dk] / math.sqrt(dk)
    if gated:
        return Row(_gated(p, y, gate, spec), history, s)
    y = rms(y, p["norm.weight"], spec.get("norm_eps", 1e-5)).flatten(1)
    return Row(linear(p, "out_proj", y), history, s)


def hgrn2(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Qin et al. 2024, equations 5 and 6: what the forget gate f leaves over is the key."""
    h, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    qfi, history = linear(p, "in_proj", x), torch.zeros(0, h * (2 * dk + dv), dtype=x.dtype)
    if spec.get("conv"):
        qfi, history = conv(p, qfi, None if state is None else state[0], lambda y: y)
    q, f, i = qfi.split([h * dk, h * dk, h * dv], dim=-1)
    low = torch.tensor(spec.get("bound", 0.0), dtype=x.dtype)
    if spec.get("layer"):  # the share of the layers from 1 to this one
        shares = p["bounds"].exp() / p["bounds"].exp().sum(0)
        low = sum(shares[n] for n in range(1, spec["layer"] + 1))
    f = low + (1 - low) / (1 + torch.exp(-f))
    s = torch.zeros(h, dk, dv, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            key, value = slice(j * dk, (j + 1) * dk), slice(j * dv, (j + 1) * dv)
            s[j] = torch.diag(f[t, key]) @ s[j] + torch.outer(1 - f[t, key], i[t, value])
            y[t, j] = s[j].T @ silu(q[t, key]) / math.sqrt(dk)
    y = rms(y.flatten(1), p["norm.weight"], spec.get("norm_eps", 1e-5))
    return Row(linear(p, "out_proj", y), history, s)


def linear_attn(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Katharopoulos et al. 2020, equations 18 to 20, and Arora et al. 2024, section 4.1, for the map: sums
    of phi(k) v^T and, the last column of ssm, of phi(k)."""
    h, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    hk = spec.get("kv_heads") or h
    q, k, v = linear(p, "in_proj", x).split([h * dk, hk * dk, hk * dv], dim=-1)
    phi = {
        "elu": lambda u: torch.where(u > 0, u + 1, torch.exp(u)),
        "relu": lambda u: u.clamp(min=0),
        "identity": lambda u: u,
        "unit": lambda u: u / torch.sqrt((u * u).sum() + 1e-6),
        "taylor": _taylor,
    }[spec.get("feature_map", "elu")]
    wide, divided = len(phi(q[0, :dk])) if len(x) else 0, spec.get("normaliser", True)
    s = torch.zeros(h, wide, dv + divided, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            shared = j // (h // hk)
            key, query = phi(k[t, shared * dk : (shared + 1) * dk]), phi(q[t, j * dk : (j + 1) * dk])
            key = key / (key.sum() + 1e-4) if spec.get("unit_k") else key
            query = query / (query.sum() + 1e-4) if spec.get("unit_q") else query
            s[j, :, :dv] += torch.outer(key, v[t, shared * dv : (shared + 1) * dv])
            y[t, j] = s[j, :, :dv].T @ query / math.sqrt(len(query))
            if divided:
                s[j, :, dv] += key
                y[t, j] /= s[j, :, dv] @ query / math.sqrt(len(query)) + spec.get("eps", 1e-10)
    if spec.get("output_norm", True):
        y = rms(y, p["norm.weight"], spec.get("norm_eps", 1e-5))
    return Row(linear(p, "out_proj", y.flatten(1)), x[:0], s)


def convolution(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """A filter a channel over the last few inputs, zeros before the first."""
    act = silu if spec.get("act") else lambda u: u
    y, history = conv(p, x, None if state is None else state[0], act)
    return Row(y, history, x[:0])


def _taylor(u: Tensor) -> Tensor:
    """1, u and u_i u_j / sqrt(2), each of which the state holds once for i <= j."""
    u, n = u / len(u) ** 0.25, len(u)
    pairs = [u[i] * u[j] * (1 if i < j else 0.5**0.5) for i in range(n) for j in range(i, n)]
    return torch.cat([torch.ones_like(u[:1]), u, torch.stack(pairs)])


def gated_deltanet(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Yang et al. 2024, equation 10: S <- alpha (I - beta k k^T) S + beta k v^T with unit keys."""
    hk, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    h = spec.get("value_heads") or hk
    sizes = [2 * hk * dk + h * dv, h * dv if spec.get("gate", True) else 0, h, h]
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
    return Row(_gated(p, y, gate, spec) if sizes[1] else _normed(p, y, spec), history, s)


def kda(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Kimi Team 2025, equation 1: S <- (I - beta k k^T) diag(alpha) S + beta k v^T with unit keys, and with
    `bound` its kernels' other decay."""
    hk, dk, dv, rank = spec["heads"], spec["key_dim"], spec["value_dim"], spec["rank"]
    h = spec.get("value_heads") or hk
    qkv, low, gate, b = linear(p, "in_proj", x).split([2 * hk * dk + h * dv, rank, rank, h], dim=-1)
    qkv, history = conv(p, qkv, None if state is None else state[0])
    q, k, v = qkv.split([hk * dk, hk * dk, h * dv], dim=-1)
    beta, drive = 1 / (1 + torch.exp(-b)), linear(p, "decay_proj", low) + p["dt_bias"]
    s = torch.zeros(h, dk, dv, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            shared, channels = j // (h // hk), drive[t, j * dk : (j + 1) * dk]
            if spec.get("bound") is None:
                alpha = torch.exp(-p["a_log"][j].exp() * softplus(channels))
            else:
                alpha = torch.exp(spec["bound"] / (1 + torch.exp(-p["a_log"][j].exp() * channels)))
            key = _unit(k[t, shared * dk : (shared + 1) * dk])
            query = _unit(q[t, shared * dk : (shared + 1) * dk])
            erase = torch.eye(dk, dtype=x.dtype) - beta[t, j] * torch.outer(key, key)
            fresh = beta[t, j] * torch.outer(key, v[t, j * dv : (j + 1) * dv])
            s[j] = erase @ torch.diag(alpha) @ s[j] + fresh
            y[t, j] = s[j].T @ query / math.sqrt(dk)
    y = rms(y, p["norm.weight"], spec.get("norm_eps", 1e-5)).flatten(1)
    return Row(linear(p, "out_proj", y / (1 + torch.exp(-linear(p, "gate_proj", gate)))), history, s)


def rg_lru(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """De et al. 2024, equations 1 to 4, block by block; the first token of a text enters unscaled."""
    width, heads = spec["width"], spec["heads"]
    y, x = linear(p, "in_proj", x).split([width, width], dim=-1)
    x, history = conv(p, x, None if state is None else state[0], lambda u: u)
    block = width // heads
    h = torch.zeros(width, dtype=x.dtype) if state is None else state[1].clone()
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for j in range(heads):
            own = slice(j * block, (j + 1) * block)
            logits = x[t, own] @ p["gates"][j] + p["gate_bias"][j]
            i, r = (1 / (1 + torch.exp(-logits))).split([block, block])
            a = torch.exp(-8 * softplus(p["rate"][own]) * r)
            scale = 1 if t + spec.get("past", 0) == 0 else (1 - a.square()).sqrt()
            h[own] = a * h[own] + scale * i * x[t, own]
        out[t] = h
    act = ACTS[spec.get("act", "gelu_pytorch_tanh")]
    return Row(linear(p, "out_proj", out * act(y)), history, h)


def retnet(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Sun et al. 2023, equations 6 to 8, without xPos; `past` tokens were read before x."""
    h, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    hk, gates = spec.get("kv_heads") or h, h * dv if spec.get("gate", True) else 0
    q, k, v, gate = linear(p, "in_proj", x).split([h * dk, hk * dk, hk * dv, gates], dim=-1)
    turn = {"rope_theta": spec.get("rope_theta", 10000.0)}
    q, k = (_turned(t.unflatten(-1, (-1, dk)), turn, spec.get("past", 0)) for t in (q, k))
    s = torch.zeros(h, dk, dv, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            shared = j // (h // hk)
            value = v[t, shared * dv : (shared + 1) * dv]
            s[j] = (1 - 2.0 ** (-5 - j)) * s[j] + torch.outer(k[t, shared], value)
            y[t, j] = s[j].T @ q[t, j] / math.sqrt(dk)
    if gates:
        return Row(_gated(p, y, gate, spec), x[:0], s)
    y = rms(y, p["norm.weight"], spec.get("norm_eps", 1e-5)).flatten(1)
    return Row(linear(p, "out_proj", y), x[:0], s)


def lightning(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """MiniMax 2025 (2501.08313), equations 4 to 8 without blocks: S <- exp(-slope) S + k v^T, o = q S."""
    h, dim = spec["heads"], spec["head_dim"]
    qkv, gate = linear(p, "in_proj", x).split([3 * h * dim, h * dim], dim=-1)
    q, k, v = silu(qkv).split(h * dim, dim=-1)
    s = torch.zeros(h, dim, dim, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h * dim, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            own, slope = slice(j * dim, (j + 1) * dim), spec.get("share", 1.0) * (2 ** (-8 / h)) ** (j + 1)
            s[j] = math.exp(-slope) * s[j] + torch.outer(k[t, own], v[t, own])
            y[t, own] = q[t, own] @ s[j]
    y = rms(y, p["norm.weight"], spec.get("norm_eps", 1e-6)) / (1 + torch.exp(-gate))
    return Row(linear(p, "out_proj", y), x[:0], s)


def delta_net(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Yang et al. 2024 (2406.06484), equation 4: S <- (I - beta k k^T) S + beta k v^T."""
    h, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    gates, rates = h * dv if spec.get("gate") else 0, h if spec.get("rate", True) else 0
    qkv, gate, b = linear(p, "in_proj", x).split([2 * h * dk + h * dv, gates, rates], dim=-1)
    history = torch.zeros(0, qkv.shape[1], dtype=x.dtype)
    if spec.get("conv", 4):
        qkv, history = conv(p, qkv, None if state is None else state[0], act=lambda y: y)
    q, k, v = qkv.split([h * dk, h * dk, h * dv], dim=-1)
    act = {
        "silu": silu,
        "relu": lambda y: y.clamp(min=0),
        "elu": lambda y: torch.where(y > 0, y + 1, y.exp()),
        "identity": lambda y: y,
    }[spec.get("act", "silu")]
    q, k, v = act(q), act(k), silu(v)
    beta = (2 if spec.get("negative") else 1) * (1 / (1 + torch.exp(-b)) if rates else torch.ones(len(x), h))
    s = torch.zeros(h, dk, dv, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            key, query = k[t, j * dk : (j + 1) * dk], q[t, j * dk : (j + 1) * dk]
            if spec.get("qk_norm", "l2") == "l2":
                key, query = _unit(key), _unit(query)
            else:
                key, query = (z / z.abs().sum().clamp(min=1e-6) for z in (key, query))
            erase = torch.eye(dk, dtype=x.dtype) - beta[t, j] * torch.outer(key, key)
            s[j] = erase @ s[j] + beta[t, j] * torch.outer(key, v[t, j * dv : (j + 1) * dv])
            y[t, j] = s[j].T @ query / math.sqrt(dk)
    return Row(_gated(p, y, gate, spec) if gates else _normed(p, y, spec), history, s)


def rwkv7(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Peng et al. 2025, equations 4 to 22, one head and one token at a time. `shared` holds what the first
    layer leaves: its value."""
    h, dk, dv = spec["heads"], spec["key_dim"], spec["value_dim"]
    before = torch.zeros(1, x.shape[1], dtype=x.dtype) if state is None else state[0]
    seen = torch.cat([before, x])
    r, w, k, v, a, g = (x + (seen[:-1] - x) * p["mix"][i] for i in range(6))  # x_r, x_w, x_k, x_v, x_a, x_g

    def low_rank(name: str, y: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        return linear(p, f"{name}.up", act(linear(p, f"{name}.down", y))) + p.get(f"{name}.bias", 0)

    w = torch.exp(-math.exp(-0.5) / (1 + torch.exp(-low_rank("decay", w, torch.tanh))))
    rate = 1 / (1 + torch.exp(-low_rank("rate", a, lambda y: y)))
    gate = low_rank("gate", g, lambda y: 1 / (1 + torch.exp(-y)))
    r, k, value = linear(p, "r_proj", r), linear(p, "k_proj", k), linear(p, "v_proj", v)
    shared = spec.get("shared", {})
    if spec.get("value_rank"):
        share = 1 / (1 + torch.exp(-low_rank("share", v, lambda y: y)))
        value = value + (shared["value"] - value) * share
    else:
        shared.setdefault("value", value)
    removal, k = k * p["kappa_scale"], k * (1 + (rate - 1) * p["rate_share"])
    s = torch.zeros(h, dk, dv, dtype=x.dtype) if state is None else state[1].clone()
    y = torch.zeros(len(x), h * dv, dtype=x.dtype)
    for t in range(len(x)):
        for j in range(h):
            keys, values = slice(j * dk, (j + 1) * dk), slice(j * dv, (j + 1) * dv)
            kappa = removal[t, keys] / (removal[t, keys].square().sum() + spec.get("kappa_eps", 0)).sqrt()
            transition = torch.diag(w[t, keys]) - torch.outer(kappa * rate[t, keys], kappa)
            s[j] = transition @ s[j] + torch.outer(k[t, keys], value[t, values])
            o = s[j].T @ r[t, keys]
            o = (o - o.mean()) / (o.var(correction=0) + spec.get("norm_eps", 64e-5)).sqrt()
            o = o * p["norm.weight"][values] + p["norm.bias"][values]
            y[t, values] = o + (r[t, keys] * k[t, keys] * p["bonus"][j]).sum() * value[t, values]
    return Row(linear(p, "out_proj", y * gate), seen[-1:], s)


def attention(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Softmax over the positions that a token sees; rotary as a complex turn of each pair of channels. With
    `kv_from` the keys and values are those of an earlier layer (Brandon et al. 2024, section 3)."""
    h, hk, dim = spec["heads"], spec.get("kv_heads") or spec["heads"], spec["head_dim"]
    shared, rope = spec.get("shared", {}), spec.get("rope")

    def placed(y: Tensor, name: str) -> Tensor:
        if spec.get("qk_norm"):
            weight = p[f"{name}_norm.weight"] + spec.get("norm_offset", 0)
            y = rms(y, weight, spec.get("norm_eps", 1e-5))
        return y if rope is None else _turned(y, rope)

    if spec.get("kv_from") is None:
        q, k, v = linear(p, "qkv", x).unflatten(-1, (-1, dim)).split([h, hk, hk], dim=1)
        k = placed(k, "k")
        shared["kv", spec.get("index")] = k, v
    else:
        q = linear(p, "q", x).unflatten(-1, (-1, dim))
        k, v = shared["kv", spec["kv_from"]]
    q, scale = placed(q, "q"), spec.get("scale") or 1 / math.sqrt(dim)
    y = torch.zeros(len(x), h, dim, dtype=x.dtype)
    for t in range(len(x)):
        start = 0 if spec.get("window") is None else max(0, t - spec["window"] + 1)
        block = spec.get("block", 1)  # None: the whole row
        end = len(x) if block is None else min(len(x), (t // block + 1) * block)
        for j in range(h):
            own = j // (h // hk)
            weights = torch.softmax(k[start:end, own] @ q[t, j] * scale, 0)
            y[t, j] = weights @ v[start:end, own]
    if spec.get("gate"):
        y = y / (1 + torch.exp(-linear(p, "gate", x))).unflatten(-1, (h, dim))
    return Row(linear(p, "out", y.flatten(1)), x[:0], x[:0])


def latent(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """DeepSeek-V2 (2405.04434), equations 9 to 19, a token and a head at a time: every key and value made."""
    h, rank, dr = spec["heads"], spec["rank"], spec["rope_dim"]
    dk, dv, eps = spec["key_dim"], spec["value_dim"], spec.get("norm_eps", 1e-6)
    q, c, key = linear(p, "in_proj", x).split([spec.get("q_rank") or h * (dk + dr), rank, dr], dim=-1)
    if spec.get("q_rank"):
        q = linear(p, "q_proj", rms(q, p["q_norm.weight"], eps))
    q, key, c = q.unflatten(-1, (h, dk + dr)), key[:, None], rms(c, p["norm.weight"], eps)
    if spec.get("rope") is not None:
        key = _turned(key, spec["rope"])
        q = torch.cat([q[..., :dk], _turned(q[..., dk:], spec["rope"])], dim=-1)
    scale = spec.get("scale") or (dk + dr) ** -0.5
    y = torch.zeros(len(x), h, dv, dtype=x.dtype)
    for j in range(h):
        made = p["kv_proj.weight"][j * (dk + dv) : (j + 1) * (dk + dv)]
        k, v = torch.cat([c @ made[:dk].T, key[:, 0]], dim=-1), c @ made[dk:].T
        for t in range(len(x)):
            y[t, j] = torch.softmax(scale * k[: t + 1] @ q[t, j], 0) @ v[: t + 1]
    return Row(linear(p, "out", y.flatten(1)), x[:0], x[:0])


ACTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": lambda y: y / 2 * (1 + torch.erf(y / 2**0.5)),
    "relu2": lambda y: y.clamp(min=0) ** 2,
    "gelu_pytorch_tanh": lambda y: y / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3))),
}


def mlp(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """down(act(up)), or down(act(gate) * up) where there is a gate."""
    act = ACTS[spec.get("act", "silu")]
    if "gate_up.weight" in p:
        gate, up = linear(p, "gate_up", x).chunk(2, dim=-1)
        return Row(linear(p, "down", act(gate * spec.get("gate_scale", 1.0)) * up), x[:0], x[:0])
    return Row(linear(p, "down", act(linear(p, "up", x))), x[:0], x[:0])


def experts(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Shazeer et al. 2017, equation 1, with the routers of DeepSeek-V3 (2024, equations 12 to 16) and of the
    softmax families: one token at a time, each of its experts by itself."""
    count, groups, act = spec["experts"], spec.get("groups", 1), ACTS[spec.get("act", "silu")]
    y = torch.zeros_like(x)
    for t in range(len(x)):
        logits = [(p["router.weight"][e] * x[t]).sum() for e in range(count)]
        powers = [torch.exp(z - max(logits)) for z in logits]
        softmax = [z / sum(powers) for z in powers]
        sigmoid = [1 / (1 + torch.exp(-z)) for z in logits]
        scores = softmax if spec.get("scores", "softmax") == "softmax" else sigmoid
        bias = p["router.correction"] if spec.get("correction") else torch.zeros(count)
        appeal = [float((scores[e] + bias[e]).detach()) for e in range(count)]
        size = count // groups
        worth = [sum(sorted(appeal[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -worth[g])[: spec.get("kept_groups", 1)]
        best = sorted((e for e in range(count) if e // size in kept), key=lambda e: -appeal[e])
        chosen = best[: spec["per_token"]]
        total = sum(scores[e] for e in chosen) if spec.get("normalise", True) else 1
        seen = linear(p, "latent_in", x[t]) if spec.get("latent") else x[t]
        answer = torch.zeros_like(seen)
        for e in chosen:
            inner = p["up"][e] @ seen
            if spec.get("gated", True):
                inner = act(inner[: spec["width"]]) * inner[spec["width"] :]
            else:
                inner = act(inner)
            answer = answer + spec.get("scale", 1.0) * scores[e] / total * (p["down"][e] @ inner)
        y[t] = linear(p, "latent_out", answer) if spec.get("latent") else answer
        own = {name.removeprefix("shared."): w for name, w in p.items() if name.startswith("shared.")}
        if own and spec.get("shared", True):
            share = 1 / (1 + torch.exp(-linear(p, "shared_gate", x[t]))) if spec.get("shared_gate") else 1
            y[t] = y[t] + share * mlp(own, x[t], spec).y
    return Row(y, x[:0], x[:0])


MIXERS: Mapping[str, Callable[..., Row]] = {
    "mlp": mlp,
    "experts": experts,
    "mamba": mamba,
    "mamba2": mamba2,
    "gla": gla,
    "hgrn2": hgrn2,
    "linear_attn": linear_attn,
    "gated_deltanet": gated_deltanet,
    "delta_net": delta_net,
    "kda": kda,
    "rg_lru": rg_lru,
    "rwkv7": rwkv7,
    "retnet": retnet,
    "lightning": lightning,
    "attention": attention,
    "latent": latent,
    "convolution": convolution,
}


# The window of each layer, None for full attention.
TRANSFORMERS: Mapping[str, Callable[[Mapping[str, Any]], list[int | None]]] = {
    "llama": lambda raw: [None] * raw["num_hidden_layers"],
    "mistral": lambda raw: [raw["sliding_window"]] * raw["num_hidden_layers"],
    "qwen2": lambda raw: [
        raw["sliding_window"] if i >= raw["max_window_layers"] else None
        for i in range(raw["num_hidden_layers"])
    ],
    "qwen3": lambda raw: [
        raw["sliding_window"] if kind == "sliding_attention" else None for kind in raw["layer_types"]
    ],
}


# A causal config with the layers of each denoiser (biases are where there are any); how far a place sees.
DENOISERS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], int | None]]] = {
    "Dream": lambda raw: ({**raw, "model_type": "llama"}, None),
    "llada": lambda raw: (
        {
            "model_type": "llama",
            "num_hidden_layers": raw["n_layers"],
            "num_attention_heads": raw["n_heads"],
            "num_key_value_heads": raw["n_kv_heads"],
            "head_dim": raw["d_model"] // raw["n_heads"],
            "rope_parameters": {"rope_theta": raw["rope_theta"]},
        },
        None,
    ),
    "sdar": lambda raw: (
        {**raw, "model_type": "qwen3", "layer_types": ["full_attention"] * raw["num_hidden_layers"]},
        raw["block_size"],
    ),
    "llada2_moe": lambda raw: (
        {
            "model_type": "composed",
            "norm_eps": raw["rms_norm_eps"],
            "layers": [
                {
                    "mixer": {
                        "type": "attention",
                        "heads": raw["num_attention_heads"],
                        "kv_heads": raw["num_key_value_heads"],
                        "head_dim": raw["head_dim"],
                        "rope": {"partial_rotary_factor": 0.5, **raw["rope_parameters"]},
                        "qk_norm": True,
                        "norm_eps": raw["rms_norm_eps"],
                    },
                    "mlp": {"width": raw["intermediate_size"]}
                    if i < raw["first_k_dense_replace"]
                    else {
                        "experts": raw["num_experts"],
                        "per_token": raw["num_experts_per_tok"],
                        "width": raw["moe_intermediate_size"],
                        "scores": "sigmoid",
                        "scale": 2.5,
                        "groups": raw["n_group"],
                        "kept_groups": raw["topk_group"],
                        "correction": True,
                    },
                }
                for i in range(raw["num_hidden_layers"])
            ],
        },
        raw["block_size"],
    ),
}

# flash-linear-attention's families: the mixer of layer i, where it is not attention, and its spec.
FLA: Mapping[str, Callable[[Mapping[str, Any], int], tuple[str, Mapping[str, Any]]]] = {
    "gla": lambda raw, i: (
        "gla",
        {
            **_widths(raw),
            "temperature": raw["gate_logit_normalizer"],
            "conv": raw["conv_size"],
            "decay_min": raw["clamp_min"],
        },
    ),
    "linear_attn": lambda raw, i: (
        "linear_attn",
        {
            **_widths(raw),
            "feature_map": raw["feature_map"],
            "normaliser": raw["norm_feature_map"],
            "unit_q": raw["norm_q"],
            "unit_k": raw["norm_k"],
        },
    ),
    "based": lambda raw, i: (
        "linear_attn",
        {
            "heads": raw["num_heads"],
            "key_dim": raw["feature_dim"],
            "value_dim": raw["hidden_size"] // raw["num_heads"],
            "feature_map": "taylor",
            "output_norm": False,
        },
    ),
    "hgrn2": lambda raw, i: (
        "hgrn2",
        {
            "heads": raw["hidden_size"] // raw["expand_ratio"],
            "key_dim": raw["expand_ratio"],
            "value_dim": raw["expand_ratio"],
            "conv": raw["conv_size"],
            "layer": i,
        },
    ),
}


def _widths(raw: Mapping[str, Any]) -> dict[str, Any]:
    h, d = raw["num_heads"], raw["hidden_size"]
    return {
        "heads": h,
        "kv_heads": raw.get("num_kv_heads"),
        "key_dim": int(d * raw["expand_k"]) // h,
        "value_dim": int(d * raw["expand_v"]) // h,
        "norm_eps": raw["norm_eps"],
    }


def _fla(raw: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    attn = raw.get("attn") or {**raw, "layers": raw.get("window_layers", ())}
    spec = attn["layers"] and {
        "heads": attn["num_heads"],
        "kv_heads": attn.get("num_kv_heads"),
        "head_dim": raw["hidden_size"] // attn["num_heads"],
        "window": attn.get("window_size"),
        "rope": {"rope_theta": attn.get("rope_theta", 10000.0)},
    }
    layers = range(raw["num_hidden_layers"])
    mixers = [("attention", spec) if i in attn["layers"] else FLA[raw["model_type"]](raw, i) for i in layers]
    return [(kind, own, True) for kind, own in mixers]


def model(module: nn.Module, tokens: Tensor, raw: Mapping[str, Any]) -> Tensor:
    """Logits (t, vocab) of a whole model of ours, given its config.json."""
    p = params(module)
    if raw["model_type"] == "rwkv7":
        return _rwkv7_model(p, tokens, raw)
    from tests.stacks import STACKS, run  # built of the mixers above

    if raw["model_type"] in STACKS:
        return run(p, tokens, STACKS[raw["model_type"]](raw))
    layers, eps, scale = _layers(raw)
    shared: dict[str, Tensor] = {}
    x = p["embed.weight"][tokens] * scale
    for i, (kind, spec, mlp) in enumerate(layers):
        at = f"blocks.{i}."
        own = {name.removeprefix(at + "mixer."): t for name, t in p.items() if name.startswith(at + "mixer.")}
        own |= {name.split(".")[-1]: t for name, t in p.items() if name.endswith(".bounds")}  # of all layers
        spec = {**spec, "shared": shared, "index": i}
        x = x + MIXERS[kind](own, rms(x, p[at + "mixer_norm.weight"], eps), spec).y
        if mlp:
            own = {name.removeprefix(at + "mlp."): t for name, t in p.items() if name.startswith(at + "mlp.")}
            kind, spec = ("experts", mlp) if isinstance(mlp, Mapping) else ("mlp", {})
            x = x + MIXERS[kind](own, rms(x, p[at + "mlp_norm.weight"], eps), spec).y
    return rms(x, p["norm.weight"], eps) @ p.get("head.weight", p["embed.weight"]).T


def _layers(raw: Mapping[str, Any]) -> tuple[list[tuple[str, Mapping[str, Any], Any]], float, float]:
    """(mixer, its spec, whether an MLP follows or the spec of experts) of each layer; the norms' eps; the
    embedding's scale."""
    if raw["model_type"] == "composed":
        mlps = [
            layer["mlp"] if "experts" in (layer["mlp"] or ()) else bool(layer["mlp"])
            for layer in raw["layers"]
        ]
        mixers = [layer["mixer"] for layer in raw["layers"]]
        layers = [(mixer["type"], mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
        return layers, raw["norm_eps"], raw.get("embed_scale", 1.0)
    if raw["model_type"] == "composed_diffusion":
        layers, eps, scale = _layers({**raw, "model_type": "composed", "norm_eps": raw.get("norm_eps", 1e-5)})
        return [(kind, {**spec, "block": raw.get("block")}, mlp) for kind, spec, mlp in layers], eps, scale
    if raw["model_type"] in DENOISERS:
        twin, block = DENOISERS[raw["model_type"]](raw)
        layers, eps, scale = _layers(twin)
        eps = raw.get("rms_norm_eps", eps)
        return [(kind, {**spec, "block": block}, mlp) for kind, spec, mlp in layers], eps, scale
    if raw["model_type"] == "mamba2":
        spec = {
            "heads": raw["num_heads"],
            "head_dim": raw["head_dim"],
            "state_size": raw["state_size"],
            "groups": raw["n_groups"],
            "conv": raw["conv_kernel"],
        }
        return [("mamba2", spec, False)] * raw["num_hidden_layers"], 1e-5, 1.0
    if raw["model_type"] in ("mamba", "falcon_mamba"):
        spec = {"inner": raw["intermediate_size"], "state_size": raw["state_size"], "rank": 2}
        spec["norm_eps"] = raw.get("mixer_rms_eps")
        return [("mamba", spec, False)] * raw["num_hidden_layers"], 1e-5, 1.0
    if raw["model_type"] == "retnet":
        h, d, eps = raw["num_heads"], raw["hidden_size"], raw["norm_eps"]
        spec = {"heads": h, "kv_heads": raw["num_kv_heads"], "norm_eps": eps}
        spec |= {"key_dim": int(d * raw["expand_k"]) // h, "value_dim": int(d * raw["expand_v"]) // h}
        return [("retnet", spec, True)] * raw["num_hidden_layers"], eps, 1.0
    if raw["model_type"] in FLA:
        return _fla(raw), raw["norm_eps"], 1.0
    if raw["model_type"] in ("delta_net", "gated_deltanet"):
        h, eps = raw["num_heads"], raw["norm_eps"]
        spec = {"heads": h, "norm_eps": eps, "gate": raw["use_gate"], "negative": raw["allow_neg_eigval"]}
        if raw["model_type"] == "delta_net":
            dk, dv = (int(raw["hidden_size"] * raw[f"expand_{part}"]) // h for part in "kv")
        else:
            dk, dv = raw["head_dim"], int(raw["head_dim"] * raw["expand_v"])
            spec["value_heads"] = raw["num_v_heads"]
        spec |= {"conv": raw["conv_size"], "key_dim": dk, "value_dim": dv}
        return [(str(raw["model_type"]), spec, True)] * raw["num_hidden_layers"], eps, 1.0
    if raw["model_type"] in TRANSFORMERS:
        spec = {
            "heads": raw["num_attention_heads"],
            "kv_heads": raw["num_key_value_heads"],
            "head_dim": raw["head_dim"],
            "rope": raw["rope_parameters"],
            "qk_norm": raw["model_type"] == "qwen3",
            "norm_eps": 1e-6,
        }
        windows = TRANSFORMERS[raw["model_type"]](raw)
        return [("attention", {**spec, "window": w}, True) for w in windows], 1e-6, 1.0
    raise KeyError(f"{raw['model_type']}: say in tests/loops.py which layers it has")


def _rwkv7_model(p: Params, tokens: Tensor, raw: Mapping[str, Any]) -> Tensor:
    """Layer norms, one of them behind the embedding; the channel mix has a token shift too."""
    eps, dk = raw["norm_eps"], raw["head_dim"]
    h = raw["hidden_size"] // dk
    spec = {"heads": h, "key_dim": dk, "value_dim": raw.get("value_dim", raw["hidden_size"]) // h}
    spec |= {"norm_eps": dk * eps, "kappa_eps": 1e-6 if raw.get("fuse_norm", True) else 0, "shared": {}}

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = norm(p["embed.weight"][tokens], "embed_norm")
    for i in range(raw["num_hidden_layers"]):
        at = f"blocks.{i}."
        own = {name.removeprefix(at + "mixer."): t for name, t in p.items() if name.startswith(at + "mixer.")}
        x = x + rwkv7(own, norm(x, at + "mixer_norm"), {**spec, "value_rank": i}).y
        y = norm(x, at + "mlp_norm")
        y = y + (torch.cat([torch.zeros_like(y[:1]), y[:-1]]) - y) * p[at + "mlp.mix"]
        x = x + linear(p, at + "mlp.down", linear(p, at + "mlp.up", y).clamp(min=0).square())
    return norm(x, "norm") @ p.get("head.weight", p["embed.weight"]).T


def _normed(p: Params, y: Tensor, spec: Mapping[str, Any]) -> Tensor:
    """Norm a head, then out."""
    return linear(p, "out_proj", rms(y, p["norm.weight"], spec.get("norm_eps", 1e-5)).flatten(1))


def _gated(p: Params, y: Tensor, gate: Tensor, spec: Mapping[str, Any]) -> Tensor:
    """Norm a head, then gate, then out."""
    y = rms(y, p["norm.weight"], spec.get("norm_eps", 1e-5)).flatten(1)
    return linear(p, "out_proj", y * silu(gate))


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()


def _turned(x: Tensor, rope: Mapping[str, Any], past: int = 0) -> Tensor:
    """x (t, h, k): channels i and i + dim / 2 are one complex number, turned by position * frequency."""
    dim = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    half = dim // 2
    frequency = rope.get("rope_theta", 10000.0) ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(past, past + len(x), dtype=torch.float64)[:, None, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:dim]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag, x[..., dim:]], dim=-1)
