"""One generation: what was asked (frozen) and how far it is (mutable, written on the loop thread only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from engine.plan.grammar import CompiledGrammar, Grammar
from engine.plan.speculation.spec_stats import SpecStats
from engine.plan.speculation.speculation_config import DraftingChange, LengthPolicyName

MIN_PRIORITY, MAX_PRIORITY = -1000, 1000


class Priority(IntEnum):
    """Named points on the priority scale, MIN_PRIORITY to MAX_PRIORITY; a lower one runs first."""

    HIGH = -10
    DEFAULT = 0
    FLEX = 10


class FinishReason(Enum):
    """Why a request ended. OpenAI's spelling is chosen in `server`, not here."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"


class RequestStatus(Enum):
    """Where a request is. It holds KV blocks only while RUNNING."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to stop, already checked against the limits."""

    max_tokens: int  # 0 generates nothing: only the prompt's log-probabilities are computed
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # drawn at admission when the caller gave none
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: frozenset[int] = frozenset()  # shown although special tokens are skipped
    logprobs: int | None = None  # 0: of the sampled token; n: of the n likeliest as well
    prompt_logprobs: int | None = None  # the same for the prompt
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token is not drawn right after the others

    @property
    def has_penalties(self) -> bool:
        """True when the drawn distribution depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What one request wants of drafting; None leaves it to the server, whose limits hold anyway."""

    enabled: bool = True
    method: str | None = None
    num_tokens: int | None = None
    prediction: tuple[int, ...] = ()  # the caller's guess of the output
    length_policy: LengthPolicyName | None = None

    def changed(self, change: DraftingChange) -> SpeculationOptions:
        """These options with the new values."""
        return replace(
            self,
            enabled=self.enabled if change.enabled is None else change.enabled,
            method=change.method or self.method,
            num_tokens=change.num_tokens or self.num_tokens,
            length_policy=change.length_policy or self.length_policy,
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation as a caller asks for it, validated. Times are seconds of `Engine.now`.

    Choices of one reply share a `group` and count as one request; None is a group of its own. Only requests
    with the same `cache_salt` share cached prefixes; `engine.owned_salt` makes one that no other tenant has.
    Replies of one `endpoint` and tenant are taken to be alike in length.
    """

    request_id: str  # the engine's own, fresh
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = Priority.DEFAULT
    group: str | None = None
    tenant: str | None = None  # None is the anonymous one
    endpoint: str = ""
    arrival_time: float | None = None  # None: when it is submitted
    deadline: float | None = None
    cache_salt: str | None = None
    fork_of: str | None = None  # an earlier choice with the same prompt, computed once for both
    speculation: SpeculationOptions = SpeculationOptions()
    grammar: CompiledGrammar | None = None  # what the output must follow

    @property
    def computes_nothing(self) -> bool:
        """True for no output and nothing to say of the prompt; its first token has no log-probability."""
        scores = self.sampling.prompt_logprobs is not None and len(self.prompt_token_ids) > 1
        return self.sampling.max_tokens == 0 and not scores

    @property
    def scores_only(self) -> bool:
        """True for no output but the prompt's log-probabilities; see `Request`."""
        return self.sampling.max_tokens == 0 and not self.computes_nothing

    def as_scoring(self) -> GenerationRequest:
        """A request of which `scores_only`, as it is computed."""
        *prompt, last = self.prompt_token_ids
        number = self.sampling.prompt_logprobs
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            allowed_token_ids=(last,),
            ignore_eos=True,
            logprobs=number,
            prompt_logprobs=number,
        )
        speculation = SpeculationOptions(enabled=False)
        return replace(
            self, prompt_token_ids=prompt, sampling=sampling, speculation=speculation, grammar=None
        )


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of one generation. Its own methods are the only writers of its progress.

    A step schedules `num_tokens - num_computed_tokens` of its tokens; everything else follows from that.
    Times are seconds of the engine's monotonic clock.

    `scores_only` marks a request that generates nothing and wants its prompt's log-probabilities. The last
    token of its prompt is drawn, with no other allowed, because a drawn token is scored anyway; so a prompt
    that fills the whole context fits. That token counts as prompt wherever tokens are reported.
    """

    request_id: str
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]  # with the model's EOS set unless EOS is ignored
    arrival: int  # a counter that breaks every tie
    arrival_time: float
    priority: int = Priority.DEFAULT
    tenant: str | None = None
    endpoint: str = ""
    deadline: float | None = None
    cache_salt: str | None = None
    fork_of: str | None = None  # the request whose prompt KV it shares
    speculation: SpeculationOptions = SpeculationOptions()
    grammar: Grammar | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, whose KV was found when it first ran
    first_scheduled_time: float | None = None  # None: not yet
    preemptions: list[tuple[float, str]] = field(default_factory=list)  # with "recompute" or "swap"
    is_late: bool = False  # it will probably miss its deadline
    turn_tokens: int = 0  # this and the next two belong to the policy
    backlog_tokens: int = 0
    num_charged_tokens: int = 0
    spec_stats: SpecStats | None = None  # None until something is drafted
    block_hashes: list[bytes] = field(default_factory=list)  # of its first full blocks, as far as needed yet
    scores_only: bool = False
    max_num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_num_tokens = self.num_prompt_tokens + self.sampling.max_tokens

    @classmethod
    def of(cls, asked: GenerationRequest, eos_token_ids: frozenset[int], arrival: int, now: float) -> Request:
        """The record of a request that is submitted `now`, as the `arrival`-th."""
        scores_only = asked.scores_only
        if scores_only:
            asked = asked.as_scoring()
        sampling = asked.sampling
        stop_token_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
        return cls(
            request_id=asked.request_id,
            token_ids=list(asked.prompt_token_ids),
            num_prompt_tokens=len(asked.prompt_token_ids),
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            arrival=arrival,
            arrival_time=now if asked.arrival_time is None else asked.arrival_time,
            priority=asked.priority,
            tenant=asked.tenant,
            endpoint=asked.endpoint,
            deadline=asked.deadline,
            cache_salt=asked.cache_salt,
            fork_of=asked.fork_of,
            speculation=asked.speculation,
            grammar=None if asked.grammar is None else asked.grammar.start(stop_token_ids),
            scores_only=scores_only,
        )

    @property
    def is_background(self) -> bool:
        """True in the worst class: nobody waits for it, and it must not be felt by those who do wait."""
        return self.priority >= MAX_PRIORITY

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and committed."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_token_steps(self) -> int:
        """Steps that gave it tokens: fewer than those, where drafts were accepted."""
        stats = self.spec_stats
        return self.num_output_tokens - (0 if stats is None else stats.num_committed - stats.num_rounds)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def reported_prompt_tokens(self) -> int:
        """Tokens of the prompt as the caller knows it."""
        return self.num_prompt_tokens + self.scores_only

    @property
    def reported_output_tokens(self) -> int:
        """Tokens generated for the caller."""
        return 0 if self.scores_only else self.num_output_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to be computed if the request reaches its `max_tokens`."""
        return self.max_num_tokens - self.num_computed_tokens

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        return len(self.preemptions)

    @property
    def is_finished(self) -> bool:
        """True once it has ended; that never changes back."""
        return self.status is RequestStatus.FINISHED

    @property
    def least_output_tokens(self) -> int:
        """The fewest output tokens it can end with: all of them, if nothing can stop it sooner."""
        if self.sampling.stop or self.grammar is not None:
            return 1
        return max(1, self.sampling.min_tokens) if self.stop_token_ids else self.sampling.max_tokens

    @property
    def draws_by_history(self) -> bool:
        """True when the processors of its logits depend on which tokens were drawn, not only on how many."""
        sampling = self.sampling
        return sampling.has_penalties or bool(sampling.bad_words) or self.grammar is not None

    @property
    def scores_prompt(self) -> bool:
        """True while log-probabilities of its prompt are wanted: the whole prompt is computed for it then."""
        return self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    def shows_stop(self, token_id: int) -> bool:
        """True when the text of this token, which ends it, is part of the output."""
        return self.sampling.include_stop_str_in_output and token_id in self.sampling.stop_token_ids

    def admit(self, now: float, num_computed_tokens: int, num_cached_tokens: int) -> None:
        """It runs, with KV for so many tokens; `num_cached_tokens` counts the first time only."""
        self.status = RequestStatus.RUNNING
        self.num_computed_tokens = num_computed_tokens
        if self.first_scheduled_time is None:
            self.first_scheduled_time = now
            self.num_cached_tokens = num_cached_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Commit one generated token; the finish reason it causes by its id, the grammar or the length."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.sampling.min_tokens:
            return FinishReason.STOP
        if self.grammar is not None and self.grammar.accept(token_id):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_num_tokens else None

    def cut(self, num_tokens: int) -> None:
        """Drop the tokens behind the first `num_tokens`: they follow a stop string."""
        del self.token_ids[num_tokens:]

    def advance_to(self, num_tokens: int) -> None:
        """A step has computed the KV of its first `num_tokens`."""
        self.num_computed_tokens = num_tokens

    def recompute_from(self, position: int) -> None:
        """Its KV from `position` on is lost; while it waits, it has no KV on the host any more."""
        self.num_computed_tokens = min(self.num_computed_tokens, position)
        if self.status is RequestStatus.SWAPPED:
            self.status = RequestStatus.PREEMPTED

    def preempt(self, now: float, *, swapped: bool) -> None:
        """It has to wait again, with its KV on the host if `swapped`, else without any."""
        self.status = RequestStatus.SWAPPED if swapped else RequestStatus.PREEMPTED
        self.preemptions.append((now, "swap" if swapped else "recompute"))
        if not swapped:
            self.num_computed_tokens = 0

    def reprioritize(self, priority: int | None, deadline: float | None) -> None:
        """Set a new priority or deadline; None leaves the old one."""
        self.priority = self.priority if priority is None else priority
        self.deadline = self.deadline if deadline is None else deadline
        self.is_late = False

    def mark_late(self) -> None:
        """It will probably miss its deadline, as long as that stays."""
        self.is_late = True

    def retune(self, change: DraftingChange) -> None:
        """Set what it wants of drafting anew."""
        self.speculation = self.speculation.changed(change)

    def finish(self, reason: FinishReason) -> None:
        """It has ended."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
