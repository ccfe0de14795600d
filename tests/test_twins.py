"""Our models beside transformers' own: the same folder, the same logits, alone and decoding.

The twins are tiny and random, with weights that hide no fault. For each odd point of a family there is a
removal that must move our logits off the twin's by more than 1e-3: a twin that would not notice proves
nothing. transformers' one-token steps forget limits of the step size (time_step_limit of mamba2, and
time_step_min of nemotron_h), so there whole forwards are compared.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from constate.core.model import Model
from constate.core.norms import GatedRMSNorm, RMSNorm
from constate.loading import load
from constate.spans import Spans
from tests.referee import same_logits

transformers = pytest.importorskip("transformers")

TOOL = Path(__file__).parents[2] / "shared" / "tools" / "tiny_hf_models.py"
VOCAB = 97
LENGTHS = (1, 33, 130)

MAMBA2 = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=12, n_groups=2,
    conv_kernel=3, chunk_size=16, layer_norm_epsilon=1e-2,
)  # fmt: skip
MAMBA = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=6, intermediate_size=40, conv_kernel=3,
    layer_norm_epsilon=1e-2,
)  # fmt: skip
OTHERWISE = dict(
    tie_word_embeddings=False, use_bias=True, use_conv_bias=False, time_step_rank=5, conv_kernel=4,
)  # fmt: skip
LLAMA = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, intermediate_size=40, num_attention_heads=6,
    num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-2, max_position_embeddings=64, attention_bias=True,
    mlp_bias=True,
)  # fmt: skip


# A window of 5 is passed by the decoding that follows one token, one of 20 within a prompt.
TRANSFORMER = dict(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, intermediate_size=40, num_attention_heads=6,
    num_key_value_heads=2, rms_norm_eps=1e-2, max_position_embeddings=64,
)  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **parameters}}


TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", MAMBA2),
    "mamba2 tied, biased": ("mamba2", {**MAMBA2, "tie_word_embeddings": True, "use_bias": True}),
    "mamba2 no conv bias": ("mamba2", {**MAMBA2, "use_conv_bias": False, "n_groups": 4}),
    "mamba2 limited": ("mamba2", {**MAMBA2, "time_step_limit": (0.01, 0.2)}),
    "mamba": ("mamba", MAMBA),
    "mamba otherwise": ("mamba", {**MAMBA, **OTHERWISE}),
    "falcon_mamba": ("falcon_mamba", {**MAMBA, "mixer_rms_eps": 1e-2}),
    "falcon_mamba otherwise": ("falcon_mamba", {**MAMBA, **OTHERWISE}),
    "llama": ("llama", {**LLAMA, **rope("default")}),
    "llama tied": (
        "llama", {**LLAMA, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}
    ),
    "llama linear": ("llama", {**LLAMA, **rope("linear", factor=3.0)}),
    "llama llama3": ("llama", {**LLAMA, **rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )}),
    "mistral": ("mistral", {**TRANSFORMER, "head_dim": 12, "sliding_window": 5, **rope("default")}),
    "mistral, no window": (
        "mistral", {**TRANSFORMER, "sliding_window": None, "tie_word_embeddings": True, **rope("default")}
    ),
    "qwen2": ("qwen2", {
        **TRANSFORMER, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
        **rope("default"),
    }),
    "qwen2, window not in use": ("qwen2", {**TRANSFORMER, "sliding_window": 5, "tie_word_embeddings": True}),
    "qwen2, layer types": ("qwen2", {
        **TRANSFORMER, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3,
        "layer_types": [SLIDING, FULL, SLIDING],
    }),
    "qwen3": ("qwen3", {**TRANSFORMER, "head_dim": 12, **rope("default")}),
    "qwen3, biased, sliding": ("qwen3", {
        **TRANSFORMER, "head_dim": 12, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 5, "layer_types": [FULL, SLIDING, FULL], "tie_word_embeddings": True,
    }),
    "llama yarn": ("llama", {**LLAMA, **rope("yarn", factor=4.0, original_max_position_embeddings=16)}),
    "llama yarn, in full": ("llama", {**LLAMA, **rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=1.0, mscale=0.7,
        mscale_all_dim=1.2, truncate=False,
    )}),
}  # fmt: skip
WHOLE_ONLY = ("mamba2 limited", "shared nemotron_h")
SHARED = tuple(
    f"shared {kind}"
    for kind in (
        "mamba",
        "falcon_mamba",
        "mamba2",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_next",
        "nemotron_h",
    )
)


@dataclass(frozen=True)
class Pair:
    """transformers' model and ours, read from the folder that it wrote."""

    theirs: Any
    ours: Model

    def whole(self, prompt: Tensor) -> Tensor:
        with torch.no_grad():
            return self.theirs(prompt[None]).logits[0].float()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            theirs = _shared(name) if name.startswith("shared ") else _own(name)
            folder = tmp_path_factory.mktemp("twin")
            theirs.save_pretrained(folder)
            made[name] = Pair(theirs, load(folder, backend="torch"))
        return made[name]

    return get


