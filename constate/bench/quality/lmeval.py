"""lm-eval (Gao et al., github.com/EleutherAI/lm-evaluation-harness) over every family here.

    constate quality lm-eval --model tiny/mamba2                 the tasks that ship, offline

After `register()` the harness itself knows the model "constate" too, with model_args model=NAME. Its tasks
download their data; those of TASKS are made of the package's own texts, and nothing is asked of a network.
Needs the extra `lmeval`, which is large; nothing else here does. Knows the harness's interface; what is
computed is scorer.py's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from ...loading import load
from .asked import DEPTHS
from .cloze import questions
from .scorer import Scorer
from .texts import BOOK, read, sentences

NEW = 256  # tokens written where a task does not say
BATCH = 16  # prompts written behind together: a bound on memory alone
TASKS = ("constate_bpb", "constate_cloze", "constate_copy", "constate_passkey")
PAGES, PAGE = 64, 2048  # and characters of each: fewer tokens than the tiny models were trained on
QUESTIONS = 100  # of cloze
COPIES, COPIED = 40, 12  # strings, and words of each
KEYS, CHOICES, HAY = 40, 10, 100  # passages, keys to choose from in each, and words of each at least


def harness(part: str = "") -> Any:
    """The package lm_eval, or a module of it. Raises ValueError where it is absent."""
    try:
        return import_module(f"lm_eval{part}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] != "lm_eval":
            raise ValueError(f"lm-eval is here without its own dependency {error.name}") from None
        raise ValueError("lm-eval is not installed: pip install 'constate[lmeval]'") from None


@cache
def register() -> Any:
    """The harness's model class over a Scorer, known to it as "constate" from now on."""
    base: Any = harness(".api.model").TemplateLM

    class Constate(base):
        """model_args: `model` as constate.load takes it, and `load`'s options. What is read together follows
        from the lengths, so that the harness's batch sizes change nothing."""

        def __init__(
            self, model: str = "tiny/hybrid", batch_size: Any = 1, max_batch_size: Any = None, **options: Any
        ):
            super().__init__()
            if unknown := options.keys() - LOAD:
                raise ValueError(f"model_args {min(unknown)}: known are model, {', '.join(LOAD)}")
            self.scorer = Scorer(load(model, **options), model)

        @property
        def eot_token_id(self) -> int:
            return self.scorer.start

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return self.scorer.ids(string)

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            """As the harness splits the tokens of both together; but a continuation of which that leaves no
            token, since all merge with the context's, keeps its own."""
            heard, more = super()._encode_pair(context, continuation)
            return heard, more or self.scorer.ids((context + continuation)[len(context.rstrip()) :])

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return list(self.scorer.after([(context, more) for _, context, more in requests]))

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            return [self.scorer.whole(request.args[0]) for request in requests]

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            alike: dict[Any, list[int]] = {}
            for i, request in enumerate(requests):
                alike.setdefault(_ends(request.args[1]), []).append(i)
            found = [""] * len(requests)
            for (stops, new), places in alike.items():
                for some in (places[i : i + BATCH] for i in range(0, len(places), BATCH)):
                    prompts = [requests[i].args[0] for i in some]
                    for i, text in zip(some, self.scorer.until(prompts, stops, new), strict=True):
                        found[i] = text
            return found

    harness(".api.registry").register_model("constate")(Constate)
    return Constate


LOAD = ("dtype", "weights", "state_dtype", "device", "backend")


