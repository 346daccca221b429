"""The plain draw in one sweep, through Triton's interpreter; `make test-triton`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute.cuda.device_draw import DrawColumns, column_words, draw_plain
from engine.compute.cuda.draw_choice import check_draw
from tests.support.sampling_reference import CPU, Row, inputs_of

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda.triton_draw import draw_plain_at_once  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # Triton 3.6, numpy 2.3
]


def test_it_passes_the_check_that_it_must_pass_on_a_gpu() -> None:
    check_draw(draw_plain_at_once, CPU)


def test_a_draw_of_other_tokens_does_not_pass() -> None:
    def other(logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        return draw_plain(logits, columns._replace(keys=columns.keys ^ 1))

    with pytest.raises(RuntimeError, match="other tokens"):
        check_draw(other, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [40, 1024, 3001])
def test_the_tokens_are_those_of_the_plain_draw(vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = [
        Row(
            temperature=float(rng.choice([0.0, 0.01, 1.0, 2.5, 1e6])),
            min_p=float(rng.choice([0.0, 0.0, 0.3, 1.0])),
            seed=int(rng.integers(-(2**63), 2**63)),
            position=int(rng.integers(2**40)),
        )
        for _ in range(24)
    ]
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits[3, ::2] = -torch.inf
    logits[4, 7] = torch.inf
    logits[5, 8] = torch.nan
    logits = logits.to(dtype)
    words = column_words(inputs_of(rows), np.arange(24), 25)
    columns = DrawColumns.of({name: torch.from_numpy(column[:24]) for name, column in words.items()})
    expected = draw_plain(logits, columns)
    assert torch.equal(draw_plain_at_once(logits, columns), expected)
    assert (expected[4:6] == -1).all() and (expected >= 0).sum() == 22
