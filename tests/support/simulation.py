"""One simulated run of the whole loop, drawn from a seed: what arrives, what is changed, what fails.

Everything but the forward pass is real, time is made up, and nothing but the seed decides, so that a run
repeats exactly. The fake model's right text is known for every prompt, so that any schedule can be checked
token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.errors import EngineError, OutOfDeviceMemory, Overloaded
from engine.loop.stream import RequestStream
from engine.plan.request import FinishReason, GenerationRequest, SamplingParams
from engine.plan.speculation.drafter import Draft, DraftJob
from engine.plan.speculation.speculation_config import DraftingChange, LengthPolicyName
from engine.plan.step_records import StepInputs
from tests.support.ahead_fakes import AheadFakeRunner
from tests.support.engines import Collected, EngineShape, Harness, collect, running_engine
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE, FakeRunner, expected_output
from tests.support.virtual_time import run_in_virtual_time

POLICIES = ("fcfs", "sjf", "priority", "deadline", "orca", "fair")
PREEMPTIONS = ("recompute", "swap", "auto")
PREEMPTION_LIMITS = (0, 1, 2, 8)
Event = tuple[float, str | StepInputs]  # when, what

FAULTY = 0.02  # the share of passes that fail, in runs with faults


@dataclass(frozen=True, slots=True)
class Job:
    """One reply asked for: when, what, and what its reader does to it."""

    arrival_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int
    stop_token_ids: frozenset[int]
    priority: int
    tenant: str
    salt: str | None
    deadline_s: float | None
    reads: int | None  # deltas until the reader leaves; None reads all
    changes: tuple[tuple[float, str, int], ...]  # (seconds after the arrival, what, to which value)
    presence_penalty: float = 0.0  # has steps drawn later, and changes no token of the fake model


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a seed decides before a run begins."""

    shape: EngineShape
    jobs: tuple[Job, ...]
    resets_s: tuple[float, ...]  # when the prefix cache is reset
    token_s: float
    swap_s: float  # a block
    drafters: tuple[FakeDrafter, ...] = ()
    device: str = ""  # that is given steps ahead: computing "early" or "late"; "" is given one at a time

    @property
    def make_runner(self) -> Callable[..., FakeRunner]:
        """Of the fake model on the device."""
        return partial(AheadFakeRunner, is_late=self.device == "late") if self.device else FakeRunner

    def seconds(self, inputs: StepInputs) -> tuple[float, float]:
        """What a step takes, and its swapping."""
        num_swapped = len(inputs.moves.swap_out) + len(inputs.moves.swap_in)
        return 0.001 + self.token_s * len(inputs.token_ids), self.swap_s * num_swapped


