"""RecordedStep: the pass and the draw of one GraphShape, over memory that stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from engine.compute.attention import StepAttention
from engine.compute.attention.context import context_over
from engine.compute.cuda.device_draw import DrawColumns, column_shapes, column_words
from engine.compute.cuda.graphs.device_pass import AnyForward, DevicePass, TokenMemory, fill_in, token_words
from engine.compute.cuda.graphs.graph_shapes import GraphShape
from engine.compute.cuda.graphs.recorder import Recorder
from engine.compute.cuda.triton_tables import Bucket, StepTables
from engine.compute.runner.pass_memory import PassMemory
from engine.plan.step_records import Int64, StepInputs


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """What steps of every shape use in turn, each from the first place on; for the places of the largest.

    `words` holds the inputs. `logits` has a row for each place, `hidden` for each token; it is None when no
    drafter reads the hidden states.
    """

    words: torch.Tensor  # int32 [words]
    tokens: TokenMemory
    logits: torch.Tensor  # [places, vocab]
    hidden: torch.Tensor | None  # [tokens, hidden]


def bucket_of(shape: GraphShape, max_blocks: int) -> Bucket:
    """The room that the attention of `shape` needs, of sequences with up to `max_blocks` blocks."""
    num_tokens, query_len, num_rows = shape
    if num_rows:
        return Bucket(num_rows, num_tokens, max_blocks, query_len)
    if query_len == 1:
        return Bucket(num_tokens, num_tokens, max_blocks)
    return Bucket(num_tokens, num_tokens, max_blocks, query_len, num_tokens, query_len)


def other_words(shape: GraphShape, memory: PassMemory) -> dict[str, tuple[int, ...]]:
    """What a step sends beside the tables of its attention."""
    num_tokens = shape.num_tokens
    words = {"token_ids": (num_tokens,), "previous": (num_tokens,), **column_shapes(shape.num_places)}
    words |= memory.words(shape.room)
    return words | ({"rows": (shape.num_rows,)} if shape.num_rows else {})


class RecordedStep:
    """A recorded step with a place for each token, or each row; those after the last compute nothing of use.

    They store no keys, attend to nothing and draw greedily, and their results are not read.
    """

    def __init__(
        self,
        tables: StepTables,
        attention: StepAttention,
        forward: AnyForward,
        carried: PassMemory,
        memory: GraphMemory,
        shape: GraphShape,
    ) -> None:
        self._tables = tables
        self._forward = forward
        self._carried = carried
        self._room = shape.room
        self._context = carried.recorded(context_over(attention, carried.kv), tables.arrays.views, shape.room)
        num_places = shape.num_places
        self._has_rows = shape.num_rows > 0
        self._tokens = memory.tokens
        self.logits = memory.logits[:num_places]
        self.hidden = memory.hidden
        arrays = tables.arrays
        self._columns = DrawColumns.of({name: arrays[name] for name in DrawColumns._fields})
        self._replay_pass: Callable[[], None] = self._compute
        self._replay_draw: Callable[[], None] = self._draw

    def record(self, recorder: Recorder) -> None:
        """Have both parts recorded, over a step without a token. Raises what keeps them from it."""
        self._tables.clear()
        self._replay_pass = recorder.record(self._compute)
        self._replay_draw = recorder.record(self._draw)

    def fill(self, inputs: StepInputs, previous: Int64 | None, num_to_come: int = 0) -> None:
        """Send the step in one asynchronous copy; `previous` as in EagerPasses.

        With `num_to_come` as many more may follow it, see `go_on`.
        """
        words = {**token_words(inputs, previous), **self._carried.fill(inputs, self._room)}
        if self._has_rows:
            words["rows"] = inputs.logits_rows.astype(np.int32)
        places = self.places(inputs)
        num_places = int(places[-1]) + 1 if len(places) else 0  # what is not sent means greedy, too
        columns = column_words(inputs.sampling, places, num_places)
        self._tables.fill(inputs, {**words, **columns}, num_to_come)

    def go_on(self, words: Mapping[str, torch.Tensor]) -> None:
        """Put what has changed since the step before into the first places, from tensors on the device."""
        places = [self._tables.arrays[name][: len(tensor)] for name, tensor in words.items()]
        torch._foreach_copy_(places, list(words.values()))

    def replay(self) -> None:
        """Queue the pass."""
        self._replay_pass()

    def draw(self) -> None:
        """Queue the plain draw of every place of the pass that was replayed last."""
        self._replay_draw()

    def as_pass(self, inputs: StepInputs) -> DevicePass:
        """The pass that was replayed last, over these inputs."""
        return DevicePass(self.logits, self.places(inputs), self._replay_draw, self.hidden)

    def places(self, inputs: StepInputs) -> Int64:
        """Where the logits of each row of a step are, [R]."""
        return np.arange(len(inputs.logits_rows)) if self._has_rows else inputs.logits_rows

    def _compute(self) -> None:
        arrays = self._tables.arrays
        token_ids = fill_in(arrays["token_ids"], arrays["previous"], self._tokens.tokens)
        positions = arrays["positions"].long().clamp_(min=0)
        rows = arrays["rows"].long().clamp_(min=0) if self._has_rows else None

        def compute() -> torch.Tensor:
            return self._forward.compute(token_ids, positions, self._context, rows)

        if self.hidden is None:
            logits = compute()
        else:
            logits, hidden = self._forward.keeping_features(compute, rows)
            self.hidden[: len(hidden)].copy_(hidden)
        self.logits.copy_(logits)

    def _draw(self) -> None:
        self._tokens.draw(self.logits, self._columns)
