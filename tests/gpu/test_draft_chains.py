"""A draft model in its own stream on a GPU: recorded chains, beside a target that is at work all the time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.attention.swap_tensors import SwapTensors
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import DraftJob, DraftRequest, UnreadChains
from engine.plan.step_records import NO_TOKEN, BlockCopy, StepResult, UnreadDrafts
from tests.bench.gpu.made_models import make_model, make_walk, random_walk
from tests.bench.gpu.sizes import LlamaShape

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.cuda_runner import CudaRunner  # noqa: E402
from engine.compute.drafters.draft_loader import on_device  # noqa: E402
from engine.compute.drafters.draft_model import DraftModelDrafter, DraftSizes, OnDevice  # noqa: E402

CUDA = torch.device("cuda", 0)
SHAPE = LlamaShape("tiny", 512, 1024, 4, 8, 2, 4096, tied=False)
WALK = random_walk(SHAPE.vocab)
SIZES = DraftSizes(SHAPE.vocab, num_blocks=256, block_size=16, max_num_seqs=8)
CHAIN = 4


def walker(seed: int) -> LoadedModel:
    """A model that says each token's successor, by a margin that no rounding takes away."""
    loaded = make_model(SHAPE.config(), torch.bfloat16, CUDA, 512, seed)
    make_walk(loaded, WALK)
    return loaded


def walked(token_id: int, count: int) -> list[int]:
    """The tokens that follow."""
    found = []
    for _ in range(count):
        token_id = int(WALK[token_id])
        found.append(token_id)
    return found


@pytest.fixture(scope="module")
def device() -> OnDevice:
    found = on_device(walker(1), SIZES)
    assert found is not None and isinstance(found.runner, CudaRunner)
    assert found.runner.graphs.shapes, "nothing was recorded"
    return found


def draft_rounds(
    drafter: DraftModelDrafter, names: Sequence[str], rounds: int, temperature: float, top_p: float = 1.0
) -> None:
    """Chains for all names, with every second one rejected in its middle; every token must be right."""
    params = SamplingParams(max_tokens=400, temperature=temperature, top_p=top_p, seed=3)
    known = {name: [10 + index] * (5 + 20 * index) for index, name in enumerate(names)}
    told = dict.fromkeys(names, 0)
    for number in range(rounds):
        jobs = []
        for name in names:
            about = DraftRequest(name, 5, params)
            tokens = known[name]
            jobs.append(DraftJob(about, number, told[name], tuple(tokens[told[name] :]), len(tokens), CHAIN))
        for draft in drafter.draft(jobs).drafts:
            tokens = known[draft.request_id]
            told[draft.request_id] = len(tokens)
            if draft.is_behind:
                continue
            assert list(draft.token_ids) == walked(tokens[-1], CHAIN), (number, draft)
            kept = draft.token_ids[: CHAIN if number % 2 else 1]
            told[draft.request_id] += len(kept)
            tokens += [*kept, 20 + number]
    drafter.close(list(names))
    assert drafter.num_used_blocks == 0


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.2, 1.0), (0.2, 0.9)])
def test_recorded_chains_walk(device: OnDevice, temperature: float, top_p: float) -> None:
    drafter = DraftModelDrafter(walker(1), SIZES, on_device=device)
    assert not drafter.is_stepwise
    draft_rounds(drafter, [f"r{index}" for index in range(5)], 12, temperature, top_p)


def test_laws_come_one_at_a_time(device: OnDevice) -> None:
    drafter = DraftModelDrafter(walker(1), SIZES, "rejection", device)
    about = DraftRequest("a", 3, SamplingParams(max_tokens=9, temperature=1.0, seed=1))
    (draft,) = drafter.draft([DraftJob(about, 0, 0, (5, 6, 7), 3, CHAIN)]).drafts
    (law,) = draft.probs
    assert isinstance(law, torch.Tensor) and law.is_cuda and float(law.sum()) == pytest.approx(1, abs=1e-4)


