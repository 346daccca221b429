"""GraphShape: how large the steps are that one recording serves, and which there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.compute.runner.pass_memory import PassRoom
from engine.compute.verification.draft_rows import DraftRows
from engine.plan.step_records import StepInputs

# Up to some 256 tokens a pass takes as long as reading the weights does: a few tokens more cost nothing.
# Beyond, each place has its price, so the sizes stay close enough that at most a quarter of them is padding.
_DECODES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
_WITH_DRAFTS = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
# Up to where the device takes longer for a step than the host to queue it. At most a third is padding, beyond
# 64 tokens.
_WITH_PROMPTS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
# The most new tokens of one sequence that attention takes by the kernel for drafts.
MAX_QUERY_LEN = 48


class StepSize(NamedTuple):
    """How large a step is: its tokens, the most of one sequence, and its sequences or wanted rows.

    A model that carries state also has `num_again` drafts of earlier steps to take in.
    """

    num_tokens: int
    query_len: int
    num_rows: int
    num_again: int = 0

    @classmethod
    def of(cls, inputs: StepInputs, num_again: int = 0) -> StepSize:
        """That of `inputs`."""
        num_rows = max(len(inputs.query_lens), len(inputs.logits_rows))
        return cls(len(inputs.token_ids), int(inputs.query_lens.max()), num_rows, num_again)


class GraphShape(NamedTuple):
    """Serves every step of at most so many tokens, of which no sequence has more than `max_query_len`.

    With `num_rows` it serves steps of at most so many sequences and wanted rows, whose drafts are chains; 0:
    any token may be a sequence of its own, and has logits.
    """

    num_tokens: int
    max_query_len: int = 1
    num_rows: int = 0

    @property
    def num_places(self) -> int:
        """Of how many tokens there are logits."""
        return self.num_rows or self.num_tokens

    @property
    def room(self) -> PassRoom:
        """Where no sequence has more than one token, none was verified before; else as many as there are."""
        return PassRoom(self.num_places, self.num_tokens, self.num_tokens if self.max_query_len > 1 else 0)

    def holds(self, size: StepSize) -> bool:
        """Whether a step of this size fits."""
        return (
            size.num_tokens <= self.num_tokens
            and size.query_len <= self.max_query_len
            and size.num_rows <= self.num_places
            and size.num_again <= self.room.num_again
        )


def graph_shapes(max_num_seqs: int, max_draft_tokens: int, max_tokens: int = 0) -> list[GraphShape]:
    """What to record, the largest first, for steps of up to so many sequences with so many drafts each.

    With prompts among them they have up to `max_tokens`; 0 leaves those out. There as many rows are wanted as
    steps without prompts have: what more drafts would want has its price in each step, drafts or not, since
    logits are computed and drawn from for every row that a recording has.
    """
    shapes = [GraphShape(size) for size in sizes_up_to(_DECODES, max_num_seqs)]
    if max_draft_tokens:
        largest = max_num_seqs * (1 + max_draft_tokens)
        shapes += [GraphShape(size, MAX_QUERY_LEN) for size in sizes_up_to(_WITH_DRAFTS, largest)]
    if max_tokens:
        rows = max(max_num_seqs, min(max_num_seqs * (1 + max_draft_tokens), _WITH_DRAFTS[-1]))
        sizes = sizes_up_to(_WITH_PROMPTS, max_tokens)
        shapes += [GraphShape(size, size, min(size, rows)) for size in sizes]
    return sorted(shapes, reverse=True)


def cheapest_first(shapes: Iterable[GraphShape]) -> list[GraphShape]:
    """In the order that `shape_for` wants them in."""
    return sorted(shapes, key=lambda shape: (shape.max_query_len, shape.num_tokens))


def shape_for(inputs: StepInputs, recorded: Iterable[GraphShape], num_again: int = 0) -> GraphShape | None:
    """The first of the recorded, the cheapest, that holds the step; None if none does what is asked."""
    if inputs.prompt_rows is not None:
        return None
    size = StepSize.of(inputs, num_again)
    shape = next((shape for shape in recorded if shape.holds(size)), None)
    if shape is not None and shape.num_rows and inputs.drafts is not None:
        return shape if DraftRows.of(inputs.drafts).are_chains else None
    return shape


def sizes_up_to(sizes: tuple[int, ...], most: int) -> list[int]:
    """Those of the ascending sizes that are needed for up to `most`."""
    enough = next((size for size in sizes if size >= most), sizes[-1])
    return [size for size in sizes if size <= enough]
