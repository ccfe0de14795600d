"""`constate generate`: text after prompts, as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    DEFAULT_MODEL,
    Backend,
    BlockSize,
    Blur,
    Bound,
    CacheWay,
    Confidence,
    Device,
    Dtype,
    Ends,
    Executor,
    Guidance,
    Json,
    Least,
    Model,
    Policy,
    Refresh,
    StateDtype,
    Steps,
    Threshold,
    Weights,
    count,
    given,
)
from .output import emit, say, seconds, size

if TYPE_CHECKING:
    from ..generation import Result

Prompts = Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="What to write after.")]
MaxNew = Annotated[int, typer.Option(parser=count, metavar="N", help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; higher varies more.")]
TopK = Annotated[int, typer.Option(parser=count, metavar="N", help="Draw from the N likeliest; 0: all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest that together weigh this much.")]
MinP = Annotated[float, typer.Option(help="Drop what is less likely than this times the likeliest.")]
Penalty = Annotated[float, typer.Option(help="Above 1 makes tokens already met less likely.")]
Seed = Annotated[int, typer.Option(help="Sample j of a prompt draws from seed + j.")]
Samples = Annotated[int, typer.Option("--n", parser=count, metavar="N", help="Samples of each prompt.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End there; repeat for several.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Write on past an end-of-text token.")]
Logprobs = Annotated[bool, typer.Option("--logprobs", help="With --json: each token's log-probability.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")]
Infill = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Text to the right of what is written: once for all prompts, or each."),
]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Store the state after the last token.")]
Load = Annotated[Path | None, typer.Option(metavar="FILE", help="Go on from a stored state.")]
From = Annotated[
    str | None, typer.Option("--file", metavar="FILE", help="Prompts from a file, one a line; - is stdin.")
]
Copies = Annotated[
    int, typer.Option(parser=count, metavar="M", help="Under --executor ray: so many copies of the model.")
]


def generate(
    prompts: Prompts = None,
    model: Model = DEFAULT_MODEL,
    file: From = None,
    max_new_tokens: MaxNew = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    n: Samples = 1,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Logprobs = False,
    chat: Chat = False,
    save_state: Save = None,
    load_state: Load = None,
    infill: Infill = None,
    policy: Policy = None,
    steps: Steps = None,
    block: BlockSize = None,
    threshold: Threshold = None,
    entropy_bound: Bound = None,
    confidence: Confidence = None,
    order_noise: Blur = None,
    cache: CacheWay = None,
    refresh: Refresh = None,
    guidance: Guidance = None,
    eos: Ends = None,
    min_new_tokens: Least = None,
    executor: Executor = "local",
    copies: Copies = 1,
    dtype: Dtype = "float32",
    weights: Weights = None,
    state_dtype: StateDtype = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """Write text after each PROMPT. Several are one batch, and each gets the text it would get alone."""
    if logprobs and not as_json:
        raise ValueError("--logprobs has nowhere to go in plain text: add --json")
    texts = _prompts(prompts or [], file, load_state)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "n": n,
        "stop": stop or (),
        "ignore_eos": ignore_eos,
        "chat": chat,
        "save_state": save_state,
        "load_state": load_state,
        **given(infill=infill[0] if infill and len(infill) == 1 else infill or None),
        **given(policy=policy, steps=steps, block=block, threshold=threshold, entropy_bound=entropy_bound),
        **given(confidence=confidence, order_noise=order_noise, cache=cache, refresh=refresh),
        **given(guidance=guidance, eos=eos, min_new_tokens=min_new_tokens),
    }
    if executor != "local" or copies != 1:
        loading = given(dtype=dtype, weights=weights, state_dtype=state_dtype, device=device, backend=backend)
        spread = _spread(model, texts, executor, copies, loading, options)
        _print(model, spread, len(texts), n, as_json, logprobs)
        return
    from ..generation import generate as write
    from ..generation import stream
    from ..loading import load

    loaded = load(model, device, dtype, backend, state_dtype, weights)
    if as_json:
        _print(model, write(loaded, texts, **options), len(texts), n, as_json, logprobs)
    elif len(texts) * n == 1:
        done = None
        for event in stream(loaded, texts, **options):
            print(event.text, end="", flush=True)
            done = event.result or done
        print()
        if done is not None:
            say(summary(model, [done]))
    else:
        _print(model, write(loaded, texts, **options), len(texts), n, as_json, logprobs)


def _print(
    model: str, results: Iterable[Result], prompts: int, n: int, as_json: bool, logprobs: bool
) -> None:
    """Results as they come, `n` to a prompt."""
    done, several = [], prompts * n > 1
    for i, result in enumerate(results):
        done.append(result)
        if as_json:
            emit(record(model, result, logprobs))
            continue
        if several:
            sample = f" · sample {i % n + 1} of {n}" if n > 1 else ""
            print(f"── {' '.join(str(result.prompt).split())}{sample}")
        print(result.text, *[""] * several, sep="\n")
    if not as_json:
        say(summary(model, done))


def _spread(
    model: str,
    texts: list[str],
    executor: str,
    copies: int,
    loading: dict[str, Any],
    options: dict[str, Any],
) -> Iterator[Result]:
    """The results of `copies` copies of the model on a cluster, in the order of the prompts."""
    from ..bench.executor import check

    check(executor)
    if executor == "local":
        raise ValueError(f"--copies {copies} run on a cluster: add --executor ray")
    state = {key: options.pop(key) for key in ("save_state", "load_state")}
    if asked := [key for key, value in state.items() if value is not None]:
        raise ValueError(f"--{asked[0].replace('_', '-')} is one file for all prompts: leave --executor out")
    from ..bench.ray.copies import write

    return write(model, texts, copies, loading=loading, writing=options)


def record(model: str, result: Result, logprobs: bool) -> dict[str, Any]:
    """A result as `--json` prints it."""
    row = {"model": model, **asdict(result)}
    scores = row.pop("logprobs")
    return {**row, "logprobs": scores} if logprobs else row


def summary(model: str, results: Sequence[Result]) -> str:
    """What the texts cost, in one line."""
    used = [result.usage for result in results]
    new = sum(usage.new_tokens for usage in used)
    kinds = ("state", "conv", "kv")
    held = {kind: sum(getattr(usage, f"{kind}_bytes") for usage in used) for kind in kinds}
    parts = [model, used[0].backend, f"{new} tokens"]
    if used[0].decoding:
        calls = max(usage.model_calls for usage in used)
        parts.append(f"{calls} calls ({', '.join(f'{k} {v}' for k, v in used[0].decoding.items())})")
    if used[0].ttft_s is not None:
        parts.append(f"first after {seconds(used[0].ttft_s)}")
    if used[0].itl_s is not None:
        parts.append(f"{seconds(used[0].itl_s)} each")
    parts += [f"{kind} {size(nbytes)}" for kind, nbytes in held.items() if nbytes]
    return " · ".join(parts)


def _prompts(given: list[str], file: str | None, load_state: Path | None) -> list[str]:
    """Those of the command line, then those of the file; a state alone goes on where its rows stopped."""
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise ValueError(f"--file {file}: no such file; one prompt a line is wanted") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"--file {file}: not UTF-8 ({error}); one prompt a line is wanted") from None
        given = given + [line for line in text.split("\n") if line.strip()]
    if not given and load_state is not None:
        from ..core.cache import read_header

        return [""] * len(read_header(load_state)["lengths"])
    if not given:
        raise ValueError('no prompt was given: constate generate "It is a truth", or --file with one a line')
    return given
