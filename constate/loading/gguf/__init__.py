"""GGUF files, as llama.cpp and its kin have models on disk: each becomes a folder of safetensors once.

`file` reads the format; `maps` knows the architectures, `transformer` and `ssm` what their keys and tensors
mean, `text` the tokenizer; `convert` writes the folder, `store` keeps it from one run to the next.
"""

from .convert import convert
from .store import folder_of, smollm2

__all__ = ["convert", "folder_of", "smollm2"]
