"""The tokenizer that a GGUF file's metadata holds, as the files of Hugging Face's that say the same.

Byte-level BPE alone (`tokenizer.ggml.model` gpt2). How a text is cut before BPE is not in the file but a
name, `tokenizer.ggml.pre`, for what the model's own tokenizer.json does; a name that is not known is an
error, since a wrong cut gives other tokens than the model has learnt. Knows metadata; no tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..names import near

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # the file's names to Hugging Face's
ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
# Cuts one after the other, each within the pieces of the one before.
CUTS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_WORDS,),
    "smollm": (r"\p{N}", _WORDS),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}
_ALIASES = {
    "gpt-2": "gpt-2 phi-2 mpt olmo jais trillion jina-es jina-de jina-v2-es jina-v2-de jina-v2-code",
    "smollm": "smollm starcoder refact command-r codeshell exaone minerva-7b",
    "llama-bpe": "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 midm-2.0 smaug-bpe dbrx",
    "qwen2": "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez",
    "default": "default",
}
PRE = {name: cut for cut, names in _ALIASES.items() for name in names.split()}
# Of those: a word that is a token is not merged anew, and a text begins with bos unless the file says no.
_LLAMA3_LIKE = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "midm-2.0"})
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})  # whose tokenizer.json normalises to NFC


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer, or None where the file holds none. Raises ValueError for a kind that is not read."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not read, only gpt2 (byte-level BPE): take the model's own "
            "folder, with its tokenizer.json"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        pre = "default"
        warnings.warn("the file does not name its tokenizer.ggml.pre; a default is taken", stacklevel=2)
    if pre not in PRE:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} has no known way to cut a text; {near(str(pre), PRE)}")
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    texts, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type", [])
    if not texts:
        raise ValueError("the metadata names a tokenizer and has no tokenizer.ggml.tokens")
    kinds = list(kinds) + [NORMAL] * (len(texts) - len(kinds))
    used = {text: i for i, text in enumerate(texts) if kinds[i] != UNUSED}  # unused ids only pad the head
    merges = [tuple(line.split(" ", 1)) for line in metadata.get("tokenizer.ggml.merges", [])]
    try:
        bpe = models.BPE(vocab=used, merges=merges, ignore_merges=pre in _LLAMA3_LIKE)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the file's tokens and merges are no BPE ({error})") from error
    tokenizer = Tokenizer(bpe)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cutter(CUTS[PRE[pre]])
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(text, special=kinds[i] != USER_DEFINED, normalized=False)
        for text, i in used.items()
        if kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    _frame(tokenizer, metadata, texts, bos=pre in _LLAMA3_LIKE)
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer_config.json's roles: the texts of the opening, closing, unknown and padding tokens."""
    texts = metadata.get("tokenizer.ggml.tokens", [])
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, role in ROLES.items()}
    return {f"{role}_token": texts[i] for role, i in ids.items() if i is not None and i < len(texts)}


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end a text, a turn or a message, as the file names them."""
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS)
    return sorted({i for i in found if i is not None})


def _cutter(cuts: tuple[str, ...]) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    parts: list[Any] = [Split(Regex(cut), "isolated") for cut in cuts]
    return Sequence([*parts, ByteLevel(add_prefix_space=False, use_regex=False)])


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], texts: list[str], *, bos: bool) -> None:
    """What stands before and after every text, where the file asks for it."""
    asked = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role, wanted in asked.items() if wanted}
    framing = {role: (texts[i], i) for role, i in ids.items() if i is not None and i < len(texts)}
    if not framing:
        return
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    before, after = ([framing[role][0]] if role in framing else [] for role in ("bos", "eos"))
    once = [*before, "$A", *after]
    template = TemplateProcessing(
        single=once, pair=[*once, *before, "$B:1", *after], special_tokens=list(framing.values())
    )
    tokenizer.post_processor = Sequence([ByteLevel(trim_offsets=False), template])
