"""One run of the batcher, drawn from a seed: what arrives, what is drafted, what is changed, what fails.

The batcher, its KV accounting and the decoder are real; the device is a fake paged KV that knows which token
was written in which slot, and its next token is a hash of what it reads there. So the right text of every
request is known before it runs, and a wrong write, copy or rewind is a wrong text.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.errors import OutOfDeviceMemory
from engine.loop.engine_parts import LaunchedStep
from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.request import FinishReason, Request, RequestStatus, SpeculationOptions
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.in_flight import CommittedToken
from engine.plan.speculation.drafter import Draft, DraftJob, read_answers
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder
from engine.plan.step_records import BatchDecision, StepInputs, StepResult
from tests.support.ahead_fakes import AheadFakeRunner
from tests.support.engines import EngineShape, make_decoder
from tests.support.factories import make_batcher, make_request, preempted
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE, ManualClock, expected_output
from tests.support.simulation import POLICIES, PREEMPTION_LIMITS, PREEMPTIONS, Faults


class TreeDrafter(FakeDrafter):
    """Answers with a tree of any shape: the chain that it believes in, among siblings and cousins."""

    def _with_siblings(self, job: DraftJob, first: int, tokens: list[int]) -> Draft:
        draw = random.Random(hash((first, *tokens)))
        token_ids: list[int] = []
        parents: list[int] = []
        stem = -1
        for token in tokens:
            for _ in range(draw.choice((0, 0, 1, 2))):
                parents.append(draw.randrange(-1, len(parents)))
                token_ids.append((token + 7 + len(token_ids)) % VOCAB_SIZE)
            parents.append(stem)
            token_ids.append(token)
            stem = len(parents) - 1
        num_wanted = job.num_wanted
        return Draft(
            job.request.request_id,
            job.epoch,
            first,
            tuple(token_ids[:num_wanted]),
            tuple(parents[:num_wanted]),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """How likely each thing is before each step, and how likely a pass or a row is to fail."""

    arrival: float
    cancel: float
    change: float
    reset: float
    draft: float
    ahead: float
    bad_pass: float
    bad_row: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a seed decides before a run begins."""

    limits: dict[str, Any]  # of the batcher
    jobs: tuple[Request, ...]  # in their order of arrival
    rates: Rates
    drafters: tuple[FakeDrafter, ...]
    longest_draft: int
    length_policy: str
    awaits_drafts: bool  # the next step does
    is_late: bool  # the device computes a step when it is waited for
    rewindable: Rewindable  # DRAFTS and NEVER: the model keeps state beside the blocks, as recurrent ones do


