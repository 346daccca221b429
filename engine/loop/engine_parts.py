"""What an engine is made of: its state, its limits, what loading gives it, and where its work runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from engine.errors import EngineError
from engine.loop.daemon_executor import DaemonExecutor
from engine.plan.metrics.batch_metrics import BatchMetrics
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.step_records import SamplingInputs, StepInputs, StepResult
from engine.text.detokenizer import Detokenizer
from engine.text.reply.reply_format import ReplyFormat
from engine.text.tokenizer import Tokenizer

MAX_TEXT_THREADS = 4  # more would only take cores from the model


class EngineState(Enum):
    """Loading, ready, draining, dead: each only ever moves rightwards."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded; constant once the engine is ready."""

    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_kv_blocks: int
    kv_block_size: int
    kv_bytes: int  # of the K/V tensors
    has_chat_template: bool
    draft_methods: tuple[str, ...] = ()  # the draft sources at hand
    max_draft_tokens: int = 0  # that a step verifies of one request; 0 without speculation
    num_host_blocks: int = 0  # room for preempted requests in host memory
    host_state_bytes: int = 0  # what one of them takes beside its blocks
    num_state_snapshots: int = 0  # of a recurrent model's states, for prompts that begin alike
    compute_threads: str = ""  # how many threads compute, and why so many
    kernels: str = ""  # which compute the model
    default_sampling: Mapping[str, float] = field(default_factory=dict)  # where a request says nothing
    scratch_bytes: int = 0  # the most that compiled kernels work in
    kv_dtype: str = ""  # what keys and values are kept in
    weight_bytes: Mapping[str, int] = field(default_factory=dict)  # by format, most first
    max_num_seqs: int = 0  # seats
    max_num_batched_tokens: int = 0  # of one step
    max_logits_rows: int = 0  # that one step draws from
    size_origins: Mapping[str, str] = field(default_factory=dict)  # of seats, tokens, blocks: where from


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine accepts and how long a step may take before it no longer counts as alive."""

    max_queued_requests: int = 256
    max_queued_tokens: int = 1_000_000
    watchdog_timeout_s: float = 60.0
    queue_timeout_s: float = 0.0  # that a request may wait for its first step; 0 is no limit
    has_tenants: bool = False  # several, none of whom may take all places in the queue
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # of their shares; 1 by default


class StepRunner(Protocol):
    """The model's side of a step; called on the target thread only, never concurrently."""

    def run(self, inputs: StepInputs) -> StepResult:
        """Run one forward pass and sample."""


class LaunchedStep(Protocol):
    """A step that the device may still be at work on."""

    def draw(self, sampling: SamplingInputs) -> None:
        """Have a step that `is_drawn_later` drawn by this and come back at once, before the next is launched.

        On the target thread, once. Raises as `launch` does.
        """

    def wait(self) -> StepResult:
        """Its result, once it is there; on any one thread, once. Raises what `run` raises.

        The result of one that was to be drawn later, and was not, means nothing.
        """


@runtime_checkable
class AheadRunner(StepRunner, Protocol):
    """A runner whose device works beside the host: a step may be launched before the last one is read.

    The loop treats a runner as one when it has `launch`; a runner that gains nothing from launching ahead
    must not define it. Called on the target thread only. Steps run on the device in the order they were
    launched, two at most. An error may come from `launch` or from `wait`, and the step behind one that
    failed may draw anything.
    """

    def launch(self, inputs: StepInputs) -> LaunchedStep:
        """Start a step and come back at once; `inputs.previous_rows` are rows of the last launch.

        One that `is_drawn_later` is started without its draw.
        """


class Companion(Protocol):
    """What is served beside the generator, or alone, and shares its life and its target thread."""

    async def start(self) -> None:
        """Load it. Raises StartRefused."""

    async def wait_until_none(self) -> None:
        """Return when none of its requests is open."""

    def end_all(self, error: EngineError) -> None:
        """End each of them with `error`."""

    def stop(self) -> None:
        """Take no more work; all requests have been ended."""


class PrefixStore(Protocol):
    """Where blocks of the prefix cache outlive the process."""

    def start(self, metrics: BatchMetrics, resume: Callable[[str], None]) -> None:
        """Begin; `resume` lets a request go on that is held for what may be stored."""

    def forget(self, owner: str | None) -> None:
        """Delete what is stored of this owner's, of all if None."""

    async def flush(self) -> None:
        """Return when all is stored that can be found by now."""

    def stop(self) -> None:
        """Take no more work."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What loading gives the loop. `eos_token_ids` ends any request that does not ignore EOS.

    Without drafters in the batcher's decoder nothing is drafted. `detokenizer` is made for each request.
    """

    runner: StepRunner
    batcher: ContinuousBatcher
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    info: EngineInfo
    reply_format: ReplyFormat  # how replies to chats are read
    detokenizer: Callable[..., Detokenizer] = Detokenizer
    prefix_store: PrefixStore | None = None


@dataclass(frozen=True, slots=True)
class Executors:
    """Where work that must not hold up the event loop runs; `target` and `draft` are one thread each."""

    target: Executor
    draft: Executor
    text: Executor
    num_text_threads: int = 1  # calls that `text` runs at a time

    @classmethod
    def threads(cls, num_cores: int = 1) -> Executors:
        """Named threads, started when first used, on that many cores.

        Two at least for text, which lets go of the interpreter: no tenant's has to wait for another's to end.
        """
        num_text_threads = min(MAX_TEXT_THREADS, max(2, num_cores))
        return cls(
            target=ThreadPoolExecutor(1, thread_name_prefix="target"),
            draft=DaemonExecutor("draft"),
            text=DaemonExecutor("text", num_text_threads),
            num_text_threads=num_text_threads,
        )

    def shutdown(self, *, wait: bool) -> None:
        """Take no more work, drop what has not begun; `wait` joins the threads, for a moment if they hang."""
        for executor in (self.text, self.draft, self.target):
            executor.shutdown(wait=wait, cancel_futures=True)
