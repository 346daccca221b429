"""Verified: what a step commits once its drafts are judged, and where in the target's pass it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.compute.sampling.logprobs import logprob_records
from engine.compute.verification.draft_rows import DraftRows
from engine.plan.step_records import (
    NO_TOKEN,
    DraftInputs,
    Int32,
    Int64,
    SampledRows,
    SamplingInputs,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    """Which drafts of the V sequences that had any were accepted.

    A sequence commits one token more than its accepted drafts; its last token was drawn from `last_row`, the
    row of logits that follows the last of them. `drafts` are indices among the sequence's own drafts, in
    order, sequence by sequence; None if all were chains, of which the first drafts are accepted.
    """

    num_accepted: Int32  # [V]
    last_row: Int64  # [V] indices into [0, R)
    drafts: Int32 | None = None  # [sum of num_accepted]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step commits; `paths` is None when it had no drafts."""

    rows: SampledRows
    paths: AcceptedPaths | None = None


@dataclass(frozen=True, slots=True)
class Draws:
    """The tokens drawn from the rows of logits; a token is meaningless where `errors` has its row.

    Of the rows of drafts, only those that accepted drafts lead to need one. Where nobody can look at the
    logits later, `not_finite` says which of the rows with errors are that, and `logprobs` has the record of
    each row's token; None when no row asks.
    """

    token_ids: Int64  # [R]
    errors: dict[int, str]
    not_finite: frozenset[int] = frozenset()
    logprobs: tuple[TokenLogprobs | None, ...] | None = None  # [R]

    @classmethod
    def of(cls, rows: SampledRows) -> Draws:
        """What the sampler drew, NO_TOKEN where it failed."""
        errors = rows.row_errors or {}
        token_ids = np.array(rows.token_ids, np.int64)
        token_ids[list(errors)] = NO_TOKEN
        return cls(token_ids, errors)


def has_logprobs(sampling: SamplingInputs) -> bool:
    """True if any row is asked for log-probabilities."""
    return bool((sampling.num_logprobs >= 0).any())


def without_logprobs(sampling: SamplingInputs) -> SamplingInputs:
    """The same draws without log-probabilities, which are computed for the committed tokens only."""
    if not has_logprobs(sampling):
        return sampling
    return replace(sampling, num_logprobs=np.full_like(sampling.num_logprobs, -1))


def commit_drafts(drafts: DraftInputs, rows: SampledRows) -> Verified:
    """What `commit_rows` gives where all `rows` were drawn, without log-probabilities.

    `rows` becomes what is committed. In plain Python: a step has few drafts, and dozens of operations on
    short arrays would take longer.
    """
    token_ids, drafted = rows.token_ids, drafts.token_ids.tolist()
    parents = None if drafts.parents is None else drafts.parents.tolist()
    num_accepted, last_rows, accepted, stop = [], [], [], 0
    for row, count in zip(drafts.first_row.tolist(), drafts.num_drafts.tolist(), strict=True):
        start, stop = stop, stop + count
        before = range(-1, count - 1) if parents is None else parents[start:stop]
        drawn = token_ids[row : row + count + 1]
        path: list[int] = []
        end = -1
        for draft, (parent, token_id) in enumerate(zip(before, drafted[start:stop], strict=True)):
            if parent == end and token_id == drawn[parent + 1]:  # parents come first: one pass finds all
                path.append(draft)
                end = draft
        committed = [*(drafted[start + draft] for draft in path), drawn[end + 1]]
        token_ids[row : row + count + 1] = committed + [NO_TOKEN] * (count - len(path))
        num_accepted.append(len(path))
        last_rows.append(row + end + 1)
        accepted += path
    path_drafts = None if parents is None else np.array(accepted, np.int32)
    return Verified(
        rows, AcceptedPaths(np.array(num_accepted, np.int32), np.array(last_rows, np.int64), path_drafts)
    )


def commit_rows(
    logits: torch.Tensor | None, sampling: SamplingInputs, drafts: DraftRows, draws: Draws, last: Int64
) -> Verified:
    """Put the tokens into the order of commit; `last` [V] is each sequence's last accepted draft or ROOT.

    Without `logits`, which rows are not finite and the log-probabilities are what `draws` say.
    """
    token_ids = draws.token_ids.copy()
    source = np.arange(len(token_ids))  # [R] the row of logits that each committed token came from
    owned = drafts.rows(np.arange(len(last)))
    token_ids[owned], source[owned] = NO_TOKEN, -1

    marks = drafts.paths(last)  # [V, G]
    sequence, draft = np.nonzero(marks)  # parents come first, so this is the order of commit
    num_accepted = marks.sum(axis=1)
    place = drafts.first_row[sequence] + marks.cumsum(axis=1)[sequence, draft] - 1
    token_ids[place] = drafts.token_ids[sequence, draft]
    source[place] = drafts.first_row[sequence] + drafts.parents[sequence, draft] + 1
    end, last_row = drafts.first_row + num_accepted, drafts.first_row + last + 1
    token_ids[end], source[end] = draws.token_ids[last_row], last_row

    reached = {int(row): place for place, row in enumerate(source) if row >= 0} if draws.errors else {}
    errors = {reached[row]: reason for row, reason in draws.errors.items() if row in reached}
    source[list(errors)] = -1
    committed = token_ids.tolist()
    spoiled, logprobs = tuple(sorted(draws.errors.keys() - reached.keys())), None
    if logits is not None:
        logprobs = logprob_records(logits, sampling.num_logprobs, committed, source)
        spoiled = _not_finite(logits, spoiled)
    else:
        spoiled = tuple(row for row in spoiled if row in draws.not_finite)
        if (told := draws.logprobs) is not None:  # a committed token is what was drawn from its row
            logprobs = tuple(told[row] if row >= 0 else None for row in source.tolist())
    path = None if drafts.are_chains else draft.astype(np.int32)
    return Verified(
        SampledRows(committed, logprobs, errors or None, spoiled),
        AcceptedPaths(num_accepted.astype(np.int32), last_row, path),
    )


def _not_finite(logits: torch.Tensor, rows: tuple[int, ...]) -> tuple[int, ...]:
    """The rows whose logits hold NaN or infinity; others failed because of their parameters."""
    if not rows:
        return ()
    finite = logits[torch.tensor(rows, device=logits.device)].amax(dim=1).isfinite().tolist()
    return tuple(row for row, is_finite in zip(rows, finite, strict=True) if not is_finite)
