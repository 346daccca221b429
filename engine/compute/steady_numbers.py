"""alike: a function of every number of some rows, by which a row has the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_GRAIN = 32_768  # numbers that torch gives a thread at least
_VECTORS = 64  # numbers; a multiple of what any CPU's loop takes at once


def alike(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """What `function` makes of each number of `rows`, of any shape; a number is rounded alike wherever it is.

    On a CPU torch computes numbers by vectors and the last few of each thread by other code, which rounds
    exponentials otherwise (softplus, sigmoid and SiLU in float32), and GELU of rows that lie apart by other
    code still. Here numbers lie side by side, and no thread has any that fill no vector.
    """
    if rows.device.type != "cpu":
        return function(rows)
    count = rows.numel()
    num_threads = min(torch.get_num_threads(), max(1, -(-count // _GRAIN)))
    spare = -count % (_VECTORS * num_threads)
    if not spare:
        return function(rows.contiguous())
    return function(F.pad(rows.reshape(-1), (0, spare)))[:count].view(rows.shape)
