"""Steps launched before the last one's tokens were read give what steps one by one give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import SampledRows, StepInputs, StepResult
from tests.support.ahead_runner import AheadOnHost
from tests.support.packed import load_tiny, random_tokens

BLOCK_SIZE = 4
PROMPTS = [random_tokens(np.random.default_rng(seed), 3 + seed) for seed in range(3)]
BLOCKS = [list(range(8 * row, 8 * row + 8)) for row in range(3)]


def make_runner() -> ModelRunner:
    loaded = load_tiny("llama")
    return ModelRunner(loaded, 32, BLOCK_SIZE, Sampler(loaded.vocab_size, loaded.device))


def prompts(rows: list[int], temperature: float = 0.0) -> StepInputs:
    parts = [Part(PROMPTS[row], 0, len(PROMPTS[row]), BLOCKS[row]) for row in rows]
    return pack_step(parts, BLOCK_SIZE, temperature=temperature)


def unknown(rows: list[int], num_drawn: int, previous: list[int], temperature: float = 0.0) -> StepInputs:
    """The newest token of each of `rows`, which has `num_drawn` behind its prompt, drawn by `previous`."""
    parts = []
    for row in rows:
        stop = len(PROMPTS[row]) + num_drawn
        parts.append(Part([0] * stop, stop - 1, stop, BLOCKS[row]))
    inputs = pack_step(parts, BLOCK_SIZE, temperature=temperature)
    return replace(inputs, previous_rows=np.array(previous, np.int64))


def one_by_one(temperature: float, num_tokens: int) -> list[list[int]]:
    runner = make_runner()
    sequences = [list(prompt) for prompt in PROMPTS]
    inputs = prompts([0, 1, 2], temperature)
    for _ in range(num_tokens):
        for tokens, token_id in zip(sequences, runner.run(inputs).rows.token_ids, strict=True):
            tokens.append(token_id)
        parts = [
            Part(tokens, len(tokens) - 1, len(tokens), blocks)
            for tokens, blocks in zip(sequences, BLOCKS, strict=True)
        ]
        inputs = pack_step(parts, BLOCK_SIZE, temperature=temperature)
    return [tokens[-num_tokens:] for tokens in sequences]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_only_the_last_launch_knows(temperature: float) -> None:
    expected = one_by_one(temperature, 5)
    runner = AheadOnHost(make_runner())
    flying = [runner.launch(prompts([0, 1, 2], temperature))]
    flying += [runner.launch(unknown([0, 1, 2], drawn, [0, 1, 2], temperature)) for drawn in range(1, 5)]
    drawn = [step.wait().rows.token_ids for step in flying]
    assert [list(tokens) for tokens in zip(*drawn, strict=True)] == expected


def test_rows_may_change_places_and_be_known() -> None:
    expected = one_by_one(0.0, 3)
    runner = AheadOnHost(make_runner())
    first = runner.launch(prompts([0, 1, 2])).wait().rows.token_ids
    assert first == [tokens[0] for tokens in expected]
    mixed = unknown([2, 0], 1, [-1, 0])
    mixed.token_ids[0] = first[2]
    assert runner.launch(mixed).wait().rows.token_ids == [expected[2][1], expected[0][1]]
    assert runner.launch(unknown([0], 2, [1])).wait().rows.token_ids == [expected[0][2]]


class HalfFailing:
    """A StepRunner whose first row can never be drawn."""

    def __init__(self) -> None:
        self.seen: list[StepInputs] = []

    def run(self, inputs: StepInputs) -> StepResult:
        self.seen.append(inputs)
        return StepResult(SampledRows([-1, 7], row_errors={0: "not finite"}), 0.0, 0.0)


def test_a_row_that_failed_is_some_token() -> None:
    inner = HalfFailing()
    runner = AheadOnHost(inner)
    runner.launch(prompts([0, 1]))
    runner.launch(unknown([0, 1], 1, [0, 1]))
    assert inner.seen[1].token_ids.tolist() == [0, 7]
    assert inner.seen[1].previous_rows is None


def test_errors_come_when_waited_for() -> None:
    runner = AheadOnHost(make_runner())
    flying = runner.launch(replace(prompts([0]), token_ids=np.full(3, 1 << 20)))
    with pytest.raises(IndexError):
        flying.wait()