def _own(name: str) -> Any:
    kind, settings = TWINS[name]
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        _spread(model)
    return model


def _spread(model: Any) -> None:
    """As tests/models.py does ours, under transformers' names."""
    g = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if "A_log" in name:
            p.copy_(torch.linspace(-4, 2, p.numel())[torch.randperm(p.numel(), generator=g)].view_as(p))
        elif "embed" in name:
            p.copy_(0.7 * noise)
        elif p.ndim > 1:
            p.copy_(1.4 * noise * p.shape[-1] ** -0.5)
        else:
            p.copy_(0.4 * noise + (0 if name.endswith("bias") else 1))


def _shared(name: str) -> Any:
    if not TOOL.exists():
        pytest.skip(f"{TOOL.name} is not beside this checkout; the twins built here are")
    import sys

    hidden = {p: sys.modules.get(p) for p in ("fla", "mamba_ssm", "causal_conv1d")}
    spec = importlib.util.spec_from_file_location("tiny_hf_models", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for module, was in hidden.items():  # it hides kernels that have no CPU form
        sys.modules.pop(module, None)
        if was is not None:
            sys.modules[module] = was
    return tool.make(name.removeprefix("shared "))


def ids(n: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*TWINS, *SHARED])
def test_forward_equals_the_twin(name: str, pair: Callable[[str], Pair]) -> None:
    twin = pair(name)
    for n in LENGTHS:
        want = twin.whole(ids(n))
        same_logits(twin.ours(ids(n), Spans.of([n])), want, f"{n} tokens")
        cache = twin.ours.init_cache(1)
        got = [twin.ours(piece, Spans.of([len(piece)]), cache) for piece in ids(n).split(50)]
        same_logits(torch.cat(got), want, f"{n} tokens in pieces of 50")


@pytest.mark.parametrize("name", [n for n in (*TWINS, *SHARED) if n not in WHOLE_ONLY])
def test_decoding_equals_the_twin(name: str, pair: Callable[[str], Pair]) -> None:
    """Eight greedy tokens; their cached step beside ours, and beside their whole forward."""
    twin = pair(name)
    for n in LENGTHS:
        prompt, cache = ids(n, seed=n), twin.ours.init_cache(1)
        logits = twin.ours(prompt, Spans.of([n]), cache, at="last")
        with torch.no_grad():
            their = twin.theirs(prompt[None], use_cache=True)
            cached = "cache_params" if "cache_params" in their else "past_key_values"
            for i in range(8):
                same_logits(logits, their.logits[:, -1].float(), f"{n} tokens, step {i}")
                token = logits.argmax(-1)
                prompt = torch.cat([prompt, token])
                their = twin.theirs(token[None], use_cache=True, **{cached: their[cached]})
                logits = twin.ours.step(token, cache)
        same_logits(logits, twin.whole(prompt)[-1:], f"{n} tokens and eight more")


def test_steps_keep_the_limits_that_the_twins_step_forgets(pair: Callable[[str], Pair]) -> None:
    twin = pair("mamba2 limited")
    prompt = ids(20)
    cache = twin.ours.init_cache(1)
    stepped = torch.cat([twin.ours.step(t[None], cache) for t in prompt])
    same_logits(stepped, twin.whole(prompt), "steps under time_step_limit")


