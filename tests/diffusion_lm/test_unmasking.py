"""The decoder of masked diffusion: rows, ends, given text, caches, on scripted and on tiny random models."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from constate.bench.quality.unmasking import stretches
from constate.core.decode import Commit, Request
from constate.core.model import Model
from constate.core.sampling import Sampling
from constate.diffusion_lm.admit import admit
from constate.diffusion_lm.cache import Reading
from constate.diffusion_lm.decode import masked_diffusion
from constate.diffusion_lm.denoiser import Denoiser, denoiser
from constate.diffusion_lm.plan import Plan
from constate.diffusion_lm.policies import POLICIES
from constate.spans import Spans
from tests.denoisers import DENOISERS, MASK, make
from tests.kernels.memory import peak_bytes
from tests.oracle import Oracle, odds, order, run, written

BLOCKS = [name for name, raw in DENOISERS.items() if denoiser(make(name)).block]
WHOLE = [name for name in DENOISERS if name not in BLOCKS]
PROMPTS = [(3,), (5, 6, 7), tuple(range(9)), (), tuple(range(17))]
WARM = Sampling(0.9, top_p=0.95)


def chaotic(vocab: int, spread: float = 2.0):
    """Logits drawn anew for every canvas and place."""

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        dice = Random(str((canvas, place)))
        return [dice.gauss(0.0, spread) for _ in range(vocab)]

    return rule


def same(mine: Sequence[Commit], theirs: Sequence[Commit], close: float = 0.0) -> None:
    assert order(mine) == order(theirs)
    assert [c.tokens for c in mine] == [c.tokens for c in theirs]
    assert [c.calls for c in mine] == [c.calls for c in theirs]
    assert mine[-1].finish == theirs[-1].finish
    for a, b in zip(mine, theirs, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=close)


# -- rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_unequal_rows_in_one_batch_equal_lone_runs(policy: str):
    """Scripted: to the last bit, and in calls."""
    requests = [
        Request(p, 5 + 4 * i % 9, WARM, seed=i, plan=Plan(policy=policy, block=4))
        for i, p in enumerate(PROMPTS)
    ]
    model = Oracle(chaotic(19), 19)
    rows = run(model.any, requests)
    longest = 0
    for request, commits in zip(requests, rows, strict=True):
        lone = Oracle(chaotic(19), 19)
        same(commits, run(lone.any, [request])[0])
        longest = max(longest, len(lone.calls))
    assert len(model.calls) == longest
    assert [len(call) for call in model.calls] == sorted((len(c) for c in model.calls), reverse=True)


@pytest.mark.parametrize("name", DENOISERS)
def test_rows_of_a_real_model_equal_lone_runs(name: str):
    """Of each its own settings: policy, budget, temperature, guidance, and its own cache."""
    plans = [Plan(), Plan("ancestral", steps=12), Plan("margin", guidance=0.8), Plan("remask", steps=9)]
    plans += [Plan("threshold", threshold=0.6)]
    model = make(name)
    requests = [
        Request(p, 13, WARM if i % 2 else Sampling(), seed=i, plan=plan)
        for i, (p, plan) in enumerate(zip(PROMPTS, plans, strict=True))
    ]
    rows = run(model, requests)
    for request, commits in zip(requests, rows, strict=True):
        same(commits, run(model, [request])[0], close=2e-3)
    assert len({tuple(written(commits)) for commits in rows}) >= 4
    assert max(t for commits in rows for t in written(commits)) < MASK


def test_samples_draw_from_their_own_seeds():
    request = Request((1, 2), 10, WARM, seed=4, n=3)
    rows = run(Oracle(chaotic(9), 9).any, [Request((5,), 10, WARM), request, Request((5,), 10, WARM)])
    for j in range(3):
        lone = run(Oracle(chaotic(9), 9).any, [replace(request, seed=4 + j, n=1)])
        same(rows[1 + j], lone[0])
    assert len({tuple(written(row)) for row in rows[1:4]}) == 3
    same(rows[0], rows[4])


def test_nothing_asked_for_is_nothing_done():
    model = Oracle(chaotic(9), 9)
    rows = run(model.any, [Request((1,), 0), Request((1,), 0)])
    assert model.calls == []
    for commits in rows:
        assert (written(commits), commits[0].finish, commits[0].calls) == ([], "length", 0)
    model = Oracle(chaotic(9), 9)
    rows = run(model.any, [Request((1,), 0), Request((1,), 3)])
    assert model.calls == [(4,)] * 3 and len(written(rows[1])) == 3


@pytest.mark.parametrize("name", ["both sides", "both sides, shifted", "blocks, shifted"])
def test_an_empty_prompt_works(name: str):
    """For shifted models an end mark stands before the text, where there is one."""
    model = make(name)
    model.eos_ids = frozenset({7, 11})
    rows = run(model, [Request((), 6, eos=frozenset()), Request((7,), 6, eos=frozenset())])
    assert len(written(rows[0])) == 6
    if denoiser(model).shift:
        same(rows[0], rows[1])


# -- ends ----------------------------------------------------------------------------------------------


def story(script: Sequence[int], vocab: int = 12, sure: Sequence[float] | None = None, prompt: int = 1):
    """Says `script` after `prompt` tokens, place by place with these probabilities."""

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        at = place - prompt
        return odds(vocab, script[at], sure[at] if sure else 0.9)

    return rule


def test_a_row_ends_at_the_end_of_the_text():
    """What stands behind it is not filled, and what was filled there is not counted."""
    script = [3, 4, 0, 5, 6, 7, 8, 9]
    request = Request((1,), 8, eos=frozenset({0}))
    model = Oracle(story(script), 12, eos=(0,))
    (commits,) = run(model.any, [request])
    assert (written(commits), commits[-1].finish, len(model.calls)) == ([3, 4, 0], "stop", 3)
    backwards = Oracle(story(script, sure=[0.2 + 0.1 * i for i in range(8)]), 12, eos=(0,))
    (commits,) = run(backwards.any, [request])
    assert order(commits) == [(7,), (6,), (5,), (4,), (3,), (2,), (1,), (0,)]
    assert (written(commits), commits[-1].end, commits[-1].finish) == ([3, 4, 0], 3, "stop")
    # Found early, it spares the rest of its block and all later ones.
    early = Oracle(story(script, sure=[0.5, 0.6, 0.9, *[0.3] * 5]), 12, eos=(0,))
    (commits,) = run(early.any, [request])
    assert order(commits) == [(2,), (1,), (0,)]
    (commits,) = run(early.any, [replace(request, eos=frozenset())])
    assert (written(commits), commits[-1].finish) == (script, "length")


def test_the_first_end_counts():
    script = [3, 0, 4, 0, 5]
    model = Oracle(story(script, sure=[0.3, 0.5, 0.4, 0.9, 0.8]), 12, eos=(0,))
    (commits,) = run(model.any, [Request((1,), 5, eos=frozenset({0}))])
    assert order(commits) == [(3,), (1,), (0,)]
    assert written(commits) == [3, 0]


def test_finished_sees_the_text_in_reading_order_token_by_token():
    script = [3, 4, 5, 6, 7]
    seen: list[list[int]] = []

    def finished(row: int, tokens: Sequence[int]) -> str | None:
        seen.append(list(tokens))
        return "stop" if tokens[-1] == 6 else None

    model = Oracle(story(script, sure=[0.3, 0.9, 0.8, 0.7, 0.6]), 12)
    (commits,) = run(model.any, [Request((1,), 5, eos=frozenset({9}))], finished)
    assert order(commits) == [(1,), (2,), (3,), (4,), (0,)]
    assert seen == [script[:i] for i in range(1, 5)]
    assert (written(commits), commits[-1].finish) == ([3, 4, 5, 6], "stop")


@pytest.mark.parametrize("policy", POLICIES)
def test_at_least_so_many_tokens(policy: str):
    """The end of the text is excluded from the first places, whatever their order."""

    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        return [5.0, 4.0, *[0.0] * 7]

    request = Request((3,), 8, eos=frozenset({0}), plan=Plan(policy, min_new_tokens=4))
    (commits,) = run(Oracle(rule, 9, eos=(0,)).any, [request])
    assert written(commits) == [1, 1, 1, 1, 0]
    request = replace(request, sampling=Sampling(3.0), plan=Plan(policy, min_new_tokens=8))
    for seed in range(20):
        (commits,) = run(Oracle(rule, 9, eos=(0,)).any, [replace(request, seed=seed)])
        assert len(written(commits)) == 8 and 0 not in written(commits)


# -- given text, guidance, penalties ---------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_text_on_both_sides_is_left_and_heeded(name: str):
    model = make(name)
    model.eos_ids = frozenset(range(20))
    right = (30, 31, 32, 33)
    request = Request((1, 2, 3), 6, eos=model.eos_ids, after=right)
    (commits,) = run(model, [request])
    out = written(commits)
    assert len(out) == 6 and min(out) >= 20, "a text ended in the middle of given text"
    (other,) = run(model, [replace(request, after=right[::-1])])
    assert [c.logprobs for c in other] != [c.logprobs for c in commits]
    # Each token is the arg-max of the finished canvas around it, if only that place is masked last.
    last = commits[-1]
    canvas = torch.tensor([1, 2, 3, *out, *right])
    canvas[3 + last.positions[0]] = MASK
    logits = model(canvas, Spans.of([13]))[3 + last.positions[0] - denoiser(model).shift, :MASK]
    logits[:20] = -torch.inf
    assert int(logits.argmax()) == last.tokens[0]


def test_text_to_the_right_of_a_model_that_cannot_see_it_is_refused():
    with pytest.raises(ValueError, match="blocks of 4 places and nothing beyond"):
        masked_diffusion(make("blocks"), [Request((1,), 4, after=(2,))], lambda row, tokens: None)


@pytest.mark.parametrize("weight", [0.5, 2.0])
@pytest.mark.parametrize("name", ["both sides", "both sides, shifted", "blocks"])
def test_guidance_is_the_formula(name: str, weight: float):
    """u + (1 + w)(l - u), u being what the model says with the prompt masked; in one call."""
    model = make(name)
    prompt, about = (5, 6, 7, 8), denoiser(model)
    (commits,) = run(model, [Request(prompt, 1, plan=Plan(guidance=weight))])
    place = 4 - about.shift
    with torch.no_grad():
        told = model(torch.tensor([*prompt, MASK]), Spans.of([5]))[place, :MASK]
        blind = model(torch.full((5,), MASK), Spans.of([5]))[place, :MASK]
    guided = (blind + (1 + weight) * (told - blind)).double()
    assert commits[0].tokens == (int(guided.argmax()),)
    assert commits[0].logprobs[0] == pytest.approx(float(guided.log_softmax(-1).max()), abs=1e-3)
    assert commits[0].calls == 1


def test_a_penalty_makes_what_was_met_less_likely():
    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        return [3.0, 2.9, 2.8, 2.7, *[0.0] * 5]

    sampling = Sampling(repetition_penalty=1.5)
    (commits,) = run(Oracle(rule, 9).any, [Request((0,), 3, sampling)])
    assert sorted(written(commits)) == [1, 2, 3]
    (commits,) = run(Oracle(rule, 9).any, [Request((0,), 3)])
    assert written(commits) == [0, 0, 0]


# -- caches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, 1, 3])
@pytest.mark.parametrize("policy", ["confidence", "ancestral", "threshold", "remask"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_exact_cache_changes_nothing(name: str, policy: str, block: int | None):
    """Case J8. Prompts that end within a block, at its edge and before any."""
    model = make(name)
    plan = Plan(policy, block=block)
    requests = [Request(tuple(range(n)), 11, WARM, seed=n, plan=plan) for n in (0, 1, 4, 5, 6, 10, 15)]
    cached = run(model, requests)
    plain = run(model, [replace(r, plan=replace(plan, cache="none")) for r in requests])
    for a, b in zip(cached, plain, strict=True):
        same(a, b, close=1e-4 * 30)
        assert (a[-1].how["cache"], b[-1].how["cache"]) == ("exact", "none")
        assert a[-1].held["kv"] > 0 and b[-1].held["kv"] == 0


@pytest.mark.parametrize("name", BLOCKS)
def test_the_exact_cache_reads_each_finished_block_once_more(name: str):
    """A step reads its block (and for shifted models one place before); the first step of the next block
    reads the finished one with it, and absorbs it."""
    model, about = make(name), denoiser(make(name))
    size, lead = about.block or 0, int(about.shift)
    calls: list[tuple[int, Any]] = []
    forward = model.forward

    def spy(tokens: Any, spans: Any, cache: Any, **given: Any):
        calls.append((spans.total, given["keep"][0]))
        return forward(tokens, spans, cache, **given)

    model.forward = spy  # pyright: ignore[reportAttributeAccessIssue]  # planted
    run(model, [Request(tuple(range(2 * size)), 3 * size, plan=Plan())])
    first = [(3 * size, 2 * size - lead), *[(size + lead, 0)] * (size - 1)]
    later = [(2 * size + lead, size), *[(size + lead, 0)] * (size - 1)]
    assert calls == first + later * 2


@pytest.mark.parametrize("way", ["prefix", "dual", "delayed"])
@pytest.mark.parametrize("name", [name for name in WHOLE if not denoiser(make(name)).time_conditioned])
def test_an_approximate_cache_made_anew_at_every_call_is_none(name: str, way: str):
    """Case J8. And made anew less often it is something else, and says so."""
    model = make(name)
    requests = [Request(p, 24, seed=i, plan=Plan(block=8)) for i, p in enumerate(PROMPTS)]

    def go(**over: Any):
        return run(model, [replace(r, plan=Plan(block=8, **over)) for r in requests])

    plain, always, seldom = go(), go(cache=way, refresh=1), go(cache=way)
    for a, b in zip(plain, always, strict=True):
        same(a, b)
        assert b[-1].how["cache"] == f"none ({way}, anew at every call)"
    assert [written(a) for a in seldom] != [written(a) for a in plain]
    for a, b in zip(plain, seldom, strict=True):  # the first call reads every place, and is exact
        assert (a[0].positions, a[0].tokens) == (b[0].positions, b[0].tokens)
        assert a[0].logprobs == pytest.approx(b[0].logprobs, abs=2e-3)
    assert all(commits[-1].how["cache"].startswith(f"approximate ({way}, ") for commits in seldom)
    for request, commits in zip(requests, seldom, strict=True):
        lone = replace(request, plan=Plan(block=8, cache=way))
        same(commits, run(model, [lone])[0], close=2e-3)


@pytest.mark.parametrize("way", ["prefix", "dual", "delayed"])
@pytest.mark.parametrize("name", ["both sides", "both sides, shifted"])
def test_what_a_cache_holds_is_made_anew_from_what_stands_there(name: str, way: str):
    """With an interval of 1 in the mechanism itself, past the shortcut: every call reads all places, in
    another order, and the logits are those of no cache."""
    model = make(name)
    about = denoiser(model)
    canvas = torch.randint(0, MASK, (19,))
    canvas[[5, 6, 9, 12, 13, 18]] = MASK
    masked = {p for p in range(19) if canvas[p] == MASK}
    reading = Reading(way, int(about.shift), refresh=1)
    want = model(canvas, Spans.of([19]))
    cache = model.init_cache(1)
    for block in (range(5, 10), range(5, 10), range(10, 15)):
        read = reading.next(block, 19, masked)
        assert sorted(read.places) == list(range(19)) and read.anew
        assert 0 < read.keep < 19
        cache.truncate(0, 0)
        places = torch.tensor(read.places)
        spans = Spans.of([19])
        got = model.forward(canvas[places], spans, cache, keep=[read.keep], positions=places)
        assert torch.allclose(got, want[places], atol=1e-4 * float(want.abs().max()))
    reading = Reading(way, int(about.shift))
    first, second = reading.next(range(5, 10), 19, masked), reading.next(range(5, 10), 19, masked)
    assert not second.anew and second.keep == 0
    assert second.places == first.places[first.keep :]
    cache.truncate(0, 0)
    for read in (first, second):  # nothing was written between them, so that both are exact
        places = torch.tensor(read.places)
        spans = Spans.of([len(places)])
        got = model.forward(canvas[places], spans, cache, keep=[read.keep], positions=places)
        assert torch.allclose(got, want[places], atol=1e-4 * float(want.abs().max()))


def test_which_places_each_cache_reads():
    masked = {6, 7, 8, 9, 10, 11}

    def reads(way: str, lead: int, **over: Any) -> list[tuple[list[int], int, bool]]:
        reading, todo = Reading(way, lead, **over), set(masked)
        found = []
        for block, filled in ((range(6, 9), 7), (range(6, 9), 6), (range(6, 9), 8), (range(9, 12), 9)):
            read = reading.next(block, 14, todo)
            found.append((read.places, read.keep, read.anew))
            todo.remove(filled)
        return found

    everything = list(range(14))
    assert reads("none", 0) == [(everything, 0, True)] * 4
    tail = (list(range(6, 14)), 0, False)
    assert reads("prefix", 0) == [(everything, 6, True), tail, tail, (everything, 9, True)]
    assert reads("prefix", 1)[1] == (list(range(5, 14)), 0, False)
    outside = [*range(6), *range(9, 14)]
    assert reads("dual", 0)[0] == ([*outside, 6, 7, 8], 11, True)
    assert reads("dual", 0)[1:3] == [([6, 7, 8], 0, False)] * 2
    assert reads("dual", 1)[1] == ([5, 6, 7, 8], 0, False)
    assert reads("dual", 0, refresh=2)[2] == ([*outside, 6, 7, 8], 11, True)
    given = [0, 1, 2, 3, 4, 5, 12, 13]
    assert reads("delayed", 0) == [
        ([*given, 6, 7, 8, 9, 10, 11], 8, True),
        ([7, 6, 8, 9, 10, 11], 1, False),  # filled at the last call, absorbed at this one
        ([6, 8, 9, 10, 11], 1, False),
        ([8, 9, 10, 11], 1, False),
    ]
    # Shifted, the place before a masked one is read again: it says what stands there.
    assert reads("delayed", 1)[:3] == [
        ([0, 1, 2, 3, 4, 12, 13, 5, 6, 7, 8, 9, 10, 11], 7, True),
        ([5, 6, 7, 8, 9, 10, 11], 0, False),
        ([5, 6, 7, 8, 9, 10, 11], 2, False),
    ]


def test_logits_of_some_places_are_those_of_all():
    model, tokens, spans = make("both sides"), torch.randint(0, MASK, (9,)), Spans.of([4, 5])
    whole, at = model(tokens, spans), torch.tensor([7, 0, 7])
    assert torch.allclose(model(tokens, spans, at=at), whole[at], atol=1e-5)
    moved = model(tokens, spans, positions=torch.tensor([3, 4, 5, 6, 1, 2, 3, 4, 5]))
    assert torch.allclose(moved, whole, atol=1e-3), "rotary positions are relative"
    with pytest.raises(ValueError, match="one for each of 9 tokens"):
        model(tokens, spans, positions=torch.arange(8))


@pytest.mark.parametrize(
    ("name", "plan", "said"),
    [
        ("both sides", Plan(cache="exact"), "every key changes with each place"),
        ("blocks", Plan(cache="dual"), "this model's cache is exact"),
        ("mdlm, timed", Plan(cache="prefix"), "hears what share of a row is masked"),
        ("blocks", Plan(block=5), "block=5 with a model of blocks of 4 places"),
        ("blocks", Plan(block=8), "at most that is wanted"),
        ("both sides", Plan(block=4, steps=2), "steps=2 for 3 blocks"),
    ],
    ids=str,
)
def test_what_a_model_cannot_heed_is_refused_before_any_call(name: str, plan: Plan, said: str):
    model = make(name)
    model.forward = None  # pyright: ignore[reportAttributeAccessIssue]  # any call would fail otherwise
    with pytest.raises(ValueError, match=said):
        masked_diffusion(model, [Request((1,), 12, plan=plan)], lambda row, tokens: None)


def test_a_stretch_that_does_not_divide_a_model_s_block():
    """Each block of 4 is filled as 3 and 1, the first of them from where the prompt ends."""
    about = denoiser(make("blocks"))
    row = admit(about, frozenset(), Request((1, 2), 12, plan=Plan(block=3)), 0, 0, 0)
    assert row.blocks == [range(2, 3), range(3, 4), *pairs(4, 7, 8), *pairs(8, 11, 12), range(12, 14)]
    assert stretches(4, 3, 2, 12) == len(row.blocks)
    row = admit(denoiser(make("both sides")), frozenset(), Request((1, 2), 12, plan=Plan(block=5)), 0, 0, 0)
    assert [len(block) for block in row.blocks] == [5, 5, 2]
    assert stretches(None, 5, 2, 12) == len(row.blocks)


def pairs(first: int, middle: int, stop: int) -> list[range]:
    return [range(first, middle), range(middle, stop)]


def test_states_are_refused():
    model: Model = make("blocks")
    given: Any
    for given in ({"keep": True}, {"cache": model.init_cache(1)}):
        with pytest.raises(ValueError, match="no state to go on from"):
            masked_diffusion(model, [Request((1,), 2)], lambda row, tokens: None, **given)


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_mean_nothing_are_an_error(value: float, at: int):
    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        return [value if place == 3 and i == at else 1.0 * i for i in range(9)]

    assert len(run(Oracle(rule, 9).any, [Request((1,), 2)])[0]) == 2
    with pytest.raises(ValueError, match="NaN or infinity"):
        run(Oracle(rule, 9).any, [Request((1,), 5)])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", [{}, {"eos": "late"}, {"confidence": "tempered"}], ids=str)
def test_a_step_takes_little_memory_beside_the_block_s_logits(policy: str, plan: dict[str, Any]):
    """Noise, probabilities and entropies are made a few places at a time: never twice the logits together."""
    block, vocab = 64, 5000
    asked = Request((1,), block, Sampling(0.8, top_p=0.9), plan=Plan(policy, block=block, steps=4, **plan))
    one = admit(Denoiser(vocab), frozenset({0}), asked, 0, 0, 0)
    logits = torch.randn(block, vocab)
    # "late" copies the places that it lets go first, "tempered" is another distribution for each place.
    share = 1.2 if plan else 0.3
    assert peak_bytes(lambda: one.unmask(logits)) < share * logits.numel() * 4


def test_large_logits_keep_their_logarithms():
    def rule(canvas: tuple[int, ...], place: int) -> list[float]:
        return [1e4 + x for x in (1.0, 2.0, 0.5)]

    (commits,) = run(Oracle(rule, 3).any, [Request((1,), 1)])
    assert commits[0].logprobs[0] == pytest.approx(
        torch.tensor([1.0, 2.0, 0.5]).log_softmax(-1)[1].item(), abs=2e-3
    )
