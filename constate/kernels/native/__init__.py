"""The ops in C, compiled on first use. Knows which of them have no C form, and why; imports none of them."""

from types import MappingProxyType

MISSING = MappingProxyType(
    {
        "attention": "many queries at once are matrix products, which PyTorch makes of them",
    }
)
"""The reason for each op that the chunked form serves."""
