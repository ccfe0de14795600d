"""What an architecture is to the rest of the house, and how its config.json is read.

A config is a frozen dataclass whose fields are Hugging Face's keys. A key that is no field must be known
to leave the maths alone, or it is an error: a model that ignores a key it does not understand writes
fluent nonsense. Knows no architecture and no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from torch import Size

from .weights import Rule

if TYPE_CHECKING:
    from .model import Model

C = TypeVar("C")

# Keys that no forward pass reads, by the reason. One that a family does read is a field of its Config, and
# fields come first.
_IGNORED: Mapping[str, str] = {
    "what the file is, and who wrote it": """
        model_type architectures auto_map transformers_version _name_or_path name_or_path torch_dtype dtype
        _attn_implementation attn_implementation _attn_implementation_autoset task_specific_params""",
    "ids: loading reads the end-of-text ones, the tokenizer knows the others": """
        bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id prefix
        decoder_start_token_id forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens
        bad_words_ids tokenizer_class""",
    "how the weights were first drawn": """
        initializer_range initializer_cutoff_factor init_std rescale_prenorm_residual time_step_min
        time_step_max time_step_floor time_step_init_scheme time_step_scale w_init_variance_scale
        final_w_init_variance_scale""",
    "read in training alone": """
        attention_dropout attn_dropout attn_pdrop embd_pdrop resid_pdrop dropout dropout_rate hidden_dropout
        hidden_dropout_prob attention_probs_dropout_prob residual_dropout embedding_dropout
        classifier_dropout gradient_checkpointing problem_type id2label label2id num_labels
        router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux output_router_logits
        fuse_cross_entropy fuse_linear_cross_entropy use_l2warp""",
    "how the same numbers are computed": """
        use_cache cache_implementation ep_size chunk_size pretraining_tp use_flash_attention
        use_mamba_kernels use_mambapy use_associative_scan mamba_chunk_size use_mem_eff_path
        num_logits_to_keep calc_logits_for_entire_prompt attn_mode fuse_norm fuse_swiglu torchscript
        use_bfloat16 return_dict output_attentions output_hidden_states mamba_ssm_cache_dtype
        moe_shared_expert_overlap""",
    "layers that guess several tokens ahead, which one token at a time does not read": """
        num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern""",
    "what training saw (a rotary scaling that reads it declares it), and a rank that only some read": """
        max_position_embeddings model_max_length time_step_rank""",
    "advice to a sampler": """
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate
        remove_invalid_values exponential_decay_length_penalty""",
}
NO_EFFECT = frozenset(key for keys in _IGNORED.values() for key in keys.split())

# Keys that change the maths, with the value at which they do not. `null` is neutral for every key.
NEUTRAL: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "qkv_bias": False,
    "mamba_proj_bias": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "use_sliding_window": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
    "use_gk": True,
    "use_gv": False,
}


def autoregressive(*args: Any, **options: Any) -> Any:
    """The decoder of causal models, one token a row at a time: `core.decode.autoregressive`."""
    from .decode import autoregressive as decode  # decode sits above models, and models name architectures

    return decode(*args, **options)


@dataclass(frozen=True)
class Dialect:
    """Another way in which people have a family's checkpoints on disk, beside the primary one.

    `spoken(raw, names)` tells it by config.json's content ({} where there is none) and the tensors'
    names, and must not claim the primary dialect; `config(raw, shapes)` gives the mapping that
    `read_config` takes, from the same content and the tensors' shapes; `weights(config)` lists the rules
    from this dialect's names. `signs` says in words what `spoken` looks for, for errors.
    """

    name: str
    spoken: Callable[[Mapping[str, Any], Collection[str]], bool]
    config: Callable[[Mapping[str, Any], Mapping[str, Size]], Mapping[str, Any]]
    weights: Callable[[Any], Sequence[Rule]]
    signs: str = ""


@dataclass(frozen=True)
class Architecture:
    """A published model family: how its config is read, its model built, its weights named.

    `model_type` is config.json's; `build(config)` makes the model with weights not yet filled;
    `weights(config)` lists the rules from a checkpoint's names to the parameters'; `decode` turns
    prompts into commits; `dialects` are the other ways to write the same model down.
    """

    model_type: str
    Config: type[Any]
    build: Callable[[Any], Model]
    weights: Callable[[Any], Sequence[Rule]]
    decode: Callable[..., Any] = autoregressive
    dialects: tuple[Dialect, ...] = ()


def read_config(cls: type[C], raw: Mapping[str, Any]) -> C:
    """config.json's content as a `cls`, whose field names are its keys.

    Lists become tuples, transformers' spelling of infinity infinity; a float field takes whole numbers as
    they are. A field without a default is required. Raises ValueError for keys that are missing, of the
    wrong type, or neither a field nor known to leave the maths alone.
    """
    known = {f.name: f for f in fields(cls)}  # pyright: ignore[reportArgumentType]  # cls is a dataclass
    hints = get_type_hints(cls)
    faults: list[str] = []
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key in known:
            try:
                values[key] = _typed(hints[key], _frozen(value))
            except TypeError as error:
                faults.append(f"{key}: {error}")
        elif key in NO_EFFECT or value is None:
            continue
        elif key not in NEUTRAL:
            near = get_close_matches(key, known, 1, 0.75)
            hint = f" (near {near[0]!r}, which is known)" if near else ""
            faults.append(f"{key} = {value!r} is not understood{hint}")
        elif value != NEUTRAL[key]:
            faults.append(f"{key} = {value!r} is not supported; only {NEUTRAL[key]!r} is")
    empty = [key for key in ("vocab_size", "hidden_size") if values.get(key) == 0]
    faults += [f"{key}: 0 where at least 1 is wanted" for key in empty]
    required = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in values and name not in raw]:
        faults.append(f"missing: {', '.join(missing)}")
    if faults:
        raise ValueError(
            f"config.json of model_type {raw.get('model_type')!r}: {'; '.join(faults)}. "
            "A key that changes the maths and is not understood would give a model that runs and is wrong"
        )
    try:
        return cls(**values)
    except (TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(
            f"config.json of model_type {raw.get('model_type')!r}: a size is 0, or a list or an object holds "
            f"something of the wrong type or length ({error})"
        ) from error


def write_config(config: Any, model_type: str) -> dict[str, Any]:
    """The inverse of `read_config`: what config.json holds, without the fields that are None by default."""
    unset = {f.name for f in fields(config) if f.default is None and getattr(config, f.name) is None}
    return {"model_type": model_type} | {k: v for k, v in asdict(config).items() if k not in unset}


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:  # transformers 5: JSON has no infinity
            return float(value["__float__"])
        return {k: _frozen(v) for k, v in value.items()}
    return value


def _typed(hint: Any, value: Any) -> Any:
    """The value as the field's type. A whole number counts something, so that none is negative; what a list
    or an object holds is its Config's matter."""
    wanted = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if Any in wanted:
        return value
    nested = tuple(kind for t in wanted if (kind := get_origin(t)) is not None)
    if isinstance(value, nested) and not isinstance(value, str):
        return value
    if type(value) is int and int in wanted and value < 0:
        raise TypeError(f"{value} where at least 0 is wanted")
    if type(value) in wanted or (type(value) is int and float in wanted):
        return value
    if type(value) is float and int in wanted and math.isfinite(value) and value == int(value):
        return int(value)
    spelled: Mapping[Any, str] = {NoneType: "null", Mapping: "object", Sequence: "list", tuple: "list"}
    names = " or ".join(spelled.get(get_origin(t) or t, f"{t.__name__}") for t in wanted)
    raise TypeError(f"{value!r} where {names} is wanted")
