"""Whole hybrids as float64 loops: which branches each layer of a published family has, from its config.json.

The mixers are tests/loops.py's. A family says here what stands around them; nothing is shared with the
package but the names of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.loops import MIXERS, Params, Row, attention, linear, mamba2, mlp, rms


class Arm(NamedTuple):
    """One residual branch: with y = norm(x), x becomes keep * r + scale * post(f(y)); r is x, or y."""

    name: str
    kind: str
    spec: Mapping[str, Any] = {}
    post: bool = False
    keep: float = 1.0
    scale: float = 1.0
    from_norm: bool = False


class Stack(NamedTuple):
    """Each layer's branches, and what stands around them. `offset` is added to the weight of every norm."""

    layers: Sequence[Sequence[Arm]]
    eps: float
    offset: float = 0.0
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    cap: float | None = None


def run(p: Params, tokens: Tensor, stack: Stack) -> Tensor:
    """Logits (t, vocab)."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, p[f"{name}.weight"] + stack.offset, stack.eps)

    x = p["embed.weight"][tokens] * stack.embed_scale
    shared: dict[str, Tensor] = {"embedding": x}
    for i, layer in enumerate(stack.layers):
        for arm in layer:
            at = f"blocks.{i}.{arm.name}"
            own = {name.removeprefix(f"{at}."): t for name, t in p.items() if name.startswith(f"{at}.")}
            y = norm(x, f"{at}_norm") if f"{at}_norm.weight" in p else x
            said = KINDS[arm.kind](own, y, {**arm.spec, "shared": shared}).y
            said = norm(said, f"{at}_post") if arm.post else said
            x = arm.keep * (y if arm.from_norm else x) + arm.scale * said
    logits = norm(x, "norm") @ p.get("head.weight", p["embed.weight"]).T * stack.logit_scale
    return logits if stack.cap is None else stack.cap * torch.tanh(logits / stack.cap)


def _gemma3_text(raw: Mapping[str, Any]) -> Stack:
    def layer(kind: str) -> list[Arm]:
        spec = {
            "heads": raw["num_attention_heads"],
            "kv_heads": raw["num_key_value_heads"],
            "head_dim": raw["head_dim"],
            "window": raw["sliding_window"] if kind == "sliding_attention" else None,
            "rope": raw["rope_parameters"][kind],
            "scale": raw["query_pre_attn_scalar"] ** -0.5,
            "qk_norm": True,
            "norm_offset": 1.0,
            "norm_eps": raw["rms_norm_eps"],
        }
        return [
            Arm("mixer", "attention", spec, post=True),
            Arm("mlp", "mlp", {"act": "gelu_pytorch_tanh"}, post=True),
        ]

    scale, cap = raw["hidden_size"] ** 0.5, raw["final_logit_softcapping"]
    layers = [layer(kind) for kind in raw["layer_types"]]
    return Stack(layers, raw["rms_norm_eps"], offset=1.0, embed_scale=scale, cap=cap)


def _qwen3_next(raw: Mapping[str, Any]) -> Stack:
    eps, kinds = raw["rms_norm_eps"], {"linear_attention": "gated_deltanet", "full_attention": "attention"}
    mixers = {
        "linear_attention": {
            "heads": raw["linear_num_key_heads"],
            "value_heads": raw["linear_num_value_heads"],
            "key_dim": raw["linear_key_head_dim"],
            "value_dim": raw["linear_value_head_dim"],
            "norm_eps": eps,
        },
        "full_attention": {
            "heads": raw["num_attention_heads"],
            "kv_heads": raw["num_key_value_heads"],
            "head_dim": raw["head_dim"],
            "rope": raw["rope_parameters"],
            "qk_norm": True,
            "norm_offset": 1.0,
            "norm_eps": eps,
            "gate": True,
        },
    }
    experts = {
        "experts": raw["num_experts"],
        "per_token": raw["num_experts_per_tok"],
        "width": raw["moe_intermediate_size"],
        "shared": raw["shared_expert_intermediate_size"],
        "shared_gate": True,
    }
    layers = [
        [
            Arm("mixer", kinds[kind], mixers[kind]),
            Arm("mlp", "mlp") if i in raw["mlp_only_layers"] else Arm("mlp", "experts", experts),
        ]
        for i, kind in enumerate(raw["layer_types"])
    ]
    return Stack(layers, eps, offset=1.0)


def _deepseek_v3(raw: Mapping[str, Any]) -> Stack:
    latent = {
        "heads": raw["num_attention_heads"],
        "rank": raw["kv_lora_rank"],
        "q_rank": raw["q_lora_rank"],
        "key_dim": raw["qk_nope_head_dim"],
        "rope_dim": raw["qk_rope_head_dim"],
        "value_dim": raw["v_head_dim"],
        "rope": raw["rope_parameters"],
        "norm_eps": 1e-6,
    }
    experts = {
        "experts": raw["n_routed_experts"],
        "per_token": raw["num_experts_per_tok"],
        "width": raw["moe_intermediate_size"],
        "scores": "sigmoid",
        "correction": True,
        "scale": raw["routed_scaling_factor"],
        "groups": raw["n_group"],
        "kept_groups": raw["topk_group"],
        "shared": raw["moe_intermediate_size"] * raw["n_shared_experts"],
    }

    def layer(i: int) -> list[Arm]:
        sparse = i >= raw["first_k_dense_replace"]
        mlp = Arm("mlp", "experts", experts) if sparse else Arm("mlp", "mlp")
        return [Arm("mixer", "latent", latent), mlp]

    return Stack([layer(i) for i in range(raw["num_hidden_layers"])], raw["rms_norm_eps"])


def within(p: Params, name: str) -> Params:
    """The parameters of a part, under its own names."""
    return {n.removeprefix(f"{name}."): t for n, t in p.items() if n.startswith(f"{name}.")}


def parallel(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Several mixers on one input, each with a factor before and one after."""
    arms = spec["arms"]
    said = [after * MIXERS[k](within(p, name), before * x, own).y for name, k, own, before, after in arms]
    return Row(torch.stack(said).sum(0), x[:0], x[:0])


