"""Killed without a word in the midst of writing K/V to disk, time and again: no later answer differs."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.killed_writer import NUM_PROMPTS, answer_until_killed
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_KILLS = 200
START_S = 120.0


def received(answers: Connection) -> list[tuple[int, list[int], int]]:
    """All that was sent and not received yet."""
    found = []
    try:
        while answers.poll():
            found.append(answers.recv())
    except EOFError:
        pass
    return found


def test_no_token_is_wrong_after_two_hundred_kills(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.support.killed_writer"])
    draw = random.Random(11)

    def start(directory: Path | None, seed: int) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=answer_until_killed, args=(model, directory, seed, theirs))
        process.start()
        theirs.close()
        return process, ours

    process, answers = start(None, 0)
    right = dict(answers.recv()[:2] for _ in range(NUM_PROMPTS))
    process.join()
    num_answers = num_read = num_blocks_left = 0
    for kill in range(NUM_KILLS):
        process, answers = start(tmp_path / "kv", kill)
        assert answers.poll(START_S), "it did not start"
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        found = received(answers)
        process.join()
        for number, token_ids, _ in found:
            assert token_ids == right[number], f"prompt {number} after {kill} kills"
        num_answers += len(found)
        num_read += found[-1][2]
        num_blocks_left = sum(1 for _ in (tmp_path / "kv").glob("v*/*/[!.]*"))
        if kill % 10 == 9:  # so that there is always something to write
            for path in (tmp_path / "kv").glob("v*/*/*"):
                path.unlink(missing_ok=True)
    print(
        f"{NUM_KILLS} kills, {num_answers} answers, {num_read} blocks read, {num_blocks_left} left at the end"
    )
    assert num_read > NUM_KILLS
