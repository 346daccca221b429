"""BatchConfig: the limits that the scheduler keeps to, and what it may do beyond."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.errors import StartRefused


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """The limits of a step and of a sequence, each at least 1, `max_preemptions` 0; StartRefused otherwise.

    A budget smaller than `max_num_seqs` is allowed: running requests take turns then. `preemption` and
    `max_preemptions` are explained at PreemptionPolicy. `gap_limit_s` is how long a step should take at most
    while requests wait for their next token in it; None is no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    max_decode_seqs: int
    max_model_len: int
    prefix_caching: bool = False
    preemption: str = "recompute"
    max_preemptions: int = 8
    kv_block_bytes: int = 0  # what swapping a block moves
    gap_limit_s: float | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            least = 0 if limit.name == "max_preemptions" else 1
            if limit.name.startswith("max_") and value < least:
                raise StartRefused(f"{limit.name.replace('_', '-')} is {value}: it must be at least {least}")
