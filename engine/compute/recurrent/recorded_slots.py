"""RecordedSlots: the indices of a pass over slots, read on the device when a recording is carried out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from engine.compute.recurrent.slot_step import Index, SlotIndices
from engine.compute.runner.pass_memory import PassRoom
from engine.plan.step_records import Int32

_PREFIX = "slots."


class RecordedSlots:
    """As a SlotStep, for all passes that fit a room; made while they are recorded, and then each time anew.

    What comes of places that no pass fills is of no use, and is kept in no slot. Layers whose states no
    kernel advances cannot be recorded: how their sequences lie has to be known on the host.
    """

    def __init__(
        self, arrays: Mapping[str, Tensor], conv_width: int, num_kept: int, num_slots: int, room: PassRoom
    ) -> None:
        """`arrays` are those of `words`; the slot behind the last of `num_slots` is nobody's."""
        self._arrays = arrays
        self._nobodys = num_slots * num_kept
        self._room = room
        self.conv_width = conv_width
        self.num_mixed = room.num_tokens + room.num_again

    # As those of a SlotStep. What no layer reads is not recorded.

    @cached_property
    def before(self) -> Tensor | None:
        """See SlotStep."""
        return self._own("before").clamp_(min=0)

    @cached_property
    def order(self) -> Tensor | None:
        """See SlotStep."""
        return self._own("order").clamp_(min=0)

    @cached_property
    def mixed(self) -> Index:
        """See SlotStep."""
        return self._own("mixed").clamp_(min=self.conv_width)

    @cached_property
    def new(self) -> Index | None:
        """See SlotStep."""
        return self._own("new").clamp_(min=0) if self._room.num_again else None

    @cached_property
    def kept_rows(self) -> Tensor:
        """See SlotStep."""
        return self._own("kept_rows").clamp_(min=0)

    @cached_property
    def kept_places(self) -> Tensor:
        """See SlotStep."""
        places = self._own("kept_places")
        return torch.where(places < 0, self._nobodys, places)

    @cached_property
    def runs(self) -> Tensor:
        """See SlotStep; -1 where no sequence is."""
        return self._own("runs")

    @cached_property
    def joins(self) -> Tensor:
        """See SlotStep."""
        return self._own("joins")

    @property
    def begins(self) -> Tensor:
        """Not to be had: see `blocks`."""
        self.blocks(0)

    def blocks(self, size: int) -> NoReturn:
        """Raises RuntimeError, which keeps a layer from being recorded."""
        raise RuntimeError(
            "no kernel advances the states of some layers, so that their passes differ in shape"
        )

    def _own(self, name: str) -> Tensor:
        return self._arrays[_PREFIX + name].long()


def slot_words(conv_width: int, room: PassRoom) -> dict[str, tuple[int, ...]]:
    """The arrays of a recorded pass over slots whose rows begin `conv_width` tokens before a state's end."""
    num_sequences, num_tokens, num_again = room
    num_before = num_sequences * conv_width + num_again
    sizes = {
        "before": (num_before,),
        "order": (num_before + num_tokens,),
        "mixed": (num_tokens + num_again,),
        "new": (num_tokens,),
        "kept_rows": (num_sequences * conv_width + num_tokens,),
        "kept_places": (num_sequences * conv_width + num_tokens,),
        "runs": (4, num_sequences),
        "joins": (2, num_sequences),
    }
    return {_PREFIX + name: shape for name, shape in sizes.items()}


def slot_arrays(indices: SlotIndices, num_before: int) -> dict[str, Int32]:
    """What to put into them for one pass; `num_before` is the length of their `before`."""
    found = indices._asdict()
    del found["begins"]
    # New rows lie behind the room for those before them, not behind these.
    order = indices.order
    found["order"] = order + (order >= len(indices.before)) * (num_before - len(indices.before))
    return {_PREFIX + name: array.astype("int32") for name, array in found.items()}
