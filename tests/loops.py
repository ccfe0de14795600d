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
    if spec.get("norm_eps") is not None:  # Falcon Mamba (Zuo et al. 2024, section 3.2)
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
    """Softmax over the positions that a token sees; rotary as a complex turn of each pair of channels."""
    h, hk, dim = spec["heads"], spec.get("kv_heads") or spec["heads"], spec["head_dim"]
    q, k, v = linear(p, "qkv", x).unflatten(-1, (-1, dim)).split([h, hk, hk], dim=1)
    if spec.get("qk_norm"):
        q, k = (rms(t, p[f"{n}_norm.weight"], spec.get("norm_eps", 1e-5)) for n, t in (("q", q), ("k", k)))
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
    "hgrn2": hgrn2,
    "linear_attn": linear_attn,
    "gated_deltanet": gated_deltanet,
    "delta_net": delta_net,
    "rwkv7": rwkv7,
    "retnet": retnet,
    "attention": attention,
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
    layers, eps, scale = _layers(raw)
    shared: dict[str, Tensor] = {}
    x = p["embed.weight"][tokens] * scale
    for i, (kind, spec, mlp) in enumerate(layers):
        at = f"blocks.{i}."
        own = {name.removeprefix(at + "mixer."): t for name, t in p.items() if name.startswith(at + "mixer.")}
        own |= {name.split(".")[-1]: t for name, t in p.items() if name.endswith(".bounds")}  # of all layers
        x = x + MIXERS[kind](own, rms(x, p[at + "mixer_norm.weight"], eps), {**spec, "shared": shared}).y
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