class Draw(random.Random):
    """The draws of a scenario."""

    def scenario(self) -> Scenario:
        """A cache that is too small for all that want to run, and now and then no trouble beside that."""
        rewindable = Rewindable.ANYWHERE
        if self.random() > 0.85:
            rewindable = self.choice((Rewindable.DRAFTS, Rewindable.DRAFTS, Rewindable.NEVER))
        limits = self.limits()
        if rewindable is not Rewindable.ANYWHERE:
            limits |= {"rewindable": rewindable, "num_snapshots": self.choice((0, 1, 2, 8))}
            limits |= {"num_host_states": self.choice((0, 1, 2, 8))}
        has_drafts = self.random() < 0.85
        return Scenario(
            limits=limits,
            jobs=tuple(self.jobs(limits["max_model_len"], limits["max_preemptions"])),
            rates=self.rates(),
            drafters=tuple(self.drafters()) if has_drafts else (),
            longest_draft=self.choice((1, 3, 3, 6)),
            length_policy=self.choice(("fixed", "fixed", "threshold", "goodput")),
            awaits_drafts=self.random() < 0.2,
            is_late=self.random() < 0.5,
            rewindable=rewindable,
        )

    def limits(self) -> dict[str, Any]:
        """The sizes of the batcher."""
        block_size = self.choice((1, 2, 3, 4))
        max_model_len = self.choice((12, 16, 24))
        needed = -(-max_model_len // block_size)
        seats = self.randint(2, 5)
        tokens = self.choice((2, 5, 16, 64, 64))
        return {
            "num_blocks": needed + self.randrange(needed + 1),
            "block_size": block_size,
            "max_model_len": max_model_len,
            "max_num_seqs": seats,
            "max_num_batched_tokens": tokens,
            "max_prefill_tokens": min(tokens, self.choice((2, 64))),
            "max_logits_rows": seats + tokens // 4,
            "max_decode_seqs": self.randint(1, seats) if self.random() < 0.3 else seats,
            "policy": self.choice(POLICIES),
            "aging_s": self.choice((0.0, 2.0)),
            "num_host_blocks": self.choice((0, needed, 4 * needed, 4 * needed)),
            "prefix_caching": self.random() < 0.6,
            "preemption": self.choice(PREEMPTIONS),
            "max_preemptions": self.choice(PREEMPTION_LIMITS),
            "kv_block_bytes": 1,
            "gap_limit_s": self.choice((None, None, 0.5)),
        }

    def rates(self) -> Rates:
        """Much or little of everything, or nothing."""
        return Rates(
            arrival=self.choice((0.2, 1.0, 1.0)),
            cancel=self.choice((0.0, 0.0, 0.03, 0.1)),
            change=self.choice((0.0, 0.0, 0.1)),
            reset=self.choice((0.0, 0.05)),
            draft=self.choice((0.3, 0.9)),
            ahead=self.choice((0.0, 0.5, 1.0)),
            bad_pass=self.choice((0.0, 0.0, 0.02, 0.1)),
            bad_row=self.choice((0.0, 0.0, 0.01, 0.1)),
        )

    def drafters(self) -> list[FakeDrafter]:
        """One or two: chains, trees, or both."""
        return [
            self.drafter(kind) for kind in self.sample(("ngram", "draft_model", "medusa"), self.randint(1, 2))
        ]

    def drafter(self, method: str) -> FakeDrafter:
        """Often right, often wrong; the one with heads makes trees."""
        make, tree = (TreeDrafter, 1) if method == "medusa" else (FakeDrafter, 0)
        return make(
            method=method,
            alpha=self.choice((0.0, 0.5, 0.9, 1.0)),
            is_stepwise=method == "draft_model",
            reads=self.choice((4, 10_000, 10_000)),
            tree=tree,
            is_shy=self.random() < 0.2,
        )

    def jobs(self, max_model_len: int, max_preemptions: int) -> list[Request]:
        """Requests that often begin alike; some are choices of one reply, and forks."""
        shared = [self.tokens(max_model_len) for _ in range(2)]
        jobs: list[Request] = []
        while len(jobs) < 3 or self.random() < 0.6:
            parent = self.job(len(jobs), max_model_len, max_preemptions, shared)
            jobs.append(parent)
            num_choices = self.choice((1, 1, 1, 2, 3))
            for _ in range(num_choices - 1):
                jobs.append(self.choice_of(parent, len(jobs)))
        return jobs

    def job(
        self, number: int, max_model_len: int, max_preemptions: int, shared: Sequence[list[int]]
    ) -> Request:
        """One that fits the context."""
        length = self.randint(1, max_model_len - 1)
        if self.random() < 0.7:
            length = self.randint(1, 4)  # long outputs are what runs out of blocks
        prompt = self.choice(shared)[: self.choice((0, length // 2, length))]
        request = make_request(
            f"r{number}",
            prompt + self.tokens(length - len(prompt)),
            arrival=number,
            max_tokens=max_model_len - length - self.choice((0, 0, self.randrange(max_model_len - length))),
            seed=number,
            priority=self.randint(-2, 2),
            cache_salt=self.choice((None, None, None, "salt")),
            stop_token_ids=frozenset(self.tokens(self.choice((0, 0, 20)))),
            min_tokens=self.choice((0, 0, 3)),
            prompt_logprobs=self.choice((None,) * 9 + (1,)),
            presence_penalty=self.choice((0.0, 0.0, 0.0, 1.0)),
        )
        request.tenant = self.choice((None, "x", "y"))
        request.deadline = self.choice((None, self.uniform(100.0, 200.0)))
        if self.random() < 0.1:
            request.speculation = SpeculationOptions(enabled=False)
        if self.random() < 0.3:
            request.status = RequestStatus.PREEMPTED  # before this run began
            preempted(request, self.choice((max_preemptions, self.randint(0, max_preemptions))))
        return request

    def choice_of(self, parent: Request, number: int) -> Request:
        """Another reply to the same prompt."""
        request = make_request(
            f"r{number}",
            parent.token_ids,
            arrival=number,
            max_tokens=parent.sampling.max_tokens,
            seed=number,
            priority=parent.priority,
            cache_salt=parent.cache_salt,
            stop_token_ids=parent.stop_token_ids,
            fork_of=parent.request_id,
        )
        request.tenant = parent.tenant
        return request

    def tokens(self, number: int) -> list[int]:
        """Random ones."""
        return self.choices(range(VOCAB_SIZE), k=number)


def right_text(request: Request) -> list[int]:
    """Prompt and output as serial generation gives them."""
    tokens = list(request.token_ids)
    sampling = request.sampling
    for token in expected_output(tokens, sampling.max_tokens, sampling.seed):
        tokens.append(token)
        num_output_tokens = len(tokens) - request.num_prompt_tokens
        if token in request.stop_token_ids and num_output_tokens > sampling.min_tokens:
            break
    return tokens


class Flight(NamedTuple):
    """A step that the device was given, or what it said to that, and the blocks where it writes."""

    decision: BatchDecision
    step: LaunchedStep | Exception
    written: frozenset[int]

    def wait(self) -> StepResult:
        """Its result; raises what went wrong with it."""
        if isinstance(self.step, Exception):
            raise self.step
        return self.step.wait()


@dataclass
class Run:
    """A scenario while it is played."""

    scenario: Scenario
    draw: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    alive: dict[str, Request] = field(default_factory=dict)
    right: dict[str, list[int]] = field(default_factory=dict)
    flying: list[Flight] = field(default_factory=list)
    states: dict[str, range] = field(default_factory=dict)  # tokens that the state of each has seen
    snapshots: dict[int, list[int]] = field(default_factory=dict)  # the tokens that each has seen
    host_states: dict[int, tuple[str, range]] = field(
        default_factory=dict
    )  # whose each is, and as in `states`
    slots: dict[int, str] = field(default_factory=dict)  # whose state each has
    last_was_empty: bool = False
    failed_in_a_row: int = 0

    def __post_init__(self) -> None:
        scenario, draw = self.scenario, self.draw
        self.clock = ManualClock()
        self.decoder = self._make_decoder()
        self.batcher: ContinuousBatcher = make_batcher(
            **scenario.limits, clock=self.clock, decoder=self.decoder
        )
        self.batcher.running.lookup.stops.least = draw.choice((1, 4, 8))
        self.batcher.running.lookup.stops.period = draw.choice((4, 12, 512))
        faults = Faults(scenario.rates.bad_pass, draw)
        self.drafters = list(scenario.drafters)
        self.asked: list[list[DraftJob]] = [[] for _ in self.drafters]
        for drafter in self.drafters:
            drafter.spoil = faults.spoil
        kv = self.batcher.kv
        self.runner = AheadFakeRunner(
            kv.num_blocks,
            kv.block_size,
            before=faults.before,
            after=faults.after,
            on_draw=faults.on_draw,
            row_errors=self._row_error,
            num_host_blocks=kv.host.num_blocks,
            is_late=scenario.is_late,
        )
        self.to_come = list(reversed(scenario.jobs))
        self.turns_left = 100 + 30 * sum(request.max_num_tokens for request in scenario.jobs)

    def _row_error(self, step: int, row: int) -> str | None:
        return "injected" if self._happens(self.scenario.rates.bad_row) else None

    def _make_decoder(self) -> SpeculativeDecoder:
        scenario = self.scenario
        shape = EngineShape(
            max_draft_tokens=max(1, scenario.longest_draft),
            length_policy=scenario.length_policy,  # type: ignore[arg-type]
        )
        decoder = make_decoder(
            shape, scenario.drafters, can_rewind=scenario.rewindable is not Rewindable.NEVER
        )
        if scenario.awaits_drafts:
            decoder.begin_step(decoder.links)
        return decoder

    def play(self) -> None:
        """To the end of every request; then nothing is held by anybody."""
        while self.to_come or self.alive or self.flying:
            self.turns_left -= 1
            assert self.turns_left > 0, "the work does not end"
            self._meddle()
            self._check_writes()
            self._speculate()
            self._go_on()
            self._check_writes()
        self._check_quiet()

    # Beside the steps.

    def _happens(self, rate: float) -> bool:
        return self.draw.random() < rate

    def _meddle(self) -> None:
        """What callers do."""
        rates = self.scenario.rates
        self.clock.advance(1.0)
        while self.to_come and (self._happens(rates.arrival) if self.alive else True):
            self._add(self.to_come.pop())
        self._cancel_somebody()
        if self.alive and self._happens(rates.change):
            priority, deadline = self.draw.randint(-2, 2), self.draw.uniform(100.0, 200.0)
            name = self._anybody().request_id
            assert self.batcher.reprioritize(name, priority=priority, deadline=deadline)
        if self._happens(rates.reset):
            self.batcher.kv.prefixes.reset()

    def _cancel_somebody(self) -> None:
        if self.alive and self._happens(self.scenario.rates.cancel):
            request = self._anybody()
            assert self.batcher.finish(request.request_id, FinishReason.ABORT) is request
            self._expect_ended(request, FinishReason.ABORT)

    def _add(self, request: Request) -> None:
        self.right[request.request_id] = right_text(request)
        request.arrival_time = self.clock.now
        self.batcher.add(request)
        self.alive[request.request_id] = request

    def _anybody(self) -> Request:
        return self.draw.choice(list(self.alive.values()))

    def _speculate(self) -> None:
        """Drafters are asked, and answer, when they like."""
        for index, drafter in enumerate(self.drafters):
            if self.asked[index] and self._happens(self.scenario.rates.draft):
                self._answer(index, drafter)
            if not self.asked[index] and self._happens(self.scenario.rates.draft):
                drafter.close(self.decoder.links[index].take_closed())
                self.asked[index] = self.decoder.links[index].jobs(ahead=bool(self.flying))
                if self._happens(0.5):
                    self._answer(index, drafter)

    def _answer(self, index: int, drafter: FakeDrafter) -> None:
        jobs, self.asked[index] = self.asked[index], []
        if not jobs:
            return
        answers = read_answers(jobs, drafter.draft(jobs), VOCAB_SIZE)
        link = self.decoder.links[index]
        link.take(answers)
        link.lose(answers.unfit)

    # Steps.

    def _go_on(self) -> None:
        if not self.flying:
            self._step()
        elif len(self.flying) == 1 and self._happens(self.scenario.rates.ahead):
            self._step_ahead()
        else:
            self._land()

    def _step(self) -> None:
        had_work = self.batcher.has_work
        running = [request for request in self.alive.values() if request.status is RequestStatus.RUNNING]
        decision = self.batcher.step()
        self.seen["preempted"] += len(decision.preempted)
        self.seen["swapped"] += len(decision.swapped)
        if running:
            oldest = min(running, key=lambda request: request.arrival)
            assert oldest.request_id not in decision.preempted, "the oldest gave way"
        limits = self.scenario.limits
        num_tokens = sum(entry.num_tokens for entry in decision.scheduled)
        assert decision.num_tokens == num_tokens <= limits["max_num_batched_tokens"]
        if decision.inputs is None:
            assert not (had_work and self.last_was_empty), "two steps without progress"
            self.last_was_empty = had_work
            return
        self.last_was_empty = False
        assert len(decision.inputs.logits_rows) <= limits["max_logits_rows"]
        self._take_off(decision, decision.inputs)

    def _step_ahead(self) -> None:
        decision = self.batcher.step_ahead(self.flying[0].decision)
        if decision is None:
            self._land()
            return
        assert decision.inputs is not None
        self.seen["steps ahead"] += 1
        self._take_off(decision, decision.inputs)

    def _take_off(self, decision: BatchDecision, inputs: StepInputs) -> None:
        self._count(decision, inputs)
        self._check_slots(decision, inputs)
        step: LaunchedStep | Exception
        try:
            step = self.runner.launch(inputs)
        except (RuntimeError, OutOfDeviceMemory) as error:
            step = error
        written = frozenset((inputs.slot_mapping // self.batcher.kv.block_size).tolist())
        self.flying.append(Flight(decision, step, written))

    def _count(self, decision: BatchDecision, inputs: StepInputs) -> None:
        self.seen["steps"] += 1
        self.seen["forks"] += len(inputs.moves.block_copies)
        self.seen["swapped in"] += len(inputs.moves.swap_in)
        self.seen["drafts"] += decision.num_draft_tokens
        if inputs.drafts is not None and inputs.drafts.parents is not None:
            self.seen["trees"] += 1
        limit = self.scenario.limits["max_preemptions"]
        self.seen["spent with drafts"] += sum(
            entry.num_drafts > 0 and self.alive[entry.request_id].num_preemptions >= limit
            for entry in decision.scheduled
        )

    def _check_slots(self, decision: BatchDecision, inputs: StepInputs) -> None:
        """Each token has the slot of its place in its own sequence, and state goes on where it is."""
        kv = self.batcher.kv
        slots: list[int] = []
        self._swap_states_out(inputs)
        self._restore(decision, inputs)
        self._swap_states_in(inputs)
        for name, first, count, _, num_drafts in decision.scheduled:
            held = kv.block_ids(name)
            assert first + count <= len(held) * kv.block_size, (
                f"{name} has no block for token {first + count - 1}"
            )
            slots += [
                held[position // kv.block_size] * kv.block_size + position % kv.block_size
                for position in range(first, first + count)
            ]
            assert not kv.keeps_state or first == 0 or first in self.states.get(name, ())
            self.states[name] = range(first + count - num_drafts, first + count + 1)
            self.slots[kv.row(name)] = name
        for sequence in inputs.held_back:
            name, first, count, _, num_drafts = decision.scheduled[sequence]
            assert num_drafts == 0 and count > 1, "nothing else is held back"
            self.states[name] = range(first + count - 1, first + count + 1)
        assert inputs.slot_mapping.tolist() == slots
        self._save(decision, inputs)

    def _swap_states_out(self, inputs: StepInputs) -> None:
        """What a slot has when its sequence gives way is kept."""
        for row, place in inputs.moves.states_out:
            name = self.slots[row]
            self.host_states[place] = (name, self.states[name])
            self.seen["states out"] += 1

    def _swap_states_in(self, inputs: StepInputs) -> None:
        """A state comes back to its own sequence, in whichever slot that has now."""
        of_row = {self.batcher.kv.row(name): name for name in self.alive if name in self.batcher.kv}
        for place, row in inputs.moves.states_in:
            name, seen = self.host_states[place]
            assert of_row[row] == name, f"{of_row[row]} gets the state of {name}"
            self.states[name] = seen
            self.seen["states in"] += 1

    def _restore(self, decision: BatchDecision, inputs: StepInputs) -> None:
        """States go on where a snapshot saw the same tokens."""
        of_row = {self.batcher.kv.row(entry.request_id): entry for entry in decision.scheduled}
        for snapshot, row in inputs.moves.state_restores:
            name, first, *_ = of_row[row]
            assert self.snapshots[snapshot] == self.right[name][:first], f"{name} begins on another's state"
            self.states[name] = range(first, first + 1)
            self.seen["restored"] += 1
        parents = {self.batcher.kv.row(name): name for name in self.alive if name in self.batcher.kv}
        for source, row in inputs.moves.state_copies:
            parent, (name, first, *_) = parents[source], of_row[row]
            assert first in self.states[parent], f"{parent} has left the state that {name} is to begin on"
            assert self.right[parent][:first] == self.right[name][:first], f"{name} begins on another's state"
            self.states[name] = range(first, first + 1)
            self.seen["state copies"] += 1

    def _save(self, decision: BatchDecision, inputs: StepInputs) -> None:
        of_row = {self.batcher.kv.row(entry.request_id): entry for entry in decision.scheduled}
        for row, snapshot in inputs.moves.state_saves:
            name, first, count, _, num_drafts = of_row[row]
            end = first + count - num_drafts
            assert end % self.batcher.kv.block_size == 0, "no block ends where the state is saved"
            assert end == self.states[name].start, "the state has not taken in all that is saved"
            self.snapshots[snapshot] = self.right[name][:end]
            self.seen["saved"] += 1

    def _check_writes(self) -> None:
        """What the device writes is held once, and nobody can find it."""
        kv = self.batcher.kv
        for flight in self.flying:
            for block_id in flight.written:
                assert kv.pool.ref_count(block_id) == 1, f"block {block_id} is written and free, or shared"
                assert block_id not in kv.prefixes, f"block {block_id} is written and published"

    def _land(self) -> None:
        flight = self.flying[0]
        try:
            rows = flight.wait().rows
        except (RuntimeError, OutOfDeviceMemory) as error:
            self._recover(flight.decision, error)
            return
        del self.flying[0]
        self.runner.events.clear()
        self.failed_in_a_row = 0
        decision = flight.decision
        self.batcher.rates.observe(decision.num_prefill_tokens, decision.num_decode_tokens, 1.0)
        kv = self.batcher.kv
        held = {name: kv.block_ids(name) for name in self.alive if name in kv}
        for token in self.batcher.commit(decision, rows):
            self._check_token(token)
            if token.error is not None:
                assert not any(block_id in kv.prefixes for block_id in held[token.request.request_id])
        kv.check_integrity()
        self._draw_ahead()

    def _draw_ahead(self) -> None:
        """Have the step ahead drawn if that waited for the last one; who is in it may end just before."""
        if not self.flying:
            return
        decision, step, _ = flight = self.flying[0]
        if decision.inputs is None or not decision.inputs.is_drawn_later or isinstance(step, Exception):
            return
        self._cancel_somebody()
        self.seen["drawn later"] += 1
        try:
            step.draw(self.batcher.sampling_ahead(decision))
        except (RuntimeError, OutOfDeviceMemory) as error:
            self._wait_in_vain(flight)
            self.flying[0] = flight._replace(step=error)

    def _recover(self, decision: BatchDecision, error: Exception) -> None:
        """A pass failed, and what is behind it is dropped."""
        for flight in self.flying[1:]:
            if not isinstance(flight.step, Exception):
                self._wait_in_vain(flight)
        for flight in self.flying:
            for entry in flight.decision.scheduled:
                self.states.pop(entry.request_id, None)
            assert flight.decision.inputs is not None
            for _, snapshot in flight.decision.inputs.moves.state_saves:
                self.snapshots.pop(snapshot, None)
        self.flying.clear()
        self.failed_in_a_row += 1
        if isinstance(error, OutOfDeviceMemory):
            if self.failed_in_a_row == 1 or self.batcher.kv.keeps_state:
                self.seen["out of memory"] += 1
                self.batcher.preempt_for_memory(decision)
            else:
                self.batcher.abandon(decision)
            return
        self.seen["failed passes"] += 1
        for request in self.batcher.isolate(decision):
            self._expect_ended(request, FinishReason.ERROR)

    def _wait_in_vain(self, flight: Flight) -> None:
        try:
            flight.wait()
        except (RuntimeError, OutOfDeviceMemory):
            return

    # What must hold.

    def _check_token(self, token: CommittedToken) -> None:
        request = token.request
        name = request.request_id
        if token.error is None:
            assert token.token_id == self.right[name][token.num_tokens - 1], (
                f"{name}: wrong token at {token.num_tokens - 1}"
            )
        else:
            self.seen["failed rows"] += 1
        if token.finish_reason is not None:
            self._expect_ended(request, token.finish_reason)

    def _expect_ended(self, request: Request, reason: FinishReason) -> None:
        name = request.request_id
        self.seen[reason.value] += 1
        assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, reason)
        right = self.right.pop(name)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert request.token_ids == right, name
        else:
            assert request.token_ids == right[: len(request.token_ids)], name
        del self.alive[name]

    def _check_quiet(self) -> None:
        """Nobody is served, and nothing is held: no block, no row, no draft."""
        batcher = self.batcher
        assert not self.runner.violations
        assert not any(drafter.violations for drafter in self.drafters)
        assert not batcher.has_work
        assert batcher.kv.num_used_blocks == 0
        assert batcher.kv.host.num_free == batcher.kv.host.num_blocks
        for index in range(len(self.drafters)):
            assert not self.decoder.links[index].jobs(ahead=True), "somebody who has ended is drafted for"


def play(seed: int) -> Counter[str]:
    """Play the scenario of `seed` to its end; how often what happened.

    What it raises says how to replay it.
    """
    draw = Draw(seed)
    try:
        run = Run(draw.scenario(), draw)
        run.play()
    except BaseException as error:
        error.add_note(f"seed {seed}; replay: python -m tests.support.batcher_fuzz {seed}")
        raise
    return run.seen


def main() -> None:
    """Play seeds once more; the first failure ends it with its traceback."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("seeds", type=int, nargs="+", metavar="seed")
    for seed in parser.parse_args().seeds:
        print(Draw(seed).scenario())
        print(dict(play(seed)))


if __name__ == "__main__":
    main()
