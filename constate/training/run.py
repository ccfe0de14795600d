"""A training from recipe to checkpoint, as an iterator over its reports.

Knows the order of things: batches in, losses out, a state saved now and then, and at the end the checkpoint
as it ships, in bfloat16, read back and scored. Everything that has its own file is only called here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import loading
from ..core.architecture import read_config
from ..core.checkpoint import whole, write_json
from ..core.model import Model
from ..kernels.dispatch import select
from . import objectives, recipes, resume
from .batches import TOKENS
from .init import initialise, start_from
from .objectives import Objective
from .optim import course, optimizers
from .recipes import Recipe
from .score import WINDOW
from .text import END_ID, Corpus, austen, load_tokenizer, own_text

REPORT = 10  # steps from one report to the next
ESTIMATE, SAMPLE = 100, 20  # steps from one estimate on the held-out text to the next, by each 20th window


def train(
    recipe: Recipe | str,
    out: str | Path,
    *,
    text: str | Path | None = None,
    steps: int | None = None,
    threads: int | None = None,
    save_every: float = 120.0,
) -> Iterator[dict[str, Any]]:
    """Train a tiny model into the folder `out`; iterate to run it.

    `recipe` as `recipes.find` takes it; `text` a file to read instead of the shipped novels; `steps` in
    place of the recipe's; `threads` for torch.set_num_threads. Every ten steps yields `step`, `tokens`,
    `loss` (nats a token, mean since the last report), `bpb` (the same in bits a byte) and `cpu_s`, now and
    then with `held_out_bpb`, an estimate; the last report's is the shipped weights' over the whole
    held-out text. Of a denoiser `loss` and `bpb` are those of masked places, and the last two become
    `held_out_bpb_bound`. Writes train.jsonl, config.json, model.safetensors (bfloat16), tokenizer.json and
    quality.json. The state is saved every `save_every` seconds, and the same call goes on from there.
    Raises ValueError for an unknown recipe or text, and for a folder that holds another training.
    """
    recipe = recipes.find(recipe) if isinstance(recipe, str) else recipe
    if steps is not None:
        recipe = replace(recipe, steps=steps)
    objective = objectives.of(recipe.config.get("model_type"), recipe.name)
    folder = Path(out)
    if (folder / "quality.json").exists():
        raise ValueError(f"--out {folder} holds a finished training; name another folder or empty this one")
    tokenizer = load_tokenizer()
    corpus = austen(tokenizer) if text is None else own_text(text, tokenizer)
    told = {"recipe": recipe.name, "config": recipe.config, "steps": recipe.steps, "seed": recipe.seed}
    told["train_tokens"] = len(corpus.train.ids)
    if recipe.start is not None:
        told["start"] = recipe.start
    job = Job(recipe, objective, folder, corpus, json.loads(json.dumps(told)), save_every)
    before = resume.header(job.state)
    if before and {k: before.get(k) for k in told} != job.told:
        raise ValueError(
            f"--out {folder} holds an unfinished training of {before['recipe']}, {before['steps']} steps "
            f"over {before['train_tokens']:,} tokens, which differs from what is asked: name another folder"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    return _run(job, build(recipe))


@dataclass(frozen=True)
class Job:
    """What a training is about; `told` is what its saved state must agree with."""

    recipe: Recipe
    objective: Objective
    folder: Path
    corpus: Corpus
    told: Mapping[str, Any]
    save_every: float

    @property
    def state(self) -> Path:
        return self.folder / "resume.safetensors"

    def write_log(self, rows: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        whole(self.folder / "train.jsonl", lambda new: new.write_text(lines))


def build(recipe: Recipe) -> Model:
    """The model of a recipe with its starting weights, the same for the same seed."""
    architecture = objectives.of(recipe.config.get("model_type"), recipe.name).architecture
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = initialise(architecture.build(read_config(architecture.Config, recipe.config)))
    if recipe.start is not None:
        start_from(model, loading.load(recipe.start))
    model.architecture, model.tokenizer = architecture, load_tokenizer()
    model.eos_ids = frozenset({END_ID})
    model.ops = select("torch")  # the backend whose scans have gradients
    return model


def update(model: Model, chosen: Mapping[str, torch.optim.Optimizer], job: Job, step: int) -> float:
    """One step of all optimisers; the loss before it, nats a token."""
    model.zero_grad(set_to_none=True)
    loss = job.objective.loss(model, job.corpus.train.ids, step, job.recipe.seed)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    rate = course(step, job.recipe.steps)
    for optimizer in chosen.values():
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        optimizer.step()
    if not math.isfinite(value := loss.item()):
        raise FloatingPointError(f"{job.recipe.name}: the loss is {value} at step {step}")
    return value


def _run(job: Job, model: Model) -> Iterator[dict[str, Any]]:
    chosen, last = optimizers(model), job.recipe.steps
    step, log, spent = 0, [], 0.0
    if before := resume.header(job.state):
        resume.load(job.state, model, chosen)
        step, log, spent = before["step"], before["log"], before["cpu_s"]
    began, saved, losses = time.process_time() - spent, time.monotonic(), []
    while step < last:
        losses.append(update(model, chosen, job, step))
        step += 1
        if step % REPORT and step < last:
            continue
        row = _row(step, sum(losses) / len(losses), job.corpus)
        losses = []
        if step % ESTIMATE == 0 and step < last:
            score = job.objective.score(model, job.corpus.held_out, SAMPLE)
            row[job.objective.held_out] = round(next(iter(score.values())), 4)
        row["cpu_s"] = round(time.process_time() - began, 1)
        log.append(row)
        job.write_log(log)
        if step == last or time.monotonic() - saved > job.save_every:
            told = {**job.told, "step": step, "cpu_s": row["cpu_s"], "log": log}
            resume.save(job.state, model, chosen, told)
            saved = time.monotonic()
        if step < last:
            yield row
    yield finish(job, model, log)


def finish(job: Job, model: Model, log: list[dict[str, Any]]) -> dict[str, Any]:
    """Write the checkpoint, score it as whoever loads it gets it, and drop the training's state."""
    loading.save(model, job.folder, "bfloat16")
    loaded = loading.load(job.folder)
    scores = {
        text.name: {**job.objective.score(loaded, text, 1), "bytes": text.nbytes}
        for text in (job.corpus.held_out, *job.corpus.others)
    }
    log[-1][job.objective.held_out] = round(next(iter(scores[job.corpus.held_out.name].values())), 4)
    job.write_log(log)
    quality = {
        "name": job.recipe.name,
        "params": sum(p.numel() for p in model.parameters()),
        "window": WINDOW,
        "held_out": scores,
        "trained_tokens": log[-1]["tokens"],
    }
    if job.recipe.start is not None:
        quality["start"] = job.recipe.start  # which has read its own tokens before
    write_json(job.folder / "quality.json", quality)
    job.state.unlink()
    return log[-1]


def _row(step: int, loss: float, corpus: Corpus) -> dict[str, Any]:
    bpb = loss / math.log(2) * len(corpus.train.ids) / corpus.train.nbytes
    return {"step": step, "tokens": step * TOKENS, "loss": round(loss, 4), "bpb": round(bpb, 4)}
