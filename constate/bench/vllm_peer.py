"""vLLM as a peer: our weights in a folder that its offline engine reads.

Knows the calling convention of vLLM 0.9 and later, which is asked for whole generations: of the steps it
tells what they take together.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ..core.model import Model
from ..loading import save
from .engine import Engine, Run
from .gpu_peers import named, there, version
from .machine import timed


class Vllm(Engine):
    """vLLM's offline engine on a folder of the same weights. Its graphs are on, and its prefix cache off:
    the rounds repeat their prompts. It shows no logits, and of the steps only what they take together."""

    name = "vllm"
    share = 0.5  # of the GPU's memory that it may take: our model lies beside it

    def __init__(self, ours: Model, source: Model, room: int):
        self.package = there("vllm", "vllm", ours, "pip install vllm, which brings a torch of its own")
        self.priced, self.dtype = ours, ours.weight_dtype
        kind, transformers = named(ours)[0], import_module("transformers")
        known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind not in known:
            raise ValueError(f"vLLM knows models by transformers' names, which has no {kind!r}")
        place = Path(tempfile.mkdtemp(prefix="constate-"))
        finalize(self, shutil.rmtree, place, ignore_errors=True)
        save(ours, place, ours.weight_dtype)
        raw = json.loads((place / "config.json").read_text(encoding="utf-8"))
        (place / "config.json").write_text(json.dumps({**raw, "architectures": [known[kind]]}))
        self.engine: Any = self.package.LLM(
            model=str(place),
            skip_tokenizer_init=True,
            dtype=ours.weight_dtype,
            enable_prefix_caching=False,
            gpu_memory_utilization=self.share,
            seed=0,
        )
        self.backend = f"cuda (vllm {version(self.package)})"

    @property
    def graph(self) -> str:
        return "captured"

    def write(self, tokens: Tensor, new: int) -> Run:
        device, prompts = str(tokens.device), [{"prompt_token_ids": row} for row in tokens.tolist()]

        def ask(count: int) -> Tensor:
            params = self.package.SamplingParams(
                temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
            )
            told = self.engine.generate(prompts, params, use_tqdm=False)
            return torch.tensor([list(each.outputs[0].token_ids) for each in told])

        ttft, first = timed(lambda: ask(1), device)
        if not new:
            return Run(ttft, (), first)
        whole, written = timed(lambda: ask(new + 1), device)
        return Run(ttft, ((whole - ttft) / new,), written)