class Draw(random.Random):
    """The draws of a scenario."""

    def scenario(self) -> Scenario:
        """A small engine, its cache often too small for its requests, which often share prefixes."""
        shape = self.shape()
        span_s = self.choice((0.0, 0.02, 0.2))
        shared = [self.tokens(shape.max_model_len) for _ in range(self.randint(1, 3))]
        jobs = [self.job(shape, span_s, shared) for _ in range(self.randint(1, 12))]
        return Scenario(
            shape=shape,
            jobs=tuple(jobs),
            resets_s=tuple(self.uniform(0, span_s + 0.05) for _ in range(self.choice((0, 0, 2)))),
            token_s=self.choice((0.0001, 0.001)),
            swap_s=self.choice((0.00001, 0.003)),
            drafters=self.drafters(),
            device=self.choice(("", "", "early", "late")),
        )

    def drafters(self) -> tuple[FakeDrafter, ...]:
        """None, one or two, of all kinds."""
        methods = self.sample(("ngram", "draft_model", "medusa"), self.choice((0, 1, 1, 1, 2)))
        return tuple(self.drafter(method) for method in methods)

    def drafter(self, method: str) -> FakeDrafter:
        """Quick or slow, right or wrong."""
        return FakeDrafter(
            method=method,
            alpha=self.choice((0.0, 0.5, 0.9, 1.0)),
            is_cheap=method == "ngram",
            is_stepwise=method != "ngram",
            step_s=self.choice((0.0, 0.0003, 0.002, 0.02)),
            reads=self.choice((3, 10, 10_000)),
            tree=self.choice((1, 3)) if method == "medusa" else 0,
            is_shy=self.random() < 0.3,
        )

    def shape(self) -> EngineShape:
        """The sizes of an engine."""
        block_size = self.choice((1, 2, 4, 8))
        max_model_len = self.choice((16, 40))
        needed = -(-max_model_len // block_size)
        return EngineShape(
            num_blocks=needed + self.randrange(needed + 1),
            block_size=block_size,
            max_num_seqs=self.randint(1, 8),
            max_num_batched_tokens=self.choice((1, 3, 8, 64)),
            max_model_len=max_model_len,
            policy=self.choice(POLICIES),
            prefix_caching=self.choice((True, False)),
            preemption=self.choice(PREEMPTIONS),
            max_preemptions=self.choice((1, *PREEMPTION_LIMITS)),
            num_host_blocks=self.choice((0, needed, 4 * needed)),
            schedule=self.choice(("async", "sync", "auto")),
            length_policy=self.choice(("fixed", "threshold", "goodput")),
            max_draft_tokens=self.choice((1, 3, 8)),
            min_acceptance_rate=self.choice((0.0, 0.3)),
        )

    def tokens(self, number: int) -> list[int]:
        """Random ones."""
        return self.choices(range(VOCAB_SIZE), k=number)

    def job(self, shape: EngineShape, span_s: float, shared: Sequence[list[int]]) -> Job:
        """One reply that fits the context."""
        length = self.randint(1, self.choice((4, shape.max_model_len - 1)))
        prompt = self.choice(shared)[: self.choice((0, length // 2, length))]
        prompt = prompt + self.tokens(length - len(prompt))
        changes = [
            (
                self.uniform(0, 0.05),
                self.choice(("cancel", "priority", "deadline", "drafts")),
                self.randint(-30, 30),
            )
            for _ in range(self.choice((0, 0, 0, 1, 3)))
        ]
        return Job(
            arrival_s=self.uniform(0, span_s),
            prompt=tuple(prompt),
            max_tokens=shape.max_model_len
            - length
            - self.choice((0, self.randrange(shape.max_model_len - length))),
            num_choices=self.choice((1, 1, 1, 2, 4)),
            stop_token_ids=frozenset(self.tokens(self.choice((0, 20)))),
            priority=self.randint(-20, 20),
            tenant=self.choice(("a", "b", "c")),
            salt=self.choice((None, None, None, "salt")),
            deadline_s=self.choice((None, None, self.uniform(0.001, 0.3))),
            reads=self.choice((None, None, None, None, self.randrange(4))),
            changes=tuple(sorted(changes)),
            presence_penalty=self.choice((0.0, 0.0, 0.0, 1.0)),
        )


def _change_of(value: int) -> DraftingChange:
    """One that a value between -30 and 30 stands for."""
    policies: tuple[LengthPolicyName, ...] = ("fixed", "threshold", "goodput")
    return DraftingChange(
        enabled=(None, True, False)[value % 3],
        num_tokens=(None, 1, 3, 8)[value % 4],
        length_policy=(None, *policies)[value % 4],
        method=(None, None, "auto", "ngram", "medusa")[value % 5],
    )


@dataclass
class Faults:
    """Fails passes and rows now and then, never three passes in a row: that would be the engine's death."""

    rate: float
    draw: random.Random
    when: str = ""
    kind: type[Exception] = RuntimeError
    failed_in_a_row: int = 0

    def before(self, inputs: StepInputs) -> None:
        """Decide on a step's fault, which comes before anything is done or after all is."""
        number = self.draw.random()
        failing = number < 2 * self.rate and self.failed_in_a_row < 2
        self.failed_in_a_row = self.failed_in_a_row + 1 if failing else 0
        self.when = self.draw.choice(("before", "after", "draw")) if failing else ""
        self.kind = RuntimeError if number < self.rate else OutOfDeviceMemory
        self._raise("before")

    def after(self, inputs: StepInputs) -> None:
        """Fail a step whose work has been done."""
        self._raise("after")

    def on_draw(self, inputs: StepInputs) -> None:
        """Fail a step as it is drawn."""
        self._raise("draw")

    def _raise(self, when: str) -> None:
        if self.when == when:
            raise self.kind("injected")

    def row_errors(self, step: int, row: int) -> str | None:
        """Fail a row now and then."""
        return "injected" if self.draw.random() < self.rate / 4 else None

    def before_draft(self, jobs: Sequence[DraftJob]) -> None:
        """Fail a micro-step now and then."""
        if self.draw.random() < 2 * self.rate:
            raise RuntimeError("injected")

    def spoil(self, job: DraftJob, draft: Draft) -> Draft:
        """Answer with nonsense now and then."""
        if self.draw.random() >= 2 * self.rate:
            return draft
        nonsense = self.draw.choice(
            (
                {"token_ids": (VOCAB_SIZE,), "parents": None},
                {"token_ids": (0,) * (job.num_wanted + 1), "parents": None},
                {"first": draft.first + 1, "token_ids": (1,), "parents": None},
                {"epoch": draft.epoch - 1},
                {"request_id": "nobody"},
                {"token_ids": (2,), "parents": (0,)},
                {"token_ids": (self.draw.randrange(VOCAB_SIZE),), "parents": None},
            )
        )
        return replace(draft, **nonsense)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did: the events in order, and how often each kind of event came."""

    trace: list[Event]
    seen: Counter[str]


@dataclass
class Run:
    """A scenario while it is played."""

    scenario: Scenario
    harness: Harness
    faulty: bool
    outcome: Outcome

    async def play(self) -> None:
        """All jobs, to the end of each."""
        origin = self._now()
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(self.scenario.jobs):
                group.create_task(self._reply(number, job, origin))
            for at_s in self.scenario.resets_s:
                group.create_task(self._reset(at_s))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _note(self, event: str) -> None:
        self.outcome.trace.append((self._now(), event))

    async def _reset(self, at_s: float) -> None:
        await asyncio.sleep(at_s)
        number = self.harness.engine.controls.reset_prefix_cache()
        self._note(f"{number} cached blocks forgotten")
        self.outcome.seen["blocks forgotten"] += number

    async def _reply(self, number: int, job: Job, origin: float) -> None:
        await asyncio.sleep(origin + job.arrival_s - self._now())
        streams: list[RequestStream] = []
        for choice in range(job.num_choices):
            name = f"{number}.{choice}"
            request = GenerationRequest(
                request_id=name,
                prompt_token_ids=job.prompt,
                sampling=SamplingParams(
                    max_tokens=job.max_tokens,
                    seed=100 * number + choice,
                    stop_token_ids=job.stop_token_ids,
                    presence_penalty=job.presence_penalty,
                ),
                priority=job.priority,
                group=f"{number}",
                tenant=job.tenant,
                deadline=None if job.deadline_s is None else self._now() + job.deadline_s,
                cache_salt=job.salt,
                fork_of=f"{number}.0" if choice else None,
            )
            try:
                streams.append(self.harness.engine.submit(request))
            except EngineError as refusal:
                self._note(f"{name} refused {refusal}")
                self.outcome.seen["refused"] += 1
                assert job.deadline_s is not None or isinstance(refusal, Overloaded), refusal
        async with asyncio.TaskGroup() as group:
            for choice, stream in enumerate(streams):
                group.create_task(self._read(job, stream, 100 * number + choice))
            if streams:
                group.create_task(self._change(job, streams))

    async def _read(self, job: Job, stream: RequestStream, seed: int) -> None:
        if job.reads is None:
            result = await collect(stream)
            self._check(job, stream.request_id, seed, result)
            return
        for _ in range(job.reads):
            delta = await anext(stream, None)
            if delta is None or delta.finish is not None:
                break
        stream.close()
        self.outcome.seen["left"] += 1

    async def _change(self, job: Job, streams: Sequence[RequestStream]) -> None:
        arrival = self._now()
        for at_s, what, value in job.changes:
            name = streams[value % len(streams)].request_id
            await asyncio.sleep(arrival + at_s - self._now())
            engine = self.harness.engine
            explanation = engine.controls.explain(name)
            if what == "cancel":
                done = engine.cancel(name)
            elif what == "priority":
                done = engine.controls.reprioritize(name, priority=value)
            elif what == "drafts":
                done = engine.controls.retune(name, _change_of(value))
                if value % 3 == 0 and self.harness.parts.batcher.decoder.why_never is None:
                    engine.controls.change_drafting(_change_of(value // 3))
            else:
                done = engine.controls.reprioritize(name, deadline_s=max(0, value) / 100)
            assert done is (explanation is not None), name
            if explanation is not None:
                assert (explanation.waits_because is None) is (explanation.status == "running"), name
            self._note(f"{name} {what} {value}: {done}")
            self.outcome.seen[f"changed: {what}"] += done

    def _check(self, job: Job, name: str, seed: int, result: Collected) -> None:
        """The text is the serial text, up to where the request ended, and it ended for a reason it has."""
        finish = result.finish
        self._note(f"{name} {finish.reason.value} {result.token_ids} cached {finish.num_cached_tokens}")
        self.outcome.seen[finish.reason.value] += 1
        expected, reason = right_output(job, seed)
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (result.token_ids, finish.reason) == (expected, reason), name
            return
        assert result.token_ids == expected[: len(result.token_ids)], name
        changes = {what for _, what, _ in job.changes}
        if finish.reason is FinishReason.ABORT:
            assert "cancel" in changes, name
        elif finish.reason is FinishReason.DEADLINE:
            assert job.deadline_s is not None or "deadline" in changes, name
        else:
            assert self.faulty, finish.error


def right_output(job: Job, seed: int) -> tuple[list[int], FinishReason]:
    """What serial generation gives a job's choice of this seed, and how it ends."""
    tokens = expected_output(job.prompt, job.max_tokens, seed)
    for index, token in enumerate(tokens):
        if token in job.stop_token_ids:
            return tokens[: index + 1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


def simulate(seed: int, *, faulty: bool, trace: list[Event] | None = None) -> Outcome:
    """Play the scenario of `seed` to its end. What it raises says how to replay it.

    The events go to `trace` while they happen.
    """
    outcome = Outcome([] if trace is None else trace, Counter())
    try:
        run_in_virtual_time(
            _simulate(seed, faulty, outcome)
        )  # it returns nothing: asyncio prints what it does
    except BaseException as error:
        error.add_note(f"seed {seed}; replay: {replay_command(seed, faulty=faulty)}")
        raise
    return outcome


async def _simulate(seed: int, faulty: bool, outcome: Outcome) -> None:
    scenario = Draw(seed).scenario()
    faults = Faults(FAULTY if faulty else 0.0, random.Random(seed))
    loop = asyncio.get_running_loop()

    def before(inputs: StepInputs) -> None:
        outcome.trace.append((loop.time(), inputs))
        faults.before(inputs)

    for drafter in scenario.drafters:
        drafter.before, drafter.spoil = faults.before_draft, faults.spoil
    async with running_engine(
        scenario.shape,
        before=before,
        row_errors=faults.row_errors,
        clock=loop.time,
        inline=True,
        drafters=scenario.drafters,
        make_runner=scenario.make_runner,
    ) as harness:
        harness.runner.after = faults.after
        harness.runner.on_draw = faults.on_draw
        harness.runner.seconds = scenario.seconds
        run = Run(scenario, harness, faulty, outcome)
        await run.play()
        assert not harness.runner.violations
        assert not any(drafter.violations for drafter in scenario.drafters)
        metrics = harness.engine.metrics
        outcome.seen.update({f"preempted by {how}": number for how, number in metrics.preemptions.items()})
        outcome.seen["blocks swapped in"] += harness.runner.num_swapped_in
        outcome.seen["steps ahead"] += getattr(harness.runner, "num_ahead", 0)
        outcome.seen["drawn later"] += getattr(harness.runner, "num_drawn_later", 0)
        outcome.seen["cached"] += metrics.prompt_tokens_cached
        outcome.seen.update(_of_drafts(harness))


def _of_drafts(harness: Harness) -> dict[str, int]:
    stats = harness.parts.batcher.decoder.stats
    return {
        "drafts accepted": stats.num_accepted,
        "drafts rejected": stats.num_proposed - stats.num_accepted,
        "drafters failed": harness.engine.metrics.engine_errors["drafter"],
        **{f"drafts dropped: {reason}": number for reason, number in stats.dropped.items()},
        **{f"ahead: {result}": number for result, number in stats.run_ahead.items()},
    }


def replay_command(seed: int, *, faulty: bool) -> str:
    """The command that plays a seed once more and prints what happens."""
    return f"python -m tests.support.simulation {seed}" + (" --faulty" if faulty else "")


def main() -> None:
    """Play one seed and print its events; a failure ends it with its traceback."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--faulty", action="store_true", help="let passes and rows fail now and then")
    options = parser.parse_args()
    trace: list[Event] = []
    print(Draw(options.seed).scenario())
    try:
        print(dict(simulate(options.seed, faulty=options.faulty, trace=trace).seen))
    finally:
        for seconds, event in trace:
            print(f"{seconds:.6f} {event}")


if __name__ == "__main__":
    main()
