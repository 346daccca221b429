"""StepChain: queues steps that each compute what the last one drew, told to the device all at once.

The host lays out the first of them, replays its recording for each, and has the device put the next numbers
in their places between. So a step of the chain costs the host a few launches and no layout.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.compute.cuda.device_draw import FilteredDraw, FilteredRows, filtered_rows
from engine.compute.cuda.device_ints import Array, send
from engine.compute.cuda.graphs.device_pass import TokenMemory
from engine.compute.cuda.graphs.step_graphs import StepGraphs
from engine.compute.runner.following_steps import FollowingSteps
from engine.compute.sampling.noise import row_keys
from engine.plan.step_records import Int64, SamplingInputs

_MOVING = ("previous", "positions", "slots", "kv_lens", "keys")  # what differs from step to step
_FILTER = "filter."  # before the names of the words that rows are filtered by


class StepChain:
    """Queues chains over recordings of `graphs`, drawing into `memory`."""

    def __init__(self, graphs: StepGraphs, memory: TokenMemory, draw_filtered: FilteredDraw) -> None:
        self._graphs = graphs
        self._memory = memory
        self._draw_filtered = draw_filtered

    def queue(self, steps: FollowingSteps, first: Int64) -> torch.Tensor | None:
        """The tokens of the step before, of which each row has its place in `first`, then R of each step.

        Int64, kept on the device as they are. None if no recording holds one of the steps.
        """
        inputs, tokens, num_rows = steps.step(0), self._memory.tokens, steps.num_rows
        num_before = int(first[-1]) + 1
        recorded = self._graphs.recorded(inputs)
        if recorded is None:
            return None
        kept = torch.empty(num_before + len(steps) * num_rows, dtype=torch.int64, device=tokens.device)
        kept[:num_before].copy_(tokens[:num_before])
        drawn = kept[num_before:].view(len(steps), num_rows)
        recorded.fill(inputs, first[steps.previous_rows], len(steps) - 1)
        self._graphs.module(recorded)
        recorded.draw()
        rows = steps.all_rows()
        words = _words(steps, rows)
        filtered = filtered_rows(rows, recorded.logits.shape[1])
        if filtered is not None:
            words |= {f"{_FILTER}{name}": array for name, array in filtered.words.items()}
            words["at"] = filtered.rows % num_rows
        sent = {name: _by_step(each, len(steps)) for name, each in send(words, tokens.device).items()}
        for number in range(len(steps)):
            if number:
                recorded.go_on({name: sent[name][number] for name in _MOVING})
                self._graphs.module(recorded)
                recorded.draw()
            if filtered is not None:
                own = {name: sent[f"{_FILTER}{name}"][number] for name in filtered.words}
                at, filters = sent["at"][number], FilteredRows.filters(own)
                tokens.index_copy_(0, at, self._draw_filtered(recorded.logits, at, filters, own["keys"]))
            drawn[number].copy_(tokens[:num_rows])
        return kept


def _words(steps: FollowingSteps, rows: SamplingInputs) -> dict[str, Array]:
    """What differs from step to step, one step behind the other; `rows` are those of all steps."""
    positions = steps.positions.ravel()
    return {
        "previous": np.tile(np.arange(steps.num_rows, dtype=np.int32), len(steps)),
        "positions": positions.astype(np.int32),
        "slots": steps.slots.ravel().astype(np.int32),
        "kv_lens": (positions + 1).astype(np.int32),
        "keys": row_keys(rows.seed, rows.position).numpy(),
    }


def _by_step(words: torch.Tensor, num_steps: int) -> torch.Tensor:
    """[steps, rows of each, …]"""
    return words.view(num_steps, -1, *words.shape[1:])
