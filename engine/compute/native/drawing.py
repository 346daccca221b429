"""NativeDraw: draws without a temporary of the vocabulary's size; draw.h with tensors for arguments."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from config import ModelSettings
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.compiler import find_library
from engine.compute.native.forms import NativeUnavailable, choose_build
from engine.compute.native.records import INDEX, POINTER, Draw
from engine.compute.native.team import ComputeTeam, library_function, load_library
from engine.plan.step_records import Int64, SamplingInputs


def find_row_draw(loaded: LoadedModel, settings: ModelSettings, home: Path) -> NativeDraw | None:
    """What draws the model's tokens under `--compile`; None where tensor operations do. Compiles nothing."""
    if settings.compile == "off" or loaded.device.type != "cpu":
        return None
    try:
        found = find_library(home, choose_build(loaded.dtype, settings.cpu_kernels))
        return None if found is None else NativeDraw(found, loaded.team)
    except NativeUnavailable:
        return None


class NativeDraw:
    """A RowDraw on the compiled kernels, for logits in float32 or bfloat16 on the CPU.

    By the same rules as engine/compute/sampling/processors.py and noise.py. Only its exponential and its
    logarithms round otherwise in the last bit, so that the two choose alike unless two tokens are as close as
    that.
    `team` are the threads of the model's kernels; None makes as many as torch has on the calling thread.
    Raises NativeUnavailable if the library cannot be loaded.
    """

    def __init__(self, library: Path, team: ComputeTeam | None = None) -> None:
        loaded = load_library(library)
        self.team = team or ComputeTeam(loaded, torch.get_num_threads())
        self._best = library_function(loaded, "slip_best", POINTER, POINTER, INDEX, INDEX, INDEX, POINTER)
        self._draw = library_function(loaded, "slip_draw", POINTER, ctypes.POINTER(Draw))

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """See RowDraw."""
        logits = _readable(logits)
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        is_bf16 = logits.dtype is torch.bfloat16
        self._best(self.team.handle, logits.data_ptr(), is_bf16, *logits.shape, token_ids.data_ptr())
        return token_ids

    def draw(
        self, logits: torch.Tensor, rows: Int64, inputs: SamplingInputs, keys: torch.Tensor
    ) -> torch.Tensor:
        """See RowDraw."""
        logits = _readable(logits)
        token_ids = torch.empty(len(inputs.seed), dtype=torch.int64)
        top_p = inputs.top_p.astype(np.float64)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(inputs.min_p.astype(np.float64))
        columns: list[NDArray[Any]] = [
            rows,
            *map(np.ascontiguousarray, (inputs.temperature, inputs.top_k)),
            top_p,
            log_min_p,
        ]
        self._draw(
            self.team.handle,
            Draw(
                logits.data_ptr(),
                *(column.ctypes.data for column in columns),
                *(tensor.data_ptr() for tensor in (keys, token_ids)),
                *(len(rows), logits.shape[1], logits.dtype is torch.bfloat16),
            ),
        )
        return token_ids


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """The logits as the kernels read them."""
    return (logits if logits.dtype is torch.bfloat16 else logits.float()).contiguous()