def zamba2_hybrid(p: Params, x: Tensor, spec: Mapping[str, Any], state: Any = None) -> Row:
    """Glorioso et al. 2024, figure 2: a block whose weights its first user leaves for the others. Each user
    adds its adapters to the matrices themselves."""
    shared, eps = spec["shared"], spec["eps"]
    block = shared.setdefault(f"block {spec['block']}", p)

    def adapted(name: str, parts: int) -> Tensor:
        if f"{name}.down.weight" not in p:
            return block[f"{name}.weight"]
        down, up = (p[f"{name}.{part}.weight"].chunk(parts) for part in ("down", "up"))
        low = torch.cat([u @ d for u, d in zip(up, down, strict=True)])
        return block[f"{name}.base.weight"] + low

    both = rms(torch.cat([x, shared["embedding"]], dim=-1), block["attention_norm.weight"], eps)
    qkv = {"qkv.weight": adapted("attention.qkv", 3), "out.weight": block["attention.out.weight"]}
    said = rms(attention(qkv, both, spec["attention"]).y, block["mlp_norm.weight"], eps)
    own = {**within(block, "mlp"), "gate_up.weight": adapted("mlp.gate_up", 1)}
    if "gate_up.base.bias" in own:
        own["gate_up.bias"] = own["gate_up.base.bias"]
    said = linear(p, "linear", mlp(own, said, {"act": "gelu"}).y)
    return mamba2(within(p, "mamba"), rms(x + said, p["mamba_norm.weight"], eps), spec["ssm"])


KINDS: Mapping[str, Callable[..., Row]] = {**MIXERS, "parallel": parallel, "zamba2": zamba2_hybrid}


def _falcon_h1(raw: Mapping[str, Any]) -> Stack:
    heads, gate, down = raw["num_attention_heads"], *raw["mlp_multipliers"]
    ssm = {
        "heads": raw["mamba_n_heads"],
        "head_dim": raw["mamba_d_ssm"] // raw["mamba_n_heads"],
        "state_size": raw["mamba_d_state"],
        "groups": raw["mamba_n_groups"],
        "norm": raw["mamba_rms_norm"],
        "norm_before": raw["mamba_norm_before_gate"],
        "norm_eps": raw["rms_norm_eps"],
        "scales": raw["ssm_multipliers"],
    }
    attention = {
        "heads": heads,
        "kv_heads": raw["num_key_value_heads"],
        "head_dim": raw["head_dim"],
        "rope": raw["rope_parameters"],
        "scale": raw["key_multiplier"] * raw["head_dim"] ** -0.5,
    }
    arms = [
        ("ssm", "mamba2", ssm, raw["ssm_in_multiplier"], raw["ssm_out_multiplier"]),
        (
            "attention",
            "attention",
            attention,
            raw["attention_in_multiplier"],
            raw["attention_out_multiplier"],
        ),
    ]
    layer = [Arm("mixer", "parallel", {"arms": arms}), Arm("mlp", "mlp", {"gate_scale": gate}, scale=down)]
    return Stack(
        [layer] * raw["num_hidden_layers"],
        raw["rms_norm_eps"],
        embed_scale=raw["embedding_multiplier"],
        logit_scale=raw["lm_head_multiplier"],
    )