# -- every odd point is seen --------------------------------------------------------------------


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute set for a moment; a tensor takes the place of a parameter."""
    before = getattr(owner, name)
    if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=False)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


Removal = tuple[Any, str, Any]


def mixers(model: Model) -> list[Any]:
    return [block.mixer for block in model.blocks]


def norms(model: Model) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, RMSNorm)]


def one_group(model: Model) -> list[Removal]:
    scan = model.ops.gated_linear_scan

    def first(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
        return scan(q[:, :1].expand_as(q), k[:, :1].expand_as(k), *rest, **options)

    return [(model, "ops", replace(model.ops, gated_linear_scan=first))]


def interleaved_heads(model: Model) -> list[Removal]:
    attend = model.ops.attention

    def faulty(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v))
        return attend(q, k, v, *rest, **options)

    return [(model, "ops", replace(model.ops, attention=faulty))]


def scaled_wrongly(model: Model) -> list[Removal]:
    """The scale that hidden_size / heads would give."""
    attend, dim = model.ops.attention, model.config.hidden_size / model.config.num_attention_heads
    return [
        (model, "ops", replace(model.ops, attention=lambda *a, **o: attend(*a, **{**o, "scale": dim**-0.5})))
    ]


def rotary(**fields: Any) -> Callable[[Model], list[Removal]]:
    def removal(model: Model) -> list[Removal]:
        plain = mixers(model)[0].rotary
        new = replace(plain, **{k: v(plain) for k, v in fields.items()}) if fields else None
        return [(m, "rotary", new) for m in mixers(model)]

    return removal


def plain_frequencies(of: Any, theta: float = 100.0) -> tuple[float, ...]:
    return tuple(theta ** (-i / of.dim) for i in range(0, of.dim, 2))


def every(get: Callable[[Model], list[Any]], name: str, value: Any) -> Callable[[Model], list[Removal]]:
    def removal(model: Model) -> list[Removal]:
        return [(o, name, value(getattr(o, name)) if callable(value) else value) for o in get(model)]

    return removal


def gates(model: Model) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, GatedRMSNorm)]


def convs(model: Model) -> list[Any]:
    return [mixer.conv for mixer in mixers(model)]


def parts(path: str) -> Callable[[Model], list[Any]]:
    """The module at this path in every block."""
    return lambda model: [block.get_submodule(path) for block in model.blocks]


def biased(model: Model) -> list[Removal]:
    return [(c, "bias", torch.nn.Parameter(torch.full(c.weight.shape[:1], 0.1))) for c in convs(model)]


def windows(of: Callable[[int, int | None], int | None]) -> Callable[[Model], list[Removal]]:
    """`of(layer, window)` in place of each layer's window."""
    return lambda model: [(m, "window", of(i, m.window)) for i, m in enumerate(mixers(model))]


def normed_after_rotary(model: Model) -> list[Removal]:
    def late(mixer: Any) -> Callable[..., Any]:
        early = mixer._enter

        def enter(x: Tensor, call: Any) -> Any:
            with changed(mixer, "q_norm", None):
                q, k, v = early(x, call)
            return mixer.q_norm(q), mixer.k_norm(k), v

        return enter

    return [(m, "_enter", late(m)) for m in mixers(model)]


def normed_over_all_heads(model: Model) -> list[Removal]:
    class Whole(torch.nn.Module):
        def __init__(self, norm: RMSNorm):
            super().__init__()
            self.weight, self.eps = norm.weight, norm.eps

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.rms_norm(x, x.shape[1:], None, self.eps) * self.weight

    return [(m, name, Whole(getattr(m, name))) for m in mixers(model) for name in ("q_norm", "k_norm")]


def normed_but(part: int) -> Callable[[Model], list[Removal]]:
    """Of dt, B and C, which Falcon Mamba norms, one is not."""

    def operands(mixer: Any) -> Callable[[Tensor], Any]:
        def call(x: Tensor) -> Any:
            parts = mixer.x_proj(x).split([mixer.rank, mixer.s, mixer.s], dim=-1)
            normed = [torch.nn.functional.rms_norm(t, t.shape[-1:], None, mixer.norm_eps) for t in parts]
            dt, b, c = (parts[i] if i == part else t for i, t in enumerate(normed))
            return mixer.dt_proj(dt), b, c

        return call

    return lambda model: [(m, "_operands", operands(m)) for m in mixers(model)]


