"""The frozen records that pass between the scheduler, the model's thread and the streams.

Arrays are numpy so that the plan tier stays free of torch; once built they are never written again.
N = tokens scheduled in the step, S = sequences scheduled, R = rows of logits wanted (one a sampled position).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plan.grammar import MaskOf

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


NO_TOKEN = -1  # in a list of token ids: nothing was drawn here


class ScheduledRequest(NamedTuple):
    """What one request computes in a step: `num_tokens` tokens from `first_position` on.

    `samples` is True when the newest known token is among them, so that its logits give the next one. The
    last `num_drafts` are drafts that follow the newest token and are verified.
    """

    request_id: str
    first_position: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0


class BlockCopy(NamedTuple):
    """Copy block `source` onto `target` before the pass: both on the device, or one on the host (a swap)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """Which tokens a sequence holds, as penalties count them: each once, and how often the output has it.

    `in_output` is 0 for a token of the prompt alone.
    """

    token_ids: Int64  # [T] no two equal
    in_output: Int64  # [T]


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """What one sampled row needs beyond the columns of `SamplingInputs`; built only for such rows.

    `row` indexes [0, R). `banned_token_ids` get -inf (min_tokens: the stop set); `allowed_token_ids` and
    `allowed_mask`, a grammar's, allow all where they are None; the grammar is lent to the target thread for
    the step. `history` counts the tokens before the one to draw; it is None when no penalty is set.
    """

    row: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    allowed_mask: MaskOf | None = None
    banned_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: TokenCounts | None = None


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampling parameters of the R rows of one step, as columns.

    `temperature` 0 = greedy; `top_k` 0, `top_p` 1, `min_p` 0 = off. `seed` is the request's 64 bits as int64;
    `position` is the absolute index of the token to draw. `num_logprobs` is -1 for none.
    """

    temperature: Float32  # [R]
    top_k: Int32  # [R]
    top_p: Float32  # [R]
    min_p: Float32  # [R]
    seed: Int64  # [R]
    position: Int64  # [R]
    num_logprobs: Int32  # [R]
    adjustments: tuple[LogitAdjustment, ...] = ()

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.seed)


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The drafts that a step verifies: V sequences with at least one each, D drafts in packed order.

    Sequence v owns the rows `first_row[v] .. first_row[v] + num_drafts[v]`: the newest known token's, then
    one for each draft. `parents` None means that all are chains; else an entry is the index of the parent
    among its sequence's drafts, and -1 is the newest token. `probs` has each draft's float32 [vocab]
    distribution, None for a certain draft; it is empty when the verification rule needs none.
    """

    sequence: Int32  # [V] indices into [0, S)
    first_row: Int64  # [V] indices into [0, R)
    num_drafts: Int32  # [V]
    token_ids: Int64  # [D]
    parents: Int32 | None = None  # [D]
    probs: tuple[object, ...] = ()  # [D]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The P prompt tokens whose log-probabilities a step reports, in packed order.

    `rows` are the tokens before them, whose logits they are read from; `num_top` is how many of the likeliest
    to report beside each.
    """

    sequence: Int32  # [P] indices into [0, S)
    rows: Int64  # [P] indices into [0, N)
    token_ids: Int64  # [P]
    num_top: Int32  # [P]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One packed forward pass: sequences one after another, sequence s owning `query_lens[s]` tokens.

    Sequences of one token (decodes) come first. `slot_mapping` is block_id * block_size + offset of each
    token; `kv_lens` counts the tokens of a sequence after this step. Unused entries of `block_tables` are 0.
    Slots follow a sequence's tokens one by one; positions count depth, so drafts of a tree may share one.
    `state_slots` are constant and exclusive while a request runs: where a recurrent model keeps its state,
    which begins anew where `positions` begin at 0.

    Blocks are moved before the pass, in the order `swap_out`, `scrub_blocks`, `block_copies`, `swap_in`. A
    block that `swap_out` saves may be reused in the same step; what `swap_in` reads must not be its target.

    `previous_rows` is for a step launched before the last one's result: it has, for a token not known yet,
    the row of the last step that draws it, and -1 for known ones. Its entry of `token_ids` is 0.
    """

    token_ids: Int64  # [N]
    positions: Int64  # [N]
    slot_mapping: Int64  # [N]
    query_lens: Int32  # [S]
    kv_lens: Int32  # [S]
    block_tables: Int32  # [S, max blocks of any sequence in this step]
    logits_rows: Int64  # [R] indices into [0, N)
    sampling: SamplingInputs
    drafts: DraftInputs | None = None
    prompt_rows: PromptRows | None = None  # None when no prompt's log-probabilities are asked for
    state_slots: Int32 | None = None  # [S]
    block_copies: tuple[BlockCopy, ...] = ()
    scrub_blocks: tuple[int, ...] = ()  # blocks that held non-finite values: zeroed before the pass
    swap_out: tuple[BlockCopy, ...] = ()  # device block -> host block
    swap_in: tuple[BlockCopy, ...] = ()  # host block -> device block
    previous_rows: Int64 | None = None  # [N], None when every token is known


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """The scheduler's order for one step; immutable, so the model's thread may read it freely.

    `scheduled` lists decodes, then prefill chunks in policy order, then decodes with drafts; each that
    `samples` has one row of logits and one more a draft, in this order. `inputs` is None exactly when nothing
    is scheduled. Of the `preempted`, those `swapped` keep their KV on the host.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    inputs: StepInputs | None
    num_decode_tokens: int
    num_prefill_tokens: int
    num_draft_tokens: int = 0
    preempted: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.num_decode_tokens + self.num_prefill_tokens + self.num_draft_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities (before any processor) at one position; `rank` is 1 for the likeliest token.

    `top` is sorted, likeliest first, with as many entries as asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The token drawn for each row, and what went wrong for single rows.

    The rows of a sequence with drafts hold what it commits: the accepted drafts, then the recovered or bonus
    token, then NO_TOKEN. `row_errors` maps a row to a one-line reason; its token means nothing and none
    follows. `spoiled_rows` lie past a sequence's last token and were not finite: their K/V must not be read
    again. `logprobs` is None when no request asked.
    """

    token_ids: list[int]  # [R]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    row_errors: dict[int, str] | None = None
    spoiled_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the model's thread gives back for one decision, with the seconds it took.

    `forward_s` excludes `swap_s`, in which `swap_bytes` moved between device and host; `sample_s` includes
    verification. The K/V of accepted drafts of a tree lies at their positions. `features` has one row for
    each sampled sequence, for drafters that read the target, or is None. `prompt_logprobs` has a record for
    each prompt row, None where the logits are not finite.
    """

    rows: SampledRows
    forward_s: float
    sample_s: float
    swap_s: float = 0.0
    swap_bytes: int = 0
    features: tuple[object, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # [P]


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """How one live request stands between two steps, and why it waits.

    `waits_because` is one plain sentence and `position` its place in the queue, from 1; both are None while
    it runs. `deadline_s` counts from arrival; None for no limit. `preemptions` are (engine clock, "recompute"
    or "swap"). Blocks are those on the device.
    """

    request_id: str
    status: str
    waits_because: str | None
    position: int | None
    priority: int
    deadline_s: float | None
    preemptions: tuple[tuple[float, str], ...]
    num_known_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_blocks: int
