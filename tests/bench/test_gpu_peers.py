"""The peers that want a GPU, without one: what is said then, and how they are written and called.

Their packages are stood in for by objects that write down what they were asked; the weights that mamba_ssm
would be given are read back by our own loader of its checkpoints, which is tested against its files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from constate.bench import gpu_peers, shapes, vllm_peer
from constate.bench.engine import Absent
from constate.core.model import Model
from constate.loading import load
from constate.spans import Spans
from tests.bench.test_speed import TINY

MAMBA = {
    **{"model_type": "mamba", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2},
    **{"state_size": 8, "expand": 3, "time_step_rank": 5, "conv_kernel": 3, "tie_word_embeddings": True},
}
MAMBA2 = {
    **{"model_type": "mamba2", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "expand": 3},
    **{"num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "tie_word_embeddings": False},
    **{"time_step_limit": (0.01, 0.5), "conv_kernel": 3},
}


@pytest.mark.parametrize("peer", [gpu_peers.Fla, gpu_peers.MambaSSM, vllm_peer.Vllm])
def test_none_runs_on_a_cpu(peer: Any) -> None:
    model = shapes.random_model(MAMBA)
    with pytest.raises(Absent, match="NVIDIA GPU, and this model is on cpu") as told:
        peer(model, model, 4)
    assert told.value.install == "--device cuda"


@pytest.mark.parametrize("name", ["fla", "mamba_ssm", "vllm"])
def test_an_absent_package_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    on_a_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(Absent, match=f"the package {name} cannot be imported") as told:
        gpu_peers.there(name, name, on_a_gpu, f"pip install {name}")
    assert told.value.install == f"pip install {name}"


def present(monkeypatch: pytest.MonkeyPatch, package: Any = None) -> None:
    """As if there were a GPU with this package."""
    for peers in (gpu_peers, vllm_peer):
        monkeypatch.setattr(peers, "there", lambda *given: package)
        monkeypatch.setattr(peers, "version", lambda package: "0")


class Asked:
    """Stands for mamba_ssm: keeps the config, the weights and every call, and answers with noughts."""

    config: Any = None
    weights: Any = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.past: Any = SimpleNamespace(seqlen_offset=0, reset=lambda most, rows: self.began(most, rows))

    def began(self, most: int, rows: int) -> None:
        self.past.seqlen_offset = 0
        self.calls.append(("reset", most, rows))

    def modules(self) -> dict[str, ModuleType]:
        outer = self

        class Head(nn.Module):
            def __init__(self, config: dict[str, Any], device: Any, dtype: Any):
                super().__init__()
                outer.config = config

            def load_state_dict(self, weights: Any, strict: bool = True) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # what is asked of it here
                outer.weights = weights
                return SimpleNamespace(missing_keys=[], unexpected_keys=[])

            def forward(self, tokens: Tensor, inference_params: Any, num_last_tokens: int) -> Any:
                outer.calls.append(
                    ("prefill", tuple(tokens.shape), inference_params.seqlen_offset, num_last_tokens)
                )
                return SimpleNamespace(logits=torch.zeros(len(tokens), 1, 97))

        def update(peer: Any, cache: Any, rows: int, length: int, most: int) -> Any:
            outer.calls.append(("graph", cache is None, rows, length, most))
            return SimpleNamespace(inference_params=outer.past, run=outer.run)

        made = {
            "mamba_ssm.utils.generation": {"update_graph_cache": update},
            "mamba_ssm.models.mixer_seq_simple": {"MambaLMHeadModel": Head},
            "mamba_ssm.models.config_mamba": {"MambaConfig": dict},
        }
        found = {name: ModuleType(name) for name in made}
        for name, attributes in made.items():
            vars(found[name]).update(attributes)
        return found

    def run(self, tokens: Tensor, places: Tensor, at: int) -> Tensor:
        self.calls.append(("step", tuple(tokens.shape), places.tolist(), at))
        return torch.zeros(len(tokens), 1, 97)


def mamba_ssm(model: Model, monkeypatch: pytest.MonkeyPatch, room: int = 4) -> tuple[Any, Asked]:
    present(monkeypatch)
    asked = Asked()
    for name, module in asked.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return gpu_peers.MambaSSM(model, model, room), asked


@pytest.mark.parametrize("raw", [MAMBA, MAMBA2], ids=["mamba", "mamba2"])
def test_mamba_ssm_is_given_our_model(raw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.random_model(raw)
    asked = mamba_ssm(model, monkeypatch)[1]
    assert {n for n in asked.weights if "embedding" in n} == {"backbone.embedding.weight"}, "its own name"
    (tmp_path / "config.json").write_text(json.dumps(asked.config))
    weights = {name: t.contiguous() for name, t in asked.weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    tokens = torch.randint(0, 97, (9,))
    again = load(tmp_path)
    torch.testing.assert_close(again(tokens, Spans.of([9])), model(tokens, Spans.of([9])), atol=1e-5, rtol=0)


def test_mamba_ssm_is_called_as_its_own_generation_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, asked = mamba_ssm(shapes.random_model(MAMBA), monkeypatch, room=4)
    run = peer.write(torch.zeros(2, 7, dtype=torch.int64), 2)
    assert asked.calls == [
        ("graph", True, 2, 7, 12),
        ("reset", 12, 2),
        ("prefill", (2, 7), 0, 1),
        ("step", (2, 1), [[7], [7]], 7),
        ("step", (2, 1), [[8], [8]], 8),
    ]
    assert (tuple(run.tokens.shape), len(run.steps), peer.graph) == ((2, 3), 2, "captured")
    asked.calls.clear()
    peer.prefill(torch.zeros(2, 7, dtype=torch.int64))
    assert [call[0] for call in asked.calls] == ["graph", "reset", "prefill"]
    assert asked.calls[0][1] is False, "the graph of the turn before is handed in again"
    assert asked.calls[2][2] == 0, "and reading begins anew"


@pytest.mark.parametrize(
    ("raw", "told"),
    [(TINY["llama"], "not 'llama'"), ({**MAMBA, "layer_norm_epsilon": 1e-6}, "eps of 1e-5")],
)
def test_mamba_ssm_refuses_what_it_cannot_hold(raw: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gpu_peers.original_config(shapes.random_model(raw))


def test_fla_is_for_linear_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch)
    model = shapes.random_model(MAMBA)
    with pytest.raises(ValueError, match="linear attentions, not 'mamba'"):
        gpu_peers.Fla(model, model, 4)


def test_vllm_reads_our_folder_and_is_timed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class LLM:
        def __init__(self, model: str, **options: Any):
            seen["config"] = json.loads((Path(model) / "config.json").read_text())
            seen["files"] = sorted(path.name for path in Path(model).iterdir())
            seen["options"] = options

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            seen.setdefault("asked", []).append((prompts, vars(params)))
            ids = [[7 + i for i in range(params.max_tokens)] for _ in prompts]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(row))]) for row in ids]

    package = SimpleNamespace(LLM=LLM, SamplingParams=lambda **given: SimpleNamespace(**given))
    present(monkeypatch, package)
    mapping = SimpleNamespace(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES={"mamba2": "Mamba2ForCausalLM"})
    auto = SimpleNamespace(models=SimpleNamespace(auto=SimpleNamespace(modeling_auto=mapping)))
    monkeypatch.setitem(sys.modules, "transformers", auto)  # pyright: ignore[reportArgumentType]  # all of it that is used
    model = shapes.random_model(TINY["mamba2"], dtype="bfloat16")
    peer = vllm_peer.Vllm(model, model, 4)
    assert seen["config"]["architectures"] == ["Mamba2ForCausalLM"]
    assert "model.safetensors" in seen["files"]
    assert (seen["options"]["enable_prefix_caching"], seen["options"]["dtype"]) == (False, "bfloat16")
    run = peer.write(torch.tensor([[1, 2], [3, 4]]), 3)
    assert [params["max_tokens"] for _, params in seen["asked"]] == [1, 4], "the first token alone, then all"
    for prompts, params in seen["asked"]:
        assert [prompt["prompt_token_ids"] for prompt in prompts] == [[1, 2], [3, 4]]
        assert (params["temperature"], params["ignore_eos"]) == (0.0, True)
    assert run.tokens.tolist() == [[7, 8, 9, 10]] * 2
    assert len(run.steps) == 1, "what the three took together"
    with pytest.raises(ValueError, match="no 'llama'"):
        vllm_peer.Vllm(shapes.random_model(TINY["llama"]), model, 4)


def test_int8_is_no_format_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch)
    narrow = shapes.random_model(MAMBA, weights="int8")
    for peer in (gpu_peers.Fla, vllm_peer.Vllm):
        with pytest.raises(ValueError, match="int8"):
            peer(narrow, narrow, 4)
