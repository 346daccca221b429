"""GraphShape: how large the steps are that one recording serves, and which there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.plan.step_records import StepInputs

# Up to some 256 tokens a pass takes as long as reading the weights does: a few tokens more cost nothing.
# Beyond, each place has its price, so the sizes stay close enough that at most a quarter of them is padding.
_DECODES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
_WITH_DRAFTS = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
# The most new tokens of one sequence that attention takes by the kernel for drafts.
MAX_QUERY_LEN = 48


class GraphShape(NamedTuple):
    """Serves every step of at most so many tokens, of which no sequence has more than `max_query_len`."""

    num_tokens: int
    max_query_len: int = 1

    def holds(self, num_tokens: int, query_len: int) -> bool:
        """Whether a step of as many tokens, as many of one sequence, fits."""
        return num_tokens <= self.num_tokens and query_len <= self.max_query_len


def graph_shapes(max_num_seqs: int, max_draft_tokens: int) -> list[GraphShape]:
    """What to record, the largest first, for steps of up to so many sequences with so many drafts each."""
    shapes = [GraphShape(size) for size in _up_to(_DECODES, max_num_seqs)]
    if max_draft_tokens:
        largest = max_num_seqs * (1 + max_draft_tokens)
        shapes += [GraphShape(size, MAX_QUERY_LEN) for size in _up_to(_WITH_DRAFTS, largest)]
    return sorted(shapes, reverse=True)


def shape_for(inputs: StepInputs, recorded: Iterable[GraphShape]) -> GraphShape | None:
    """The smallest that holds the step; None if there is none, or something is asked that none does."""
    if inputs.prompt_rows is not None:
        return None
    num_tokens, query_len = len(inputs.token_ids), int(inputs.query_lens.max())
    fitting = (shape for shape in recorded if shape.holds(num_tokens, query_len))
    return min(fitting, default=None, key=lambda shape: (shape.max_query_len, shape.num_tokens))


def _up_to(sizes: tuple[int, ...], most: int) -> list[int]:
    """Those that steps of at most `most` tokens can need."""
    enough = next((size for size in sizes if size >= most), sizes[-1])
    return [size for size in sizes if size <= enough]
