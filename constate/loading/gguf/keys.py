"""The keys of a GGUF file's metadata that belong to its architecture. Knows no architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Keys of `{arch}.` that no forward pass reads, and those that change it with the value at which they do not.
_IGNORED = frozenset({"context_length", "vocab_size", "rope.scaling.finetuned"})
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.head_count": (0,),
    "attention.head_count_kv": (0,),
    "feed_forward_length": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


class Metadata:
    """The `{arch}.` keys of one file. What was not asked for in the end must be known to change nothing."""

    def __init__(self, arch: str, metadata: Mapping[str, Any]):
        self.arch, prefix = arch, f"{arch}."
        self._left = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}

    def take(self, key: str) -> Any:
        """A value that the architecture needs. Raises ValueError where it is absent or nothing."""
        if not (value := self.find(key)):
            raise ValueError(
                f"the metadata has {'no ' if value is None else f'{value!r} for '}{self.arch}.{key}"
            )
        return value

    def find(self, key: str, default: Any = None) -> Any:
        """A value that may be absent; a list that repeats one value, as one for each layer, is that value."""
        value = self._left.pop(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(
                    f"{self.arch}.{key} = {value} differs between layers, which is not supported"
                )
            return value[0]
        return value

    def finish(self) -> None:
        """Raises ValueError for keys that were not understood: the model would run and be wrong."""
        left = {k: v for k, v in self._left.items() if k not in _IGNORED and v not in _NEUTRAL.get(k, ())}
        if left:
            found = ", ".join(f"{self.arch}.{key} = {value!r}" for key, value in left.items())
            raise ValueError(f"the metadata has {found}, which is not understood")
