"""The draw of filtered rows by radix selection on a GPU: the tokens of the sort, recorded too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute.cuda.device_draw import draw_filtered
from engine.compute.sampling.noise import row_keys
from engine.compute.sampling.processors import Filters, process_logits
from tests.support.sampling_reference import Row, inputs_of

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.graphs.recorder import CudaRecorder  # noqa: E402
from engine.compute.cuda.triton_border import Rows  # noqa: E402
from engine.compute.cuda.triton_filter import draw_filtered_at_once  # noqa: E402
from tests.support.kept_tokens import kept_tokens  # noqa: E402

CUDA = torch.device("cuda", 0)
NUM_ROWS, VOCAB = 128, 128_256


def filters_and_keys() -> tuple[Filters, torch.Tensor]:
    rng = np.random.default_rng(0)
    rows = [
        Row(
            temperature=float(rng.choice([0.05, 0.3, 0.7, 1.0, 2.5, 1e6])),
            top_k=int(rng.choice([0, 0, 1, 20, 1000, 100_000])),
            top_p=float(rng.choice([0.1, 0.9, 0.999, 1 - 2**-24])),
            min_p=float(rng.choice([0.0, 0.0, 0.02])),
            seed=int(rng.integers(2**62)),
            position=row,
        )
        for row in range(NUM_ROWS)
    ]
    inputs = inputs_of(rows)
    filters = Filters.of_rows(inputs, np.arange(NUM_ROWS), VOCAB, CUDA)
    return filters, row_keys(inputs.seed, inputs.position).to(CUDA)


def logits_of(dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(NUM_ROWS, VOCAB, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0)) * 3
    logits[::4, ::997] += 12  # some are peaked
    logits[5], logits[6, ::2] = 1.5, -torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kept_tokens_are_those_of_the_pipeline(dtype: torch.dtype) -> None:
    logits, (filters, _) = logits_of(dtype), filters_and_keys()
    rows = Rows(logits, torch.arange(NUM_ROWS, device=CUDA), logits.amax(dim=1), filters)
    kept = kept_tokens(rows)
    support = process_logits(logits.to(torch.float32, copy=True), filters)
    times = torch.zeros(kept.shape, dtype=torch.int32, device=CUDA)  # padding repeats id 0
    drawable = times.scatter_add_(1, support.token_ids, support.scaled.isfinite().int()) > 0
    gaps = (logits.float() - rows.best.float().unsqueeze(1)).abs()
    kept &= (gaps / -filters.temperature >= filters.log_min_p) & gaps.isfinite()
    assert torch.equal(kept, drawable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_drawn_tokens_are_those_of_the_sort_recorded_too(dtype: torch.dtype) -> None:
    logits, (filters, keys) = logits_of(dtype), filters_and_keys()
    logits[9, 1] = torch.nan
    places = torch.arange(NUM_ROWS, device=CUDA).flip(0)
    expected = draw_filtered(logits, places, filters, keys)
    drawn = torch.zeros_like(expected)

    def work() -> None:
        drawn.copy_(draw_filtered_at_once(logits, places, filters, keys))

    replay = CudaRecorder(CUDA).record(work)
    assert (expected == -1).sum() == 1
    for _ in range(2):
        drawn.zero_()
        replay()
        assert torch.equal(drawn, expected)
