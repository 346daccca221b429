"""The plain draw in one sweep, through Triton's interpreter; `make test-triton`."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from engine.compute.cuda.device_draw import TORCH_DRAWS, DeviceDraws, DrawColumns, column_words, draw_plain
from engine.compute.cuda.device_ints import send
from engine.compute.cuda.draw_choice import check_draw
from engine.compute.cuda.graphs.device_pass import DevicePass, TokenMemory
from engine.compute.cuda.step_draw import StepDraw
from engine.compute.sampling.sampler import NOTHING_LEFT, Sampler
from engine.plan.step_records import NO_TOKEN
from tests.support.sampling_reference import CPU, Row, adjusted, counted, inputs_of

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda.triton_draw import draw_plain_at_once  # noqa: E402
from engine.compute.cuda.triton_filter import draw_filtered_at_once  # noqa: E402

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


def test_adjusted_rows_are_drawn_as_by_many_operations() -> None:
    """Those with nothing left among them, over float32 copies of what a pass gave."""
    rows = [
        adjusted(Row(temperature=0.8, min_p=0.05), banned_token_ids=tuple(range(0, 1500, 2))),
        adjusted(Row(temperature=0.0), logit_bias=((1400, 50.0),)),
        adjusted(Row(), allowed_token_ids=()),
        Row(temperature=1.3),
        adjusted(Row(top_p=0.7), presence_penalty=2.0, history=counted([3], [5, 9])),
    ]
    inputs = inputs_of(rows)
    logits = (torch.randn(5, 1500, generator=torch.Generator().manual_seed(2)) * 3).bfloat16()
    found = []
    for draws in (TORCH_DRAWS, DeviceDraws(draw_plain_at_once, draw_filtered_at_once)):
        memory = TokenMemory(torch.zeros(5, dtype=torch.int64), draws.plain)
        columns = DrawColumns.of(send(column_words(inputs, np.arange(5), 5), CPU))
        under_way = DevicePass(logits, np.arange(5), partial(memory.draw, logits, columns))
        found.append(StepDraw(memory, draws.filtered).queue(under_way, inputs).verdict(inputs, None).rows)
    expected = Sampler(1500, CPU).sample(logits, inputs)
    expected.token_ids[2] = NO_TOKEN  # means nothing
    assert found[0] == found[1] == expected
    assert found[0].row_errors == {2: NOTHING_LEFT}
