"""The host benchmark: a model that takes no time, and a step that is timed between its calls."""

from __future__ import annotations

import pytest

from tests.bench.host import RING, InstantRunner, host_step
from tests.bench.streams import BenchmarkFailed
from tests.support.engines import text_tokenizer

WORDS = list(range(100, 150))


async def test_a_step_is_timed_with_every_sequence_decoding() -> None:
    step = await host_step(text_tokenizer(), WORDS, batch=3, num_steps=20)
    assert 5 < step.wall_us < 1e6
    assert 5 < step.cpu_us < 1e6


async def test_too_few_common_steps_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InstantRunner, "notes", lambda self, inputs: False)
    with pytest.raises(BenchmarkFailed, match="only 0 steps"):
        await host_step(text_tokenizer(), WORDS, batch=2, num_steps=20)


def test_the_instant_model_has_words_for_any_batch() -> None:
    runner = InstantRunner(WORDS, num_sequences=1024)
    for step in range(2 * RING):
        runner.call_times = [0.0] * step
        assert len(runner.row_tokens(1024)) == 1024
        assert set(runner.row_tokens(7)) <= set(WORDS)
