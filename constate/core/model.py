"""The stack of blocks and the language model around it. Knows mixers by their protocol alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Ops, select
from ..spans import Spans
from .backed import Backed
from .cache import Cache
from .cost import Cost, matmul, read_weights
from .linear import Int8Linear, Linear
from .mixer import Call, Mixer
from .recording import recorded
from .state import State

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .architecture import Architecture


@dataclass(frozen=True)
class Branch:
    """One residual branch: with y = norm(x), x becomes keep * r + scale * post(mixer(y)).

    The residual r is x; where `from_norm` it is y, so that what was normed runs on (MiniMax). `post` norms
    what the mixer says before it is added (Gemma).
    """

    norm: nn.Module
    mixer: Mixer
    post: nn.Module | None = None
    keep: float = 1.0
    scale: float = 1.0
    from_norm: bool = False

    def add(self, x: Tensor, y: Tensor, said: Tensor) -> Tensor:
        """The stream after this branch: x before it, y = norm(x), `said` what the mixer made of y."""
        said = said if self.post is None else self.post(said)
        said = said if self.scale == 1.0 else said * self.scale
        kept = y if self.from_norm else x
        return (kept if self.keep == 1.0 else kept * self.keep) + said


class Block(nn.Module):
    """Residual branches one after the other; a plain (norm, f) is x + f(norm(x)). The modules of a branch
    called `mixer` are `mixer_norm`, `mixer` and, where it has one, `mixer_post`."""

    def __init__(self, **branches: Branch | tuple[nn.Module, Mixer]):
        super().__init__()
        each = {name: b if isinstance(b, Branch) else Branch(*b) for name, b in branches.items()}
        self.branches = tuple(each.values())
        for name, branch in each.items():
            self.add_module(f"{name}_norm", branch.norm)
            self.add_module(name, branch.mixer)
            if branch.post is not None:
                self.add_module(f"{name}_post", branch.post)


class Model(nn.Module):
    """Embedding, blocks, final norm and head behind one decode interface.

    `config` is the architecture's frozen Config; `tokenizer`, `chat_template`, `special_tokens`, `eos_ids`
    and `vocab` (how many ids are real: rows of the head beyond it are padding) are set by loading.
    `embed_scale` multiplies the embedding, `embed_norm` norms it; `embed_shared` leaves it in
    `call.shared["embedding"]` for mixers that read it. `logit_scale` multiplies the logits, `logit_cap` c
    then makes c * tanh(logits / c) of them. `residual_float32` keeps the residual stream in float32
    whatever the weights' dtype.
    """

    def __init__(
        self,
        config: Any,
        blocks: Sequence[Block],
        norm: nn.Module,
        *,
        vocab: int,
        d: int,
        tied: bool,
        embed_scale: float = 1.0,
        embed_norm: nn.Module | None = None,
        embed_shared: bool = False,
        logit_scale: float = 1.0,
        logit_cap: float | None = None,
        residual_float32: bool = False,
    ):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(blocks)
        self.branches = tuple(branch for block in blocks for branch in block.branches)
        self.norm = norm
        self.head = Linear(d, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.embed_scale, self.embed_norm, self.embed_shared = embed_scale, embed_norm, embed_shared
        self.logit_scale, self.logit_cap = logit_scale, logit_cap
        self.residual_float32 = residual_float32
        self.vocab = vocab
        self.eos_ids: frozenset[int] = frozenset()
        self.tokenizer: Tokenizer | None = None
        self.chat_template: str | None = None
        self.special_tokens: dict[str, str] = {}
        self.architecture: Architecture | None = None
        self.state_dtype = torch.float32
        self.ops = select("torch", "cpu")  # loading picks; a model under construction is to be trained
        self._fingerprint: str | None = None

    # -- the decode interface -------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        spans: Spans,
        cache: Cache | None = None,
        *,
        at: str | Tensor = "all",
        keep: bool | Sequence[int] = True,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits of packed tokens.

        tokens (n,) int64 or int32, packed by spans. Returns (n, vocab) float32, or with at="last" (rows,
        vocab), NaN for an empty span, or for packed indices `at` (k,) int64 those k rows of the whole. With
        a cache the rows continue from it and it absorbs the tokens (under no_grad): `keep=False` absorbs
        none, a list the first k of each row; both only where every state can drop its tail. `positions` (n,)
        int64: where the tokens stand in their rows, if not behind those before, for attention that sees the
        whole row. Raises ValueError for lengths, ids, rows or a cache that do not fit.
        """
        if not isinstance(at, Tensor) and at not in ("all", "last"):
            raise ValueError(f"at={at!r}: 'all' gives logits for every token, 'last' for each row's last")
        self._check_tokens(tokens, spans)
        if positions is not None and positions.shape != tokens.shape:
            raise ValueError(f"positions {tuple(positions.shape)}: one for each of {len(tokens)} tokens")
        if cache is None:
            past = torch.zeros(spans.rows, dtype=torch.int64, device=tokens.device)
            call = Call(spans, self.ops, (0,) * spans.rows, past, placed=positions)
            return self._logits(self._hidden(tokens, call, None), spans, at)
        self._check_cache(cache, spans.rows, tokens)
        kept = self._kept(cache, spans, keep)
        with torch.no_grad():
            cache.reserve(spans.lengths)
            call = Call(spans, self.ops, cache.lengths, cache.past, cache.states, placed=positions)
            logits = self._logits(self._hidden(tokens, call, cache.states), spans, at)
            cache.advance(kept)
        return logits

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """One token a row: tokens (rows,) int64 to logits (rows, vocab) float32; the cache advances."""
        spans = Spans.ones(cache.rows, cache.past.device)
        self._check_tokens(tokens, spans)
        self._check_cache(cache, tokens.shape[0], tokens)
        cache.reserve(spans.lengths)
        recording = recorded(self, cache)
        if recording is not None:
            logits = recording.step(self, tokens, cache)
        else:
            call = Call(spans, self.ops, cache.lengths, cache.past, cache.states)
            x = self.enter(tokens, call)
            for branch, state in zip(self.branches, cache.states, strict=True):
                y, mixer = branch.norm(x), branch.mixer
                x = branch.add(x, y, mixer.step(self._cast(y, mixer), call, state))
            logits = self._head(x)
        cache.advance(spans.lengths)
        return logits

    def init_cache(self, rows: int, capacity: int | None = None) -> Cache:
        """An empty cache of `rows` rows. With `capacity` there is room for that many tokens a row and no
        more; without one it grows as needed."""
        if rows < 1:
            raise ValueError(f"init_cache(rows={rows}): at least one row is wanted")
        room = 0 if capacity is None else index(capacity)
        if room < 0:
            raise ValueError(f"init_cache(capacity={capacity}): at least 0 tokens a row; None lets it grow")
        states = tuple(mixer.init_state(rows, room, self.state_dtype) for mixer in self.mixers())
        past = torch.zeros(rows, dtype=torch.int64, device=self.device)
        return Cache(states, (0,) * rows, room, capacity is not None, self.fingerprint, past)

    def cost(self, new: int = 1, past: int = 0, rows: int = 1) -> Cost:
        """FLOPs and bytes of `new` tokens a row after `past`, logits for the last token of each row."""
        total = Cost()
        for mixer in self.mixers():
            total = total + mixer.cost(new, past).stored_in(self.state_dtype.itemsize)
        head = Cost({"head": matmul(1 if new else 0, self.head)}, read_weights(*self.head.parameters()))
        total = (total + head).times(rows)
        norms = [norm for b in self.branches for norm in (b.norm, b.post) if norm is not None] + [self.norm]
        norms += [self.embed_norm] if self.embed_norm is not None else []
        weights = {**read_weights(*(w for n in norms for w in n.parameters())), **total.weights}
        for mixer in self.mixers():
            weights |= mixer.reads(rows * new)
        for table in self.embed.parameters():
            if id(table) not in weights:  # where the head is not tied to it
                weights[id(table)] = min(rows * new, self.embed.num_embeddings) * table[0].nbytes
        return Cost(total.flops, weights, total.read, total.written, total.held)

    # -- what it is -----------------------------------------------------------------------------

    @property
    def ops(self) -> Ops:
        """The backend that serves this model; setting it hands it to every module that is one op."""
        return self._ops

    @ops.setter
    def ops(self, ops: Ops) -> None:
        self._ops = ops
        for module in self.modules():
            if isinstance(module, Backed):
                module.ops = ops

    @property
    def device(self) -> torch.device:
        return self.head.like.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, KV and convolution history; of most weights too, unless those are int8."""
        return self.head.like.dtype

    @property
    def weight_dtype(self) -> str:
        """What matrices are stored in: float32, bfloat16, float16, or int8 (see int8.py)."""
        return "int8" if isinstance(self.head, Int8Linear) else str(self.dtype).removeprefix("torch.")

    def mixers(self) -> list[Mixer]:
        """Every invocation of a mixer, in call order; `Cache.states` has the same order."""
        return [branch.mixer for branch in self.branches]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, a shared one once."""
        return sum(read_weights(*self.parameters()).values())

    @property
    def fingerprint(self) -> str:
        """What tells this model's states from another's: its config and samples of every weight, rounded
        to bfloat16 so that loading in another dtype keeps it."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(repr(self.config).encode(), digest_size=8)
            for name, weight in self.state_dict().items():
                flat = weight.detach().flatten()
                sample = flat[:: max(1, flat.numel() // 64)].to(torch.bfloat16).cpu()
                digest.update(f"{name}{tuple(weight.shape)}{sample.tolist()}".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def to_dtype(self, dtype: torch.dtype) -> Model:
        """Cast every parameter but those that its module declares `float32`."""
        for module in self.modules():
            kept = getattr(type(module), "float32", frozenset())
            for name, p in module.named_parameters(recurse=False):
                if p.is_floating_point():  # int8 stays
                    p.data = p.data.to(torch.float32 if name in kept else dtype)
        return self

    # -- inside ---------------------------------------------------------------------------------

    def enter(self, tokens: Tensor, call: Call) -> Tensor:
        """What the first block reads: the embeddings of tokens (n,), scaled and normed, (n, d)."""
        x = self.embed(tokens)
        x = x.float() if self.residual_float32 else x
        x = x if self.embed_scale == 1.0 else x * self.embed_scale
        x = x if self.embed_norm is None else self.embed_norm(x)
        if self.embed_shared:
            call.shared["embedding"] = x
        return x

    def _hidden(self, tokens: Tensor, call: Call, states: Sequence[State] | None) -> Tensor:
        x = self.enter(tokens, call)
        for i, branch in enumerate(self.branches):
            y, mixer = branch.norm(x), branch.mixer
            x = branch.add(x, y, mixer(self._cast(y, mixer), call, states[i] if states else None))
        return x

    def _cast(self, x: Tensor, mixer: Mixer) -> Tensor:
        return x.to(mixer.dtype) if self.residual_float32 else x

    def _head(self, x: Tensor) -> Tensor:
        return self.scaled(self.head(self.norm(x).to(self.dtype)).float())

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits as this model has them, of those that its head gives."""
        logits = logits if self.logit_scale == 1.0 else logits * self.logit_scale
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap

    def _logits(self, x: Tensor, spans: Spans, at: str | Tensor) -> Tensor:
        if isinstance(at, Tensor):
            return self._head(x[at])
        if at == "all":
            return self._head(x)
        if min(spans.lengths) > 0:
            return self._head(x[spans.last])
        full = [r for r, n in enumerate(spans.lengths) if n]
        logits = x.new_full((spans.rows, self.head.out_features), math.nan, dtype=torch.float32)
        if full:
            logits[full] = self._head(x[spans.last[full]])
        return logits

    def _kept(self, cache: Cache, spans: Spans, keep: bool | Sequence[int]) -> tuple[int, ...]:
        if keep is True:
            return spans.lengths
        kept = (0,) * spans.rows if keep is False else tuple(map(index, keep))
        if len(kept) != spans.rows or any(not 0 <= k <= n for k, n in zip(kept, spans.lengths, strict=True)):
            raise ValueError(f"keep={list(kept)}: one count a row is wanted, at most the span's length")
        ends = zip(cache.lengths, spans.lengths, kept, strict=True)
        if any(k < n and not cache.can_drop(length + n) for length, n, k in ends):
            raise ValueError(
                "keep: this cache holds a recurrent state, or a window that would be overwritten, and cannot "
                "read tokens without absorbing them. Work on cache.clone() instead"
            )
        return kept

    def _check_tokens(self, tokens: Tensor, spans: Spans) -> None:
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens are a {type(tokens).__name__}; a flat torch tensor of ids is wanted")
        if tokens.ndim != 1 or tokens.shape[0] != spans.total:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} with spans of {spans.total} tokens: one flat (n,) tensor is "
                "wanted, the rows laid end to end without padding"
            )
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens are {tokens.dtype}: token ids are wanted, int64 (or int32)")
        if tokens.device != self.device:
            raise ValueError(f"tokens on {tokens.device}, the model on {self.device}")
        # Where the values can be read: on an accelerator the host would wait for them.
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high = torch.aminmax(tokens)
            if low < 0 or high >= self.embed.num_embeddings:
                bad = int(high) if high >= self.embed.num_embeddings else int(low)
                raise ValueError(f"token id {bad} is outside the vocabulary of {self.embed.num_embeddings}")

    def _check_cache(self, cache: Cache, rows: int, tokens: Tensor) -> None:
        if cache.model != self.fingerprint:
            raise ValueError(f"this cache was made by another model ({cache.model}, not {self.fingerprint})")
        if cache.rows != rows:
            raise ValueError(f"the cache has {cache.rows} rows and {rows} rows of tokens were given")
        if cache.past.device != tokens.device:
            raise ValueError(f"the cache is on {cache.past.device}, the tokens on {tokens.device}")