def _zamba2(raw: Mapping[str, Any]) -> Stack:
    d, heads, eps = raw["hidden_size"], raw["num_attention_heads"], raw["rms_norm_eps"]
    ssm = {
        "heads": raw["n_mamba_heads"],
        "head_dim": raw["mamba_expand"] * d // raw["n_mamba_heads"],
        "state_size": raw["mamba_d_state"],
        "groups": raw["mamba_ngroups"],
        "dt_limit": (raw["time_step_min"], math.inf),
    }
    head_dim = 2 * d // heads
    attention = {"heads": heads, "head_dim": head_dim, "scale": (head_dim / 2) ** -0.5}
    hybrid = {"eps": eps, "ssm": ssm, "attention": {**attention, "rope": raw["rope_parameters"]}}
    layers, used = [], 0
    for kind in raw["layers_block_type"]:
        if kind == "hybrid":
            layers.append([Arm("mixer", "zamba2", {**hybrid, "block": used % raw["num_mem_blocks"]})])
            used += 1
        else:
            layers.append([Arm("mixer", "mamba2", ssm)])
    return Stack(layers, eps)


def _jamba(raw: Mapping[str, Any]) -> Stack:
    eps, heads = raw["rms_norm_eps"], raw["num_attention_heads"]
    mamba = {"inner": raw["mamba_expand"] * raw["hidden_size"], "rank": raw["mamba_dt_rank"]}
    mamba |= {"state_size": raw["mamba_d_state"], "norm_eps": eps, "norm_weight": True}
    attention = {"heads": heads, "kv_heads": raw["num_key_value_heads"]}
    attention |= {"head_dim": raw["hidden_size"] // heads}
    experts = {"experts": raw["num_experts"], "per_token": raw["num_experts_per_tok"]}
    experts |= {"width": raw["intermediate_size"], "normalise": False}

    def layer(i: int) -> list[Arm]:
        attends = i % raw["attn_layer_period"] == raw["attn_layer_offset"]
        asks = i % raw["expert_layer_period"] == raw["expert_layer_offset"]
        return [
            Arm("mixer", "attention", attention) if attends else Arm("mixer", "mamba", mamba),
            Arm("mlp", "experts", experts) if asks else Arm("mlp", "mlp"),
        ]

    return Stack([layer(i) for i in range(raw["num_hidden_layers"])], eps)


def _minimax(raw: Mapping[str, Any]) -> Stack:
    layers = raw["num_hidden_layers"]
    size = {"heads": raw["num_attention_heads"], "head_dim": raw["head_dim"]}
    full = {**size, "kv_heads": raw["num_key_value_heads"], "rope": raw["rope_parameters"]}
    full["window"] = raw["sliding_window"]
    experts = {
        "experts": raw["num_local_experts"],
        "per_token": raw["num_experts_per_tok"],
        "width": raw["intermediate_size"],
    }

    def weighed(what: str) -> dict[str, Any]:
        return {"keep": raw[f"{what}_alpha_factor"], "scale": raw[f"{what}_beta_factor"], "from_norm": True}

    def layer(i: int, kind: str) -> list[Arm]:
        if kind == "full_attention":
            mixer = Arm("mixer", "attention", full, **weighed("full_attn"))
        else:
            share = 1 - i / (layers - 1 + 1e-5) + 1e-5
            mixer = Arm("mixer", "lightning", {**size, "share": share}, **weighed("linear_attn"))
        return [mixer, Arm("mlp", "experts", experts, **weighed("mlp"))]

    return Stack([layer(i, kind) for i, kind in enumerate(raw["layer_types"])], raw["rms_norm_eps"])


def _recurrent_gemma(raw: Mapping[str, Any]) -> Stack:
    heads, d, act = raw["num_attention_heads"], raw["hidden_size"], {"act": "gelu_pytorch_tanh"}
    attention = {
        "heads": heads,
        "kv_heads": raw["num_key_value_heads"],
        "head_dim": d // heads,
        "window": raw["attention_window_size"],
        "rope": raw["rope_parameters"],
    }
    mixers = {
        "attention": Arm("mixer", "attention", attention),
        "recurrent": Arm("mixer", "rg_lru", {"width": raw["lru_width"], "heads": heads}),
    }
    types = raw["block_types"] * raw["num_hidden_layers"]
    layers = [[mixers[kind], Arm("mlp", "mlp", act)] for kind in types[: raw["num_hidden_layers"]]]
    # sqrt(32) is 5.65685...; bfloat16 keeps 8 bits of it, 181 / 32
    scale = {32: 181 / 32}[d]
    return Stack(layers, raw["rms_norm_eps"], offset=1.0, embed_scale=scale, cap=raw["logits_soft_cap"])


def _kimi_linear(raw: Mapping[str, Any]) -> Stack:
    dim, eps = raw["linear_head_dim"], raw["rms_norm_eps"]
    kda = {"heads": raw["linear_num_heads"], "key_dim": dim, "value_dim": dim, "rank": dim, "norm_eps": eps}
    latent = {
        "heads": raw["num_attention_heads"],
        "rank": raw["kv_lora_rank"],
        "key_dim": raw["qk_nope_head_dim"],
        "rope_dim": raw["qk_rope_head_dim"],
        "value_dim": raw["v_head_dim"],
        "norm_eps": 1e-6,
    }
    experts = {
        "experts": raw["num_experts"],
        "per_token": raw["num_experts_per_token"],
        "width": raw["moe_intermediate_size"],
        "scores": "sigmoid",
        "correction": True,
        "scale": raw["routed_scaling_factor"],
        "groups": raw["num_expert_group"],
        "kept_groups": raw["topk_group"],
        "shared": raw["moe_intermediate_size"] * raw["num_shared_experts"],
    }
    mixers = {"linear_attention": Arm("mixer", "kda", kda), "full_attention": Arm("mixer", "latent", latent)}
    mlps = {"dense": Arm("mlp", "mlp"), "sparse": Arm("mlp", "experts", experts)}
    kinds = zip(raw["layer_types"], raw["mlp_layer_types"], strict=True)
    return Stack([[mixers[mixer], mlps[mlp]] for mixer, mlp in kinds], eps)


def _nemotron_h(raw: Mapping[str, Any]) -> Stack:
    eps = raw["layer_norm_epsilon"]
    kinds = {
        "linear_attention": (
            "mamba2",
            {
                "heads": raw["mamba_num_heads"],
                "head_dim": raw["mamba_head_dim"],
                "state_size": raw["ssm_state_size"],
                "groups": raw["n_groups"],
                "dt_limit": (raw["time_step_min"], float("inf")),
                "norm_eps": eps,
            },
        ),
        "full_attention": (
            "attention",
            {
                "heads": raw["num_attention_heads"],
                "kv_heads": raw["num_key_value_heads"],
                "head_dim": raw["head_dim"],
            },
        ),
        "mlp": ("mlp", {"act": "relu2"}),
        "moe": (
            "experts",
            {
                "experts": raw["n_routed_experts"],
                "per_token": raw["num_experts_per_tok"],
                "width": raw["moe_intermediate_size"],
                "act": "relu2",
                "gated": False,
                "scores": "sigmoid",
                "scale": raw["routed_scaling_factor"],
                "groups": raw["n_group"],
                "kept_groups": raw["topk_group"],
                "correction": True,
                "shared": raw["moe_shared_expert_intermediate_size"],
                "latent": raw["moe_latent_size"],
            },
        ),
    }
    return Stack([[Arm("mixer", *kinds[kind])] for kind in raw["layers_block_type"]], eps)


STACKS: Mapping[str, Callable[[Mapping[str, Any]], Stack]] = {
    "deepseek_v3": _deepseek_v3,
    "falcon_h1": _falcon_h1,
    "gemma3_text": _gemma3_text,
    "kimi_linear": _kimi_linear,
    "recurrent_gemma": _recurrent_gemma,
    "minimax": _minimax,
    "qwen3_next": _qwen3_next,
    "nemotron_h": _nemotron_h,
    "jamba": _jamba,
    "zamba2": _zamba2,
}
