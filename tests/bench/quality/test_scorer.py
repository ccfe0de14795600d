"""What a harness is told: each likelihood against a plain run of that row alone, for models of every kind;
and, where lm-eval is installed, its own evaluation of the tasks that ship."""

import math
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import constate
from constate.bench.quality import lmeval
from constate.bench.quality.cloze import questions
from constate.bench.quality.scorer import Scorer, _windows
from constate.bench.quality.texts import read
from constate.core.model import Model
from constate.diffusion_lm.likelihood import nelbo
from constate.spans import Spans

NAMES = ("tiny/transformer", "tiny/mamba", "tiny/mamba2", "tiny/gla", "tiny/gated_deltanet", "tiny/hybrid")
DENOISERS = ("tiny/mdlm", "tiny/block_diffusion")
PAIRS = [("It was a", " dark night."), ("", "She"), ("Her mother and her sisters were at the", " door")]
PROMPTS = ("It was", "", "Catherine had never been so much surprised by a letter in her", "\n")


def _alone(model: Model, context: list[int], more: list[int]) -> tuple[float, bool]:
    """Token by token through the state, in float64 sums."""
    cache, total, greedy = model.init_cache(1), 0.0, True
    with torch.no_grad():
        for heard, wanted in zip([*context, *more[:-1]], [*context[1:], *more], strict=True):
            said = model.step(torch.tensor([heard]), cache)[0].double()
            if cache.lengths[0] >= len(context):
                total += float(said.log_softmax(-1)[wanted])
                greedy &= int(said.argmax()) == wanted
    return total, greedy


@pytest.mark.parametrize("name", NAMES)
def test_likelihoods_of_unequal_lengths_are_those_of_lone_rows(name: str) -> None:
    scorer = Scorer(constate.load(name), name)
    pairs = [(scorer.ids(context), scorer.ids(more)) for context, more in PAIRS]
    likeliest = _greedy(scorer.model, pairs[0][0], 3)
    pairs.append((pairs[0][0], likeliest))
    for got, (context, more) in zip(scorer.after(pairs), pairs, strict=True):
        want = _alone(scorer.model, context or [scorer.start], more)
        assert got[0] == pytest.approx(want[0], rel=1e-4) and got[1] is want[1]
    assert list(scorer.after(pairs))[-1][1] is True


def _greedy(model: Model, context: list[int], count: int) -> list[int]:
    result = constate.generate(model, [context], max_new_tokens=count, ignore_eos=True)[0]
    return list(result.tokens)


def test_groups_hold_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(constate.load("tiny/gla"), "tiny/gla")
    pairs = [
        (scorer.ids("It was a dark"), scorer.ids(word)) for word in (" night", " and stormy", "er", " day")
    ]
    whole = list(scorer.after(pairs))
    monkeypatch.setattr("constate.bench.quality.scorer.PACKED", 9)
    for (mine, _), (want, _) in zip(scorer.after(pairs), whole, strict=True):
        assert mine == pytest.approx(want, rel=1e-5)


def test_greedy_is_what_generation_writes_though_a_padding_id_be_likelier() -> None:
    scorer = Scorer(constate.load("tiny/gla"), "tiny/gla")
    context = [scorer.start]
    likeliest = _greedy(scorer.model, context, 1)
    scorer.model.vocab = likeliest[0]  # ids from there on are padding
    real = _greedy(scorer.model, context, 1)
    assert real != likeliest
    assert [greedy for _, greedy in scorer.after([(context, real), (context, likeliest)])] == [True, False]


@pytest.mark.parametrize("name", ["tiny/mamba2", "tiny/hybrid"])
def test_a_whole_text_is_read_through_the_state(name: str) -> None:
    """Longer than a piece, and no window: the sum of every token given all before it."""
    scorer = Scorer(constate.load(name), name)
    text = read(None)[1][:3000]
    ids = scorer.ids(text)
    assert len(ids) > 600
    with torch.no_grad():
        said = scorer.model(torch.tensor([scorer.start, *ids[:-1]]), Spans.of([len(ids)])).double()
    want = float(said.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].sum())
    assert scorer.whole(text) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", ["tiny/gla", "tiny/hybrid"])
