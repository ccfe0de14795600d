"""The decoding loop over a scripted model whose state is its history: rows, calls, forks, ends, states."""

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from constate.core.cache import Cache
from constate.core.decode import Commit, Request, autoregressive
from constate.core.sampling import Sampling
from tests.scripted import Scripted, chaotic, histories

VOCAB = 31
PROMPTS = [(3,), (5, 6, 7), tuple(range(9)), tuple(range(17)), tuple(i % VOCAB for i in range(40))]
WARM = Sampling(0.9, top_p=0.95)


def never(row: int, tokens: Sequence[int]) -> str | None:
    return None


def run(requests, finished=never, vocab=VOCAB, **options) -> tuple[list[list[Commit]], Scripted]:
    """The commits of each row, and the model that made them."""
    model = Scripted(chaotic(VOCAB), vocab)
    rows: list[list[Commit]] = [[] for request in requests for _ in range(request.n)]
    for commit in autoregressive(model.any, requests, finished, **options):
        rows[commit.row].append(commit)
    return rows, model


def written(commits: list[Commit]) -> list[int]:
    assert [p for c in commits for p in c.positions] == list(range(sum(len(c.tokens) for c in commits)))
    assert [c.finish is not None for c in commits] == [False] * (len(commits) - 1) + [True]
    return [t for c in commits for t in c.tokens]


def test_greedy_is_the_models_own_path():
    (commits,), _ = run([Request(PROMPTS[1], 12)])
    history, rule = PROMPTS[1], chaotic(VOCAB)
    for commit in commits:
        logits = list(rule(history))
        assert commit.tokens == (logits.index(max(logits)),)
        history += commit.tokens
    assert len(commits) == 12


