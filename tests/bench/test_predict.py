"""The model on paper beside numbers that were published, or worked out elsewhere from published sizes.

The tables come from Stanford CS336's tenth lecture, from papers, and from sums over published configs that
were made without this package; each is a literal here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from constate.bench import machine
from constate.bench.predict import config, hardware, names, paper, predict
from constate.bench.predict.hardware import NAMED, Hardware
from constate.bench.predict.limits import attention_overtakes, ceiling, crossover, first, weight_balance
from constate.bench.predict.paper import Paper
from constate.bench.predict.roofline import bound
from constate.bench.predict.rows import Asked, step
from constate.bench.shapes import random_model
from constate.cli import main
from constate.core.cost import seen_pairs
from constate.loading import load
from tests.models import MODELS

H100 = NAMED["h100"]
MIB = 2**20


@cache
def published(name: str, state_dtype: str = "float32", convention: str = "model") -> Paper:
    """Made once: a large model's modules take a second."""
    return paper(config(name), state_dtype=state_dtype, convention=convention)


def lecture(name: str, state_dtype: str = "bfloat16", **changed: Any) -> Paper:
    if not changed:
        return published(name, state_dtype, "lecture")
    return paper({**config(name), **changed}, state_dtype=state_dtype, convention="lecture")


def row(model: Paper, machine: Hardware = H100, **asked: Any) -> dict[str, Any]:
    (only,) = predict(
        model, "m", [machine], [Asked(**{"phase": "decode", "rows": 1, "context": 1024, **asked})]
    )
    return only


def transformer_plus(layers: int = 32, **kind: Any) -> Paper:
    """A transformer of Mamba-2.8b's width: 32 layers of attention with as many key heads as query heads."""
    raw = {
        "model_type": "llama",
        "vocab_size": 50280,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
    }
    return paper(raw, **kind)


# -- the lecture's table -------------------------------------------------------------------------

SEVEN = [  # key heads, rows, bytes, milliseconds, tokens a second, fits into 80e9 bytes
    (40, 1, 26_869_760_000, 8.0208, 124.675, True),
    (40, 16, 39_452_672_000, 11.7769, 1358.59, True),
    (40, 64, 79_717_990_400, 23.7964, 2689.48, True),
    (40, 256, 240_779_264_000, 71.8744, 3561.77, False),
    (8, 1, 22_843_228_160, 6.8189, 146.652, True),
    (8, 16, 25_359_810_560, 7.5701, 2113.58, True),
    (8, 64, 33_412_874_240, 9.9740, 6416.69, True),
]


@pytest.mark.parametrize(("heads", "rows", "total", "ms", "rate", "fits"), SEVEN)
def test_llama_2_13b_on_an_h100(
    heads: int, rows: int, total: int, ms: float, rate: float, fits: bool
) -> None:
    said = row(lecture("llama-2-13b", num_key_value_heads=heads), rows=rows)
    assert said["total_bytes"] == pytest.approx(total, rel=1e-3)
    assert said["decode_latency_s"] == said["latency_s"] == pytest.approx(ms / 1e3, rel=1e-3)
    assert said["tokens_per_s"] == pytest.approx(rate, rel=1e-3)
    assert said["fits"] is fits
    assert said["bound"] == "memory"


def test_the_lectures_table_tells_the_conventions_apart() -> None:
    """What "model" leaves out, the embedding's table, is more than the bound of the test above."""
    said = row(published("llama-2-13b"), rows=1)
    assert abs(said["latency_s"] / 8.0208e-3 - 1) > 1e-3


def test_llama_2_13bs_cache() -> None:
    assert row(lecture("llama-2-13b"))["kv_bytes"] == 838_860_800
    said = row(lecture("llama-2-13b", num_key_value_heads=8))
    assert (said["kv_bytes"], said["kv_bytes_per_token"]) == (167_772_160, 163_840)


# -- sizes ---------------------------------------------------------------------------------------

