"""DeviceTokens: tokens that one runner draws and another computes before the host has read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.compute.runner.device import Mark, queue_behind, wait_for
from engine.plan.step_records import Int64


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """They are there once the device is past `end`, and stay as they are; below 0 where drawing failed.

    Whoever queues something that reads them keeps them until that is done.
    """

    end: Mark
    tokens: torch.Tensor  # int64 [places]

    def __len__(self) -> int:
        """How many places there are."""
        return len(self.tokens)

    def copy_to(self, memory: torch.Tensor) -> None:
        """Queue a copy to the first places of `memory`; what is queued from here on comes behind `end`."""
        queue_behind(self.end, memory.device)
        memory[: len(self)].copy_(self.tokens)

    def read(self) -> Int64:
        """Wait for them. [places]"""
        wait_for(self.end)
        tokens: Int64 = self.tokens.cpu().numpy()
        return tokens
