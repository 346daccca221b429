"""draw_isolated: drawing in which what fails for one sequence costs that sequence alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch

from engine.compute.runner.device import is_out_of_memory
from engine.compute.sampling.sampler import select_rows
from engine.compute.verification.verified import AcceptedPaths, Verified
from engine.compute.verification.verifier import Verifier
from engine.plan.step_records import NO_TOKEN, DraftInputs, Int32, SampledRows, SamplingInputs, TokenLogprobs

log = logging.getLogger("slipstream.engine")


def draw_isolated(
    verifier: Verifier, logits: torch.Tensor, sampling: SamplingInputs, drafts: DraftInputs | None
) -> Verified:
    """As `verifier.draw`, but if it raises, each sequence is drawn for apart.

    Sequences for which it raises again come back as failed rows; the others get what they would have got.
    Running out of memory is raised, because no sequence is at fault.
    """
    try:
        return verifier.draw(logits, sampling, drafts)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        log.exception("drawing the tokens of a step failed: its sequences are drawn for apart")
    parts = [
        _draw_alone(verifier, logits[rows], select_rows(sampling, np.arange(rows.start, rows.stop)), own)
        for rows, own in _sequences(sampling.num_rows, drafts)
    ]
    return _joined(parts, drafts)


def _sequences(num_rows: int, drafts: DraftInputs | None) -> Iterator[tuple[slice, DraftInputs | None]]:
    """The rows of each sequence, and its drafts."""
    owned: dict[int, DraftInputs] = {}
    if drafts is not None:
        owned = {int(row): _drafts_of(drafts, index) for index, row in enumerate(drafts.first_row)}
    row = 0
    while row < num_rows:
        own = owned.get(row)
        end = row + 1 + (0 if own is None else len(own.token_ids))
        yield slice(row, end), own
        row = end


def _drafts_of(drafts: DraftInputs, index: int) -> DraftInputs:
    """Those of one sequence, as of a step that holds nothing else."""
    first = int(drafts.num_drafts[:index].sum())
    own = slice(first, first + int(drafts.num_drafts[index]))
    return DraftInputs(
        sequence=np.zeros(1, np.int32),
        first_row=np.zeros(1, np.int64),
        num_drafts=drafts.num_drafts[index : index + 1],
        token_ids=drafts.token_ids[own],
        parents=None if drafts.parents is None else drafts.parents[own],
        probs=drafts.probs[own],
    )


def _draw_alone(
    verifier: Verifier, logits: torch.Tensor, sampling: SamplingInputs, drafts: DraftInputs | None
) -> Verified:
    """What one sequence gets; a failed row if there is no drawing for it."""
    try:
        return verifier.draw(logits, sampling, drafts)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"drawing its next token failed ({type(error).__name__})"
    rows = SampledRows([NO_TOKEN] * len(logits), row_errors={0: reason})
    if drafts is None:
        return Verified(rows)
    return Verified(rows, AcceptedPaths(np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int32)))


def _joined(parts: list[Verified], drafts: DraftInputs | None) -> Verified:
    """What the sequences got, as of one step."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    errors: dict[int, str] = {}
    spoiled: list[int] = []
    paths: list[AcceptedPaths] = []
    for rows, path in ((part.rows, part.paths) for part in parts):
        first = len(token_ids)
        token_ids += rows.token_ids
        logprobs += rows.logprobs or [None] * len(rows.token_ids)
        errors |= {first + row: reason for row, reason in (rows.row_errors or {}).items()}
        spoiled += [first + row for row in rows.spoiled_rows]
        if path is not None:
            paths.append(AcceptedPaths(path.num_accepted, path.last_row + first, _accepted(path)))
    has_logprobs = any(part.rows.logprobs is not None for part in parts)
    sampled = SampledRows(
        token_ids, tuple(logprobs) if has_logprobs else None, errors or None, tuple(spoiled)
    )
    if drafts is None:
        return Verified(sampled)
    num_accepted = np.concatenate([path.num_accepted for path in paths])
    last_row = np.concatenate([path.last_row for path in paths])
    accepted = None
    if drafts.parents is not None:
        accepted = np.concatenate([_accepted(path) for path in paths])
    return Verified(sampled, AcceptedPaths(num_accepted, last_row, accepted))


def _accepted(path: AcceptedPaths) -> Int32:
    """The accepted drafts of the one sequence, a chain's spelled out."""
    return np.arange(path.num_accepted[0], dtype=np.int32) if path.drafts is None else path.drafts