PARAMS = {  # as their publishers, or the files on the hub, count them
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "smollm2-135m": 134_515_008,
    "mamba-130m": 129_135_360,
    "mamba-370m": 371_516_416,
    "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600,
    "mamba2-130m": 128_989_632,
    "mamba2-370m": 368_346_624,
    "mamba2-780m": 780_161_280,
    "mamba2-1.3b": 1_343_757_312,
    "mamba2-2.7b": 2_702_599_680,
    "falcon-mamba-7b": 7_272_665_088,
    "jamba-v0.1": 51_570_323_328,
    "nemotron-h-8b": 8_100_852_736,
    "recurrentgemma-2b": 2_682_862_080,
    "llada-8b": 8_015_581_184,
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_are_what_is_published(name: str) -> None:
    assert published(name).params == PARAMS[name]


KV = {  # bytes a token in 16 bits
    "llama-2-7b": 524_288,
    "llama-2-13b": 819_200,
    "llama-2-70b": 327_680,
    "llama-3-70b": 327_680,
    "qwen2.5-72b": 327_680,
    "llama-3-8b": 131_072,
    "mistral-7b": 131_072,
    "jamba-v0.1": 16_384,
    "nemotron-h-8b": 16_384,
    "qwen3-next-80b-a3b": 24_576,
    "minimax-text-01": 40_960,
    "zamba2-7b": 372_736,
    "deepseek-v3": 2 * 61 * (512 + 64),
    "kimi-linear-48b-a3b": 2 * 7 * (512 + 64),
    "mamba-2.8b": 0,
}
WINDOWED = [  # bytes of keys and values after so many tokens
    ("mistral-7b", 32_768, 512 * MIB),
    ("gemma-3-27b", 32_768, 2976 * MIB),
    ("gemma-3-27b", 131_072, 10_656 * MIB),
    ("recurrentgemma-2b", 1_000_000, 16 * MIB),
    ("llama-2-7b", 262_144, 128 * 1024 * MIB),
    ("jamba-v0.1", 262_144, 4 * 1024 * MIB),
    ("qwen3-next-80b-a3b", 262_144, 6 * 1024 * MIB),
]


@pytest.mark.parametrize("name", KV)
def test_kv_a_token(name: str) -> None:
    assert row(published(name))["kv_bytes_per_token"] == KV[name]


@pytest.mark.parametrize(("name", "context", "kv"), WINDOWED)
def test_kv_at_a_length(name: str, context: int, kv: int) -> None:
    assert row(published(name), context=context)["kv_bytes"] == kv


STATE = {  # numbers of recurrent state, and of convolution history at w inputs
    "mamba-130m": (589_824, 147_456),
    "mamba-370m": (1_572_864, 393_216),
    "mamba-1.4b": (3_145_728, 786_432),
    "mamba-2.8b": (5_242_880, 1_310_720),
    "mamba2-130m": (4_718_592, 172_032),
    "mamba2-1.3b": (25_165_824, 835_584),
    "mamba2-2.7b": (41_943_040, 1_376_256),
    "jamba-v0.1": (3_670_016, 917_504),
    "nemotron-h-8b": (25_165_824, 983_040),
    "falcon-h1-7b": (34_603_008, 630_784),
    "zamba2-7b": (37_158_912, 2_405_376),
    "qwen3-next-80b-a3b": (18_874_368, 1_179_648),
    "minimax-text-01": (73_400_320, 0),
    "rwkv7-2.9b": (5_242_880, 163_840),
    "gla-1.3b": (24 * 524_288, 0),
    "retnet-1.3b": (24 * 1_048_576, 0),
}


@pytest.mark.parametrize("name", STATE)
def test_recurrent_state(name: str) -> None:
    said = row(lecture(name), context=100_000)
    assert (said["state_bytes"] // 2, said["conv_bytes"] // 2) == STATE[name]
    assert said["growth_bytes_per_token"] == said["kv_bytes_per_token"], "no window, so it goes on growing"


def test_the_state_has_a_dtype_of_its_own() -> None:
    said = row(lecture("nemotron-h-8b", "float32"))
    assert (said["state_bytes"], said["conv_bytes"]) == (4 * 25_165_824, 2 * 983_040)


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ({"model_type": "delta_net", "num_heads": 16}, 262_144),
        ({"model_type": "gated_deltanet", "num_heads": 6, "head_dim": 256, "expand_v": 2.0}, 786_432),
    ],
)
def test_recurrent_state_of_a_layer_of_width_2048(sizes: dict[str, Any], numbers: int) -> None:
    raw = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 1, **sizes}
    assert row(paper(raw))["state_bytes"] == 4 * numbers


