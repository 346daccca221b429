"""The device of stated times does what the loop asks of one, in the time that was stated."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.loop.engine_parts import AheadRunner
from engine.startup.build_runner import RunnerSizes
from tests.bench.stated_server import StatedRunner
from tests.support.packed import load_tiny

STEP_S, SEQUENCE_S = 0.2, 0.005


def test_steps_that_are_launched_ahead_last_as_long_as_stated_one_after_the_other() -> None:
    loaded = load_tiny("llama")
    sampler = Sampler(loaded.vocab_size, loaded.device)
    plain = ModelRunner(loaded, 16, 4, sampler, 4, ForDrafts())
    sizes = RunnerSizes(num_blocks=16, block_size=4, num_host_blocks=0, max_num_seqs=4, max_num_tokens=64)
    runner = StatedRunner(plain, sizes, STEP_S, SEQUENCE_S)
    assert isinstance(runner, AheadRunner)
    runner.warm_up()
    inputs = pack_step([Part([5] * 8, 6, 7, [0, 1]), Part([5] * 8, 6, 7, [2, 3])], 4, temperature=1.0)
    began = time.perf_counter()
    first = runner.launch(inputs)
    second = runner.launch(replace(inputs, previous_rows=np.arange(2)))
    assert time.perf_counter() - began < STEP_S, "the host goes on"
    results = [first.wait(), second.wait()]
    step_s = STEP_S + 2 * SEQUENCE_S
    assert time.perf_counter() - began >= 2 * step_s
    for result in results:
        assert result.forward_s == step_s
        assert result.rows.row_errors is None
        assert len(result.rows.token_ids) == 2 and min(result.rows.token_ids) >= 0
