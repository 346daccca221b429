"""Deterministic simulation of the whole loop: random arrivals, cancels, tiny KV and faults, from one seed.

The fake model's right text is known for every prompt, so any schedule can be checked token by token. A
failing seed replays exactly: executors are inline and the only randomness is the seed's.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from engine.errors import OutOfDeviceMemory
from engine.outputs import StepInputs
from engine.request import FinishReason
from engine.stream import RequestStream
from tests.engines import Collected, EngineShape, Harness, collect, running_engine
from tests.fakes import VOCAB_SIZE, expected_output

NUM_SEEDS = 400


@dataclass
class Script:
    """What happens in one run, drawn from its seed."""

    random: random.Random
    fault_rate: float
    failed_in_a_row: int = 0

    def before(self, inputs: StepInputs) -> None:
        """Fail a pass now and then, never three in a row: that would be the engine's death."""
        draw = self.random.random()
        if self.failed_in_a_row == 2:
            draw = 1.0
        self.failed_in_a_row = self.failed_in_a_row + 1 if draw < 2 * self.fault_rate else 0
        if draw < self.fault_rate:
            raise RuntimeError("injected")
        if draw < 2 * self.fault_rate:
            raise OutOfDeviceMemory("injected")

    def row_errors(self, step: int, row: int) -> str | None:
        """Fail a row now and then."""
        return "injected" if self.random.random() < self.fault_rate / 4 else None

    def shape(self) -> EngineShape:
        """A small engine, its cache often too small for its requests."""
        block_size = self.random.choice((1, 2, 4, 8))
        max_model_len = self.random.choice((16, 40))
        needed = -(-max_model_len // block_size)
        return EngineShape(
            num_blocks=needed + self.random.randrange(3 * needed),
            block_size=block_size,
            max_num_seqs=self.random.randint(1, 8),
            max_num_batched_tokens=self.random.choice((1, 3, 8, 64)),
            max_model_len=max_model_len,
            policy=self.random.choice(("fcfs", "priority")),
        )


async def read_some(script: Script, stream: RequestStream) -> Collected | None:
    """Read to the end, or give up part of the way."""
    if script.random.random() < 0.8:
        return await collect(stream)
    for _ in range(script.random.randrange(4)):
        delta = await anext(stream, None)
        if delta is None or delta.finish is not None:
            break
    stream.close()
    return None


async def one_request(script: Script, harness: Harness, max_len: int) -> None:
    """Arrive at some point, read, and check what was read."""
    for _ in range(script.random.randrange(40)):
        await asyncio.sleep(0)
    prompt = [script.random.randrange(VOCAB_SIZE) for _ in range(script.random.randint(1, max_len - 1))]
    max_tokens = script.random.randint(1, max_len - len(prompt))
    result = await read_some(script, harness.submit(prompt, max_tokens=max_tokens))
    if result is None:
        return
    if result.finish.error is None:
        assert result.finish.reason is FinishReason.LENGTH
        assert result.token_ids == expected_output(prompt, max_tokens)
    else:
        assert result.finish.reason is FinishReason.ERROR
        assert result.token_ids == expected_output(prompt, len(result.token_ids))


@pytest.mark.parametrize("faults", [0.0, 0.02], ids=["healthy", "faulty"])
async def test_every_request_gets_its_serial_text_or_a_terminal_error(faults: float) -> None:
    for seed in range(NUM_SEEDS):
        script = Script(random.Random(seed), faults)
        shape = script.shape()
        async with running_engine(
            shape, before=script.before, row_errors=script.row_errors, inline=True
        ) as harness:
            number = script.random.randint(1, 16)
            await asyncio.gather(*(one_request(script, harness, shape.max_model_len) for _ in range(number)))
            assert harness.engine.metrics.requests_started == number, f"seed {seed}"