def test_a_convolution_keeps_w_inputs_in_the_lecture_and_one_less_in_the_model() -> None:
    kept = {
        kind: row(paper(config("mamba-2.8b"), convention=kind))["conv_bytes"] for kind in ("lecture", "model")
    }
    assert kept == {"lecture": 2 * 1_310_720, "model": 2 * 983_040}


def test_mamba_130m_in_float32() -> None:
    said = row(paper(config("mamba-130m"), dtype="float32"))
    assert (said["state_bytes"], said["conv_bytes"]) == (2_359_296, 442_368)


# -- bounds --------------------------------------------------------------------------------------

BEST = [  # model, dtype of state, context; tokens a second of 1 and 64 rows on a100, h100, h200, ddr5-12ch
    ("llama-3-8b", "bfloat16", 8192, [(119, 1539), (196, 2529), (280, 3624), (26.9, 348)]),
    ("mamba-2.8b", "bfloat16", 0, [(367, 18100), (602, 29700), (863, 42600), (82.8, 4088)]),
    ("mamba2-2.7b", "float32", 0, [(355, 4792), (583, 7873), (835, 11300), (80.2, 1083)]),
    ("nemotron-h-8b", "float32", 8192, [(123, 3441), (203, 5653), (290, 8100), (27.9, 778)]),
]


@pytest.mark.parametrize(("name", "state", "context", "best"), BEST)
def test_best_decode_rates(name: str, state: str, context: int, best: list[tuple[float, float]]) -> None:
    """Traffic alone: the table has no arithmetic, which on the CPU bounds 64 rows."""
    model = lecture(name, state)
    for where, rates in zip(("a100", "h100", "h200", "ddr5-12ch"), best, strict=True):
        for rows, rate in zip((1, 64), rates, strict=True):
            said = row(model, NAMED[where], rows=rows, context=context)
            assert rows / said["memory_s"] == pytest.approx(rate, rel=0.01), (where, rows)
            if where != "ddr5-12ch":
                assert said["tokens_per_s"] == pytest.approx(rate, rel=0.01), (where, rows)


@pytest.mark.parametrize(("name", "rate"), [("a100", 7.8e3), ("h100", 12.8e3), ("h200", 18.4e3)])
def test_best_rate_of_the_smallest_mamba(name: str, rate: float) -> None:
    assert row(lecture("mamba-130m"), NAMED[name])["tokens_per_s"] == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(("name", "ridge"), [("a100", 153), ("h100", 295.22), ("h200", 206), ("b200", 281)])
def test_ridges(name: str, ridge: float) -> None:
    assert hardware(name).ridge("bfloat16") == pytest.approx(ridge, rel=0.01)


@pytest.mark.parametrize(
    ("name", "state", "traffic", "memory"),
    [
        ("mamba-2.8b", "bfloat16", 80, 40),
        ("mamba-2.8b", "float32", 144, 72),
        ("mamba2-2.7b", "bfloat16", 529, 264),
        ("mamba2-2.7b", "float32", 1041, 520),
    ],
)
def test_crossovers_with_a_transformer_of_its_size(name: str, state: str, traffic: int, memory: int) -> None:
    other = transformer_plus(convention="lecture")
    assert crossover(lecture(name, state), other) == pytest.approx(traffic, rel=0.01)
    assert crossover(lecture(name, state), other, traffic=False) == pytest.approx(memory, rel=0.01)


def test_crossovers_by_convention_and_of_a_hybrid() -> None:
    lean = {
        kind: paper(config("mamba-2.8b"), state_dtype="bfloat16", convention=kind)
        for kind in ("lecture", "model")
    }
    assert [crossover(each, transformer_plus()) for each in lean.values()] == [80, 76]
    assert crossover(lecture("nemotron-h-8b", "float32"), lecture("llama-3-8b")) == pytest.approx(
        1790, rel=0.01
    )
    assert crossover(lecture("llama-3-8b"), lecture("mamba-2.8b")) is None, "a state never grows"


