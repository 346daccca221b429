"""What `doctor` finds: plain records, made in engine.startup.doctor and shown by the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from engine.errors import StartRefused

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine. `name` is what `serve` takes, with `revision` where that is not None.

    `stored` is its format and numbers (safetensors BF16, GGUF Q4_K_M), `last_used` a Unix time as the file
    system keeps it, `reason` why it cannot be served, None where it can.
    """

    name: str
    revision: str | None
    kept_in: str
    path: str
    size_bytes: int
    stored: str
    last_used: float
    reason: str | None


@dataclass(slots=True)
class DeviceFacts:
    """What computes. `features` are instructions or capabilities that matter for speed, by name.

    `thread_counts` are the numbers of threads that a start measures on a CPU, to compute with the best.
    """

    device: str
    name: str
    why: str
    features: dict[str, bool]
    capability: str
    one_dnn: bool
    num_threads: int
    thread_counts: tuple[int, ...] = ()
    memory_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(slots=True)
class ModelFacts:
    """What is served. `pending` is what a start does before it loads; None of the rest was not found out.

    `compiled` is what the compiled kernels will be used for, or why for nothing, `quantized` what becomes of
    the weights that they read; `scratch_bytes` is the most memory that they work in. `default_sampling` has
    what a request that says nothing gets.
    """

    name: str
    how: str
    directory: str | None
    pending: str | None
    architecture: str | None = None
    dtype: str | None = None
    dtype_why: str | None = None
    num_parameters: int | None = None
    weight_bytes: int | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    has_chat_template: bool | None = None
    compiled: str | None = None
    quantized: str | None = None
    default_sampling: dict[str, float] | None = None
    scratch_bytes: int = 0


@dataclass(slots=True)
class CacheFacts:
    """Room for keys and values, as the flag `source` says. `num_full_seqs` of max_model_len fit at once.

    `size_origins` says where seats, tokens of a step and tokens of a block come from, as StepSizes does.
    `work_bytes` is about what steps of a GPU are computed in and recorded to.
    """

    num_kv_blocks: int
    kv_block_size: int
    kv_bytes: int
    source: str
    num_full_seqs: int
    max_num_seqs: int
    seats_bytes: int
    num_host_blocks: int
    host_bytes: int
    num_snapshots: int = 0
    snapshot_bytes: int = 0
    max_num_batched_tokens: int = 0
    size_origins: Mapping[str, str] = field(default_factory=dict)
    work_bytes: int = 0


@dataclass(slots=True)
class DraftFacts:
    """Who drafts. The model's figures are None without a draft model, or where they were not found out.

    `reader_bytes` and `reader_kv_bytes` are of what reads the target's features: heads, or a module;
    `reader_held_bytes` what is set aside for features on a GPU, `reader_work_bytes` for what it computes in.
    """

    methods: tuple[str, ...]
    model_how: str | None = None
    model_bytes: int | None = None
    model_kv_bytes: int | None = None
    is_on_host: bool = False  # the draft model, beside a target on a GPU
    reader_bytes: int | None = None
    reader_kv_bytes: int | None = None
    reader_held_bytes: int = 0
    reader_work_bytes: int = 0


@dataclass(slots=True)
class EmbeddingFacts:
    """An embedding model or reranker; `pooling` is empty for what scores pairs. `pending`: see ModelFacts."""

    name: str
    directory: str | None
    pending: str | None
    architecture: str | None = None
    pooling: tuple[str, ...] = ()
    max_model_len: int | None = None
    weight_bytes: int | None = None


@dataclass(slots=True)
class Diagnosis:
    """What was found. `problems` stop a start, `warnings` do not; None is what a problem kept from sight."""

    device: DeviceFacts | None = None
    model: ModelFacts | None = None
    cache: CacheFacts | None = None
    drafts: DraftFacts | None = None
    embeddings: EmbeddingFacts | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int | None:
        """What all weights, scratch, K/V and states take of the memory; None if unknown."""
        if self.model is None or self.model.weight_bytes is None or self.cache is None:
            return None
        drafts = self.drafts
        draft_bytes = 0
        if drafts is not None:
            draft_bytes = (drafts.reader_bytes or 0) + (drafts.reader_kv_bytes or 0)
            draft_bytes += drafts.reader_held_bytes
        if drafts is not None and not drafts.is_on_host:
            draft_bytes += (drafts.model_bytes or 0) + (drafts.model_kv_bytes or 0)
        model_bytes = self.model.weight_bytes + self.model.scratch_bytes
        if self.embeddings is not None:
            model_bytes += self.embeddings.weight_bytes or 0
        states_bytes = self.cache.seats_bytes + self.cache.snapshot_bytes
        return model_bytes + self.cache.kv_bytes + states_bytes + draft_bytes

    @property
    def work_bytes(self) -> int:
        """About what a GPU must have left beside it, for steps and drafters to be computed in; 0 on a CPU."""
        of_steps = 0 if self.cache is None else self.cache.work_bytes
        return of_steps + (0 if self.drafts is None else self.drafts.reader_work_bytes)

    def attempt(self, check: Callable[[], T]) -> T | None:
        """What `check` finds; None, with a problem noted, when it refuses the start."""
        try:
            return check()
        except StartRefused as refusal:
            if str(refusal) not in self.problems:  # several checks meet a folder that cannot be read
                self.problems.append(str(refusal))
            return None
