"""Requests that steps are launched ahead for, and how often that happens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

from engine.loop.engine_parts import AheadRunner, LaunchedStep, StepRunner
from engine.plan.grammar import CompiledGrammar
from engine.plan.step_records import StepInputs, StepResult
from tests.support.repetitive_world import KINDS, WORDS, Ask, Family, make_family
from tests.support.structures import SCHEMAS, compiled


def plain_families(count: int) -> list[Family]:
    """Replies with all that a request may ask for, but only one in six with what the next step waits for."""
    draw = random.Random(3)
    beginning = draw.choices(WORDS, k=17)
    families = []
    for number in range(count):
        prompt = beginning[: draw.choice((0, 8, 17))] + draw.choices(WORDS, k=6)
        waits = number % 6 == 5
        family = make_family(f"{number}", "T 1.2" if waits else "T 0.7", prompt, draw)
        families.append(family if waits else [_without_logprobs(ask) for ask in family])
    return families


def adjusted_families(count: int) -> list[Family]:
    """Replies that are greedy or not, with all that logits are adjusted by; one in three follows a schema."""
    draw = random.Random(4)
    schema = compiled("json_schema", json.dumps(SCHEMAS["nested"]))
    families = []
    for number in range(count):
        family = make_family(f"{number}", KINDS[number % 2 * 2], draw.choices(WORDS, k=6), draw)
        families.append([_following(ask, schema) for ask in family] if number % 3 == 2 else family)
    return families


def _following(ask: Ask, schema: CompiledGrammar) -> Ask:
    """The same of a reply that follows a schema, which leaves no room for the other limits."""
    sampling = replace(ask.request.sampling, allowed_token_ids=None, bad_words=(), stop=(), min_tokens=0)
    return replace(ask, request=replace(ask.request, sampling=sampling, grammar=schema))


def _without_logprobs(ask: Ask) -> Ask:
    sampling = replace(ask.request.sampling, logprobs=None)
    return replace(ask, request=replace(ask.request, sampling=sampling))


class StepCount:
    """Watches an AheadRunner: `num_ahead` launches were of tokens that nobody had read.

    Of these, `num_drawn_later` were of passes alone. `num_unread` had drafts that nobody had read.
    """

    def __init__(self) -> None:
        self.num_ahead = 0
        self.num_drawn_later = 0
        self.num_unread = 0

    def watch(self, runner: StepRunner, make_ahead: Callable[[StepRunner], AheadRunner]) -> StepRunner:
        """The runner, made into one that is launched ahead, under watch."""
        return _Watched(make_ahead(runner), self)


class _Watched:
    def __init__(self, runner: AheadRunner, count: StepCount) -> None:
        self._runner = runner
        self._count = count

    def run(self, inputs: StepInputs) -> StepResult:
        return self._runner.run(inputs)

    def launch(self, inputs: StepInputs) -> LaunchedStep:
        self._count.num_ahead += inputs.previous_rows is not None
        self._count.num_drawn_later += inputs.is_drawn_later
        self._count.num_unread += inputs.drafts is not None and inputs.drafts.unread is not None
        return self._runner.launch(inputs)


class OneByOne:
    """A runner that could be launched ahead, and is not."""

    def __init__(self, runner: StepRunner) -> None:
        self.run = runner.run