@pytest.mark.parametrize(
    ("name", "state", "context", "rows"),
    [
        ("llama-2-13b", "bfloat16", 1024, 31.0),
        ("llama-3-8b", "bfloat16", 8192, 15.0),
        ("llama-3-8b", "bfloat16", 131_072, 0.93),
        ("mamba-2.8b", "bfloat16", 0, 211),
        ("mamba2-2.7b", "float32", 0, 15.85),
        ("nemotron-h-8b", "float32", 8192, 47.7),
    ],
)
def test_rows_at_which_weights_stop_dominating(name: str, state: str, context: int, rows: float) -> None:
    assert weight_balance(lecture(name, state), context) == pytest.approx(rows, rel=0.01)
    assert row(lecture(name, state), context=context)["balance_rows"] == pytest.approx(rows, rel=0.01)


def test_rates_that_no_number_of_rows_exceeds() -> None:
    assert ceiling(transformer_plus(convention="lecture"), 2048, H100) == pytest.approx(4992, rel=0.01)
    assert ceiling(lecture("mamba-2.8b"), 0, H100) == pytest.approx(127.8e3, rel=0.01)
    assert ceiling(lecture("mamba2-2.7b", "float32"), 0, H100) == pytest.approx(9.8e3, rel=0.01)
    busy = replace(H100, bandwidth=1e18)
    assert ceiling(lecture("mamba-2.8b"), 0, busy) == pytest.approx(178.6e3, rel=0.01)


def test_prefill() -> None:
    said = row(lecture("llama-3-8b"), phase="prefill", context=8192)
    assert said["ttft_s"] == said["latency_s"] == pytest.approx(0.151, rel=0.01)
    assert said["flops"] == pytest.approx(1.316e14 + 1.76e13, rel=0.01)
    assert said["bound"] == said["limit"] == "compute"
    assert attention_overtakes(lecture("llama-3-8b")) == pytest.approx(61_000, rel=0.01)


def test_absorbed_latent_attention_is_just_memory_bound_on_an_h100() -> None:
    work = published("deepseek-v3").work(1, 8192, 1)
    assert work.mixing_flops / work.moved["kv"] == pytest.approx(241.8, rel=0.01)


def test_a_denoise_step() -> None:
    """LLaDA-8B without a cache: 59 ms of matrix products on an A100, and attention on top."""
    model, a100 = lecture("llada-8b"), NAMED["a100"]
    work = step(model, Asked("denoise", 1, 1150))
    assert work.weight_flops / a100.rate("bfloat16") == pytest.approx(0.059, rel=0.01)
    said = row(model, a100, phase="denoise", context=1150)
    assert said["tokens_per_s"] < 17
    assert said["kv_bytes"] == said["total_bytes"] - said["weight_bytes"] == 0, "nothing is kept"
    assert (said["decode_latency_s"], said["cache"]) == (None, None)
    cached = row(model, a100, phase="denoise", context=1150, block=32, tokens_per_call=2.0)
    assert cached["kv_bytes"] == 1150 * cached["kv_bytes_per_token"]
    assert cached["tokens_per_s"] == pytest.approx(2 / cached["latency_s"])
    assert cached["cache"] == "approximate", "its tokens see all others"
    blocks = paper(config("tiny/block_diffusion"))
    assert row(blocks, phase="denoise", context=64, block=8)["cache"] == "exact"


def test_a_block_is_free_until_it_is_as_large_as_the_ridge() -> None:
    """Lecture's sum: reading the weights hides the arithmetic of B * T tokens below 295 on an H100."""
    model = lecture("llada-8b")
    below, above = (bound(model.work(n, 0, 1), H100, "bfloat16").limit for n in (290, 300))
    assert (below, above) == ("weights", "compute")


# -- conventions, formats, experts, copies ---------------------------------------------------------


