"""The frozen records that pass between the scheduler, the model's thread and the streams.

Arrays are numpy so that the plan tier stays free of torch; once built they are never written again.
N = tokens scheduled in the step, S = sequences scheduled, R = rows of logits wanted (one a sampled position).
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.plan.grammar import MaskOf

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


class FeatureRows(Sized, Protocol):
    """What the target left at verified positions one after another, a tensor [positions, width]; len counts.

    The last is that from which the sequence's newest token was drawn, or the last of a part of its prompt.
    """


NO_TOKEN = -1  # in a list of token ids: nothing was drawn here
NO_DRAFT = -2  # in place of a draft: nothing was drafted here, and nothing that is drawn agrees with it


class ScheduledRequest(NamedTuple):
    """What one request computes in a step: `num_tokens` tokens from `first_position` on."""

    request_id: str
    first_position: int
    num_tokens: int
    samples: bool  # the newest known token is among them: its logits give the next one
    num_drafts: int = 0  # of them, the last: they follow the newest token and are verified


class BlockCopy(NamedTuple):
    """Copy block `source` onto `target` before the pass: both on the device, or one on the host (a swap)."""

    source: int
    target: int


class StateCopy(NamedTuple):
    """Copy a recurrent state: from a slot of a sequence into a snapshot, or the other way round."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """Which tokens a sequence holds, as penalties count them: each once, and how often the output has it."""

    token_ids: Int64  # [T] no two equal
    in_output: Int64  # [T] 0 for a token of the prompt alone


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """What one sampled row needs beyond the columns of `SamplingInputs`; built only for such rows."""

    row: int  # in [0, R)
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None allows all
    allowed_mask: MaskOf | None = None  # a grammar's, lent to the target thread for the step; None allows all
    banned_token_ids: tuple[int, ...] = ()  # they get -inf (min_tokens: the stop set)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: TokenCounts | None = None  # of the tokens before the one to draw; None without penalties


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The sampling parameters of the R rows of one step, as columns."""

    temperature: Float32  # [R] 0 is greedy
    top_k: Int32  # [R] 0 is off
    top_p: Float32  # [R] 1 is off
    min_p: Float32  # [R] 0 is off
    seed: Int64  # [R] the request's 64 bits
    position: Int64  # [R] absolute, of the token to draw
    num_logprobs: Int32  # [R] -1 for none
    adjustments: tuple[LogitAdjustment, ...] = ()

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.seed)


@dataclass(frozen=True, slots=True)
class UnreadDrafts:
    """Which drafts of a step the host has not read: the device has them by the time it comes to the step."""

    tokens: object  # the drafter's, on the device that computes the step
    places: Int64  # [D] of each draft among them, -1 for one that the host knows


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The drafts that a step verifies: V sequences with at least one each, D drafts in packed order.

    Sequence v owns the rows `first_row[v] .. first_row[v] + num_drafts[v]`: the newest known token's, then
    one for each draft. `parents` None means that all are chains; else an entry is the index of the parent
    among its sequence's drafts, and -1 is the newest token. `probs` has each draft's float32 [vocab]
    distribution, None for a certain draft; it is empty when the verification rule needs none. Those that are
    `unread` count as NO_TOKEN until `known` says what they are.
    """

    sequence: Int32  # [V] indices into [0, S)
    first_row: Int64  # [V] indices into [0, R)
    num_drafts: Int32  # [V]
    token_ids: Int64  # [D]
    parents: Int32 | None = None  # [D]
    probs: tuple[object, ...] = ()  # [D]
    unread: UnreadDrafts | None = None

    @property
    def rows(self) -> Int64:
        """The row of logits behind each draft. [D]"""
        counts = self.num_drafts.astype(np.int64)
        before = np.repeat(counts.cumsum() - counts, counts)
        return np.repeat(self.first_row, counts) + 1 + np.arange(len(before)) - before

    def known(self, tokens: Int64) -> DraftInputs:
        """The same, read: `tokens` are what the device has at each place, below 0 where drawing failed.

        Such a draft is never accepted: it is no token, and not NO_TOKEN either, which is no row's.
        """
        assert self.unread is not None, "they are known already"
        places = self.unread.places
        token_ids = np.where(places < 0, self.token_ids, tokens[places])
        return replace(self, token_ids=np.where(token_ids < 0, NO_DRAFT, token_ids), unread=None)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The P prompt tokens whose log-probabilities a step reports, in packed order."""

    sequence: Int32  # [P] indices into [0, S)
    rows: Int64  # [P] indices into [0, N): the tokens before them, whose logits are read
    token_ids: Int64  # [P]
    num_top: Int32  # [P] how many of the likeliest to report beside each


