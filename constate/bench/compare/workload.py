"""What the models are compared for: so long a prompt, so many new tokens, so many sequences at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """`prompt` and `new` tokens of each of `concurrency` sequences, in `memory_limit` bytes (None: what the
    machine has). Raises ValueError for counts below 1."""

    prompt: int = 1024
    new: int = 256
    concurrency: int = 8
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        limit = 1 if self.memory_limit is None else self.memory_limit
        if min(self.prompt, self.new, self.concurrency, limit) < 1:
            raise ValueError(f"{self}: at least 1 of each")

    @property
    def tokens(self) -> int:
        """Tokens in a sequence when it ends."""
        return self.prompt + self.new