def b_and_c_swapped(model: Model) -> list[Removal]:
    def swapped(mixer: Any) -> Callable[[Tensor], Any]:
        right = mixer._operands

        def call(x: Tensor) -> Any:
            dt, b, c = right(x)
            return dt, c, b

        return call

    return [(m, "_operands", swapped(m)) for m in mixers(model)]


def ungated_skip(model: Model) -> list[Removal]:
    """The gate on what the state says alone, D x beside it."""
    scan = model.ops.selective_scan

    def faulty(x: Tensor, *rest: Any, d: Tensor, **options: Any) -> Any:
        o, final = scan(x, *rest, **options)
        return o + d * x, final

    return [(model, "ops", replace(model.ops, selective_scan=faulty))]


ODD_POINTS: dict[str, tuple[str, Callable[[Model], list[Removal]]]] = {
    "groups of B and C": ("mamba2", one_group),
    "gated norm a group": ("mamba2", every(gates, "groups", 1)),
    "gate before norm": ("mamba2", every(gates, "before", True)),
    "the norms' eps": ("mamba2", every(norms, "eps", 1e-5)),
    "the gated norm's eps": ("mamba2", every(gates, "eps", 1e-5)),
    "the gated norm's weight": ("mamba2", every(gates, "weight", torch.ones_like)),
    "D": ("mamba2", every(mixers, "d", torch.zeros_like)),
    "A": ("mamba2", every(mixers, "a_log", torch.zeros_like)),
    "dt bias": ("mamba2", every(mixers, "dt_bias", torch.zeros_like)),
    "conv bias": ("mamba2", every(convs, "bias", torch.zeros_like)),
    "no conv bias": ("mamba2 no conv bias", biased),
    "SiLU after the convolution": ("mamba2", every(convs, "activation", None)),
    "untied head": ("mamba2", lambda m: [(m.head, "weight", m.embed.weight)]),
    "projection bias": ("mamba2 tied, biased", every(parts("mixer.in_proj"), "bias", None)),
    "out projection bias": ("mamba2 tied, biased", every(parts("mixer.out_proj"), "bias", None)),
    "time_step_limit": ("mamba2 limited", every(mixers, "dt_limit", (0.0, math.inf))),
    "its lower end": ("mamba2 limited", every(mixers, "dt_limit", (0.0, 0.2))),
    "its upper end": ("mamba2 limited", every(mixers, "dt_limit", (0.01, math.inf))),
    "mamba's norms' eps": ("mamba", every(norms, "eps", 1e-5)),
    "mamba's D": ("mamba", every(mixers, "d", torch.zeros_like)),
    "mamba's A": ("mamba", every(mixers, "a_log", torch.zeros_like)),
    "mamba's dt bias": ("mamba", every(mixers, "dt_bias", torch.zeros_like)),
    "mamba's order of B and C": ("mamba", b_and_c_swapped),
    "mamba's gate on D too": ("mamba", ungated_skip),
    "mamba's conv bias": ("mamba", every(convs, "bias", torch.zeros_like)),
    "mamba without conv bias": ("mamba otherwise", biased),
    "mamba's SiLU after the convolution": ("mamba", every(convs, "activation", None)),
    "mamba's tied head": ("mamba", lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
    "mamba's untied head": ("mamba otherwise", lambda m: [(m.head, "weight", m.embed.weight)]),
    "mamba's projection bias": ("mamba otherwise", every(parts("mixer.in_proj"), "bias", None)),
    "mamba's out projection bias": ("mamba otherwise", every(parts("mixer.out_proj"), "bias", None)),
    "mamba has no inner norm": ("mamba", every(mixers, "norm_eps", 1e-6)),
    "falcon's norm of dt": ("falcon_mamba", normed_but(0)),
    "falcon's norm of B": ("falcon_mamba", normed_but(1)),
    "falcon's norm of C": ("falcon_mamba", normed_but(2)),
    "falcon's norms' eps": ("falcon_mamba", every(mixers, "norm_eps", 1e-6)),
    "falcon's own eps": ("falcon_mamba", every(mixers, "norm_eps", 1e-5)),
    "falcon's default eps": ("falcon_mamba otherwise", every(mixers, "norm_eps", 1e-3)),
    "rotary": ("llama", rotary()),
    "rope_theta": ("llama", rotary(frequencies=lambda r: plain_frequencies(r, 10000.0))),
    "grouped key heads": ("llama", interleaved_heads),
    "head_dim is not hidden / heads": ("llama", scaled_wrongly),
    "attention bias": ("llama", every(parts("mixer.qkv"), "bias", None)),
    "attention output bias": ("llama", every(parts("mixer.out"), "bias", None)),
    "MLP bias": ("llama", every(parts("mlp.gate_up"), "bias", None)),
    "MLP output bias": ("llama", every(parts("mlp.down"), "bias", None)),
    "eps": ("llama", every(norms, "eps", 1e-6)),
    "llama's untied head": ("llama", lambda m: [(m.head, "weight", m.embed.weight)]),
    "llama's tied head": ("llama tied", lambda m: [(m.head, "weight", m.embed.weight.flip(0))]),
    "mistral's window": ("mistral", windows(lambda i, w: None)),
    "mistral's window to the token": ("mistral", windows(lambda i, w: 6)),
    "mistral's head_dim": ("mistral", scaled_wrongly),
    "mistral's grouped key heads": ("mistral", interleaved_heads),
    "mistral's null window": ("mistral, no window", windows(lambda i, w: 5)),
    "qwen2's bias on q, k, v": ("qwen2", every(parts("mixer.qkv"), "bias", None)),
    "qwen2's window": ("qwen2", windows(lambda i, w: None)),
    "qwen2's window to the token": ("qwen2", windows(lambda i, w: w and w - 1)),
    "qwen2's max_window_layers": ("qwen2", windows(lambda i, w: 5)),
    "qwen2's use_sliding_window": ("qwen2, window not in use", windows(lambda i, w: 5)),
    "qwen2's layer_types": ("qwen2, layer types", windows(lambda i, w: None if i == 2 else w)),
    "qwen3's norm of q": ("qwen3", every(parts("mixer.q_norm"), "weight", torch.ones_like)),
    "qwen3's norm of k": ("qwen3", every(parts("mixer.k_norm"), "weight", torch.ones_like)),
    "qwen3's norms at all": ("qwen3", every(mixers, "q_norm", lambda norm: None)),
    "qwen3's norms come before rotary": ("qwen3", normed_after_rotary),
    "qwen3's norms are a head's": ("qwen3", normed_over_all_heads),
    "qwen3's norms' eps": ("qwen3", every(parts("mixer.k_norm"), "eps", 1e-6)),
    "qwen3's head_dim": ("qwen3", scaled_wrongly),
    "qwen3's bias": ("qwen3, biased, sliding", every(parts("mixer.qkv"), "bias", None)),
    "qwen3's output bias": ("qwen3, biased, sliding", every(parts("mixer.out"), "bias", None)),
    "qwen3's layer_types": ("qwen3, biased, sliding", windows(lambda i, w: None)),
    "linear scaling": ("llama linear", rotary(frequencies=plain_frequencies)),
    "llama3 scaling": ("llama llama3", rotary(frequencies=plain_frequencies)),
    "yarn's frequencies": ("llama yarn", rotary(frequencies=plain_frequencies)),
    "yarn's attention factor": ("llama yarn", rotary(factor=lambda r: 1.0)),
    "yarn's mscale": ("llama yarn, in full", rotary(factor=lambda r: 1.138629)),
}


@pytest.mark.parametrize("point", ODD_POINTS)
def test_each_odd_point_moves_the_logits(point: str, pair: Callable[[str], Pair]) -> None:
    name, removal = ODD_POINTS[point]
    twin = pair(name)
    prompt = ids(60)
    want = twin.whole(prompt)

    def distance() -> float:
        with torch.no_grad():
            return float((twin.ours(prompt, Spans.of([60])) - want).abs().max())

    def without(removals: list[Removal]) -> float:
        if not removals:
            return distance()
        with changed(*removals[0]):
            return without(removals[1:])

    removals = removal(twin.ours)
    assert removals, "nothing was removed"
    assert without(removals) > 1e-3, f"{name} does not notice that {point} is gone"
    same_logits(twin.ours(prompt, Spans.of([60])), want, "put back")
