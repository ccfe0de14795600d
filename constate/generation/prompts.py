"""From prompts to token ids. Knows text and the model's tokenizer, vocabulary and chat template."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from operator import index
from typing import TYPE_CHECKING, Any, cast

from .records import Prompt

if TYPE_CHECKING:
    from ..core.model import Model


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A lone string is one prompt; a flat list of ids is refused as a likely slip."""
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    if not several:
        raise ValueError("no prompt was given: a string, or a list of strings or of token lists, is wanted")
    if any(isinstance(p, bytes) or not isinstance(p, Sized) for p in several):
        raise ValueError(
            "prompts: strings or token lists are wanted in the list; put one token list in a list; bytes are "
            "text once decoded"
        )
    return cast(list[Prompt], several)


def right_sides(infill: Prompt | Sequence[Prompt] | None, prompts: int) -> list[Prompt]:
    """What stands to the right of each prompt's gap: one text or token list for all, or one for each."""
    if infill is None:
        return [""] * prompts
    if isinstance(infill, bytes) or not isinstance(infill, Sized):
        raise ValueError(
            f"infill={infill!r}: text or a token list, or a list of these, is wanted; bytes are text once "
            "decoded"
        )
    if isinstance(infill, str) or not any(isinstance(part, Sized) for part in infill):
        return [cast(Prompt, infill)] * prompts
    if len(infill) != prompts:
        raise ValueError(
            f"infill: {len(infill)} texts for {prompts} prompts; one for all or one each is wanted"
        )
    return cast(list[Prompt], list(infill))


def encode(model: Model, prompt: Prompt, *, begins: bool, chat: bool = False) -> list[int]:
    """A prompt's ids. `begins`: nothing comes before it, so that the tokenizer may put its opening token."""
    if not isinstance(prompt, str):
        tokens = [index(t) for t in prompt]
        odd = [t for t in tokens if not 0 <= t < model.vocab]
        if odd:
            raise ValueError(f"token id {odd[0]} is outside the vocabulary: ids are 0 to {model.vocab - 1}")
        return tokens
    if model.tokenizer is None:
        raise ValueError("a text was given and this model has no tokenizer: give lists of token ids")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt {prompt!r} is not text ({error.reason}): is its encoding UTF-8?"
        ) from None
    if chat:
        return model.tokenizer.encode(_chat(model, prompt), add_special_tokens=False).ids
    return model.tokenizer.encode(prompt, add_special_tokens=begins).ids


def _chat(model: Model, message: str) -> str:
    """A user's message in the model's chat template, ready for the answer."""
    if not model.chat_template:
        raise ValueError("chat: this model has no chat template; leave chat out, or load an instruct model")
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [{"role": "user", "content": message}]
    # Roles that the model does not name print as nothing, as in transformers.
    names: dict[str, Any] = {"bos_token": "", "eos_token": "", **model.special_tokens}
    rendered, _ = render_jinja_template(
        conversations=[turns], chat_template=model.chat_template, add_generation_prompt=True, **names
    )
    return rendered[0]
