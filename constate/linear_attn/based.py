"""Based (Arora et al., 2402.18668): linear attention for the long range, a narrow window for the short.

Most layers are linear attention with the second-order Taylor map of exp(q . k / sqrt(feature_dim)),
normalised (section 4.1, equation 4); those in `window_layers` are softmax attention over a window of
`window_size` tokens with rotary positions (section 4.2). Departures: a feature x_i x_j is held once, for
half the state; the gated convolutions that the paper's models put in some layers are not here. The config
is our own, in the spelling of flash-linear-attention, and so are the names: no published format of whole
models has both layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.architecture import Architecture
from ..core.model import Model
from ..core.weights import Rule
from . import frame
from .linear_attn import LinearAttention, LinearAttentionSpec, mixer_weights


@dataclass(frozen=True, kw_only=True)
class Config(frame.Frame):
    """`num_heads` in every layer, `feature_dim` channels a head before the map (the paper's 16)."""

    num_heads: int
    feature_dim: int = 16
    window_size: int = 64
    window_layers: tuple[int, ...] = ()
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.attn is not None:
            raise ValueError("attn: window_layers, window_size and rope_theta say here what is attention")
        super().__post_init__()
        _ = self.spec  # raises for a width that the heads do not share evenly

    @property
    def listed(self) -> Sequence[Mapping[str, Any]]:
        window = {"layers": self.window_layers, "num_heads": self.num_heads, "window_size": self.window_size}
        return [{**window, "rope_theta": self.rope_theta}]

    @property
    def spec(self) -> LinearAttentionSpec:
        d, h = self.hidden_size, self.num_heads
        return LinearAttentionSpec(
            heads=h,
            key_dim=self.feature_dim,
            value_dim=frame.heads_of("hidden_size", d, h),
            feature_map="taylor",
            eps=1e-12,
            output_norm=False,
        )


def build(config: Config) -> Model:
    return frame.build(config, lambda i: LinearAttention(config.hidden_size, config.spec))


def weights(config: Config) -> list[Rule]:
    """The file's names to ours, as in a "linear_attn" checkpoint."""
    return frame.weights(config, lambda source, ours: mixer_weights(config.spec, source, ours))


ARCHITECTURE = Architecture("based", Config, build, weights)
