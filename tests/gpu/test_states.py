"""Models that carry state, on a GPU: states advanced by kernels, steps recorded and launched ahead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.draw_choice import choose_draws
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import Pieces, SlotStep
from engine.compute.recurrent.state_memory import MemorySizes
from engine.compute.runner.dummy_steps import Part
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_difference, packed_sample
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import BlockMoves, StateCopy, StepInputs
from tests.support.device_waits import waiting_refused
from tests.support.packed import as_loaded, random_tokens
from tests.support.recurrent import BLOCK_SIZE, pack_slots, with_drafts
from tests.support.scan_cases import (
    ScanCase,
    as_served,
    by_channel_of,
    delta_case,
    gated_delta_of,
    gated_structured_of,
    lightning_of,
    runs_of,
    selective_case,
    structured_case,
)
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.fused_model import with_fused_layers  # noqa: E402
from engine.compute.cuda.graphs.recorder import CudaRecorder  # noqa: E402
from engine.compute.cuda.state_scans import TritonScans  # noqa: E402

CUDA = torch.device("cuda", 0)
NUM_SEQS, BLOCKS_EACH = 6, 32
TOKENS = [random_tokens(np.random.default_rng(seed), 120) for seed in range(NUM_SEQS)]
LIMITS = GraphLimits(NUM_SEQS, BLOCKS_EACH, max_draft_tokens=4, max_tokens=256)
SIZES = MemorySizes(NUM_SEQS * BLOCKS_EACH, BLOCK_SIZE, NUM_SEQS, max_drafts=4, num_snapshots=2)
CASES = {
    "delta": delta_case(32, 16, 128, 128),
    "delta, odd": delta_case(6, 2, 20, 40),
    "delta by channel": delta_case(4, 4, 128, 128, by_channel=True),
    "structured": structured_case(48, 1, 64, 128),
    "structured, odd": structured_case(6, 2, 20, 24),
    "selective": selective_case(1024, 16),
    "selective, odd": selective_case(50, 12),
}
FAMILIES = ["mamba", "mamba2", "granite_hybrid", "qwen3_5_hybrid", "qwen3_next_hybrid", "lfm2_hybrid"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_states_and_outputs_are_those_of_torch(case: ScanCase) -> None:
    counts, drafts = np.array([70, 1, 9, 1]), np.array([0, 0, 3, 0])
    inputs = case.inputs_on(CUDA, int((counts + drafts).sum()))
    pieces = Pieces(np.array([4, 2, 0, 1]), np.zeros(4, bool), counts + drafts, 0 * counts, drafts)
    step = SlotStep(pieces, 0, 4, CUDA)
    found = []
    for kernel in (TritonScans(), None):
        state = torch.randn(5, *case.shape, generator=torch.Generator().manual_seed(0)).to(CUDA)
        output = case.scan(inputs, LayerSlots(step, torch.empty(0), state, kernel))
        found.append((output, state))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("gated_delta", gated_delta_of((32, 16, 128, 128), 500)),
        ("gated_delta", gated_delta_of((6, 2, 20, 40), 500)),
        ("gated_structured", gated_structured_of((48, 1, 64, 128), 500)),
        ("gated_structured", gated_structured_of((6, 2, 20, 24), 500)),
        ("delta", by_channel_of((32, 32, 128, 128), 500)),
        ("delta", by_channel_of((6, 2, 20, 40), 500)),
        ("structured", lightning_of((16, 16, 128, 128), 500)),
        ("structured", lightning_of((6, 2, 20, 24), 500)),
    ],
)
def test_prompts_in_chunks_are_what_they_are_token_by_token(
    name: str, made: tuple[Any, tuple[int, int, int]], dtype: torch.dtype
) -> None:
    inputs, shape = made
    runs = runs_of([(2, 300, 290), (0, 1, 1), (3, 16, 16), (1, 47, 33), (4, 130, 130)]).to(CUDA)
    moved = as_served(inputs, CUDA, dtype)
    found = []
    for scans in (TritonScans(), TritonScans(in_chunks=())):
        state = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)).to(CUDA)
        output = getattr(scans, name)(moved, state, runs)
        found.append((output.float(), state))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert torch.equal(found[0][1][0], found[1][1][0]), "a token alone has the same bits"


def load(family: str) -> LoadedModel:
    return replace(as_loaded(tiny_model(family).to(CUDA)), device=CUDA, state_kernel=TritonScans())


def make_plain(loaded: LoadedModel) -> RecurrentRunner:
    return RecurrentRunner(loaded, SIZES, Sampler(loaded.vocab_size, CUDA))


def make_ahead(loaded: LoadedModel) -> CudaRunner:
    runner = CudaRunner(make_plain(loaded), 512, LIMITS, CudaRecorder(CUDA), choose_draws(CUDA))
    runner.warm_up()
    assert len(runner.graphs.shapes) == len(LIMITS.shapes())
    return runner


def prompts(*spans: tuple[int, int, int]) -> StepInputs:
    """Of each seat the tokens from a first one up to a stop."""
    return pack_slots(
        {
            seat: Part(TOKENS[seat], first, stop, range(seat * BLOCKS_EACH, (seat + 1) * BLOCKS_EACH))
            for seat, first, stop in spans
        }
    )


COURSE = [
    prompts((0, 0, 60), (1, 0, 4), (2, 0, 33)),
    prompts((2, 33, 34), (0, 60, 61), (1, 4, 5)),
    with_drafts(prompts((2, 34, 35), (0, 61, 65), (1, 5, 10)), [0, 3, 4]),
    prompts((2, 35, 36), (0, 62, 63), (1, 6, 7)),
    prompts((2, 36, 37), (3, 0, 100)),
    prompts((2, 37, 38), (0, 63, 64), (3, 100, 101)),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_the_plain_ones(family: str) -> None:
    loaded = load(family)
    plain, ahead = make_plain(loaded), make_ahead(loaded)
    for inputs in COURSE:
        assert ahead.run(inputs).rows == plain.run(inputs).rows
        assert isinstance(ahead.parts, RecurrentRunner)
        for mine, theirs in zip(ahead.parts.states.tensors, plain.states.tensors, strict=True):
            torch.testing.assert_close(mine[:NUM_SEQS], theirs[:NUM_SEQS], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "bamba_hybrid", "nemotron_h_hybrid"])
def test_fused_as_served_the_logits_are_the_same(family: str, dtype: torch.dtype) -> None:
    loaded = replace(as_loaded(tiny_model(family, dtype=dtype).to(CUDA)), device=CUDA)
    expected = packed_sample(forward_of(loaded), block_size=16)
    fused = with_fused_layers(loaded, 16, lambda: pytest.fail("the kernels do not run"))
    assert fused.state_kernel is not None and "norms and MLPs fused" in fused.kernels_used
    found = packed_sample(forward_of(fused), block_size=16)
    assert packed_difference(found, expected, dtype, has_blocks=False) is None


def test_launches_wait_for_nothing_and_know_the_tokens() -> None:
    loaded = load("qwen3_5_hybrid")
    plain, ahead = make_plain(loaded), make_ahead(loaded)
    first = prompts((0, 0, 60), (1, 0, 40))
    expected = [plain.run(first).rows.token_ids]
    for place in range(20):
        step = prompts((0, 60 + place, 61 + place), (1, 40 + place, 41 + place))
        step.token_ids[:] = expected[-1]
        expected.append(plain.run(step).rows.token_ids)
    ahead.run(first)  # loads what its kernels need
    saving = BlockMoves(state_saves=(StateCopy(1, 0),))
    with waiting_refused():
        flying = [ahead.launch(first)]
        for place in range(20):
            step = prompts((0, 60 + place, 61 + place), (1, 40 + place, 41 + place))
            step.token_ids[:] = 0
            flying.append(ahead.launch(replace(step, previous_rows=np.array([0, 1]), moves=saving)))
    with ThreadPoolExecutor(1) as elsewhere:
        results = list(elsewhere.map(lambda step: step.wait(), flying))
    assert [result.rows.token_ids for result in results] == expected
