"""A made-up target and drafter of set costs and acceptance, quick enough for long runs.

A token is a hash of its request's seed and its position, so that neither needs the tokens before it, and a
step costs the host the same however long its sequences are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult
from engine.plan.step_records import NO_TOKEN, SampledRows, StepInputs, StepResult
from tests.support.fakes import VOCAB_SIZE

_TOKEN, _LUCK = 0, 1
_MASK = (1 << 64) - 1


def token_at(seed: int, position: int) -> int:
    """What the target draws at this position of a request with this seed."""
    return _mixed(seed, position, _TOKEN) % VOCAB_SIZE


def _mixed(seed: int, position: int, salt: int) -> int:
    """64 bits that look random (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + salt) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass
class SetDrafter:
    """One token a job and micro-step, each right with chance `alpha`, whatever the others are.

    A micro-step takes `step_s` whatever its rows. What follows a wrong token is wrong.
    """

    alpha: float
    step_s: float
    clock: Callable[[], float]
    method: str = "draft_model"
    is_cheap: bool = False
    is_stepwise: bool = True
    reads_features: bool = False
    busy_until: float = 0.0
    _last: dict[str, int] = field(default_factory=dict)  # token of each sequence, as far as it was told

    @property
    def is_out(self) -> bool:
        """True while a micro-step is being computed."""
        return self.clock() < self.busy_until

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """See Drafter."""
        self.busy_until = self.clock() + self.step_s
        return DraftResult(tuple(self._answer(job) for job in jobs), self.step_s)

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        for request_id in request_ids:
            self._last.pop(request_id, None)

    def _answer(self, job: DraftJob) -> Draft:
        request_id, seed, position = job.request.request_id, job.request.sampling.seed, job.next_position
        assert seed is not None
        if job.token_ids:
            self._last[request_id] = job.token_ids[-1]
        is_first = position == job.request.num_prompt_tokens
        is_right = is_first or self._last[request_id] == token_at(seed, position - 1)
        is_right = is_right and _mixed(seed, position, _LUCK) < self.alpha * (_MASK + 1)
        token_id = (token_at(seed, position) + (not is_right)) % VOCAB_SIZE
        self._last[request_id] = token_id
        return Draft(request_id, job.epoch, position, (token_id,))


@dataclass
class SetTarget:
    """A StepRunner whose pass takes `pass_s` whatever it computes; beside a drafter, `slowdown` times that.

    It keeps how many tokens each request got, by seed, and how many passes there were by how they drafted:
    "async" beside a micro-step, else "sync" with drafts and "off" without.
    """

    drafter: SetDrafter
    pass_s: float
    slowdown: float = 1.0
    num_tokens: Counter[int] = field(default_factory=Counter)
    num_passes: Counter[str] = field(default_factory=Counter)

    def run(self, inputs: StepInputs) -> StepResult:
        """See StepRunner."""
        seeds, positions = inputs.sampling.seed.tolist(), inputs.sampling.position.tolist()
        token_ids = [token_at(*place) for place in zip(seeds, positions, strict=True)]
        if inputs.drafts is not None:
            drafts = inputs.drafts
            proposed = iter(drafts.token_ids.tolist())
            for first, count in zip(drafts.first_row.tolist(), drafts.num_drafts.tolist(), strict=True):
                own = list(islice(proposed, count))
                num_right = next((i for i in range(count) if own[i] != token_ids[first + i]), count)
                rejected = slice(first + num_right + 1, first + count + 1)
                token_ids[rejected] = [NO_TOKEN] * (count - num_right)
        rows = zip(seeds, token_ids, strict=True)
        self.num_tokens.update(seed for seed, token_id in rows if token_id != NO_TOKEN)
        is_slowed = self.drafter.is_out
        self.num_passes["async" if is_slowed else "off" if inputs.drafts is None else "sync"] += 1
        return StepResult(SampledRows(token_ids), self.pass_s * (self.slowdown if is_slowed else 1.0), 0.0)
