"""Fits Medusa heads to samples of a frozen target ("Medusa-1", Cai et al., 2024)."""

from __future__ import annotations

import torch
from torch import nn

from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.training.fitting import FitOptions, FitResult, schedule
from engine.training.samples import Positions
from engine.training.training_plan import TrainingProgress

BATCH_ROWS = 512
LEARNING_RATE = 1e-3
_IGNORED = -100
_LOSS_MEMORY = 0.98  # the shown loss is a running mean


def fit_heads(
    heads: MedusaHeads, positions: Positions, options: FitOptions, progress: TrainingProgress
) -> FitResult:
    """Train the heads in place on every row that has a later token.

    Cross-entropy over the heads' own tokens; where the right token is none of them a row teaches nothing.
    AdamW with a cosine schedule. Heads share no weights, so weighing their losses would change nothing.
    Stops early, with what it has, when `progress` says so or the deadline is near. Equal arguments give equal
    heads, unless a deadline cuts the run.
    """
    batches = _Batches(heads, positions, options.seed)
    num_steps = max(1, options.num_epochs * len(batches.rows) // BATCH_ROWS)
    optimizer = torch.optim.AdamW(heads.heads.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses: list[torch.Tensor] = []
    shown = torch.zeros(heads.num_heads)
    began = options.clock()
    part, stopped = 0.0, False
    heads.train()
    while len(losses) < num_steps and part < 1 and not stopped:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(part)
        optimizer.zero_grad(set_to_none=True)
        losses.append(batches.learn(len(losses)))
        optimizer.step()
        shown = losses[-1] if len(losses) == 1 else shown.lerp(losses[-1], 1 - _LOSS_MEMORY)
        part = len(losses) / num_steps
        if options.deadline is not None:
            part = max(part, (options.clock() - began) / max(1e-9, options.deadline - began))
        progress.update("train", part, 1.0, "loss " + " ".join(f"{loss:.2f}" for loss in shown.tolist()))
        stopped = progress.is_stopped()
    heads.eval()
    window = max(1, len(losses) // 20)
    first, last = torch.stack(losses[:window]).mean(0), torch.stack(losses[-window:]).mean(0)
    seconds = options.clock() - began
    return FitResult(len(losses), seconds, tuple(first.tolist()), tuple(last.tolist()), stopped)


class _Batches:
    """Shuffled rows with what their heads should guess, and the loss of a batch of them."""

    def __init__(self, heads: MedusaHeads, positions: Positions, seed: int) -> None:
        self._heads = heads
        self._positions = positions
        self._generator = torch.Generator().manual_seed(seed)
        rows = torch.arange(len(positions))
        self.rows = rows[rows + 1 < positions.ends]
        self._order = self.rows
        self._index = index_of_tokens(heads)

    def learn(self, step: int) -> torch.Tensor:
        """Add the gradients of this step's rows; each head's mean cross-entropy over them, [K] on the CPU.

        Head by head: their logits together would be too large for memory to be reused.
        """
        heads, positions = self._heads, self._positions
        rows = self._take(step)
        device = heads.token_ids.device
        right = self._index[positions.later_tokens(rows, heads.num_heads)].to(device)  # [rows, K]
        hidden = positions.hidden[rows].to(device)
        losses = torch.zeros(heads.num_heads)
        for head in range(heads.num_heads):
            known = right[:, head] != _IGNORED
            if not known.any():
                continue
            logits = heads.guess(head, hidden[known]).float()  # [known rows, n]
            loss = nn.functional.cross_entropy(logits, right[known, head])
            loss.backward()  # type: ignore[no-untyped-call]
            losses[head] = loss.item()
        return losses

    def _take(self, step: int) -> torch.Tensor:
        per_epoch = max(1, len(self.rows) // BATCH_ROWS)
        place = step % per_epoch
        if place == 0:
            self._order = self.rows[torch.randperm(len(self.rows), generator=self._generator)]
        return self._order[place * BATCH_ROWS : (place + 1) * BATCH_ROWS]


def index_of_tokens(heads: MedusaHeads) -> torch.Tensor:
    """For every id of the vocabulary its place among the heads' tokens, else -100; so too at index -1."""
    index = torch.full((heads.shape.vocab_size + 1,), _IGNORED)
    token_ids = heads.token_ids.cpu()
    index[token_ids] = torch.arange(len(token_ids))
    return index
