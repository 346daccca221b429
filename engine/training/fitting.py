"""What fitting one kind of drafter has in common with fitting another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_WARM_UP = 0.03  # of the run


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How long to train: `num_epochs` over the rows, or until `deadline` on the clock, None for no limit."""

    num_epochs: int
    seed: int = 0
    deadline: float | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class FitResult:
    """What training did. `losses` are per head or token ahead: the mean over the first and the last steps."""

    num_steps: int
    seconds: float
    first_losses: tuple[float, ...]
    last_losses: tuple[float, ...]
    was_stopped: bool


def frequent_token_ids(token_ids: torch.Tensor, vocab_size: int, num_wanted: int) -> torch.Tensor:
    """The most frequent of `token_ids`, most frequent first, filled up with the lowest ids."""
    counts = torch.bincount(token_ids, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:num_wanted]


def schedule(part: float) -> float:
    """The learning rate's factor when `part` of the run is behind: a short rise, then a cosine to zero."""
    if part < _WARM_UP:
        return (part + 1e-3) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, part)))
