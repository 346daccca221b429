"""Who runs the model, by what the model and its device are: the part of `build` for runners."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from config import Settings
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.draw_choice import choose_draws
from engine.compute.cuda.graphs.recorder import CudaRecorder
from engine.compute.cuda.graphs.step_graphs import GraphLimits, graph_bytes
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.recurrent.slot_states import LEAST_KEPT_ROWS
from engine.compute.recurrent.state_memory import MemorySizes
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.startup.build_speculation import foreseen_draft_tokens
from engine.startup.step_sizes import StepSizes

Runner: TypeAlias = ModelRunner | CudaRunner | RecurrentRunner


class RunnerSizes(NamedTuple):
    """The memory a runner has, in blocks, and the most that a step has of anything."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_tokens: int
    max_draft_tokens: int = 0
    num_snapshots: int = 0  # of a recurrent model's states
    num_host_states: int = 0


def make_runner(loaded: LoadedModel, sampler: Sampler, sizes: RunnerSizes, for_drafts: ForDrafts) -> Runner:
    """The runner, not warmed up."""
    num_blocks, block_size, num_host_blocks = sizes[:3]
    runner: ModelRunner | RecurrentRunner
    if loaded.keeps_state:
        memory = MemorySizes(
            num_blocks,
            block_size,
            sizes.max_num_seqs,
            max(LEAST_KEPT_ROWS, sizes.max_draft_tokens),
            sizes.num_snapshots,
            num_host_blocks,
            sizes.num_host_states,
        )
        runner = RecurrentRunner(loaded, memory, sampler, for_drafts)
    else:
        runner = ModelRunner(loaded, num_blocks, block_size, sampler, num_host_blocks, for_drafts)
    if loaded.device.type != "cuda":
        return runner
    max_blocks = -(-loaded.max_model_len // block_size)
    limits = GraphLimits(
        sizes.max_num_seqs, max_blocks, sizes.max_draft_tokens, max_tokens=sizes.max_num_tokens
    )
    recorder, draws = CudaRecorder(loaded.device), choose_draws(loaded.device)
    return CudaRunner(runner, sizes.max_num_tokens, limits, recorder, draws)


def recorded_bytes(settings: Settings, loaded: LoadedModel, sizes: StepSizes) -> int:
    """About what the runner takes of the device's memory beside the K/V, before it is known what drafts."""
    if loaded.device.type != "cuda":
        return 0
    num_drafts = foreseen_draft_tokens(settings)
    max_blocks = -(-loaded.max_model_len // sizes.kv_block_size)
    limits = GraphLimits(sizes.max_num_seqs, max_blocks, num_drafts, max_tokens=sizes.max_num_batched_tokens)
    return graph_bytes(loaded, limits)
