"""RWKV-7 with weights that somebody trained and logits that somebody else computed; and its dialects.

The golden model (rwkv.cpp's, 834 thousand parameters, bytes for tokens) lies beside the checkout, in
../shared/data/rwkv7_tiny; where it is absent its tests are skipped. It has one head and three tokens, so that
a float64 loop with four heads and 200 tokens stands beside it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from constate.core.model import Model
from constate.core.weights import export
from constate.linear_attn.rwkv7 import ARCHITECTURE, Config
from constate.loading import load
from constate.loading.convert import convert
from constate.loading.dialects import tell
from constate.spans import Spans
from tests import loops
from tests.models import spread
from tests.referee import same_logits
from tests.test_fla_delta import RWKV7
from tests.test_twins import changed

GOLDEN = Path(__file__).parents[2] / "shared" / "data" / "rwkv7_tiny"
PROMPT = torch.tensor(list(b'"in'))
BLINKDL, RWKV_CPP = ARCHITECTURE.dialects

# In these weights all but nothing: w1 stays under 0.01, where tanh is its argument, rates' biases under 0.01,
# k_k is one number to 1%, and so the removal key is nearly the key's direction, before and after. What is
# removed moves the logits by less than 1e-3 here; in test_fla_delta.py it moves them.
FAINT = ("tanh in the decay", "rate's bias", "k_k", "removal key from the key before it is scaled")

golden = pytest.mark.skipif(not GOLDEN.exists(), reason=f"{GOLDEN.name} is not beside this checkout")


@cache
def tensors() -> dict[str, Tensor]:
    return load_file(GOLDEN / "rwkv7_tiny.safetensors")


def blinkdl_tensors() -> dict[str, Tensor]:
    """The golden model as BlinkDL would have it: rwkv.cpp's two conversions undone."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors().items():
        stem, part = name.rsplit(".", 1)
        if part == "x_rwkvag":
            made |= {f"{stem}.x_{letter}": tensor[i : i + 1] for i, letter in enumerate("rwkvag")}
        else:
            low_rank = part in {letter + n for letter in "wagv" for n in "12"}
            made[name] = tensor.T.contiguous() if low_rank else tensor
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(_folder(tmp_path_factory.mktemp("rwkv_cpp"), tensors()), backend="torch")


def _folder(folder: Path, source: dict[str, Tensor]) -> Path:
    """BlinkDL's checkpoints have no config.json; ours is one that says nothing."""
    save_file({name: tensor.contiguous() for name, tensor in source.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def distance(model: Model) -> float:
    """Sum of absolute differences from the golden logits after the three tokens, read at once."""
    return difference(model(PROMPT, Spans.of([3]), at="last")[0])


def difference(logits: Tensor) -> float:
    want = torch.from_numpy(np.load(GOLDEN / "expected_logits.npy")).flatten()
    return float((logits.double() - want.double()).abs().sum())


@golden
def test_the_golden_logits(model: Model) -> None:
    """By steps, at once, and in pieces."""
    cache = model.init_cache(1)
    stepped = [model.step(t[None], cache)[0] for t in PROMPT]
    assert difference(stepped[-1]) <= 1e-3
    assert distance(model) <= 1e-3
    for cut in (0, 1, 2, 3):
        cache, logits = model.init_cache(1), torch.empty(0)
        for piece in PROMPT.split([cut, 3 - cut]):
            logits = model(piece, Spans.of([len(piece)]), cache)[-1:] if len(piece) else logits
        assert difference(logits[0]) <= 1e-3, f"cut at {cut}"


@golden
@pytest.mark.parametrize("point", [point for point in RWKV7 if point not in FAINT])
def test_each_convention_moves_the_golden_logits(point: str, model: Model) -> None:
    def without(removals: list[tuple[object, str, object]]) -> float:
        if not removals:
            return distance(model)
        with changed(*removals[0]):
            return without(removals[1:])

    assert without(RWKV7[point](model)) > 1e-3
    assert distance(model) <= 1e-3, "put back"


@golden
@pytest.mark.parametrize("dialect", [BLINKDL, RWKV_CPP], ids=lambda dialect: dialect.name)
def test_both_dialects_are_told_and_written_back(dialect: object, tmp_path: Path) -> None:
    source = blinkdl_tensors() if dialect is BLINKDL else tensors()
    told = tell({}, {name: tensor.shape for name, tensor in source.items()})
    assert (told.architecture, told.dialect) == (ARCHITECTURE, dialect.name)  # pyright: ignore[reportAttributeAccessIssue]
    assert told.config.width == 256 and told.config.spec(1).value_rank == 32
    read = load(_folder(tmp_path, source), backend="torch")
    assert distance(read) <= 1e-3
    written = export(told.rules, dict(read.named_parameters()))
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in source.items())


@golden
def test_a_pth_file_in_blinkdl_s_names_converts(tmp_path: Path) -> None:
    """With no config.json, in bfloat16 as he publishes them; these weights are exact in it."""
    torch.save({name: tensor.bfloat16() for name, tensor in blinkdl_tensors().items()}, tmp_path / "x.pth")
    done = convert(tmp_path / "x.pth", tmp_path / "out")
    assert (done.model_type, done.dialect) == ("rwkv7", "blinkdl")
    assert distance(load(tmp_path / "out", backend="torch")) <= 1e-3


@golden
def test_a_share_of_the_first_layer_is_dropped(tmp_path: Path) -> None:
    """Some of BlinkDL's files have one; nobody reads it."""
    source = blinkdl_tensors()
    extra = {f"blocks.0.att.v{part}": source[f"blocks.1.att.v{part}"].clone() for part in "012"}
    assert distance(load(_folder(tmp_path, source | extra), backend="torch")) <= 1e-3


def test_heads_whose_group_norm_is_not_known_are_refused() -> None:
    names = ["emb.weight", "blocks.0.ffn.key.weight"]
    names += [f"blocks.0.att.{name}" for name in ("r_k", "w1", "a1", "g1")]
    shapes = dict.fromkeys([*names, "blocks.0.att.x_r"], torch.Size((8, 32)))
    with pytest.raises(ValueError, match="heads of 32 channels"):
        tell({}, shapes)
    del shapes["blocks.0.att.g1"]
    with pytest.raises(ValueError, match=r"lacks blocks\.0\.att\.g1"):
        tell({}, shapes)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_four_heads_and_200_tokens_beside_float64(backend: str) -> None:
    raw = {
        "model_type": "rwkv7", "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "head_dim": 12,
        "intermediate_size": 56, "decay_low_rank_dim": 5, "a_low_rank_dim": 4, "gate_low_rank_dim": 7,
        "v_low_rank_dim": 3, "norm_eps": 1e-5, "fuse_norm": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model = ARCHITECTURE.build(Config(**{k: v for k, v in raw.items() if k != "model_type"}))
    spread(model.requires_grad_(False), seed=3)
    tokens = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(0))
    want = loops.model(model, tokens, raw)
    same_logits(model(tokens, Spans.of([200])), want, "at once")
    cache = model.init_cache(1)
    pieces = [model(piece, Spans.of([len(piece)]), cache) for piece in tokens.split(67)]
    same_logits(torch.cat(pieces), want, "in pieces of 67")
    cache = model.init_cache(1)
    same_logits(torch.cat([model.step(t[None], cache) for t in tokens]), want, "token by token")
