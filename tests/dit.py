"""MDLM and BD3-LM as a plain float64 loop over the checkpoint's own names and tensors.

Written from the papers (2406.07524, 2503.09573) beside constate/diffusion_lm/mdlm.py, with which it shares
nothing: one place at a time, sigma and the mask of what is seen by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def logits(tensors: Tensors, tokens: Tensor, raw: Mapping[str, Any]) -> Tensor:
    """(t, vocab) of one row, given its checkpoint and config.json."""
    p = {name.removeprefix("backbone."): t.double() for name, t in tensors.items()}
    block = raw.get("block_size")
    heard = _heard(p, tokens, raw) if raw.get("adaln", True) else None
    x = p["vocab_embed.embedding"][tokens]
    for i in range(raw["n_blocks"]):
        own = {
            name.removeprefix(f"blocks.{i}."): t for name, t in p.items() if name.startswith(f"blocks.{i}.")
        }
        if heard is None:
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = 0.0, 0.0, 1.0, 0.0, 0.0, 1.0
        else:
            six = own["adaLN_modulation.weight"] @ heard + own["adaLN_modulation.bias"]
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six.chunk(6)
        y = _normed(x, own["norm1.weight"]) * (1 + scale_a) + shift_a
        x = x + gate_a * _attention(own, y, raw["n_heads"], block)
        y = _normed(x, own["norm2.weight"]) * (1 + scale_m) + shift_m
        y = _gelu(y @ own["mlp.0.weight"].T + own["mlp.0.bias"])
        x = x + gate_m * (y @ own["mlp.2.weight"].T + own["mlp.2.bias"])
    y = _normed(x, p["output_layer.norm_final.weight"])
    if heard is not None:
        both = p["output_layer.adaLN_modulation.weight"] @ heard + p["output_layer.adaLN_modulation.bias"]
        shift, scale = both.chunk(2)
        y = y * (1 + scale) + shift
    return y @ p["output_layer.linear.weight"].T + p["output_layer.linear.bias"]


def _heard(p: Tensors, tokens: Tensor, raw: Mapping[str, Any]) -> Tensor:
    sigma = 0.0
    if raw.get("time_conditioning"):
        share = int((tokens == raw["vocab_size"] - 1).sum()) / len(tokens)
        sigma = -math.log(1 - min(share, 0.999))
    waves = [sigma * 10_000 ** (-i / 128) for i in range(128)]
    x = torch.tensor([math.cos(w) for w in waves] + [math.sin(w) for w in waves], dtype=torch.float64)
    x = p["sigma_map.mlp.0.weight"] @ x + p["sigma_map.mlp.0.bias"]
    x = p["sigma_map.mlp.2.weight"] @ (x * x.sigmoid()) + p["sigma_map.mlp.2.bias"]
    return x * x.sigmoid()


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _attention(own: Tensors, x: Tensor, heads: int, block: int | None) -> Tensor:
    dim = x.shape[1] // heads
    q, k, v = (x @ own["attn_qkv.weight"].T).view(len(x), 3, heads, dim).unbind(1)
    q, k = _turned(q), _turned(k)
    rows = []
    for t in range(len(x)):
        end = len(x) if block is None else min(len(x), (t // block + 1) * block)
        scores = (q[t] * k[:end]).sum(-1) / math.sqrt(dim)  # (end, heads)
        rows.append((scores.softmax(0)[..., None] * v[:end]).sum(0).flatten())
    return torch.stack(rows) @ own["attn_out.weight"].T


def _turned(x: Tensor) -> Tensor:
    """(t, heads, dim), channels i and i + dim / 2 turned by the angle place * 10000 ** (-2 i / dim)."""
    half = x.shape[-1] // 2
    rates = 10_000 ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * rates
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([z.real, z.imag], -1)
