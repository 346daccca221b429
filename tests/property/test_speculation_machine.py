"""SpeculativeDecoder under random jobs, answers right, wrong, late and absurd, steps, pauses and ends.

Two drafters are modelled from outside: each remembers what its jobs told it, so that a job which tells too
little, or of a wrong place, shows. The target's next token is a hash of the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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

from engine.plan.request import Request, RequestStatus, SpeculationOptions
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.draft_tape import DraftedToken
from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult, read_answers
from engine.plan.speculation.length_policy import StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import DraftingChange, LengthPolicyName, SpeculationConfig
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from tests.support.examples import share_of
from tests.support.factories import make_request
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE, expected_output

METHODS = ("draft_model", "medusa")


@dataclass
class Model:
    """A drafter: what it remembers, and the micro-step that is out."""

    memory: dict[str, list[int]] = field(default_factory=dict)
    out: list[DraftJob] = field(default_factory=list)


class SpeculationMachine(RuleBasedStateMachine):
    """The model: what every request's text is, who is seated, and what each drafter was told."""

    decoder: SpeculativeDecoder

    def __init__(self) -> None:
        super().__init__()
        self.models = [Model() for _ in METHODS]
        self.seated: dict[str, Request] = {}
        self.paused: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.flying: dict[str, tuple[DraftedToken, ...]] | None = None
        self.epochs: dict[str, int] = {}
        self.changed: set[str] = set()  # that may want no drafts
        self.given_up: set[str] = set()
        self.num_opened = 0

    @initialize(longest=st.sampled_from([1, 2, 5]), policy=st.sampled_from(["fixed", "threshold", "goodput"]))
    def start(self, longest: int, policy: LengthPolicyName) -> None:
        config = SpeculationConfig(VOCAB_SIZE, longest, length_policy=policy, min_acceptance_rate=0.0)
        costs = PassCosts()
        sources = [DraftSource(FakeDrafter(method=method), longest) for method in METHODS]
        self.decoder = SpeculativeDecoder(config, sources, make_length_policy(config, costs), costs)

    # Requests.

    @rule(
        prompt=st.integers(1, 6),
        most=st.sampled_from([1, 2, 5, 30, 30]),
        method=st.sampled_from([None, None, *METHODS]),
        stops=st.sampled_from([False, False, True]),
    )
    def open(self, prompt: int, most: int, method: str | None, stops: bool) -> None:
        name = f"r{self.num_opened}"
        request = make_request(name, prompt, arrival=self.num_opened, max_tokens=most, temperature=0.0)
        if stops:
            request.stop_token_ids = frozenset(expected_output(request.token_ids, 4)[3:])
        request.speculation = SpeculationOptions(method=method)
        self.num_opened += 1
        request.status = RequestStatus.RUNNING
        self.decoder.open(request)
        self.seated[name] = request

    @precondition(lambda self: self.seated)
    @rule(choice=st.integers(0, 99))
    def pause(self, choice: int) -> None:
        request = self.pick(self.seated, choice)
        self.decoder.pause(request.request_id)
        del self.seated[request.request_id]
        request.status = RequestStatus.PREEMPTED
        self.paused[request.request_id] = request
        if self.flying is not None:
            self.flying.pop(request.request_id, None)

    @precondition(lambda self: self.paused)
    @rule(choice=st.integers(0, 99))
    def resume(self, choice: int) -> None:
        request = self.pick(self.paused, choice)
        del self.paused[request.request_id]
        request.num_computed_tokens = 0
        request.status = RequestStatus.RUNNING
        self.decoder.open(request)
        self.seated[request.request_id] = request

    @precondition(lambda self: self.seated or self.paused)
    @rule(choice=st.integers(0, 99), gives_up=st.booleans())
    def end(self, choice: int, gives_up: bool) -> None:
        request = self.pick(self.seated | self.paused, choice)
        if gives_up:
            self.decoder.give_up(request.request_id)
            self.given_up.add(request.request_id)
            self.drop_seat(request)
            request.status = RequestStatus.PREEMPTED
            self.paused[request.request_id] = request
        else:
            self.close(request)

    @precondition(lambda self: self.seated or self.paused)
    @rule(
        choice=st.integers(0, 99),
        change=st.builds(
            DraftingChange,
            st.sampled_from([None, True, True, False]),
            st.sampled_from([None, 1, 3, 5]),
            st.sampled_from([None, "fixed", "threshold", "goodput"]),
            st.sampled_from([None, None, "auto", *METHODS]),
        ),
    )
    def retune(self, choice: int, change: DraftingChange) -> None:
        """From outside, at any time."""
        request = self.pick(self.seated | self.paused, choice)
        request.retune(change)
        self.decoder.retune(request)
        self.changed.add(request.request_id)

    @precondition(lambda self: self.flying is None)
    @rule()
    def begin(self) -> None:
        self.decoder.begin_step(())
        for name, request in self.seated.items():
            if name in self.given_up:  # whatever it wants: nobody drafts for it
                sequence = self.decoder._active.get(name)
                assert sequence is None or not sequence.views
            else:
                assert (name in self.decoder._active) is request.speculation.enabled

    def pick(self, among: dict[str, Request], choice: int) -> Request:
        return list(among.values())[choice % len(among)]

    def drop_seat(self, request: Request) -> None:
        self.seated.pop(request.request_id, None)
        self.paused.pop(request.request_id, None)
        if self.flying is not None:
            self.flying.pop(request.request_id, None)

    def close(self, request: Request) -> None:
        self.decoder.close(request.request_id)
        self.drop_seat(request)
        self.ended.add(request.request_id)

    # Steps.

    @precondition(lambda self: self.flying is None and self.seated)
    @rule(room=st.integers(0, 20))
    def step(self, room: int) -> None:
        decodes = []
        for request in self.seated.values():
            if len(request.token_ids) - request.num_computed_tokens == 1:
                decodes.append(request)
        load = StepLoad(max(1, len(decodes)), max(1, len(decodes)), 0, room)
        chosen = self.decoder.choose(decodes, load)
        assert sum(len(drafted) for _, drafted in chosen) <= room
        self.flying = {name: () for name in self.seated}
        for request, drafted in chosen:
            assert request in decodes and drafted
            assert len(request.token_ids) + len(drafted) < request.max_num_tokens
            assert len(drafted) <= self.decoder.config.max_draft_tokens
            self.flying[request.request_id] = drafted

    @precondition(lambda self: self.flying is not None)
    @rule(cut=st.integers(0, 3), fails=st.booleans())
    def commit(self, cut: int = 9, fails: bool = False) -> None:
        """What the target draws; `cut` is how many drafts there was room for. Now and then a pass is lost."""
        flying, self.flying = self.flying, None
        assert flying is not None
        for name, drafted in flying.items() if not fails else ():
            request = self.seated[name]
            tokens = self.verify(request, self.trim(drafted, cut))
            ends = tokens[-1] in request.stop_token_ids or len(request.token_ids) >= request.max_num_tokens
            request.num_computed_tokens = len(request.token_ids) - 1
            self.decoder.commit(request, self.trim(drafted, cut), len(tokens))
            if ends:
                self.close(request)

    def trim(self, drafted: tuple[DraftedToken, ...], cut: int) -> tuple[DraftedToken, ...]:
        return drafted[:cut]

    def verify(self, request: Request, drafted: tuple[DraftedToken, ...]) -> list[int]:
        tokens: list[int] = []
        node = -1
        while True:
            (token,) = expected_output(request.token_ids, 1)
            tokens.append(token)
            request.token_ids.append(token)
            if token in request.stop_token_ids or len(request.token_ids) >= request.max_num_tokens:
                return tokens
            children = [
                i
                for i, draft in enumerate(drafted)
                if (i - 1 if draft.parent is None else draft.parent) == node and draft.token_id == token
            ]
            if not children:
                return tokens
            node = children[0]

    # Drafters.

    @rule(index=st.integers(0, 1), ahead=st.booleans(), may_read=st.booleans())
    def ask(self, index: int, ahead: bool, may_read: bool) -> None:
        """Hand out a micro-step. What has ended is forgotten first, as whoever runs them does."""
        model = self.models[index]
        if model.out:
            return
        jobs = self.decoder.links[index].jobs(ahead=ahead, may_read=may_read)
        for name in self.decoder.links[index].take_closed():
            model.memory.pop(name, None)
        for job in jobs:
            name = job.request.request_id
            request = self.seated[name]
            memory = model.memory.setdefault(name, [])
            assert job.first <= len(memory), "it is not told of everything"
            assert job.num_wanted >= 1
            assert job.next_position + job.num_wanted < request.max_num_tokens
            del memory[job.first :]
            memory += job.token_ids
            assert memory[: job.num_committed] == request.token_ids, "what it knows is what is known"
            assert job.num_committed == len(request.token_ids)
        assert len({job.request.request_id for job in jobs}) == len(jobs)
        model.out = jobs

    @precondition(lambda self: any(model.out for model in self.models))
    @rule(
        index=st.integers(0, 1),
        kinds=st.lists(
            st.sampled_from(["right", "right", "wrong", "silent", "behind", "tree", "absurd", "none"]),
            min_size=1,
            max_size=4,
        ),
        length=st.integers(1, 5),
    )
    def answer(self, index: int, kinds: list[str], length: int) -> None:
        """A micro-step comes back, whenever that is."""
        model = self.models[index]
        jobs, model.out = model.out, []
        drafts = []
        for place, job in enumerate(jobs):
            draft = self.draft(job, model, kinds[place % len(kinds)], min(length, job.num_wanted))
            if draft is not None:
                drafts.append(draft)
        answers = read_answers(jobs, DraftResult(tuple(drafts), 0.0), VOCAB_SIZE)
        for job, draft in answers.fitting:
            self.decoder.links[index].put(job, draft)
        self.decoder.links[index].lose(answers.unfit)

    def draft(self, job: DraftJob, model: Model, kind: str, length: int) -> Draft | None:
        name, first = job.request.request_id, job.next_position
        memory = model.memory[name]
        right = expected_output(memory, length)
        if kind == "none":
            return None
        if kind == "right":
            memory += right
            return Draft(name, job.epoch, first, tuple(right))
        if kind == "wrong":
            right[-1] = (right[-1] + 1) % VOCAB_SIZE
            memory += right
            return Draft(name, job.epoch, first, tuple(right))
        if kind == "tree":
            parents = (-1, *range(length - 1))
            return Draft(name, job.epoch, first, tuple(right), parents)
        if kind == "absurd":
            beside = length if length % 2 else -length  # never where it belongs
            return Draft(name, job.epoch, first + beside, tuple(right))
        return Draft(name, job.epoch, first, (), is_behind=kind == "behind")

    @precondition(lambda self: any(model.out for model in self.models))
    @rule(index=st.integers(0, 1))
    def fail(self, index: int) -> None:
        """A micro-step raises, halfway through."""
        model = self.models[index]
        jobs, model.out = model.out, []
        for job in jobs[::2]:
            model.memory[job.request.request_id] = [-1] * 50
        self.decoder.links[index].lose(jobs)

    # Much of it in a row, or what is rare would hardly be seen.

    @precondition(lambda self: self.seated)
    @rule(
        actions=st.lists(
            st.sampled_from(["ask 0", "ask 1", "right", "right", "wrong", "silent", "tree", "step", "land"]),
            min_size=8,
            max_size=30,
        ),
        ahead=st.booleans(),
        length=st.integers(1, 3),
    )
    def play(self, actions: list[str], ahead: bool, length: int) -> None:
        """Drafting beside good steps."""
        for action in actions:
            if action.startswith("ask"):
                self.ask(int(action[-1]), ahead, True)
            elif action == "step":
                if self.flying is None and self.seated:
                    self.step(20)
            elif action == "land":
                if self.flying is not None:
                    self.commit()
            else:
                for index in (0, 1):
                    self.answer(index, [action, "right"], length)
            self.tapes_continue_what_is_known()

    # What must hold.

    @invariant()
    def tapes_continue_what_is_known(self) -> None:
        if not hasattr(self, "decoder"):
            return
        assert self.seated.keys() - self.changed <= self.decoder._active.keys() <= self.seated.keys()
        assert self.decoder._sequences.keys() >= self.seated.keys()
        assert self.decoder._sequences.keys() == self.seated.keys() | self.paused.keys()
        for name, sequence in self.decoder._sequences.items():
            tape = sequence.tape
            assert tape.epoch >= self.epochs.get(name, 0), "epochs only rise"
            self.epochs[name] = tape.epoch
            if self.flying is not None and name in self.flying:
                drafted = self.flying[name]
                assert tuple(tape.drafted[: len(drafted)]) == drafted, "what flies stays where it is"
            if name not in self.decoder._active:
                assert not tape.drafted
            for view in sequence.views.values():
                assert 0 <= view.num_synced <= sequence.num_known
                assert name in self.seated or view.num_synced == 0
            if name in self.paused:
                assert not tape.drafted

    @invariant()
    def nothing_of_the_ended_remains(self) -> None:
        if not hasattr(self, "decoder"):
            return
        for index, model in enumerate(self.models):
            clients, closed = self.decoder.links[index]._clients, self.decoder.links[index]._closed
            assert not self.ended & clients.keys()
            assert clients.keys() <= self.seated.keys()
            left = {name for name in model.memory if name in self.ended}
            assert left <= set(closed), "somebody must still be told to forget it"
        stats = self.decoder.stats
        assert stats.num_accepted <= stats.num_proposed
        assert stats.num_bonus + stats.num_recovered <= stats.num_rounds

    def teardown(self) -> None:
        """Left alone, all drafters forget everything."""
        if not hasattr(self, "decoder"):
            return
        for request in list((self.seated | self.paused).values()):
            self.close(request)
        for index, model in enumerate(self.models):
            self.decoder.links[index].lose(model.out)
            for name in self.decoder.links[index].take_closed():
                model.memory.pop(name, None)
            assert not model.memory
            assert self.decoder.links[index].jobs(ahead=True) == []


def test_speculation() -> None:
    run_state_machine_as_test(
        SpeculationMachine,
        settings=settings(max_examples=share_of(80), stateful_step_count=40, deadline=None),
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_speculation_for_long() -> None:
    run_state_machine_as_test(
        SpeculationMachine, settings=settings(max_examples=5000, stateful_step_count=120, deadline=None)
    )
