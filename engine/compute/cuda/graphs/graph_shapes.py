"""GraphShape: how large the steps are that one recording serves, and which there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.compute.verification.draft_rows import DraftRows
from engine.plan.step_records import StepInputs

# Up to some 256 tokens a pass takes as long as reading the weights does: a few tokens more cost nothing.
# Beyond, each place has its price, so the sizes stay close enough that at most a quarter of them is padding.
_DECODES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
_WITH_DRAFTS = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
# A quarter of padding at most, and up to where the device takes longer for a step than the host to queue it.
_WITH_PROMPTS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
# The most new tokens of one sequence that attention takes by the kernel for drafts.
MAX_QUERY_LEN = 48


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

    def holds(self, num_tokens: int, query_len: int) -> bool:
        """Whether a step of as many tokens, as many of one sequence, fits."""
        return num_tokens <= self.num_tokens and query_len <= self.max_query_len

    def takes(self, inputs: StepInputs) -> bool:
        """Whether this step fits."""
        if not self.holds(len(inputs.token_ids), int(inputs.query_lens.max())):
            return False
        if not self.num_rows:
            return True
        if max(len(inputs.query_lens), len(inputs.logits_rows)) > self.num_rows:
            return False
        return inputs.drafts is None or DraftRows.of(inputs.drafts).are_chains


def graph_shapes(max_num_seqs: int, max_draft_tokens: int, max_tokens: int = 0) -> list[GraphShape]:
    """What to record, the largest first, for steps of up to so many sequences with so many drafts each.

    With prompts among them they have up to `max_tokens`; 0 leaves those out.
    """
    shapes = [GraphShape(size) for size in _up_to(_DECODES, max_num_seqs)]
    if max_draft_tokens:
        largest = max_num_seqs * (1 + max_draft_tokens)
        shapes += [GraphShape(size, MAX_QUERY_LEN) for size in _up_to(_WITH_DRAFTS, largest)]
    if max_tokens:
        rows = max_num_seqs * (1 + max_draft_tokens)
        sizes = _up_to(_WITH_PROMPTS, max_tokens)
        shapes += [GraphShape(size, size, min(size, rows)) for size in sizes]
    return sorted(shapes, reverse=True)


def shape_for(inputs: StepInputs, recorded: Iterable[GraphShape]) -> GraphShape | None:
    """The smallest that holds the step; None if there is none, or something is asked that none does."""
    if inputs.prompt_rows is not None:
        return None
    fitting = (shape for shape in recorded if shape.takes(inputs))
    return min(fitting, default=None, key=lambda shape: (shape.max_query_len, shape.num_tokens))


def _up_to(sizes: tuple[int, ...], most: int) -> list[int]:
    """Those that steps of at most `most` tokens can need."""
    enough = next((size for size in sizes if size >= most), sizes[-1])
    return [size for size in sizes if size <= enough]
