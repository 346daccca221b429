"""ContinuousBatcher under random arrivals, drafts, ends, failures and tiny caches: what must hold always.

The fake model hashes the prefix it reads back through the block tables, so that each request's right text
is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.loop.engine_parts import LaunchedStep
from engine.plan.request import FinishReason, Request, RequestStatus
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.step_planner import BatchConfig
from engine.plan.speculation.drafter import Draft
from engine.plan.step_records import BatchDecision, SampledRows, StepInputs
from tests.support.ahead_fakes import AheadFakeRunner
from tests.support.engines import EngineShape, make_decoder
from tests.support.examples import share_of
from tests.support.factories import make_batcher, make_request
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE, ManualClock, expected_output

MAX_MODEL_LEN = 24
PROMPTS = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=MAX_MODEL_LEN),
    st.integers(1, MAX_MODEL_LEN).map(lambda length: [1] * length),  # prefixes of one another
    st.lists(st.integers(0, 1), max_size=4).map(lambda tail: [1] * 12 + tail),
)
WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED)


class BatcherMachine(RuleBasedStateMachine):
    """The model: who is alive, what each still has to hold, and the decisions in flight, at most two."""

    batcher: ContinuousBatcher
    runner: AheadFakeRunner
    config: BatchConfig

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.alive: dict[str, Request] = {}
        self.held: dict[str, int] = {}  # tokens that a request was last given blocks for
        self.recomputed: Counter[str] = Counter()  # how often because rows behind its tokens were spoiled
        self.flying: list[BatchDecision] = []  # in their order
        self.launched: dict[int, LaunchedStep] = {}  # by step: those that the device was given already
        self.drawn: set[int] = set()  # the steps that were drawn later
        self.last_was_empty = False
        self.num_arrivals = 0
        self.stopped: set[str] = set()  # ended by a stop token
        self.unproven: dict[int, str] = {}  # block -> who wrote there without a good row since

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 8]),
        spare_blocks=st.one_of(st.just(0), st.integers(0, 40)),
        seats=st.integers(1, 6),
        tokens=st.sampled_from([1, 2, 3, 5, 8, 64]),
        prefill=st.sampled_from([1, 4, 64]),
        decodes=st.integers(1, 6),
        spare_rows=st.sampled_from([0, 1, 2, 5, 64]),
        policy=st.sampled_from(["fcfs", "priority", "aging", "sjf", "deadline", "orca", "fair"]),
        prefix_caching=st.booleans(),
        preemption=st.sampled_from(["recompute", "swap", "auto"]),
        host_blocks=st.sampled_from([0, 3, 40]),
        max_preemptions=st.sampled_from([0, 1, 2, 8]),
    )
    def start(
        self,
        block_size: int,
        spare_blocks: int,
        seats: int,
        tokens: int,
        prefill: int,
        decodes: int,
        spare_rows: int,
        policy: str,
        prefix_caching: bool,
        preemption: str,
        host_blocks: int,
        max_preemptions: int,
    ) -> None:
        self.batcher = make_batcher(
            num_blocks=-(-MAX_MODEL_LEN // block_size) + spare_blocks // block_size,
            block_size=block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=tokens,
            max_prefill_tokens=min(prefill, tokens),
            max_decode_seqs=min(decodes, seats),
            max_logits_rows=seats + spare_rows,
            max_model_len=MAX_MODEL_LEN,
            policy="priority" if policy == "aging" else policy,
            aging_s=2.0 if policy == "aging" else 0.0,
            clock=self.clock,
            num_host_blocks=host_blocks,
            prefix_caching=prefix_caching,
            preemption=preemption,
            max_preemptions=max_preemptions,
            kv_block_bytes=1,
            decoder=make_decoder(EngineShape(max_draft_tokens=5), [FakeDrafter(method="ngram")]),
        )
        self.config = self.batcher.config
        kv = self.batcher.kv
        self.runner = AheadFakeRunner(kv.num_blocks, kv.block_size, num_host_blocks=kv.host.num_blocks)

    # What may happen.

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([-10, 0, 0, 10]),
        tenant=st.sampled_from([None, "x", "y"]),
        salt=st.sampled_from([None, None, "salt"]),
        stops=st.booleans(),
        penalty=st.sampled_from([0.0, 0.0, 1.0]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        tenant: str | None,
        salt: str | None,
        stops: bool,
        penalty: float,
    ) -> None:
        stop_token_ids = frozenset(range(0, VOCAB_SIZE, 4)) if stops else frozenset()
        how: dict[str, Any] = {"priority": priority, "cache_salt": salt, "stop_token_ids": stop_token_ids}
        how["presence_penalty"] = penalty
        self.queue(prompt, max_tokens, tenant=tenant, **how)

    @rule(prompt=PROMPTS, max_tokens=st.lists(st.integers(1, 23), min_size=2, max_size=6))
    def burst(self, prompt: list[int], max_tokens: list[int]) -> None:
        """Several with one prompt, cut so that they fit."""
        for number in max_tokens:
            self.queue(prompt[: MAX_MODEL_LEN - number], number)

    @precondition(lambda self: bool(self.alive))
    @rule(choice=st.integers(0, 1000), max_tokens=st.integers(1, 12), num_choices=st.integers(1, 3))
    def fork(self, choice: int, max_tokens: int, num_choices: int) -> None:
        parent = list(self.alive.values())[choice % len(self.alive)]
        prompt = parent.token_ids[: parent.num_prompt_tokens]
        for _ in range(num_choices):
            self.queue(prompt, max_tokens, priority=parent.priority, fork_of=parent.request_id)

    def queue(self, prompt: list[int], max_tokens: int, tenant: str | None = None, **how: Any) -> None:
        self.clock.advance(1.0)
        self.num_arrivals += 1
        request = make_request(
            f"r{self.num_arrivals}",
            prompt,
            arrival=self.num_arrivals,
            arrival_time=self.clock.now,
            max_tokens=max_tokens,
            **how,
        )
        if request.max_num_tokens > MAX_MODEL_LEN:
            return  # admission refuses it
        request.tenant = tenant
        self.batcher.add(request)
        self.alive[request.request_id] = request

    @precondition(lambda self: bool(self.alive))
    @rule(
        choice=st.integers(0, 1000),
        priority=st.one_of(st.none(), st.integers(-2, 2)),
        deadline=st.one_of(st.none(), st.floats(100.0, 200.0)),
    )
    def reprioritize(self, choice: int, priority: int | None, deadline: float | None) -> None:
        request = list(self.alive.values())[choice % len(self.alive)]
        assert self.batcher.reprioritize(request.request_id, priority=priority, deadline=deadline)
        explanation = self.batcher.explain(request.request_id)
        assert explanation is not None
        runs = request.status is RequestStatus.RUNNING
        assert runs == (explanation.position is None) == (explanation.waits_because is None)

    @precondition(lambda self: not self.flying)
    @rule(num_right=st.integers(0, 5), num_wrong=st.integers(0, 3), is_tree=st.booleans())
    def draft(self, num_right: int, num_wrong: int, is_tree: bool) -> None:
        """Everybody who decodes has drafts from now on: those that come true, with wrong ones behind them."""
        (link,) = self.batcher.decoder.links
        for job in link.jobs(ahead=False):
            request = self.alive[job.request.request_id]
            if job.next_position > request.num_tokens:
                continue  # it has some
            tokens = expected_output(request.token_ids, num_right + num_wrong)
            tokens[num_right:] = [(token + 1) % VOCAB_SIZE for token in tokens[num_right:]]
            parents = tuple(range(-1, len(tokens) - 1))
            if is_tree and tokens:
                tokens, parents = [(tokens[0] + 1) % VOCAB_SIZE, *tokens], (-1, -1, *range(1, len(tokens)))
            count = job.num_wanted
            shape = parents[:count] if is_tree else None
            draft = Draft(request.request_id, job.epoch, job.next_position, tuple(tokens[:count]), shape)
            link.put(job, draft)

    @precondition(lambda self: not self.flying)
    @rule()
    def step(self) -> None:
        had_work = self.batcher.has_work
        running = [request for request in self.alive.values() if request.status is RequestStatus.RUNNING]
        decision = self.batcher.step()
        self.check_decision(decision, running)
        if decision.inputs is None:
            assert not (had_work and self.last_was_empty), "two steps without progress"
            self.last_was_empty = had_work
            return
        self.last_was_empty = False
        self.take_off(decision, decision.inputs)

    @precondition(lambda self: len(self.flying) == 1)
    @rule()
    def step_ahead(self) -> None:
        """The next step, where it can be decided: it may be launched before the first is read."""
        first = self.flying[0]
        num_free = self.batcher.kv.pool.num_free
        decision = self.batcher.step_ahead(first)
        if decision is None:
            assert self.batcher.kv.pool.num_free == num_free
            return
        assert decision.inputs is not None and decision.inputs.previous_rows is not None
        samplers = [entry.request_id for entry in first.scheduled if entry.samples]
        assert len(decision.scheduled) <= min(self.config.max_decode_seqs, self.config.max_num_batched_tokens)
        for entry, row in zip(decision.scheduled, decision.inputs.previous_rows, strict=True):
            request = self.alive[entry.request_id]
            assert request.status is RequestStatus.RUNNING
            assert samplers[row] == entry.request_id
            assert entry == (request.request_id, request.num_tokens, 1, True, 0)
            assert request.num_tokens + 1 < request.max_num_tokens
            self.held[entry.request_id] = max(request.num_tokens + 1, self.held[entry.request_id])
        self.take_off(decision, decision.inputs)

    def take_off(self, decision: BatchDecision, inputs: StepInputs) -> None:
        self.flying.append(decision)
        self.note_writes(decision, inputs)

    @precondition(lambda self: len(self.launched) < len(self.flying))
    @rule()
    def launch(self) -> None:
        """The device may begin at any time, in order."""
        decision = self.flying[len(self.launched)]
        assert decision.inputs is not None
        self.launched[decision.step_id] = self.runner.launch(decision.inputs)
        self.draw_oldest()

    def draw_oldest(self) -> None:
        """A step that is drawn later is drawn once it is launched and the one before it is committed."""
        decision = self.flying[0] if self.flying else None
        if decision is None or decision.inputs is None or not decision.inputs.is_drawn_later:
            return
        if decision.step_id in self.launched and decision.step_id not in self.drawn:
            self.drawn.add(decision.step_id)
            self.launched[decision.step_id].draw(self.batcher.sampling_ahead(decision))

    def note_writes(self, decision: BatchDecision, inputs: StepInputs) -> None:
        """No sequence may meet, in any block of its table, what another wrote and nobody found good."""
        block_size = self.batcher.kv.block_size
        for block_id in inputs.moves.scrub_blocks:
            self.unproven.pop(block_id, None)
        for copy in inputs.moves.block_copies:
            assert copy.source not in self.unproven
        for entry, table, kv_len in zip(decision.scheduled, inputs.block_tables, inputs.kv_lens, strict=True):
            block_ids = table[: -(-int(kv_len) // block_size)].tolist()
            for block_id in block_ids:
                assert self.unproven.get(block_id, entry.request_id) == entry.request_id
            for block_id in block_ids[entry.first_position // block_size :]:
                self.unproven[block_id] = entry.request_id

    def check_decision(self, decision: BatchDecision, were_running: list[Request]) -> None:
        config = self.config
        assert decision.num_tokens == sum(entry.num_tokens for entry in decision.scheduled)
        assert decision.num_tokens <= config.max_num_batched_tokens
        assert decision.num_prefill_tokens <= config.max_prefill_tokens
        assert decision.num_decode_tokens <= config.max_decode_seqs
        if decision.inputs is not None:
            assert len(decision.inputs.logits_rows) <= config.max_logits_rows
        lengths = [entry.num_tokens for entry in decision.scheduled]
        assert lengths == [1] * lengths.count(1) + [length for length in lengths if length > 1]
        assert len({entry.request_id for entry in decision.scheduled}) == len(lengths)
        if were_running:
            oldest = min(were_running, key=lambda request: request.arrival)
            assert oldest.request_id not in decision.preempted
        assert set(decision.swapped) <= set(decision.preempted)
        for request_id in decision.preempted:
            self.held.pop(request_id, None)
        for entry in decision.scheduled:
            request = self.alive[entry.request_id]
            assert request.status is RequestStatus.RUNNING
            assert entry.first_position == request.num_computed_tokens
            num_known = entry.num_tokens - entry.num_drafts
            assert entry.samples == (entry.first_position + num_known == request.num_tokens)
            needed = request.num_tokens + entry.num_drafts
            if self.is_spent(request):
                assert needed < request.max_num_tokens or not entry.num_drafts
                needed = request.max_num_tokens
            self.held[entry.request_id] = max(needed, self.held.get(entry.request_id, 0))  # of a step ahead

    def is_spent(self, request: Request) -> bool:
        return request.num_preemptions >= self.config.max_preemptions

    @precondition(lambda self: self.flying)
    @rule(bad_row=st.one_of(st.none(), st.none(), st.integers(0, 3)))
    def commit(self, bad_row: int | None = None) -> None:
        decision, rows = self.land()
        samplers = [entry for entry in decision.scheduled if entry.samples]
        owners = [entry.request_id for entry in samplers for _ in range(entry.num_drafts + 1)]
        going_on = [name for name in owners if name in self.alive]
        errors = dict(rows.row_errors or {})
        if bad_row is not None:
            errors[bad_row] = "injected"
        committed = self.batcher.commit(decision, SampledRows(rows.token_ids, row_errors=errors))
        assert [token.row for token in committed] == sorted({token.row for token in committed})
        assert {token.request.request_id for token in committed} == set(going_on)
        failed = {owners[row] for row in errors if row < len(owners)}
        self.note_good((name for name in owners if name not in failed), failed)
        for token in committed:
            request = token.request
            assert (owners[token.row], token.token_id) == (request.request_id, rows.token_ids[token.row])
            assert (token.error is not None) == (token.row in errors)
            if token.error is not None:
                assert token.finish_reason is FinishReason.ERROR
            if token.finish_reason is not None:
                self.expect_ended(request, token.finish_reason)
        for entry in samplers:
            if entry.num_drafts and entry.request_id in self.alive:
                self.note_cut(self.alive[entry.request_id], entry.request_id in failed)
        self.draw_oldest()

    def note_cut(self, request: Request, is_spoiled: bool) -> None:
        """Drafts were verified: what only they needed is given back; all, where rows behind them are bad."""
        name = request.request_id
        assert (request.status is RequestStatus.PREEMPTED) == is_spoiled
        if is_spoiled:
            self.recomputed[name] += 1
            del self.held[name]
        elif not self.is_spent(request):
            self.held[name] = request.num_computed_tokens

    def note_good(self, request_ids: Iterable[str], failed: Collection[str]) -> None:
        """A good row was drawn from all that these have, but for what is still being written.

        Of those that `failed` the rows before the bad one were good: what was published by them is.
        """
        good = {name for name in request_ids if name in self.alive or name in self.stopped}
        published = self.batcher.kv.prefixes
        self.unproven = {
            block: owner
            for block, owner in self.unproven.items()
            if owner not in good and not (owner in failed and block in published)
        }
        for decision in self.flying:
            assert decision.inputs is not None
            self.note_writes(decision, decision.inputs)

    @rule(num_steps=st.integers(2, 20))
    def run_on(self, num_steps: int) -> None:
        """Several good steps in a row."""
        for _ in range(num_steps):
            if len(self.flying) == 1 and num_steps % 2:
                self.step_ahead()
            if not self.flying and num_steps % 3:
                self.draft(num_steps % 4, num_steps % 2, num_steps % 5 == 0)
            self.commit() if self.flying else self.step()
            self.each_request_is_in_exactly_one_place()

    @precondition(lambda self: self.flying)
    @rule(fail=st.booleans(), ran=st.booleans())
    def abandon(self, fail: bool, ran: bool) -> None:
        decision = self.lose(ran)
        aboard = [entry.request_id for entry in decision.scheduled if entry.request_id in self.alive]
        if not fail:
            assert [request.request_id for request in self.batcher.abandon(decision)] == aboard
            return
        searched = self.batcher.is_isolating
        blamed = self.batcher.isolate(decision)
        assert len(blamed) >= (len(aboard) == 1), "one that fails alone is to blame"
        assert searched or len(aboard) < 2 or self.batcher.is_isolating, "a search begins with halves"
        for request in blamed:
            self.expect_ended(request, FinishReason.ERROR)

    @precondition(lambda self: self.flying)
    @rule(ran=st.booleans())
    def run_out_of_memory(self, ran: bool) -> None:
        running = [request for request in self.alive.values() if request.status is RequestStatus.RUNNING]
        self.batcher.preempt_for_memory(self.lose(ran))
        if running:
            assert min(running, key=lambda r: r.arrival).status is RequestStatus.RUNNING
        for request in running:
            if request.status is not RequestStatus.RUNNING:
                del self.held[request.request_id]

    @precondition(lambda self: bool(self.alive))
    @rule(choice=st.integers(0, 1000))
    def cancel(self, choice: int) -> None:
        request = list(self.alive.values())[choice % len(self.alive)]
        assert self.batcher.finish(request.request_id, FinishReason.ABORT) is request
        self.expect_ended(request, FinishReason.ABORT)

    @rule()
    def reset_prefix_cache(self) -> None:
        num_cached = self.batcher.kv.pool.num_free_kept
        assert self.batcher.kv.prefixes.reset() == num_cached
        assert self.batcher.kv.pool.num_free_kept == 0

    def land(self) -> tuple[BatchDecision, SampledRows]:
        """The oldest flying step and its rows; it, and all behind it, run as late as they can."""
        if not self.launched:
            self.launch()
        decision = self.flying.pop(0)
        self.batcher.rates.observe(decision.num_prefill_tokens, decision.num_decode_tokens, 1.0)
        return decision, self.launched.pop(decision.step_id).wait().rows

    def lose(self, ran: bool) -> BatchDecision:
        """The oldest flying step, which fails with what is behind it; `ran` if they did their work."""
        while ran and len(self.launched) < len(self.flying):
            self.launch()
        for step in self.launched.values():
            step.wait()
        decision = self.flying[0]
        self.flying.clear()
        self.launched.clear()
        return decision

    def expect_ended(self, request: Request, reason: FinishReason) -> None:
        """Check an ended request's state and text, and forget it."""
        assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, reason)
        if reason is FinishReason.STOP:
            assert request.token_ids[-1] in request.stop_token_ids
            self.stopped.add(request.request_id)
        if reason is FinishReason.LENGTH:
            assert request.num_output_tokens == request.sampling.max_tokens
        self.check_text(request)
        assert self.batcher.finish(request.request_id, FinishReason.ABORT) is None
        del self.alive[request.request_id]
        self.held.pop(request.request_id, None)

    def check_text(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == expected_output(prompt, request.num_output_tokens)

    # What must hold.

    @invariant()
    def the_device_never_writes_into_a_free_block(self) -> None:
        kv = self.batcher.kv
        for decision in self.flying:
            assert decision.inputs is not None
            written = set((decision.inputs.slot_mapping // kv.block_size).tolist())
            assert all(kv.pool.ref_count(block_id) == 1 for block_id in written)
            assert not any(block_id in kv.prefixes for block_id in written), "somebody may find it"

    @invariant()
    def each_request_is_in_exactly_one_place(self) -> None:
        kv = self.batcher.kv
        running = 0
        for request in self.alive.values():
            assert 0 <= request.num_computed_tokens < request.num_tokens
            limit = self.config.max_preemptions + self.recomputed[request.request_id]
            assert request.num_preemptions <= limit
            if request.status is RequestStatus.RUNNING:
                running += 1
                assert len(kv.block_ids(request.request_id)) == kv.blocks_for(self.held[request.request_id])
            else:
                assert request.status in WAITING
                assert request.request_id not in kv
                swapped = request.status is RequestStatus.SWAPPED
                assert (request.request_id in kv.host) == swapped
                assert (request.num_computed_tokens > 0) == swapped
        assert len(self.batcher.running) == running <= self.config.max_num_seqs
        assert len(self.batcher.queue) == len(self.alive) - running
        waiting = [r for r in self.alive.values() if r.status is not RequestStatus.RUNNING]
        assert self.batcher.has_work == bool(self.alive)
        assert self.batcher.kv.host.num_saved == sum(r.status is RequestStatus.SWAPPED for r in waiting)
        kv.check_integrity()

    def teardown(self) -> None:
        """Left alone, everything finishes with its serial text, and nothing is held."""
        if not hasattr(self, "batcher"):
            return
        steps_left = 200 + 40 * sum(request.max_num_tokens for request in self.alive.values())
        while self.alive:
            if not self.flying:
                self.step()
            else:
                self.commit()
            self.each_request_is_in_exactly_one_place()
            steps_left -= 1
            assert steps_left > 0, "the work does not end"
        while self.flying:
            self.commit()
        assert not self.runner.violations
        assert self.batcher.kv.num_used_blocks == 0
        assert self.batcher.kv.host.num_free == self.batcher.kv.host.num_blocks
        assert not self.batcher.has_work


def test_batcher() -> None:
    run_state_machine_as_test(
        BatcherMachine, settings=settings(max_examples=share_of(100), stateful_step_count=50, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_batcher_for_long() -> None:
    run_state_machine_as_test(
        BatcherMachine, settings=settings(max_examples=5000, stateful_step_count=200, deadline=None)
    )
