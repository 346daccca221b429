"""Which steps are measured before K/V gets the rest of the memory, and what is said where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.largest_step import LargestStep, _steps, measure_largest_step
from engine.compute.sampling.sampler import Sampler
from engine.errors import StartRefused
from engine.plan.step_records import SampledRows, SamplingInputs
from tests.support.packed import load_tiny

LARGEST = LargestStep(num_tokens=50, num_seqs=6, block_size=4, num_rows=20)


class CountingSampler(Sampler):
    """Notes how many rows each draw has, at which temperature."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded.vocab_size, loaded.device)
        self.draws: list[tuple[int, float]] = []

    def sample(self, logits: torch.Tensor, sampling: SamplingInputs) -> SampledRows:
        self.draws.append((len(logits), float(sampling.temperature.min())))
        return super().sample(logits, sampling)


@dataclass
class FakeGauge:
    """Steps take what `peaks` say; `error` is what comes of each, None of none."""

    peaks: list[int] = field(default_factory=list)
    error: Exception | None = None

    def free_and_total(self) -> tuple[int, int]:
        raise AssertionError("nobody asks")

    def peak(self, work: Callable[[], None]) -> int:
        if self.error is not None:
            raise self.error
        work()
        return self.peaks.pop(0)


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_prompts_of_the_whole_budget_and_a_token_of_every_sequence(family: str) -> None:
    loaded = replace(load_tiny(family), max_model_len=24)
    sampler = CountingSampler(loaded)
    tokens: list[int] = []
    loaded.model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: tokens.append(args[0].numel())
    )
    assert measure_largest_step(loaded, sampler, LARGEST, FakeGauge([7, 3])) == 7, "the larger of both"
    assert sampler.draws == [(20, 1.0), (6, 1.0)], "all rows; a token of each"
    assert sum(tokens) == 50 + 6
    prompts, decodes = _steps(loaded, LARGEST)
    assert prompts.query_lens.tolist() == [24, 24, 2] and decodes.query_lens.tolist() == [1] * 6
    assert prompts.logits_rows.tolist() == list(range(30, 50))
    assert prompts.sampling.position.tolist() == [*range(7, 25), 1, 2]


@pytest.mark.parametrize("num_rows", [1, 50])
@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_any_number_of_rows_is_measured(family: str, num_rows: int) -> None:
    loaded = load_tiny(family)
    sampler = CountingSampler(loaded)
    largest = LARGEST._replace(num_rows=num_rows)
    assert measure_largest_step(loaded, sampler, largest, FakeGauge([2, 5])) == 5
    assert sampler.draws == [(num_rows, 1.0), (6, 1.0)]


def test_no_more_sequences_than_tokens() -> None:
    loaded = load_tiny("llama")
    sampler = CountingSampler(loaded)
    assert measure_largest_step(loaded, sampler, LargestStep(4, 9, 4, 4), FakeGauge([1, 2])) == 2
    assert sampler.draws == [(4, 1.0), (4, 1.0)]


def test_no_memory_for_a_step_is_refused_with_what_to_lower() -> None:
    loaded = load_tiny("llama")
    gauge = FakeGauge(error=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(StartRefused, match=r"--max-num-batched-tokens 50 or --max-num-seqs 6 .*Lower them"):
        measure_largest_step(loaded, CountingSampler(loaded), LARGEST, gauge)


def test_other_errors_come_through() -> None:
    loaded = load_tiny("llama")
    with pytest.raises(RuntimeError, match="boom"):
        measure_largest_step(loaded, CountingSampler(loaded), LARGEST, FakeGauge(error=RuntimeError("boom")))
