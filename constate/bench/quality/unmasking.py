"""What fewer model calls cost a masked diffusion model: one row a policy and budget, the whole frontier.

Three figures stand side by side, because each alone can be had cheaply. Infill accuracy: gaps in a book that
no shipped model has read are filled greedily, with the text on both sides (a block-causal model sees only
the left), and tokens that equal the book's are counted. Bits per byte of text written at temperature 1, as
an autoregressive judge finds it: it falls when a text repeats itself. The share of distinct 4-grams in that
text: it falls then too. The first row is the book's own text. Knows plans and texts; decoding is generate's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

import torch

from ...core.model import Model
from ...diffusion_lm.admit import BLOCK
from ...diffusion_lm.denoiser import denoiser
from ...diffusion_lm.plan import APPROXIMATE
from ...generation import Result, generate
from ...training.score import bits_per_byte
from .texts import read

JUDGE = "tiny/transformer"
SIDE, GAP, PROMPT = 64, 8, 32  # tokens to the left and right of a gap, in it, and before written text
COUNTED = ("confidence", "margin", "entropy", "random", "ancestral", "remask")
EACH = (1, 2, 4, 8)  # tokens a call
TRUSTING: Mapping[str, Sequence[float]] = {
    "threshold": (0.95, 0.8, 0.6, 0.4),
    "entropy_bound": (0.1, 0.5, 1.5, 4.0),
}


def plans() -> Iterator[tuple[str, int | None, dict[str, Any]]]:
    """What is compared: a name, tokens a call where they are fixed, and options of generate."""
    for policy in COUNTED:
        for each in EACH:
            yield f"{policy}, {each} a call", each, {"policy": policy}
    for each in EACH:
        yield f"confidence, order noise 1, {each} a call", each, {"policy": "confidence", "order_noise": 1.0}
    for policy, values in TRUSTING.items():
        for value in values:
            yield f"{policy} {value}", None, {"policy": policy, policy: value}


def unmasking(
    model: Model,
    name: str,
    judge: Model,
    *,
    text: str | None = None,
    rows: int = 8,
    new: int = 256,
    seed: int = 0,
    **given: Any,
) -> Iterator[dict[str, Any]]:
    """The rows of the frontier, each as soon as it is measured. Keys as for every probe, `score` being the
    infill accuracy over `n` tokens with the 95% interval `low` to `high`; and `generated_bpb`, `distinct_4`,
    `model_calls` for `new` tokens, `tokens_per_call`, `infill_calls` for a gap, `ttft_s`,
    `between_commits_s`, `decoding`, which says whether a cache was approximate, and for one that was
    `cache_differs`, the share of the texts' tokens that are not those of the same run without a cache.

    `rows` texts are written and sixteen times as many gaps filled. `given` are further options of generate
    (block, cache, refresh, confidence ...) for all rows. Raises ValueError for a model that is no denoiser,
    or without a tokenizer or enough text.
    """
    about = denoiser(model)
    if model.tokenizer is None or judge.tokenizer is None:
        raise ValueError("the quality of text is measured: a model and a judge with tokenizers are wanted")
    title, content = read(text)
    ids = model.tokenizer.encode(content, add_special_tokens=False).ids
    gaps, prompts, size = 16 * rows, rows, given.get("block") or about.block or BLOCK
    if rows < 1 or new < 4 or len(ids) < gaps * (2 * SIDE + GAP) or len(ids) < PROMPT + new:
        raise ValueError(f"rows={rows}, new={new} with {len(ids)} tokens of {title}: more text is wanted")
    cuts = [int(i * (len(ids) - 2 * SIDE - GAP) / gaps) for i in range(gaps)]
    starts = [int(i * (len(ids) - PROMPT - new) / prompts) for i in range(prompts)]
    left = [ids[c : c + SIDE] for c in cuts]
    wanted = [ids[c + SIDE : c + SIDE + GAP] for c in cuts]
    right = [ids[c + SIDE + GAP : c + 2 * SIDE + GAP] for c in cuts] if about.block is None else None
    begun = [ids[s : s + PROMPT] for s in starts]
    sees = "both sides" if right else "the left side alone"
    base = {
        "probe": "unmasking",
        "model": name,
        "seed": seed,
        "setting": f"{title} itself",
        "score": None,
        "chance": 1 / model.vocab,
        "n": gaps * GAP,
        "low": None,
        "high": None,
        "params": sum(p.numel() for p in model.parameters()),
        "state_bytes": model.cost().held.get("state", 0),
    }
    book = [ids[s + PROMPT : s + PROMPT + new] for s in starts]
    yield base | judged(judge, model, book)
    for setting, each, options in plans():
        chosen = {**options, **given}
        if chosen["policy"] == "remask" and given.get("cache") == "delayed":
            continue  # a pair that makes no sense
        if each is not None and each > size:
            continue  # no call fills more than a block

        def steps(start: int, tokens: int, each: int | None = each) -> int | None:
            if each is None:
                return None
            return max(-(-tokens // each), stretches(about.block, size, start, tokens))

        fill = {"max_new_tokens": GAP, "ignore_eos": True, "infill": right, "steps": steps(SIDE, GAP)}
        filled = generate(model, left, **fill, **chosen)
        right_ones = sum(
            a == b
            for r, want in zip(filled, wanted, strict=True)
            for a, b in zip(r.tokens, want, strict=True)
        )
        score = right_ones / (gaps * GAP)
        spread = 1.96 * math.sqrt(score * (1 - score) / (gaps * GAP))
        write = {
            "max_new_tokens": new,
            "eos": "never",
            "temperature": 1.0,
            "seed": seed,
            "steps": steps(PROMPT, new),
        }
        texts = generate(model, begun, **write, **chosen)
        differs = None
        if chosen.get("cache") in APPROXIMATE:
            plain = generate(model, begun, **write, **{**chosen, "cache": "none", "refresh": None})
            differs = mean(
                a != b
                for x, y in zip(texts, plain, strict=True)
                for a, b in zip(x.tokens, y.tokens, strict=True)
            )
        yield (
            base
            | {"setting": f"{setting}; gaps of {GAP} with {SIDE} tokens on {sees}"}
            | {"score": score, "low": max(0.0, score - spread), "high": min(1.0, score + spread)}
            | judged(judge, model, [r.tokens for r in texts])
            | cost(filled, texts)
            | {"cache_differs": differs}
        )


def judged(judge: Model, model: Model, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Bits per byte of these texts under the judge, and the mean share of distinct 4-grams in one."""
    assert model.tokenizer is not None and judge.tokenizer is not None
    start = min(judge.eos_ids, default=0)
    bits, size = 0.0, 0
    for text in texts:
        written = model.tokenizer.decode(list(text))
        tokens = torch.tensor(judge.tokenizer.encode(written, add_special_tokens=False).ids)
        nbytes = len(written.encode())
        bits += nbytes * bits_per_byte(judge, tokens.to(judge.device), nbytes, start=start)
        size += nbytes
    return {"generated_bpb": bits / size, "distinct_4": mean(distinct(text) for text in texts)}


def stretches(block: int | None, size: int, start: int, tokens: int) -> int:
    """In how many stretches of `size` so many places from `start` on are filled, each of which takes a call:
    within the model's blocks, where it has any."""
    if block is None:
        return -(-tokens // size)
    return len({(p // block, p % block // size) for p in range(start, start + tokens)})


def distinct(tokens: Sequence[int], n: int = 4) -> float:
    """The share of the n-grams of a text that are unlike each other; 1 where nothing repeats."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams)


def cost(filled: Sequence[Result], texts: Sequence[Result]) -> dict[str, Any]:
    """Calls and seconds of a row on average. The seconds are those of the whole batch's calls."""
    used = [r.usage for r in texts]
    firsts = [u.ttft_s for u in used if u.ttft_s is not None]
    gaps = [u.between_commits_s for u in used if u.between_commits_s is not None]
    return {
        "model_calls": mean(u.model_calls for u in used),
        "tokens_per_call": mean(u.tokens_per_call for u in used),
        "infill_calls": mean(r.usage.model_calls for r in filled),
        "ttft_s": mean(firsts),
        "between_commits_s": mean(gaps) if gaps else None,
        "decoding": dict(used[0].decoding),
    }
