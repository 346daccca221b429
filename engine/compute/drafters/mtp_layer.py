"""MtpLayer: a model's MTP module as a layer that chains are drawn from."""

from __future__ import annotations

import torch

from engine.compute.drafters.mtp_module import MtpModule
from engine.compute.drafters.slab_rows import SlabRows


class MtpLayer:
    """A DraftLayer that can guess every token."""

    def __init__(self, module: MtpModule) -> None:
        self.module = module
        self._token_ids = torch.arange(module.vocab_size, device=module.weight.device)

    @property
    def token_ids(self) -> torch.Tensor:
        """See DraftLayer."""
        return self._token_ids

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """See DraftLayer; `features` are what left the target's last layer."""
        return self.module.read(features)

    def compute(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: SlabRows) -> torch.Tensor:
        """See DraftLayer."""
        out: torch.Tensor = self.module(hidden, token_ids, rows.positions, rows.context())
        return rows.newest(out)

    def again(self, out: torch.Tensor) -> torch.Tensor:
        """The output as it is: it is normed, as what is read of the target."""
        return out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """See DraftLayer."""
        return self.module.logits(out)