def _ends(wanted: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """Stop strings and most tokens of generation_kwargs, as the harness reads them. Raises ValueError where
    they ask for sampling."""
    told = harness(".models.utils").normalize_gen_kwargs(wanted, NEW)
    if told["do_sample"] and told.get("temperature") != 0.0:
        raise ValueError("generate_until with sampling: this model writes greedily for a harness")
    return tuple(stop for stop in told["until"] if stop), told["max_gen_toks"]


def evaluate(name: str, tasks: Sequence[str] = TASKS, **options: Any) -> Iterator[dict[str, Any]]:
    """A row for each metric of each shipped task, by the harness's own evaluation: `task metric score n model
    bound`. Raises ValueError for a task that does not ship."""
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"task {unknown[0]!r} does not ship; those that do are {', '.join(TASKS)}")
    made = register()(name, **options)
    # Not simple_evaluate, which seeds every generator of the process and asks pip and git what is installed.
    asked = {"tasks": {task: local(task) for task in tasks}}
    found = harness(".evaluator").evaluate(lm=made, task_dict=asked, bootstrap_iters=0, log_samples=False)
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, _, _ = key.partition(",")
            if isinstance(value, float | int) and not metric.endswith("_stderr") and "," in key:
                yield {
                    "probe": "lm-eval",
                    "model": name,
                    "task": task,
                    "metric": metric,
                    "score": float(value),
                    "n": found["n-samples"][task]["effective"],
                    "bound": made.scorer.bound,
                }


def local(task: str) -> Any:
    """A shipped task as the harness's own kind of task, with its data in memory."""
    told, base = MADE[task](), harness(".api.task").ConfigurableTask
    data = import_module("datasets").Dataset.from_list(told["data"])

    class Local(base):
        def download(self, *_: Any, **__: Any) -> None:
            # The harness's own goes through datasets.load_dataset, which counts each use at a server, files
            # or not, and keeps a copy in the user's cache.
            self.dataset = {"test": data}

    return Local(config={"task": task, "test_split": "test", "num_fewshot": 0, **told["task"]})


def _bpb() -> dict[str, Any]:
    """Pages of the unseen book, each scored whole: bits_per_byte."""
    text = read(BOOK)[1]
    pieces = [{"text": text[i : i + PAGE]} for i in range(0, PAGES * PAGE, PAGE)]
    task = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            _metric("bits_per_byte", "bits_per_byte", higher=False),
            _metric("byte_perplexity", "weighted_perplexity", higher=False),
        ],
    }
    return {"data": pieces, "task": task}


def _cloze() -> dict[str, Any]:
    """Probe cloze as a task of multiple choice: acc, of four words."""
    asked = [{"passage": q.passage, "choices": list(q.words)} for q in questions(read(BOOK)[1], QUESTIONS, 0)]
    return {"data": asked, "task": CHOICE}


def _passkey() -> dict[str, Any]:
    """A number said once, at five depths of a passage of the unseen book, and asked for behind it: acc, of
    ten. After Mohtashami & Jaggi (2305.16300, section 4.2), with a book in place of their repeated filler."""
    draw = random.Random(0)
    book, asked = sentences(read(BOOK)[1]), []
    for i in range(KEYS):
        first = last = i * len(book) // KEYS
        while len(" ".join(book[first:last]).split()) < HAY:
            last += 1
        keys = [str(key) for key in draw.sample(range(10_000, 100_000), CHOICES)]
        at = first + round((last - first) * DEPTHS[i % len(DEPTHS)] / 100)
        told = [*book[first:at], f"The pass key is {keys[0]}.", *book[at:last], "The pass key is"]
        asked.append({"passage": " ".join(told), "choices": keys})
    return {"data": asked, "task": CHOICE}


def _copy() -> dict[str, Any]:
    """A line of words twice, the second to be finished: exact_match of the generated end."""
    words = [w for w in read(BOOK)[1].split() if w.isalpha() and w.islower()]
    lines = [words[i * 97 : i * 97 + COPIED] for i in range(COPIES)]
    half = COPIED // 2
    asked = [
        {"prompt": f"{' '.join(line)}.\n{' '.join(line[:half])}", "rest": " ".join(line[half:])}
        for line in lines
    ]
    task = {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{rest}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 64},
        "filter_list": [
            {"name": "trimmed", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        "metric_list": [_metric("exact_match", "mean")],
    }
    return {"data": asked, "task": task}


def _metric(name: str, aggregation: str, *, higher: bool = True) -> dict[str, Any]:
    """A metric, with what the harness would otherwise assume and warn of."""
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher}


# The right choice comes first of all; no model sees the order.
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{passage}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "target_delimiter": " ",
    "metric_list": [_metric("acc", "mean")],
}
MADE = {"constate_bpb": _bpb, "constate_cloze": _cloze, "constate_copy": _copy, "constate_passkey": _passkey}