def test_target_and_draft_at_work_at_once(device: OnDevice) -> None:
    """Neither finds anything of the other's in its memory: each says what it says alone."""
    other = on_device(walker(2), SIZES)  # stands for the target: a runner with recordings of its own
    assert other is not None and isinstance(other.runner, CudaRunner)
    drafter = DraftModelDrafter(walker(1), SIZES, on_device=device)
    with ThreadPoolExecutor(1) as thread:
        drafting = thread.submit(draft_rounds, drafter, [f"r{index}" for index in range(8)], 60, 0.0)
        rows, position = [100 + row for row in range(8)], 0
        while not drafting.done() or position < 64:
            blocks = [range(16 * row, 16 * row + 16) for row in range(8)]
            at = position % 250
            parts = [Part([row] * 256, at, at + 1, own) for row, own in zip(rows, blocks, strict=True)]
            result = other.runner.run(pack_step(parts, SIZES.block_size))
            assert result.rows.token_ids == [int(WALK[row]) for row in rows]
            rows, position = result.rows.token_ids, position + 1
        drafting.result()


@pytest.mark.parametrize("num_drafts", [1, CHAIN])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_step_is_launched_behind_drafts_that_nobody_has_read(
    device: OnDevice, is_slow: bool, num_drafts: int
) -> None:
    """However late they are: the target's stream waits for the drafter's, and the host for neither."""
    other = on_device(walker(2), SIZES)
    assert other is not None and isinstance(other.runner, CudaRunner) and device.stream is not None
    drafter, target = DraftModelDrafter(walker(1), SIZES, on_device=device), other.runner
    params = SamplingParams(max_tokens=400, temperature=0.0)
    known = {f"r{row}": [10 + row] * 5 for row in range(6)}
    jobs = [
        DraftJob(DraftRequest(name, 5, params), 0, 0, tuple(tokens), 5, num_drafts)
        for name, tokens in known.items()
    ]
    with ThreadPoolExecutor(1) as thread:
        flying: list[Future[StepResult]] = []

        def verify(chains: UnreadChains) -> StepResult:
            places = [place for name in known for place in chains.places[name]]
            parts = [
                Part(
                    [*tokens, *[NO_TOKEN] * num_drafts],
                    4,
                    5 + num_drafts,
                    range(16 * row, 16 * row + 16),
                    range(-1, num_drafts - 1),
                )
                for row, tokens in enumerate(known.values())
            ]
            inputs = pack_step(parts, SIZES.block_size)
            assert inputs.drafts is not None
            unread = UnreadDrafts(chains.tokens, np.array(places))
            return target.run(replace(inputs, drafts=replace(inputs.drafts, unread=unread)))

        if is_slow:
            with torch.cuda.stream(device.stream):
                torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        drafts = drafter.draft_and_tell(
            jobs, lambda chains: flying.append(thread.submit(verify, chains))
        ).drafts
        rows = flying[0].result().rows.token_ids
    drafter.close(list(known))
    for row, draft in enumerate(drafts):
        first = row * (1 + num_drafts)
        assert list(draft.token_ids) == walked(10 + row, num_drafts)
        assert rows[first : first + 1 + num_drafts] == walked(10 + row, 1 + num_drafts)


def test_swapped_blocks_come_back_and_the_first_memory_is_there() -> None:
    kv = KvTensors([LayerKv(2, 64, 64)] * 3, 32, 16, torch.bfloat16, CUDA)
    for tensor in kv.tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in kv.tensors]
    swap = SwapTensors(kv, 16)
    assert swap.reserved_bytes == 16 * kv.block_bytes
    assert all(segment.is_pinned() for segment in swap._segments.values())
    swap.copy_out([BlockCopy(block, block - 4) for block in range(4, 20)])
    for tensor in kv.tensors:
        tensor[4:20] = torch.nan
    swap.copy_in([BlockCopy(block - 4, block) for block in range(4, 20)])
    for tensor, whole in zip(kv.tensors, before, strict=True):
        assert torch.equal(tensor, whole)