def test_the_model_convention_is_what_the_real_model_costs() -> None:
    raw = config("tiny/hybrid")
    model, real = paper(raw, dtype="float32"), load("tiny/hybrid")
    work, cost = model.work(1, 300, 3), real.cost(1, 300, 3)
    assert work.flops == cost.total_flops
    assert work.nbytes == cost.traffic
    assert model.weight_bytes == real.weight_bytes
    assert model.held(301) == {kind: n // 3 for kind, n in cost.held.items()}


def test_another_config_is_another_prediction() -> None:
    wide = {**config("mamba-130m"), "state_size": 32}
    assert row(paper(wide))["state_bytes"] == 2 * row(published("mamba-130m"))["state_bytes"]


def test_logits_of_every_verified_token_are_computed() -> None:
    model = published("llama-3-8b")
    once, every = (model.work(5, 100, 2, every=flag).flops for flag in (False, True))
    assert every - once == 2 * 4 * 2 * 128256 * 4096


def test_a_verify_pass_writes_snapshots_of_a_recurrent_state() -> None:
    asked = Asked("verify", 3, 100, verify=4)
    model = published("mamba2-130m")
    assert step(model, asked).moved["state"] == 3 * 6 * 4 * STATE["mamba2-130m"][0]
    attention = published("smollm2-135m")
    assert step(attention, asked).moved["kv"] == 3 * (105 + 5) * 23_040, "attention needs none"


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "jamba", "composed", "deepseek_v3"])
def test_int8_on_paper_is_what_int8_takes(name: str) -> None:
    raw = MODELS[name].raw
    real, model = random_model(raw, weights="int8"), paper(raw, dtype="float32", weights="int8")
    assert model.weight_bytes == real.weight_bytes < paper(raw, dtype="float32").weight_bytes
    assert model.work(1, 7, 2).weight_bytes == pytest.approx(real.cost(1, 7, 2).weight_bytes, rel=1e-3)


def test_narrow_formats_leave_what_the_state_hangs_on() -> None:
    full, fp8, int4 = (
        paper(config("jamba-v0.1"), weights=kind).weight_bytes for kind in (None, "fp8", "int4")
    )
    assert 0.5 < fp8 / full < 0.52
    assert 0.25 < int4 / full < 0.28
    for kind in ("fp8", "int4"):
        small = paper(config("mamba2-130m"), weights=kind)
        left = 50288 * 768 * 2 + 24 * 24 * 768 * 2  # the tied embedding, and each layer's rows of dt
        assert small.weight_bytes > left
    with pytest.raises(ValueError, match="known are int8, fp8, int4"):
        paper(config("mamba-130m"), weights="int3")


def test_experts_that_a_batch_asks() -> None:
    model = published("qwen3-next-80b-a3b")
    assert model.active_params == pytest.approx(3.9e9, rel=0.01)
    assert row(model)["experts_touched"] == pytest.approx(10)
    assert row(model, rows=64)["experts_touched"] == pytest.approx(512 * (1 - (1 - 10 / 512) ** 64))
    one, many = (row(model, rows=n)["moved_bytes"] for n in (1, 64))
    assert one < 0.12 * model.weight_bytes < 0.5 * model.weight_bytes < many
    assert row(published("llama-3-8b"))["experts_touched"] is None


def test_copies_multiply_the_rate_alone() -> None:
    one, four = (row(published("llama-3-8b"), copies=n) for n in (1, 4))
    assert four["tokens_per_s"] == 4 * one["tokens_per_s"]
    assert (four["latency_s"], four["total_bytes"]) == (one["latency_s"], one["total_bytes"])


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-27b", "nemotron-h-8b", "recurrentgemma-2b"])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_largest_that_fits_is_the_largest(name: str, rows: int) -> None:
    model = published(name)
    said = row(model, rows=rows, context=3000)
    room, most = said["memory_bytes"], said["largest_rows"]
    assert model.total_bytes(3000, most) <= room < model.total_bytes(3000, most + 1)
    if (longest := said["largest_context"]) is None:
        assert model.total_bytes(2**35, rows) <= room
    else:
        assert model.total_bytes(longest, rows) <= room < model.total_bytes(longest + 1, rows)
    within = replace(H100, memory_bytes=model.total_bytes(700, rows))  # no window is full there
    assert row(model, within, rows=rows)["largest_context"] == 700
    tight = replace(H100, memory_bytes=model.weight_bytes - 1)
    assert row(model, tight, rows=rows)["largest_context"] == row(model, tight)["largest_rows"] == 0


