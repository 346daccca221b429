"""Killed without a word in the midst of writing K/V to disk, time and again: no later answer differs.

The model is the fake one, whose text shows every wrong token of K/V; all else is real.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from tests.support.fakes import expected_output
from tests.support.killed_writer import NUM_OUTPUT, NUM_PROMPTS, answer_until_killed, prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_KILLS = 200
START_S = 120.0


def test_no_token_is_wrong_after_two_hundred_kills(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.support.killed_writer"])
    right = [expected_output(prompt_of(number), NUM_OUTPUT) for number in range(NUM_PROMPTS)]
    draw = random.Random(11)
    num_answers = num_read = num_unfinished = 0
    for kill in range(NUM_KILLS):
        answers, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=answer_until_killed, args=(tmp_path / "kv", kill, theirs))
        process.start()
        theirs.close()
        for _ in range(draw.randrange(1, 12)):
            assert answers.poll(START_S), "it does not answer"
            number, token_ids, num_blocks = answers.recv()
            assert token_ids == right[number], f"prompt {number} after {kill} kills"
            num_answers += 1
        num_read += num_blocks
        time.sleep(draw.uniform(0.0, 0.01))
        process.kill()
        process.join()
        answers.close()
        for path in (tmp_path / "kv").glob("v*/*/.unfinished*"):
            num_unfinished += 1
            path.unlink()
        if kill % 5 == 4:  # so that there is always something to write
            for path in (tmp_path / "kv").glob("v*/*/*"):
                path.unlink(missing_ok=True)
    print(
        f"{NUM_KILLS} kills, {num_unfinished} within a write; {num_answers} answers, {num_read} blocks read"
    )
    assert num_read > NUM_KILLS
    assert num_unfinished > NUM_KILLS // 20, "the kills came too late"
