"""Small builders for plan-tier tests: requests, KV managers, batchers, and one step driven to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.plan.kv.block_pool import BlockPool
from engine.plan.kv.paged_kv_manager import PagedKvManager, Rewindable
from engine.plan.request import Request, SamplingParams
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.in_flight import CommittedToken
from engine.plan.scheduling.policy import make_policy
from engine.plan.scheduling.sampling_table import SamplingTable
from engine.plan.scheduling.step_planner import BatchConfig
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder
from engine.plan.step_records import BatchDecision, Int64, SamplingInputs
from tests.support.fakes import FakeRunner, ManualClock


def free_block_ids(pool: BlockPool) -> tuple[int, ...]:
    """The free blocks, those kept last."""
    return (*pool._free, *pool._free_kept)


def make_request(
    request_id: str = "a",
    prompt: Sequence[int] | int = 4,
    *,
    arrival: int = 0,
    arrival_time: float | None = None,
    priority: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
    max_tokens: int = 8,
    fork_of: str | None = None,
    cache_salt: str | None = None,
    **sampling: Any,
) -> Request:
    """A waiting request; a prompt given as a length has the tokens arrival * 10, arrival * 10 + 1, ..."""
    if isinstance(prompt, int):
        prompt = range(arrival * 10, arrival * 10 + prompt)
    return Request(
        request_id=request_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        stop_token_ids=stop_token_ids,
        arrival=arrival,
        arrival_time=float(arrival) if arrival_time is None else arrival_time,
        priority=priority,
        fork_of=fork_of,
        cache_salt=cache_salt,
    )


def preempted(request: Request, times: int) -> Request:
    """The request, as if it had been preempted so many times before."""
    request.preemptions[:] = [(0.0, "recompute")] * times
    return request


def make_kv(
    num_blocks: int = 8,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_blocks_per_seq: int = 8,
    num_host_blocks: int = 0,
    **further: Any,
) -> PagedKvManager:
    """A small KV manager."""
    return PagedKvManager(
        num_blocks, block_size, max_num_seqs, max_blocks_per_seq, num_host_blocks, **further
    )


def make_batcher(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_prefill_tokens: int | None = None,
    max_decode_seqs: int | None = None,
    max_logits_rows: int | None = None,
    max_model_len: int = 64,
    policy: str = "fcfs",
    aging_s: float = 0.0,
    clock: Callable[[], float] | None = None,
    num_host_blocks: int = 0,
    num_snapshots: int = 0,
    num_host_states: int = 0,
    rewindable: Rewindable = Rewindable.ANYWHERE,
    decoder: SpeculativeDecoder | None = None,
    **further: Any,
) -> ContinuousBatcher:
    """A batcher over a KV manager of its own; limits not given follow the budget and the seats."""
    config = BatchConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_tokens=max_prefill_tokens or max_num_batched_tokens,
        max_decode_seqs=max_decode_seqs or max_num_seqs,
        max_model_len=max_model_len,
        max_logits_rows=max_logits_rows or max(max_num_seqs, max_num_batched_tokens),
        **further,
    )
    kv = make_kv(
        num_blocks,
        block_size,
        max_num_seqs,
        -(-max_model_len // block_size),
        num_host_blocks,
        rewindable=rewindable,
    )
    if kv.keeps_state:
        kv.keep_states(num_snapshots, num_host_states)
    return ContinuousBatcher(config, kv, make_policy(policy, aging_s), clock or ManualClock(), decoder)


def drawn_by(
    table: SamplingTable,
    rows: Int64,
    requests: Sequence[Request],
    positions: Int64,
    paths: Sequence[tuple[int, ...]] | None = None,
) -> SamplingInputs:
    """All that these rows of a sampling table draw by."""
    return table.adjusted(table.columns(rows, positions), rows, requests, paths)


def make_runner(batcher: ContinuousBatcher) -> FakeRunner:
    """The fake model over as many blocks as the batcher accounts for."""
    kv = batcher.kv
    return FakeRunner(kv.num_blocks, kv.block_size, num_host_blocks=kv.host.num_blocks)


def run_step(batcher: ContinuousBatcher, runner: FakeRunner) -> tuple[BatchDecision, list[CommittedToken]]:
    """One whole iteration; an empty decision commits nothing."""
    decision = batcher.step()
    if decision.inputs is None:
        return decision, []
    return decision, batcher.commit(decision, runner.run(decision.inputs).rows)


def shape_of(decision: BatchDecision) -> list[tuple[str, int, int, bool]]:
    """What was scheduled, as plain tuples; none of it with drafts."""
    assert not any(entry.num_drafts for entry in decision.scheduled)
    return [entry[:4] for entry in decision.scheduled]
