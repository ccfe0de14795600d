"""generate and stream: text, stop strings, states and usage, on scripted models and on tiny real ones."""

import json
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from constate.core.decode import Commit
from constate.core.model import Model
from constate.generation import Result, generate, stream
from constate.generation.streaming import TextStream
from constate.hybrid.composed import Config, build
from tests.scripted import Scripted, byte_bpe, chaotic, speaker

BPE = byte_bpe()
VOCAB = BPE.get_vocab_size()
POLYGLOT = "né à 漢字, 🙂👩‍👩‍👧 then the hat ’s"
PROMPT = "the cat"


def says(text: str, prompt: str = PROMPT, eos: tuple[int, ...] = ()) -> Any:
    """A model that says this text after this prompt, then <|end|> for ever. Not typed as a Model."""
    script = [*BPE.encode(text).ids, 0]
    return Scripted(speaker(script, len(BPE.encode(prompt).ids), VOCAB), VOCAB, BPE, eos)


def wild(**options: Any) -> Any:
    return Scripted(chaotic(VOCAB), VOCAB, BPE, **options)


# -- text ------------------------------------------------------------------------------------------


def test_text_is_what_was_said_and_ends_before_eos():
    (result,) = generate(says(POLYGLOT, eos=(0,)), PROMPT, max_new_tokens=200)
    assert result.text == POLYGLOT
    assert result.finish_reason == "stop"
    assert result.tokens == [*BPE.encode(POLYGLOT).ids, 0]
    assert len(result.logprobs) == len(result.tokens)
    assert result.prompt == PROMPT


def test_ignore_eos_writes_on():
    """Case H7: all of the set is ignored."""
    model = says("the hat", eos=(0, BPE.encode("the hat").ids[0], 5))
    assert generate(model, PROMPT)[0].tokens == BPE.encode("the hat").ids[:1]
    (result,) = generate(model, PROMPT, max_new_tokens=20, ignore_eos=True)
    assert result.finish_reason == "length"
    assert len(result.tokens) == 20
    assert result.text == "the hat"


def test_an_eos_that_is_an_ordinary_word_is_not_in_the_text():
    """Case H7: config says 7, generation_config 7 and 9, the tokenizer 5, and the model writes 9."""
    script = [40, 41, 9, 42]
    model: Any = Scripted(speaker(script, 1, VOCAB), VOCAB, BPE, eos=(5, 7, 9))
    (result,) = generate(model, [[50]])
    assert (result.tokens, result.finish_reason) == ([40, 41, 9], "stop")
    assert result.text == BPE.decode([40, 41])
    assert BPE.decode([9]) not in result.text


@pytest.mark.parametrize("count", range(1, 45))
def test_the_stream_breaks_no_character(count):
    """Cut after any number of tokens: no delta holds half a character but the last, which must."""
    events = list(stream(says(POLYGLOT), PROMPT, max_new_tokens=count))
    deltas = [e.text for e in events]
    result = events[-1].result
    assert result is not None
    assert "".join(deltas) == result.text == BPE.decode(result.tokens)
    assert "\ufffd" not in "".join(deltas[:-1])
    assert all(POLYGLOT.startswith("".join(deltas[:i])) for i in range(len(deltas)))
    assert [e.finish_reason for e in events] == [*[None] * (count - 1), "length"]
    assert [t for e in events for t in e.tokens] == result.tokens


def test_the_stream_shows_each_character_with_its_last_byte():
    ids, shown = BPE.encode(POLYGLOT).ids, ""
    for i, event in enumerate(stream(says(POLYGLOT), PROMPT, max_new_tokens=len(ids)), start=1):
        shown += event.text
        assert shown == BPE.decode(ids[:i]).rstrip("\ufffd")
    assert shown == POLYGLOT


def test_any_bytes_join_to_the_decoded_text():
    """300 random byte tokens, most of them no UTF-8: the deltas join to what decoding all at once gives."""
    for seed in range(20):
        source = Random(seed)
        ids = [source.choice((*range(1, VOCAB), *[source.randrange(1, 257)] * 300)) for _ in range(300)]
        text, shown = TextStream(BPE), ""
        for i in range(1, 301):
            text.read(ids[:i])
            shown += text.take(last=i == 300)
        assert shown == BPE.decode(ids)


