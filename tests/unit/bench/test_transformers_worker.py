"""The peer's worker on a tiny model: exact lengths, its own clock, and failures that are not results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bench.streams import BurstFigures
from tests.bench.transformers_worker import GenerateBatch, record_of
from tests.support.tiny_models import save_tiny_model


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_every_prompt_gets_exactly_the_tokens_asked_for(tmp_path: Path) -> None:
    peer = GenerateBatch(str(save_tiny_model("llama", tmp_path, dtype=torch.bfloat16)))
    prompts = [[5 + n] * (4 + n) for n in range(10)]  # more than it runs at once
    records = peer.run(prompts, max_tokens=6)
    assert [record.num_prompt_tokens for record in records] == [len(prompt) for prompt in prompts]
    for record in records:
        assert record.num_output_tokens == len(record.event_times) == 6
        assert record.sent < record.event_times[0]
        assert list(record.event_times) == sorted(record.event_times)
    assert BurstFigures.of(records).output_tokens_per_s > 0


@pytest.mark.parametrize(("error", "tokens"), [("out of memory", [1, 2]), (None, [1])])
def test_a_request_that_failed_or_stopped_early_is_no_record(error: str | None, tokens: list[int]) -> None:
    output = SimpleNamespace(request_id="r", error=error, generated_tokens=tokens)
    with pytest.raises(RuntimeError, match="r ended with"):
        record_of(output, max_tokens=2)
