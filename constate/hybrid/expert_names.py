"""Hugging Face's names of MLPs and of experts, in which the families differ by a word or two.

Knows names and core/experts.py's parameters; no architecture by itself.
"""

from __future__ import annotations

from ..core.experts import ExpertsSpec
from ..core.weights import Rule, fuse, same, stack


def expert_weights(
    source: str,
    ours: str,
    spec: ExpertsSpec,
    *,
    router: str = "gate",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
) -> list[Rule]:
    """The rules of one such layer from Hugging Face's names, which begin with `source`, to ours.

    A file has each expert's matrices by themselves, called `names` (gate, up, down; ungated experts have no
    first). `router` and `shared` are what the family calls those parts.
    """
    gate, up, down = (f"{name}.weight" for name in names)
    first = (gate, up) if spec.gated else (up,)
    rules = [
        same(source + f"{router}.weight", ours + "router.weight"),
        stack([source + "experts.{e}." + name for name in first], ours + "up", spec.experts),
        stack([source + "experts.{e}." + down], ours + "down", spec.experts),
    ]
    if spec.correction:
        rules.append(same(source + f"{router}.e_score_correction_bias", ours + "router.correction"))
    if spec.shared_gate:
        rules.append(same(source + "shared_expert_gate.weight", ours + "shared_gate.weight"))
    if spec.shared:
        rules += mlp_weights(source + shared + ".", ours + "shared.", spec.shared, spec.gated, spec.bias)
    for part in ("weight", "bias") if spec.bias else ("weight",):
        if spec.latent:
            rules.append(same(source + f"fc1_latent_proj.{part}", ours + f"latent_in.{part}"))
            rules.append(same(source + f"fc2_latent_proj.{part}", ours + f"latent_out.{part}"))
    return rules


def mlp_weights(source: str, ours: str, width: int, gated: bool = True, bias: bool = False) -> list[Rule]:
    """The rules of one MLP: gate_proj, up_proj and down_proj in the file."""
    rules = []
    for part in ("weight", "bias") if bias else ("weight",):
        rules.append(same(source + f"down_proj.{part}", ours + f"down.{part}"))
        both = [source + f"{name}_proj.{part}" for name in ("gate", "up")]
        up = same(source + f"up_proj.{part}", ours + f"up.{part}")
        rules.append(fuse(both, ours + f"gate_up.{part}", [width, width]) if gated else up)
    return rules