def test_first() -> None:
    for n in (0, 1, 2, 63, 64, 65):
        assert first(lambda k, n=n: k >= n, 64) == (n if n <= 64 else None)


@pytest.mark.parametrize("new", range(7))
def test_pairs_are_those_that_are_seen(new: int) -> None:
    for past in range(7):
        total = past + new
        for window in (None, 1, 3, 20):
            seen = [k for p in range(past, total) for k in range(p + 1) if window is None or k > p - window]
            assert seen_pairs(new, past, window) == len(seen), (past, window)
        for block in (2, 3, 7):
            seen = [k for p in range(past, total) for k in range(total) if k < (p // block + 1) * block]
            assert seen_pairs(new, past, None, block) == len(seen), (past, block)


# -- what is asked ---------------------------------------------------------------------------------


def test_published_configs_can_be_built() -> None:
    for name in names():
        model = published(name)
        assert row(model, phase="decode" if model.causal else "denoise")["latency_s"] > 0, name


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def measure(device: str, dtype: torch.dtype = torch.float32) -> machine.Machine:
        seen.append(device)
        return machine.Machine(2e9, 5e9)

    monkeypatch.setattr(machine, "measure", measure)
    said = hardware("this")
    assert (seen, said.measured) == (["cpu"], True)
    assert (said.bandwidth, said.rate("bfloat16"), said.rate("float32")) == (2e9, 5e9, 5e9)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[dict[str, Any]], str]:
    status = main(["bench", "predict", *argv, "--json"])
    out, err = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], err


def test_the_command_reads_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("mamba-130m")))
    for given in (tmp_path, tmp_path / "config.json", "mamba-130m"):
        status, rows, _ = run(
            capsys, str(given), "--hardware", "h100,rtx5090", "--rows", "1,4", "--context", "1k"
        )
        assert (status, [(r["hardware"], r["rows"]) for r in rows]) == (
            0,
            [("h100", 1), ("h100", 4), ("rtx5090", 1), ("rtx5090", 4)],
        )
        keys = "params weight_bytes kv_bytes_per_token kv_bytes state_bytes total_bytes fits decode_latency_s"
        assert set(f"{keys} tokens_per_s ttft_s bound intensity".split()) <= rows[0].keys()
        assert rows[0]["params"] == 129_135_360


def test_the_command_on_several(capsys: pytest.CaptureFixture[str]) -> None:
    status, rows, err = run(
        capsys,
        "smollm2-135m",
        "mamba-130m",
        "--phase",
        "decode,prefill",
        "--context",
        "16k",
        "--against",
        "llama-3-8b",
    )
    assert (status, len(rows)) == (0, 4)
    assert [r["beyond_positions"] for r in rows] == [True, True, False, False]
    assert "8,192 positions" in err
    assert rows[2]["crossover_traffic_tokens"] == 40, "2 * 2,580,480 bytes (float32 state) of 131,072 a token"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["mamba-130m", "--hardware", "h101"],
            "known are a100, h100, h200, b200, rtx4090, rtx5090, ddr5-12ch, this",
        ),
        (["mamba-13m"], "did you mean 'mamba-130m'"),
        (["mamba-130m", "--convention", "seminar"], "known are model, lecture"),
        (["mamba-130m", "--phase", "denoise"], "writes one token after another"),
        (["llada-8b", "--context", "1k", "--phase", "verify"], "decides its tokens in any order"),
        (["mamba-130m", "--phase", "encode"], "known are decode, prefill, verify, denoise"),
        (["mamba-130m", "--rows", "0"], "rows 0: at least 1"),
        (["mamba-130m", "--dtype", "int3"], "bf16"),
        (["mamba-130m", "--hardware", ""], "known are a100"),
        (["mamba-130m", "--tokens-per-call", "0"], "more than 0"),
        (["mamba-130m", "--tokens-per-call", "nan"], "more than 0"),
        (["mamba-130m", "--phase", "verify", "--tokens-per-call", "6"], "at most 5 a pass"),
    ],
)
def test_what_cannot_be_predicted(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows, err = run(capsys, *argv)
    assert (status, rows) == (2, [])
    assert told in err
    assert err.count("\n") == 1