def test_a_text_beyond_the_positions_is_read_in_windows(name: str) -> None:
    """Every token by itself, token by token, behind as many as its window has before it."""
    scorer = Scorer(constate.load(name), name)
    places = 10
    _limit(scorer.model, places)
    for text in (
        "It was a dark and stormy night; the rain fell in torrents, except at",
        "It was a dark night",
    ):
        ids, want = scorer.ids(text), 0.0
        behind = [scorer.start, *ids]
        for i, wanted in enumerate(ids):
            first = min(i // places * places, max(len(ids) - places, 0))
            want += _alone(scorer.model, behind[first : i + 1], [wanted])[0]
        assert scorer.whole(text) == pytest.approx(want, rel=1e-5)
    assert len(scorer.ids(text)) < places < len(scorer.ids("It was a dark and stormy night; the rain fell"))


def _limit(model: Model, places: int) -> None:
    object.__setattr__(model.config, "max_position_embeddings", places)


@pytest.mark.parametrize("name", ["tiny/gla", "tiny/mdlm"])
def test_beyond_the_positions_is_refused(name: str) -> None:
    scorer = Scorer(constate.load(name), name)
    _limit(scorer.model, 8)
    fits = [1] * 4, [2] * (4 if scorer.bound else 5)  # the last id is read by a denoiser alone
    assert len(list(scorer.after([fits]))) == 1
    with pytest.raises(ValueError, match="made for 8 positions, and 9 are read"):
        list(scorer.after([fits, (fits[0], [*fits[1], 2])]))
    with pytest.raises(ValueError, match="made for 8 positions"):
        scorer.until(["It was"], [], 8)


@pytest.mark.parametrize("name", DENOISERS)
def test_a_denoiser_reads_a_text_in_windows_within_its_positions(name: str) -> None:
    """Window after window, each with its own draws, behind the id before it."""
    scorer = Scorer(constate.load(name), name)
    _limit(scorer.model, 8)
    text = "It was a dark and stormy night; the rain fell in torrents"
    ids = torch.tensor([scorer.start, *scorer.ids(text)])
    want = [nelbo(scorer.model, [ids[at : at + 8]], [1], seed=at // 7)[0] for at in range(0, len(ids) - 1, 7)]
    assert len(want) > 2 and scorer.whole(text) == pytest.approx(-sum(b.value for b in want), rel=1e-5)


@pytest.mark.parametrize("name", ["tiny/gla", "tiny/hybrid", *DENOISERS])
def test_the_shortest_texts(name: str) -> None:
    scorer = Scorer(constate.load(name), name)
    assert scorer.whole("") == 0.0
    assert list(scorer.after([])) == []
    lone, parts = scorer.ids("a"), scorer.ids("é")
    assert len(lone) == 1 and len(parts) == 2  # less than a character each
    for text, ids in (("a", lone), ("é", parts)):
        assert scorer.whole(text) == pytest.approx(next(scorer.after([([], ids)]))[0], rel=1e-5)


@pytest.mark.parametrize("name", DENOISERS)
def test_a_denoisers_likelihood_is_a_bound_and_never_greedy(name: str) -> None:
    scorer = Scorer(constate.load(name), name)
    assert scorer.bound
    right, wrong = scorer.after(
        [(scorer.ids("It was a"), scorer.ids(" very")), (scorer.ids("It was a"), scorer.ids("qzx"))]
    )
    assert right[0] > wrong[0] and not right[1]
    size = len(text := read(None)[1][:2000])
    assert 1.0 < -scorer.whole(text) / math.log(2) / size < 5.0


@pytest.mark.parametrize("name", DENOISERS)
def test_a_denoisers_bound_is_its_own_in_any_company(name: str) -> None:
    scorer = Scorer(constate.load(name), name)
    pairs = [(scorer.ids(context), scorer.ids(more)) for context, more in PAIRS]
    pairs += pairs[:1]
    together = [bound for bound, _ in scorer.after(pairs)]
    assert together == [bound for pair in pairs for bound, _ in scorer.after([pair])]
    assert together[0] == together[-1]


def test_a_denoisers_bound_on_one_token_is_its_likelihood() -> None:
    """Nothing to draw: the one place is masked. This model predicts a place from the one before."""
    scorer = Scorer(constate.load("tiny/mdlm"), "tiny/mdlm")
    context, (more,) = scorer.ids("It was a"), scorer.ids("n")
    mask = scorer.model.config.mask
    with torch.no_grad():
        said = scorer.model(torch.tensor([*context, mask]), Spans.of([len(context) + 1])).double()[-2]
    said[mask] = -math.inf  # what is written is never the mask
    want = float(said.log_softmax(-1)[more])
    assert next(scorer.after([(context, [more])]))[0] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("name", ["tiny/mamba2", "tiny/hybrid"])
def test_text_ends_before_its_first_stop(name: str) -> None:
    """Against token by token and the whole text cut: stops within a token, over several, and of several the
    one that is complete first."""
    scorer = Scorer(constate.load(name), name)
    plain = [_written(scorer, prompt, 24) for prompt in PROMPTS]
    assert scorer.until(PROMPTS, [], 24) == plain
    text = plain[0]
    cuts = [[text[at : at + size]] for at in (0, 7, 23) for size in (1, 3, 9)]
    for stops in (*cuts, [text[20:24], text[12:19]], ["never to be seen"]):
        want = [_cut(text, stops) for text in plain]
        assert scorer.until(PROMPTS, stops, 24) == want
        assert [scorer.until([prompt], stops, 24)[0] for prompt in PROMPTS] == want


def _written(scorer: Scorer, prompt: str, new: int) -> str:
    """Greedily, token by token."""
    model, out = scorer.model, list[int]()
    cache = model.init_cache(1)
    said = [model.step(torch.tensor([i]), cache) for i in scorer.ids(prompt) or [scorer.start]][-1]
    while len(out) < new and int(said.argmax()) not in model.eos_ids:
        out.append(int(said.argmax()))
        said = model.step(torch.tensor(out[-1:]), cache)
    assert model.tokenizer is not None
    return model.tokenizer.decode(out)


def _cut(text: str, stops: Sequence[str]) -> str:
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.parametrize("name", DENOISERS)
def test_a_denoiser_writes_the_same_in_any_company(name: str) -> None:
    scorer = Scorer(constate.load(name), name)
    together = scorer.until(PROMPTS, [","], 16)
    assert together == [scorer.until([prompt], [","], 16)[0] for prompt in PROMPTS]
    assert "," not in "".join(together) and any(together)


def test_what_cannot_be_asked_is_told() -> None:
    model = constate.load("tiny/gla")
    with pytest.raises(ValueError, match="empty continuation"):
        list(Scorer(model, "tiny/gla").after([([1], [])]))
    model.tokenizer = None
    with pytest.raises(ValueError, match="no tokenizer"):
        Scorer(model, "tiny/gla")


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is here")
def test_without_the_harness_the_way_to_it_is_told() -> None:
    with pytest.raises(ValueError, match=r"pip install 'constate\[lmeval\]'"):
        next(lmeval.evaluate("tiny/gla"))


def test_a_passkey_is_said_once_and_no_other() -> None:
    told = lmeval.MADE["constate_passkey"]()["data"]
    places = []
    for passage, keys in ((line["passage"], line["choices"]) for line in told):
        said = f"The pass key is {keys[0]}. "
        assert passage.count(said) == 1 and passage.endswith(" The pass key is")
        assert re.findall(r"\d{5}", passage) == keys[:1] and len({*keys}) == lmeval.CHOICES
        places.append(passage.index(said) / (len(passage) - len(said) - len("The pass key is")))
    assert len({line["passage"] for line in told}) == len(told)
    assert set(places[::5]) == {0.0} and set(places[4::5]) == {1.0}
    for i, depth in enumerate((0, 25, 50, 75, 100)):
        assert sum(places[i::5]) / len(places[i::5]) == pytest.approx(depth / 100, abs=0.1)


def harnessed(test: Callable[..., None]) -> Callable[..., None]:
    """Where lm-eval is; warnings are its own, and those of its many dependencies."""
    test = pytest.mark.filterwarnings("ignore")(test)
    return pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra lmeval is not installed")(test)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks that ship, of a few short lines each."""
    sizes = {"PAGES": 2, "PAGE": 500, "QUESTIONS": 6, "COPIES": 5, "KEYS": 5, "CHOICES": 4, "HAY": 30}
    for name, size in sizes.items():
        monkeypatch.setattr(lmeval, name, size)


def _request(*args: Any) -> Any:
    made = import_module("lm_eval.api.instance").Instance
    return made(request_type="loglikelihood", doc={}, arguments=args, idx=0, metadata=("none", 0, 1))


@harnessed
@pytest.mark.parametrize("name", ["tiny/mamba2", "tiny/hybrid", "tiny/mdlm"])
def test_the_harness_scores_the_tasks_that_ship(name: str, few: None) -> None:
    found = {(r["task"], r["metric"]): r for r in lmeval.evaluate(name)}
    assert {task for task, _ in found} == set(lmeval.TASKS)
    scorer = Scorer(constate.load(name), name)
    assert all(r["bound"] is scorer.bound and r["model"] == name for r in found.values())
    scores = {metric: (r["score"], r["n"]) for metric, r in found.items()}
    pages = [read(None)[1][:500], read(None)[1][500:1000]]
    bits = -sum(map(scorer.whole, pages)) / math.log(2) / len("".join(pages).encode())
    assert scores["constate_bpb", "bits_per_byte"] == (pytest.approx(bits), 2)
    assert scores["constate_bpb", "byte_perplexity"] == (pytest.approx(2**bits), 2)
    passages = [(q.passage, q.words) for q in questions(read(None)[1], 6, 0)]
    assert scores["constate_cloze", "acc"] == (pytest.approx(_right(scorer, passages)), 6)
    told = lmeval.MADE["constate_passkey"]()["data"]
    passages = [(line["passage"], line["choices"]) for line in told]
    assert scores["constate_passkey", "acc"] == (pytest.approx(_right(scorer, passages)), 5)
    told = lmeval.MADE["constate_copy"]()["data"]
    wrote = [scorer.until([line["prompt"]], [".", "\n"], 64)[0].strip() for line in told]
    exact = sum(text == line["rest"] for text, line in zip(wrote, told, strict=True)) / 5
    assert scores["constate_copy", "exact_match"] == (exact, 5)


def _right(scorer: Scorer, asked: Sequence[tuple[str, Sequence[str]]]) -> float:
    """The share of passages behind which the first of the words is the likeliest, each scored alone."""
    right = 0
    for passage, words in asked:
        context = scorer.ids(passage)
        bounds = [next(scorer.after([(context, scorer.ids(" " + word))]))[0] for word in words]
        right += bounds[0] == max(bounds)
    return right / len(asked)


@harnessed
def test_a_model_that_knows_is_told_so_by_the_harness(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What generates the second half, and finds likeliest what stands in the passage, scores 1."""

    def after(scorer: Scorer, pairs: Sequence[Any]) -> Iterator[tuple[float, bool]]:
        assert scorer.model.tokenizer is not None
        for context, more in pairs:
            yield float(scorer.model.tokenizer.decode(more) in scorer.model.tokenizer.decode(context)), False

    def until(scorer: Scorer, prompts: Sequence[str], stops: Sequence[str], new: int) -> list[str]:
        halves = [prompt.split(".\n") for prompt in prompts]
        return [first.removeprefix(second) for first, second in halves]

    monkeypatch.setattr(Scorer, "after", after)
    monkeypatch.setattr(Scorer, "until", until)
    found = {
        r["task"]: r["score"] for r in lmeval.evaluate("tiny/gla", ["constate_copy", "constate_passkey"])
    }
    assert found == {"constate_copy": 1.0, "constate_passkey": 1.0}


@harnessed
def test_the_tasks_that_ship_ask_nothing_of_a_network(
    few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though nobody says that there is none; and nothing is left in the user's cache."""
    asked: list[Any] = []

    def refused(*args: Any, **_: Any) -> None:
        asked.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(import_module("huggingface_hub").constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(import_module("datasets").config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(import_module("datasets").config, "HF_DATASETS_CACHE", tmp_path)
    assert list(lmeval.evaluate("tiny/gla"))
    assert not asked and not [*tmp_path.iterdir()]


@harnessed
@pytest.mark.parametrize("name", ["tiny/mamba2", "tiny/hybrid"])
def test_requests_of_the_harness_are_split_as_it_splits_them(name: str) -> None:
    """Contexts empty, blank, and with spaces at their end; and continuations that merge over the boundary,
    in part or whole. Token by token."""
    model = lmeval.register()(name)
    scorer = model.scorer
    assert scorer.ids("th") != scorer.ids("the")[:1] and len(scorer.ids("the")) == 1
    assert scorer.ids("It was a do")[: len(scorer.ids("It was a d"))] != scorer.ids("It was a d")
    texts = [("It was", " a"), ("", " a"), (" ", "a"), ("It was  ", "a"), ("It was a d", "og"), ("th", "e")]
    for (got, greedy), (context, more) in zip(
        model.loglikelihood([_request(*pair) for pair in texts], disable_tqdm=True), texts, strict=True
    ):
        held = context.rstrip()
        moved = context[len(held) :] + more
        heard = scorer.ids(held)
        kept = scorer.ids(held + moved)[len(heard) :] or scorer.ids(moved)
        want = _alone(scorer.model, heard or [scorer.start], kept)
        assert got == pytest.approx(want[0], rel=1e-4) and greedy is want[1], (context, more)


@harnessed
def test_windows_are_the_harnesses() -> None:
    rolled, disjoint = (
        getattr(import_module("lm_eval.utils"), name)
        for name in ("get_rolling_token_windows", "make_disjoint_window")
    )
    for count in range(1, 25):
        for places in range(1, 9):
            ids = list(range(1, count + 1))
            want = [disjoint(w) for w in rolled(ids, prefix_token=0, max_seq_len=places, context_len=1)]
            assert list(_windows([0, *ids], places)) == want, (count, places)


@harnessed
def test_generation_heeds_what_the_harness_asks_for() -> None:
    """Requests of several kinds at once, each as if it were alone and in its place; of the model that the
    harness knows by name."""
    known = lmeval.register() and import_module("lm_eval.api.registry").get_model("constate")
    model = known.create_from_arg_string("model=tiny/hybrid,dtype=float32", {"batch_size": 4})
    text = _written(model.scorer, "It was", 12)
    stop = text[9:12]
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"max_gen_toks": 12}, text),
        ({"max_gen_toks": 12, "until": None}, text),
        ({"max_gen_toks": 12, "until": stop}, text[: text.index(stop)]),
        ({"max_new_tokens": 12, "until": ["", stop]}, text[: text.index(stop)]),
        ({"max_gen_toks": 12, "do_sample": False, "temperature": 0.7}, text),
        ({"max_gen_toks": 0}, ""),
        ({"until": [text[-3:]]}, _cut(text, [text[-3:]])),
        ({}, _written(model.scorer, "It was", lmeval.NEW)),
    ]
    requests = [_request("It was", wanted) for wanted, _ in kinds * 3]
    assert model.generate_until(requests) == [text for _, text in kinds * 3]
    for sampled in ({"do_sample": True}, {"temperature": 0.5}, {"do_sample": True, "temperature": 0.5}):
        with pytest.raises(ValueError, match="sampling"):
            model.generate_until([_request("It was", sampled)])
    with pytest.raises(ValueError, match=r"model_args dtpye: known are model, dtype"):
        known("tiny/gla", dtpye="float32")


def test_a_task_that_does_not_ship_is_told() -> None:
    with pytest.raises(ValueError, match="those that do are constate_bpb"):
        next(lmeval.evaluate("tiny/gla", ["hellaswag"]))