@pytest.mark.parametrize("sampling", [Sampling(), WARM, replace(WARM, repetition_penalty=1.3)])
@pytest.mark.parametrize("piece", [1, 4, 512])
def test_unequal_rows_in_one_batch_equal_lone_runs(sampling, piece):
    """Also in calls: the batch makes as many as its longest row, none of more than `piece` tokens a row."""
    requests = [Request(p, 3 + 5 * i % 7, sampling, seed=i) for i, p in enumerate(PROMPTS)]
    rows, model = run(requests, piece=piece)
    longest = 0
    for request, commits in zip(requests, rows, strict=True):
        ((alone,), lone) = run([request], piece=piece)
        assert written(commits) == written(alone)
        assert [c.logprobs for c in commits] == [c.logprobs for c in alone]
        assert [c.calls for c in commits] == [c.calls for c in alone]
        assert len(lone.calls) == -(-len(request.tokens) // piece) + request.max_new - 1
        longest = max(longest, len(lone.calls))
    assert len(model.calls) == longest
    assert max(max(call) for call in model.calls) <= piece
    assert min(min(call) for call in model.calls) == 1, "an ended row stayed in the batch"


def test_pieces_do_not_change_what_is_written():
    request = Request(PROMPTS[4], 8, WARM, seed=2)
    texts = [written(run([request], piece=piece)[0][0]) for piece in (1, 2, 7, 39, 40, 41, 512)]
    assert all(text == texts[0] for text in texts)
    with pytest.raises(ValueError, match="piece=0"):
        run([request], piece=0)


def test_one_token_a_row_is_a_step():
    _, model = run([Request((1,), 5), Request((2, 3), 5)])
    assert model.calls == [(1, 2), *[(1, 1)] * 4]
    assert model.steps == 4


def test_seeded_rows_in_any_company_and_order():
    """Case I2: six requests, permuted, in batches of 1, 2 and 6."""
    requests = [Request(PROMPTS[i % 5], 9, WARM, seed=7 if i % 2 else i) for i in range(6)]
    alone = [written(run([request])[0][0]) for request in requests]
    assert len({tuple(text) for text in alone}) == 6
    for seed, size in [(0, 1), (1, 2), (2, 2), (3, 6), (4, 6), (5, 6)]:
        order = Random(seed).sample(range(6), 6)
        for start in range(0, 6, size):
            batch = order[start : start + size]
            rows, _ = run([requests[i] for i in batch])
            assert [written(commits) for commits in rows] == [alone[i] for i in batch]


def test_samples_fork_after_one_prefill():
    """Sample j draws from seed + j; each prompt is read once, whatever the others are doing."""
    requests = [
        Request(PROMPTS[3], 6, WARM, seed=5, n=3),
        Request((4,), 9, WARM, seed=1),
        Request((4, 2), 2, n=2),
    ]
    rows, model = run(requests, piece=4)
    lone = [replace(r, n=1, seed=r.seed + j) for r in requests for j in range(r.n)]
    for request, commits in zip(lone, rows, strict=True):
        assert written(commits) == written(run([request])[0][0])
    assert written(rows[0]) != written(rows[1]) != written(rows[2])
    assert written(rows[4]) == written(rows[5])
    absorbed = sum(sum(call) for call in model.calls)
    assert absorbed == sum(len(r.tokens) + r.n * (r.max_new - 1) for r in requests)


def test_rows_end_at_their_own_eos_and_leave():
    """Case H7, in a batch: each row has its own set, and one ignores it."""
    free = [written(run([Request(p, 20)])[0][0]) for p in PROMPTS]
    ends = [
        frozenset({free[0][4], free[0][7]}),
        frozenset(),
        frozenset({free[2][0]}),
        frozenset({free[3][9]}),
    ]
    requests = [Request(p, 20, eos=e) for p, e in zip(PROMPTS, ends, strict=False)]
    rows, model = run(requests)
    for text, commits, eos in zip(free, rows, ends, strict=False):
        cut = next((i + 1 for i, t in enumerate(text) if t in eos), 20)
        assert written(commits) == text[:cut]
        assert commits[-1].finish == ("stop" if eos else "length")
        assert commits[-1].calls == cut
    assert len(rows[0]) <= 5
    assert len(rows[2]) == 1
    assert len(model.calls[1]) == 3


def test_finished_is_asked_after_every_token_but_an_eos():
    asked: list[tuple[int, list[int]]] = []

    def finished(row: int, tokens: Sequence[int]) -> str | None:
        asked.append((row, list(tokens)))
        return "stop" if len(tokens) == 3 + row else None

    free = [written(run([Request(p, 9)])[0][0]) for p in PROMPTS[:3]]
    eos = frozenset({free[2][1]}) - set(free[0]) - set(free[1]) - {free[2][0]}
    rows, _ = run([Request(p, 9, eos=eos) for p in PROMPTS[:3]], finished)
    assert [written(c) for c in rows] == [free[0][:3], free[1][:4], free[2][: 2 if eos else 5]]
    assert [c[-1].finish for c in rows] == ["stop"] * 3
    assert eos, "the third row's second token is another row's too: choose another prompt"
    assert [tokens for row, tokens in asked if row == 1] == [free[1][:i] for i in range(1, 5)]
    assert [tokens for row, tokens in asked if row == 2] == [free[2][:1]]


def test_padding_ids_are_never_written():
    """Case H4: the head is wider than the vocabulary, and likes its padding best."""

    def rule(history):
        return [*chaotic(97)(history), *[50.0] * 7]

    for sampling in (Sampling(), Sampling(5.0), Sampling(1.0, 200, 0.99, repetition_penalty=1.5)):
        model = Scripted(rule, 97)
        commits = list(autoregressive(model.any, [Request((1, 2), 30, sampling, seed=3)], never))
        assert max(t for c in commits for t in c.tokens) < 97
        raw = chaotic(97)((1, 2))
        total = sum(2.718281828459045**x for x in raw)
        assert 2.718281828459045 ** commits[0].logprobs[0] == pytest.approx(
            2.718281828459045 ** raw[commits[0].tokens[0]] / total, rel=1e-4
        )


def test_every_row_hands_out_its_state():
    """It has absorbed all tokens but the last, whenever the row ended and however the rows moved."""
    requests = [Request(p, 2 + 4 * i % 9, WARM, i, n=1 + i % 2) for i, p in enumerate(PROMPTS)]
    rows, model = run(requests, keep=True, piece=6)
    lone = [r for r in requests for _ in range(r.n)]
    for request, commits in zip(lone, rows, strict=True):
        cache = commits[-1].cache
        assert cache is not None
        assert cache.rows == 1
        assert histories(model, cache) == [[*request.tokens, *written(commits)][:-1]]
    assert all(c.cache is None for commits in rows for c in commits[:-1])
    assert all(c.cache is None for commits in run(requests)[0] for c in commits)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_a_state_continues_as_if_there_had_been_no_break(first):
    """Seeds, penalties and forks too: `drawn` and `seen` carry what the state does not."""
    sampling = replace(WARM, repetition_penalty=1.4)
    whole = [Request(p, 12, sampling, seed=i) for i, p in enumerate(PROMPTS[:3])]
    want = [written(c) for c in run(whole)[0]]
    rows, _ = run([replace(r, max_new=first) for r in whole], keep=True)
    start = [written(c) for c in rows]
    assert start == [text[:first] for text in want]
    read = [[*r.tokens, *text] for r, text in zip(whole, start, strict=True)]
    rest = [
        replace(r, tokens=(tokens[-1],), max_new=12 - first, seen=frozenset(tokens), drawn=first)
        for r, tokens in zip(whole, read, strict=True)
    ]
    kept = [c[-1].cache for c in rows]
    cache = Cache.merge([c for c in kept if c])
    rows, model = run(rest, cache=cache)
    assert [written(c) for c in rows] == [text[first:] for text in want]
    assert model.calls[0] == (1, 1, 1)


def test_nothing_asked_for_is_nothing_done():
    (commits,), model = run([Request((1, 2, 3), 0)])
    assert model.calls == []
    assert [(c.tokens, c.finish) for c in commits] == [((), "length")]
    rows, model = run([Request((1, 2, 3), 0, n=2), Request((5,), 0)], keep=True)
    caches = [c[-1].cache for c in rows]
    assert [histories(model, c) for c in caches if c] == [[[1, 2]], [[1, 2]], [[]]]
    assert model.calls == [(2, 0)]


def test_what_a_row_holds():
    """8 bytes a token of history and 8 of sum; the row's share, not the batch's."""
    rows, _ = run([Request((1,) * 70, 10), Request((1, 2), 3)])
    assert rows[0][-1].held == {"state": 8, "conv": 0, "kv": 128 * 8, "kv_used": 79 * 8}
    assert rows[1][-1].held == {"state": 8, "conv": 0, "kv": 128 * 8, "kv_used": 4 * 8}
    assert rows[0][0].held == {}


def test_the_readers_time_is_not_counted():
    model = Scripted(chaotic(VOCAB), VOCAB)
    seconds = []
    for commit in autoregressive(model.any, [Request((1,), 3)], never):
        seconds.append(commit.seconds)
        time.sleep(0.3)
    assert 0 < seconds[0] < seconds[1] < seconds[2] < 0.3


def test_bad_requests():
    model = Scripted(chaotic(VOCAB), VOCAB)
    for request, said in [
        (Request((), 3), "prompt 1 is empty"),
        (Request((1,), 3, plan=object()), "one token after another"),
        (Request((1,), 3, after=(2,)), "one token after another"),
    ]:
        with pytest.raises(ValueError, match=said):
            autoregressive(model.any, [Request((1,), 1), request], never)  # at once, without a step
    assert model.calls == []
    with pytest.raises(ValueError, match="max_new=-1"):
        Request((1,), -1)
    with pytest.raises(ValueError, match="n=0"):
        Request((1,), 1, n=0)
    with pytest.raises(ValueError, match="a state of 2 rows and 1 requests"):
        run([Request((1,), 1)], cache=Scripted(chaotic(VOCAB), VOCAB).init_cache(2))
    with pytest.raises(ValueError, match="no state and 0 requests"):
        run([])
