"""The steps of an EAGLE-3 layer at every position of texts at once, on its own outputs: training-time test.

Step 0 at position i reads the target's features there. Step s goes on from step s - 1 of the same row, at
position i + s, as the drafter will: it sees step 0 up to position i, and the steps of its own row since.
"""

from __future__ import annotations

import math

import torch

from engine.compute.drafters.eagle_layer import EagleLayer


class TrainedChain:
    """The steps so far of a batch of texts [rows, positions], and the keys and values they left.

    What goes from step to step has the dtype of the layer's weights, whatever products are computed in.
    Positions behind a text's end compute what nothing reads: no position sees a later one.
    """

    def __init__(self, layer: EagleLayer, features: torch.Tensor, token_ids: torch.Tensor) -> None:
        """`features` [rows, positions, layers * hidden]; `token_ids` [rows, positions]."""
        self._layer = layer
        self._token_ids = token_ids
        self._before = layer.fuse(features).to(layer.fc.weight.dtype)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # [rows, heads, positions, head dim]

    def step(self) -> torch.Tensor:
        """The next step's output, [rows, positions, hidden]: at position i step s guesses token i + s + 2."""
        layer, step = self._layer, len(self._kept)
        num_rows, num_positions = self._token_ids.shape
        places = torch.arange(num_positions, device=self._token_ids.device) + step
        query, key, value = layer.project(
            self._before, ahead(self._token_ids, step + 1), places.expand(num_rows, -1)
        )
        repeats = query.shape[2] // key.shape[2]
        self._kept.append(
            (
                key.transpose(1, 2).repeat_interleave(repeats, 1),
                value.transpose(1, 2).repeat_interleave(repeats, 1),
            )
        )
        attended = self._attend(query.transpose(1, 2))
        output = layer.finish(self._before, attended.transpose(1, 2).flatten(2))
        self._before = output.to(layer.fc.weight.dtype)
        return self._before

    def _attend(self, query: torch.Tensor) -> torch.Tensor:
        """Over step 0 up to each position, and over the later steps of the position itself."""
        (keys, values), *later = self._kept
        scale, num_positions = 1 / math.sqrt(query.shape[-1]), query.shape[2]
        scores = (query @ keys.mT).float() * scale
        scores = scores.masked_fill(self._unseen(num_positions, query.device), -math.inf)
        own = [(query * key).sum(-1, keepdim=True).float() * scale for key, _ in later]
        shares = torch.cat([scores, *own], dim=-1).softmax(-1)
        attended = (shares[..., :num_positions].to(values.dtype) @ values).float()
        for place, (_, value) in enumerate(later):
            attended = attended + shares[..., num_positions + place, None] * value
        return attended.to(values.dtype)

    def _unseen(self, num_positions: int, device: torch.device) -> torch.Tensor:
        """[positions, positions]: which of step 0 each position does not see now."""
        places = torch.arange(num_positions, device=device)
        back = places[:, None] - places
        window = self._layer.shape.window
        too_far = False if window is None else back + len(self._kept) - 1 >= window
        return (back < 0) | too_far


def ahead(values: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, positions] so many positions earlier; zeros at the end."""
    return torch.nn.functional.pad(values[:, count:], (0, min(count, values.shape[1])))
