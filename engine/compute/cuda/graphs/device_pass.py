"""DevicePass: a pass that is under way on the device, and how its tokens are drawn there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from engine.compute.cuda.device_draw import DrawColumns, PlainDraw, column_words
from engine.compute.cuda.device_ints import DeviceInts
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.pass_memory import PassMemory
from engine.plan.step_records import Int32, Int64, StepInputs

AnyForward: TypeAlias = PackedForward | RecurrentForward


@dataclass(frozen=True, slots=True)
class TokenMemory:
    """Where the last step's tokens stay on the device, with room for any, and who draws plain rows."""

    tokens: torch.Tensor  # int64 [places]
    plain_draw: PlainDraw

    def draw(self, logits: torch.Tensor, columns: DrawColumns) -> None:
        """Queue the plain draw of the first places, those of `logits`."""
        self.tokens[: len(logits)].copy_(self.plain_draw(logits, columns))


@dataclass(frozen=True, slots=True)
class DevicePass:
    """The logits of a step, at places of which row r has `places[r]`, ascending.

    `draw` queues the plain draw of every place, to the same places of the tokens that stay on the device.
    """

    logits: torch.Tensor  # [places, vocab]
    places: Int64  # [R]
    draw: Callable[[], None]
    hidden: torch.Tensor | None = None  # what drafters read: of each place, or with feature layers each token


class EagerPasses:
    """Passes of any size, each operation queued by itself.

    Of `tokens` a step's take as many places as it has rows.
    """

    def __init__(
        self, forward: AnyForward, memory: PassMemory, tokens: TokenMemory, *, keeps_features: bool
    ) -> None:
        self._forward = forward
        self._memory = memory
        self._tokens = tokens
        self._keeps_features = keeps_features

    def start(self, inputs: StepInputs, previous: Int64 | None) -> DevicePass:
        """Queue the pass; `previous` [N] are places of the last tokens, -1 for known ones."""
        num_rows = len(inputs.logits_rows)
        places = np.arange(num_rows)
        words = {
            **token_words(inputs, previous),
            "positions": inputs.positions.astype(np.int32),
            "rows": inputs.logits_rows.astype(np.int32),
            **column_words(inputs.sampling, places, num_rows),
        }
        ints = DeviceInts({name: array.shape for name, array in words.items()}, self._memory.kv.device)
        ints.put(words)
        token_ids = fill_in(ints["token_ids"], ints["previous"], self._tokens.tokens)
        context = self._memory.begin(inputs)
        rows = ints["rows"].long()

        def compute() -> torch.Tensor:
            return self._forward.compute(token_ids, ints["positions"].long(), context, rows)

        hidden = None
        if self._keeps_features:
            logits, hidden = self._forward.keeping_features(compute, rows)
        else:
            logits = compute()

        def draw() -> None:
            if num_rows:
                columns = DrawColumns.of({name: ints[name] for name in DrawColumns._fields})
                self._tokens.draw(logits, columns)

        return DevicePass(logits, places, draw, hidden)


def token_words(inputs: StepInputs, previous: Int64 | None) -> dict[str, Int32]:
    """What `fill_in` takes."""
    unknown = np.full(len(inputs.token_ids), -1) if previous is None else previous
    return {"token_ids": inputs.token_ids.astype(np.int32), "previous": unknown.astype(np.int32)}


def fill_in(token_ids: torch.Tensor, previous: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The tokens to compute, int64 [N]: those of `drawn` where `previous` has a place, else those given.

    Where neither knows one, as in padding and where drawing failed, it is 0, which any model can embed.
    """
    before = drawn.index_select(0, previous.clamp(min=0).long())
    return torch.where(previous >= 0, before, token_ids.long()).clamp_(min=0)