def test_a_word_keeps_its_space_where_the_tokenizer_strips_the_first():
    """Decoders of SentencePiece's kind drop the space that opens a text: a continuation opens none."""
    from tokenizers import Tokenizer, decoders, models

    words = {"▁the": 0, "▁cat": 1, "▁": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    han = [3 + b for b in "漢é字".encode()] * 30
    script = [1, *han, 0]
    model: Any = Scripted(speaker(script, 1, len(words)), len(words), tokenizer)
    deltas = [e.text for e in stream(model, [[0]], max_new_tokens=len(script))]
    assert "".join(deltas) == " cat" + "漢é字" * 30 + " the"
    assert not any("\ufffd" in d for d in deltas)


def test_half_a_character_in_the_prompt_is_shown_whole():
    start, rest = BPE.encode("漢").ids[:2], BPE.encode("漢").ids[2:]
    model: Any = Scripted(speaker(rest, 2, VOCAB), VOCAB, BPE)
    assert generate(model, [start], max_new_tokens=1)[0].text == "漢"


def test_a_replacement_character_in_the_prompt_is_the_prompts():
    assert generate(says("the", prompt="a\ufffd"), "a\ufffd", max_new_tokens=1)[0].text == BPE.decode(
        BPE.encode("the").ids[:1]
    )


# -- stop strings ----------------------------------------------------------------------------------


def by_character(text: str, stops: list[str]) -> str:
    """The text up to the stop string that is completed first; of several, the longest."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


STOPS = [
    ["字, 🙂"],
    ["the hat"],
    ["zzz"],
    ["hat", "at ’"],
    [" "],
    ["’s!"],
    ["à 漢字, 🙂👩 no", "字"],
    ["n", "né à"],
]


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_stop_strings_that_span_tokens(stops):
    want = by_character(POLYGLOT, stops)
    hit = want != POLYGLOT
    events = list(stream(says(POLYGLOT, eos=(0,)), PROMPT, max_new_tokens=200, stop=stops))
    assert "".join(e.text for e in events) == want
    result = events[-1].result
    assert result is not None
    assert result.text == want
    assert result.finish_reason == "stop"
    assert BPE.decode(result.tokens).startswith(want)
    assert (result.tokens[-1] == 0) == (not hit)
    if hit:
        shorter = BPE.decode(result.tokens[:-1])
        assert by_character(shorter, stops) == shorter, "it wrote on after the stop string"


def test_stop_strings_of_random_text_equal_the_definition():
    """Letters that merge into tokens, so that one token may complete two stop strings."""
    for seed in range(400):
        source = Random(seed)
        text = "".join(source.choice("hat ") for _ in range(30))
        stops = ["".join(source.choice("hat ") for _ in range(source.randint(2, 5))) for _ in range(3)]
        ids, shown = BPE.encode(text).ids, ""
        stream_ = TextStream(BPE, (), stops)
        for i in range(1, len(ids) + 1):
            stop = stream_.read(ids[:i])
            shown += stream_.take(last=stop or i == len(ids))
            assert by_character(text, stops).startswith(shown), "a stop string leaked"
            if stop:
                break
        assert shown == by_character(text, stops)


def test_one_token_that_completes_two_stop_strings():
    """The one completed first by its characters counts, though the other begins earlier."""
    (hat,) = BPE.encode(" hat").ids
    for stops, want in [
        ([" hat", "ha"], " "),
        (["at", " hat"], ""),
        (["t", "hat"], " "),
        ([" h", "hat"], ""),
    ]:
        text = TextStream(BPE, (), stops)
        assert text.read([hat])
        assert text.take() == by_character(" hat", stops) == want


def test_a_lone_string_is_one_stop_string():
    assert generate(says("the hat"), PROMPT, stop="hat")[0].text == "the "


def test_stops_are_each_rows_own():
    prompts = ["a", "the cat", "other"]
    texts = [r.text for r in generate(wild(), prompts, max_new_tokens=40, temperature=1.0)]
    stop = texts[1][4:6]
    results = generate(wild(), prompts, max_new_tokens=40, temperature=1.0, stop=[stop])
    assert [r.text for r in results] == [by_character(t, [stop]) for t in texts]
    assert len(results[1].text) <= 4


# -- rows, samples, states ------------------------------------------------------------------------

ALIKE = ("text", "tokens", "logprobs", "finish_reason", "prompt")


def shape(results: list[Result]) -> list[tuple[Any, ...]]:
    return [tuple(getattr(r, name) for name in ALIKE) for r in results]


def test_prompts_and_samples_come_in_order():
    """Prompt by prompt, n each; sample j is the lone run with seed + j."""
    prompts = ["the", "a much longer prompt, with many tokens in it", "é"]
    results = generate(wild(), prompts, temperature=1.0, seed=9, n=3, max_new_tokens=7)
    assert [r.prompt for r in results] == [p for p in prompts for _ in range(3)]
    for i, result in enumerate(results):
        alone = generate(wild(), prompts[i // 3], temperature=1.0, seed=9 + i % 3, max_new_tokens=7)
        assert shape(alone) == shape([result])


def test_a_stream_of_several_rows_is_their_results():
    prompts = ["the", "a much longer prompt", "é"]
    texts: dict[int, str] = defaultdict(str)
    final = {}
    for event in stream(wild(), prompts, n=2, temperature=1.0, max_new_tokens=30):
        texts[event.index] += event.text
        assert (event.result is None) == (event.finish_reason is None)
        if event.result:
            final[event.index] = event.result
    results = generate(wild(), prompts, n=2, temperature=1.0, max_new_tokens=30)
    assert shape([final[i] for i in range(6)]) == shape(results)
    assert [texts[i] for i in range(6)] == [r.text for r in results]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.1, "seed": 4, "repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_saved_and_loaded_goes_on_as_if_there_had_been_no_break(tmp_path, options, n):
    """Twice in a row, with no new text and with some; also over n samples."""
    prompts = ["the cat", "é漢", "a longer one, which the others are not"]
    first, second = tmp_path / "1", tmp_path / "2"
    whole = generate(wild(), prompts, max_new_tokens=20, **options)
    a = generate(wild(), prompts, max_new_tokens=6, save_state=first, **options)
    b = generate(wild(), [""] * 3, max_new_tokens=5, load_state=first, save_state=second, **options)
    model = wild()
    c = generate(model, [""] * 3, max_new_tokens=9, load_state=second, n=n, **options)
    for i in range(3):
        assert [*a[i].tokens, *b[i].tokens, *c[n * i].tokens] == whole[i].tokens
        assert [*a[i].logprobs, *b[i].logprobs, *c[n * i].logprobs] == whole[i].logprobs
    assert model.calls[0] == (1, 1, 1)
    more = generate(wild(), [" then", " at", ""], max_new_tokens=4, load_state=first, temperature=0)
    for prompt, before, after in zip(prompts, a, more, strict=True):
        tokens = [*BPE.encode(prompt).ids, *before.tokens, *BPE.encode(str(after.prompt)).ids]
        assert generate(wild(), [tokens], max_new_tokens=4)[0].tokens == after.tokens
    assert [r.usage.prompt_tokens for r in more] == [len(BPE.encode(p).ids) for p in (" then", " at", "")]


def test_saved_samples_go_on_with_their_own_seeds(tmp_path):
    options = {"temperature": 1.0, "seed": 4}
    whole = generate(wild(), ["the", "é漢"], max_new_tokens=9, n=2, **options)
    a = generate(wild(), ["the", "é漢"], max_new_tokens=3, n=2, save_state=tmp_path / "1", **options)
    b = generate(
        wild(), [""] * 4, max_new_tokens=2, load_state=tmp_path / "1", save_state=tmp_path / "2", **options
    )
    c = generate(wild(), [""] * 4, max_new_tokens=4, load_state=tmp_path / "2", **options)
    assert [r.tokens for r in whole] == [
        x.tokens + y.tokens + z.tokens for x, y, z in zip(a, b, c, strict=True)
    ]


def test_a_state_without_new_text_holds_the_prompt(tmp_path):
    path = tmp_path / "state"
    (result,) = generate(wild(), "the cat", max_new_tokens=0, save_state=path)
    assert (result.text, result.tokens, result.finish_reason) == ("", [], "length")
    want = generate(wild(), "the cat", max_new_tokens=5)
    assert generate(wild(), "", max_new_tokens=5, load_state=path)[0].tokens == want[0].tokens


def test_the_opening_token_is_put_once(tmp_path):
    """A tokenizer that opens each text: not again where a text goes on."""
    from tokenizers.processors import TemplateProcessing

    opening = byte_bpe()
    opening.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    model: Any = Scripted(chaotic(VOCAB), VOCAB, opening)
    (start,) = generate(model, "a", max_new_tokens=3, save_state=tmp_path / "s")
    assert start.usage.prompt_tokens == 2
    (after,) = generate(model, "b", max_new_tokens=3, load_state=tmp_path / "s")
    want = generate(model, [[0, *BPE.encode("a").ids, *start.tokens, *BPE.encode("b").ids]], max_new_tokens=3)
    assert after.tokens == want[0].tokens


def test_nothing_asked_for_is_nothing_done():
    model = wild()
    (result,) = generate(model, PROMPT, max_new_tokens=0)
    assert (result.text, result.tokens, result.usage.model_calls) == ("", [], 0)
    assert (result.usage.ttft_s, result.usage.itl_s, result.usage.tokens_per_s) == (None, None, 0.0)
    assert model.calls == []


def test_usage():
    results = generate(wild(), ["the cat", "a" * 70], max_new_tokens=9)
    for result, given in zip(results, (len(BPE.encode("the cat").ids), 70), strict=True):
        usage = json.loads(json.dumps(asdict(result.usage), allow_nan=False))
        assert 0 < usage.pop("ttft_s") < 5
        assert 0 < usage["itl_s"] < 5
        assert usage.pop("between_commits_s") == usage.pop("itl_s")  # each commit is one token
        assert usage.pop("tokens_per_s") > 1
        assert usage == {
            "prompt_tokens": given,
            "new_tokens": 9,
            "model_calls": 9,
            "weight_bytes": 1234,
            "state_bytes": 8,
            "conv_bytes": 0,
            "kv_bytes": 8 * 128,
            "kv_bytes_used": 8 * (given + 8),
            "backend": "scripted",
            "tokens_per_call": 1.0,
            "decoding": {},
            "dtype": "float32",
        }


def test_the_architecture_names_the_decoder():
    """One that fixes places in any order, as diffusion does."""

    def backwards(model, requests, finished, *, cache=None, keep=False):
        ids = BPE.encode("the hat").ids
        held = {"state": 0, "conv": 0, "kv": 0, "kv_used": 0}
        for place in reversed(range(1, len(ids))):
            yield Commit(0, (place,), (ids[place],), (-0.5 * place,), calls=1, seconds=1.0)
        finished(0, ids)
        yield Commit(0, (0,), (ids[0],), (0.0,), "length", 2, 2.0, held)

    model = wild()
    model.architecture = SimpleNamespace(decode=backwards)
    (result,) = generate(model, PROMPT)
    assert (result.text, result.tokens) == ("the hat", BPE.encode("the hat").ids)
    assert result.logprobs == [-0.5 * i for i in range(len(result.tokens))]


def test_chat_renders_the_template():
    model = wild()
    model.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    for bos in ("", "<|end|>"):
        model.special_tokens = {"bos_token": bos} if bos else {}
        (result,) = generate(model, "hi", chat=True, max_new_tokens=5)
        assert result.prompt == "hi"
        assert result.tokens == generate(model, bos + "<user>hi<answer>", max_new_tokens=5)[0].tokens


# -- what is refused ------------------------------------------------------------------------------

BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "prompt 0 is empty"),
    (["a", ""], {}, "prompt 1 is empty"),
    ([[]], {}, "prompt 0 is empty"),
    ([], {}, "no prompt was given"),
    ([1, 2], {}, "put one token list in a list"),
    ([[1, VOCAB]], {}, f"token id {VOCAB} is outside the vocabulary"),
    ([[-1]], {}, "token id -1 is outside"),
    ("a\udce9", {}, "is not text"),
    ("a", {"stop": ""}, "stop: an empty string"),
    ("a", {"stop": ["x", ""]}, "stop: an empty string"),
    ("a", {"n": 0}, "n=0"),
    ("a", {"max_new_tokens": -1}, "max_new_tokens=-1"),
    ("a", {"max_new_tokens": 2.5}, "max_new_tokens=2.5: a whole number"),
    ("a", {"seed": 1.0}, "seed=1.0: a whole number"),  # else drawn from as the text "1.0", unlike 1
    ([b"a"], {}, "bytes are text once decoded"),
    ("a", {"temperature": -1}, "temperature=-1"),
    ("a", {"top_p": 1.5}, "top_p=1.5"),
    ("a", {"chat": True}, "no chat template"),
    ("a", {"save_state": "/no/such/folder/state"}, "no such folder"),
    ("a", {"save_state": "."}, "is there and no file"),
    ("a", {"save_state": os.devnull}, "is there and no file"),
    ("a", {"load_state": "/no/such/state"}, "no such file"),
]


@pytest.mark.parametrize(("prompts", "options", "message"), BAD, ids=lambda v: str(v)[:30])
def test_a_wrong_request_is_refused_before_any_work(prompts, options, message):
    model = wild()
    with pytest.raises(ValueError, match=message) as caught:
        stream(model, prompts, **options)
    assert "\n" not in str(caught.value)
    assert model.calls == []


def test_other_refusals(tmp_path):
    with pytest.raises(TypeError, match="top_kk"):
        generate(wild(), "a", top_kk=3)
    bare: Any = Scripted(chaotic(VOCAB), VOCAB)
    with pytest.raises(ValueError, match="no tokenizer"):
        generate(bare, "a")
    with pytest.raises(ValueError, match="need a tokenizer"):
        generate(bare, [[1]], stop="x")
    assert len(generate(bare, [[1]], max_new_tokens=3)[0].tokens) == 3
    generate(wild(), ["a", "b"], max_new_tokens=2, save_state=tmp_path / "two")
    with pytest.raises(ValueError, match="2 rows and 1 prompts"):
        generate(wild(), "a", load_state=tmp_path / "two")
    other = wild()
    other.fingerprint = "another"
    with pytest.raises(ValueError, match="another model"):
        generate(other, ["a", "b"], load_state=tmp_path / "two")


# -- real models ----------------------------------------------------------------------------------

MIXERS: dict[str, dict[str, Any]] = {
    "mamba": {"type": "mamba", "inner": 48, "state_size": 5},
    "mamba2": {"type": "mamba2", "heads": 4, "head_dim": 12, "state_size": 8, "groups": 2},
    "gla": {"type": "gla", "heads": 2, "key_dim": 8, "value_dim": 12, "conv": 3},
    "gated_deltanet": {"type": "gated_deltanet", "heads": 2, "key_dim": 8, "value_dim": 12},
    "attention": {"type": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8},
    "window": {"type": "attention", "heads": 4, "kv_heads": 1, "head_dim": 8, "window": 7},
}
PATTERNS = {name: [name, name] for name in MIXERS} | {
    "hybrid": ["gated_deltanet", "mamba2", "attention", "window"]
}


@pytest.fixture(scope="module", params=PATTERNS)
def real(request: pytest.FixtureRequest) -> Model:
    return composed(PATTERNS[request.param])


def composed(pattern: list[str], vocab: int = VOCAB) -> Model:
    """Random weights so large that every mixer speaks and no two ids come close."""
    generator = torch.Generator().manual_seed(len(pattern) + sum(map(ord, pattern[0])))
    layers = tuple({"mixer": MIXERS[name], "mlp": {"width": 40}} for name in pattern)
    model = build(Config(vocab, 32, layers))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                std = 1.0 if parameter.shape[0] == vocab else 1.5 * parameter.shape[1] ** -0.5
                parameter.normal_(std=std, generator=generator)
    model.vocab, model.tokenizer = VOCAB, BPE
    return model.eval()


FIVE = ["t", "the cat and", "é漢" * 9, "the other hat; " * 5, "a" * 131]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}], ids=["greedy", "seeded"]
)
def test_five_unequal_prompts_equal_five_lone_runs(real, options):
    results = generate(real, FIVE, max_new_tokens=16, **options)
    alone = [generate(real, prompt, max_new_tokens=16, **options)[0] for prompt in FIVE]
    assert [r.text for r in results] == [r.text for r in alone]
    assert [r.tokens for r in results] == [r.tokens for r in alone]
    for a, b in zip(results, alone, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-3)
    assert max(r.usage.model_calls for r in results) <= max(r.usage.model_calls for r in alone)
    assert len({tuple(r.tokens) for r in results}) == 5
    for r in results:
        new = {"state_bytes": r.usage.state_bytes, "conv_bytes": r.usage.conv_bytes}
        held = real.cost(new=1, past=len(BPE.encode(str(r.prompt)).ids) + 14).held
        assert new == {"state_bytes": held.get("state", 0), "conv_bytes": held.get("conv", 0)}


def test_the_first_token_of_a_real_model_is_its_own_argmax(real):
    from constate.spans import Spans

    (result,) = generate(real, FIVE[3], max_new_tokens=3)
    tokens = torch.tensor([*BPE.encode(FIVE[3]).ids, *result.tokens])
    with torch.no_grad():
        logits = real.forward(tokens, Spans.of([len(tokens)]))[-4:-1]
    assert logits.argmax(-1).tolist() == result.tokens
    want = logits.double().log_softmax(-1).amax(-1).tolist()
    assert result.logprobs == pytest.approx(want, abs=2e-3)


def test_calls_on_one_model_know_nothing_of_each_other(real):
    """Case C4: A, B, A again; then both at once from two threads."""
    a, b = {"temperature": 0.8, "seed": 1}, {"temperature": 0.0}
    first = shape(generate(real, FIVE[1], max_new_tokens=12, **a))
    other = shape(generate(real, FIVE[2], max_new_tokens=12, **b))
    assert shape(generate(real, FIVE[1], max_new_tokens=12, **a)) == first
    with ThreadPoolExecutor(2) as pool:
        again = [
            pool.submit(generate, real, FIVE[1 + i % 2], max_new_tokens=12, **(b if i % 2 else a))
            for i in range(4)
        ]
        assert [shape(f.result()) for f in again] == [first, other] * 2


def test_a_real_state_continues(real, tmp_path):
    options = {"temperature": 0.7, "seed": 8}
    whole = generate(real, FIVE, max_new_tokens=14, **options)
    a = generate(real, FIVE, max_new_tokens=5, save_state=tmp_path / "s", **options)
    b = generate(real, [""] * 5, max_new_tokens=9, load_state=tmp_path / "s", **options)
    assert [x.tokens + y.tokens for x, y in zip(a, b, strict=True)] == [r.tokens for r in whole]


def test_samples_of_a_real_model_are_its_lone_runs(real):
    results = generate(real, FIVE[3:], n=3, temperature=0.8, seed=20, max_new_tokens=8)
    lone = [
        generate(real, p, temperature=0.8, seed=20 + j, max_new_tokens=8)[0]
        for p in FIVE[3:]
        for j in range(3)
    ]
    assert [r.tokens for r in results] == [r.tokens for r in lone]


def test_a_padded_head_of_a_real_model_is_never_spoken():
    """Case H4: the padding rows win every arg-max."""
    model = composed(PATTERNS["hybrid"], VOCAB + 7)
    with torch.no_grad():
        model.head.weight[VOCAB:] = 40 * model.head.weight[:7]
    for options in ({}, {"temperature": 3.0, "n": 4}):
        for result in generate(model, FIVE, max_new_tokens=12, **options):
            assert max(result.tokens) < VOCAB
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generate(model, [[VOCAB]])
