"""lm-eval (Gao et al., github.com/EleutherAI/lm-evaluation-harness) over every family here.

    constate quality lm-eval --model tiny/mamba2                 the tasks that ship, offline

After `register()` the harness itself knows the model "constate" too, with model_args model=NAME. Its tasks
download their data; those of `tasks` come with the package's own texts. Needs the extra `lmeval`, which is
large; nothing else here does. Knows the harness's interface; what is computed is scorer.py's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...loading import load
from .cloze import questions
from .scorer import Scorer
from .texts import BOOK, read

NEW = 256  # tokens written where a task does not say
TASKS = ("constate_bpb", "constate_cloze", "constate_copy")
COPIES, COPIED = 40, 12  # strings, and words of each


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
        """model_args: `model` as constate.load takes it, and `load`'s options."""

        def __init__(self, model: str = "tiny/hybrid", **options: Any):
            super().__init__()
            options = {k: v for k, v in options.items() if k in LOAD}
            self.scorer = Scorer(load(model, **options), model)

        @property
        def eot_token_id(self) -> int:
            return self.scorer.start

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            return self.scorer.ids(string)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return list(self.scorer.after([(context, more) for _, context, more in requests]))

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            return [self.scorer.whole(request.args[0]) for request in requests]

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            return [self._written(*request.args) for request in requests]

        def _written(self, prompt: str, wanted: dict[str, Any]) -> str:
            stops = wanted.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            if wanted.get("do_sample") or wanted.get("temperature"):
                raise ValueError("generate_until with sampling: this model writes greedily for a harness")
            return self.scorer.until([prompt], stops, wanted.get("max_gen_toks") or NEW)[0]

    harness(".api.registry").register_model("constate")(Constate)
    return Constate


LOAD = ("dtype", "weights", "state_dtype", "device", "backend")


def evaluate(name: str, tasks: Sequence[str] = TASKS, **options: Any) -> Iterator[dict[str, Any]]:
    """A row for each metric of each shipped task, by the harness's own evaluation: `task metric score stderr
    n model bound`. Raises ValueError for a task that does not ship."""
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"task {unknown[0]!r} does not ship; those that do are {', '.join(TASKS)}")
    made = register()(name, **options)
    with TemporaryDirectory() as place:  # data_files must be absolute paths
        write(Path(place), tasks)
        manager = harness(".tasks").TaskManager(include_path=place, include_defaults=False)
        found = harness().simple_evaluate(
            made, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, log_samples=False
        )
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


def write(place: Path, tasks: Sequence[str]) -> None:
    """The harness's YAML and JSON lines of these tasks, into a folder."""
    for task in tasks:
        data, told = place / f"{task}.jsonl", MADE[task]()
        data.write_text("".join(json.dumps(line) + "\n" for line in told["data"]), encoding="utf-8")
        whole = {
            "task": task,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "num_fewshot": 0,
            **told["task"],
        }
        (place / f"{task}.yaml").write_text(json.dumps(whole), encoding="utf-8")  # JSON is YAML


def _bpb() -> dict[str, Any]:
    """Chapters' worth of the unseen book, each scored whole: bits_per_byte."""
    text = read(BOOK)[1]
    pieces = [{"text": text[i : i + 8192]} for i in range(0, 16 * 8192, 8192)]
    task = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    }
    return {"data": pieces, "task": task}


def _cloze() -> dict[str, Any]:
    """Probe cloze as a task of multiple choice: acc. The right word comes first of four; no model sees the
    order."""
    asked = [{"passage": q.passage, "words": list(q.words)} for q in questions(read(BOOK)[1], 100, 0)]
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{passage}}",
        "doc_to_choice": "{{words}}",
        "doc_to_target": 0,
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}],
    }
    return {"data": asked, "task": task}


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
        "metric_list": [{"metric": "exact_match"}],
    }
    return {"data": asked, "task": task}


MADE = {"constate_bpb": _bpb, "constate_cloze": _cloze, "constate_copy": _copy}