class BlockMoves(NamedTuple):
    """What a step does to whole blocks before its pass, and to recurrent states around it.

    Blocks are moved in the order `swap_out`, `scrub_blocks`, `block_copies`, `swap_in`. One that `swap_out`
    saves may be reused in the same step; what `swap_in` reads must not be its target.
    """

    swap_out: tuple[BlockCopy, ...] = ()  # device block -> host block
    scrub_blocks: tuple[int, ...] = ()  # that held non-finite values, to be zeroed
    block_copies: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()  # host block -> device block
    states_out: tuple[StateCopy, ...] = ()  # slot -> host state, before all other copies
    state_restores: tuple[StateCopy, ...] = ()  # snapshot -> slot, before the pass
    state_copies: tuple[StateCopy, ...] = ()  # slot, held back by the last pass -> slot, before the pass
    states_in: tuple[StateCopy, ...] = ()  # host state -> slot, before the pass, behind them
    state_saves: tuple[StateCopy, ...] = ()  # slot -> snapshot, after the pass, of a state without drafts


NO_MOVES = BlockMoves()


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One packed forward pass: sequences one after another, sequence s owning `query_lens[s]` tokens.

    Sequences of one token (decodes) come first. `slot_mapping` is block_id * block_size + offset of each
    token; `kv_lens` counts the tokens of a sequence after this step. Unused entries of `block_tables` are 0.
    Slots follow a sequence's tokens one by one; positions count depth, so drafts of a tree may share one.
    `state_slots` are constant and exclusive while a request runs: where a recurrent model keeps its state,
    which begins anew where `positions` begin at 0, unless `moves` put one there.

    `previous_rows` is for a step launched before the last one's result: it has, for a token not known yet,
    the row of the last step that draws it, and -1 for known ones. Its entry of `token_ids` is 0. Such a step
    `is_drawn_later` if what may be drawn depends on those tokens: only its pass is launched then, and its
    `sampling` is without adjustments until they are known.
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
    held_back: tuple[int, ...] = ()  # of [0, S): their last tokens may be taken back, as drafts may be
    moves: BlockMoves = NO_MOVES
    previous_rows: Int64 | None = None  # [N], None when every token is known
    is_drawn_later: bool = False

    def with_read_drafts(self, tokens: Int64) -> StepInputs:
        """The same where the host knows its drafts, see DraftInputs.known."""
        assert self.drafts is not None, "it has none"
        drafts, token_ids = self.drafts.known(tokens), self.token_ids.copy()
        token_ids[self.logits_rows[drafts.rows]] = drafts.token_ids
        return replace(self, token_ids=token_ids, drafts=drafts)


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """The scheduler's order for one step; immutable, so the model's thread may read it freely.

    `scheduled` lists decodes, then prefill chunks in policy order, then decodes with drafts; each that
    `samples` has one row of logits and one more a draft, in this order. `inputs` is None exactly when nothing
    is scheduled. Of the `preempted`, those `swapped` keep their KV, and their state, on the host.
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
    """Raw log-probabilities (before any processor) at one position."""

    token_id: int
    logprob: float
    rank: int  # 1 for the likeliest token
    top: tuple[tuple[int, float], ...] = ()  # sorted, likeliest first, as many as asked for


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The token drawn for each row, and what went wrong for single rows.

    The rows of a sequence with drafts hold what it commits: the accepted drafts, then the recovered or bonus
    token, then NO_TOKEN.
    """

    token_ids: list[int]  # [R]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None  # None when no request asked
    row_errors: dict[int, str] | None = None  # a one-line reason; the token means nothing and none follows
    spoiled_rows: tuple[int, ...] = ()  # past a sequence's last token and not finite: not to be read again


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the model's thread gives back for one decision, with the seconds it took.

    The K/V of accepted drafts of a tree lies at their positions.
    """

    rows: SampledRows
    forward_s: float  # without `swap_s`
    sample_s: float  # verification included
    swap_s: float = 0.0
    swap_bytes: int = 0  # moved between device and host
    features: tuple[FeatureRows | None, ...] | None = None  # of each sequence, for drafters that read them
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # [P] None where the logits are not finite
