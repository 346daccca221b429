import numpy as np
import pytest

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import Request
from engine.plan.scheduling.sampling_table import SamplingTable
from engine.plan.scheduling.step_inputs import ScheduledItem, build_step_inputs
from engine.plan.speculation.draft_tape import DraftedToken, UnreadToken
from engine.plan.step_records import (
    NO_DRAFT,
    NO_TOKEN,
    BlockMoves,
    LogitAdjustment,
    ScheduledRequest,
    StepInputs,
)
from tests.support.factories import make_kv, make_request


def build(kv: PagedKvManager, *work: tuple[Request, int, int]) -> StepInputs:
    """Seat and schedule (request, first position, number of tokens)."""
    table = SamplingTable(kv.max_num_seqs)
    items = []
    for request, first, count in work:
        table.write(kv.row(request.request_id), request)
        samples = first + count == request.num_tokens
        items.append(ScheduledItem(ScheduledRequest(request.request_id, first, count, samples), request))
    return build_step_inputs(items, kv, table, BlockMoves(scrub_blocks=(7,)))


def build_verify(kv: PagedKvManager, *work: tuple[Request, tuple[DraftedToken, ...]]) -> StepInputs:
    """Seat and schedule decodes with drafts."""
    table = SamplingTable(kv.max_num_seqs)
    items = []
    for request, drafted in work:
        table.write(kv.row(request.request_id), request)
        count = 1 + len(drafted)
        scheduled = ScheduledRequest(
            request.request_id, request.num_tokens - 1, count, True, num_drafts=len(drafted)
        )
        items.append(ScheduledItem(scheduled, request, drafted))
    return build_step_inputs(items, kv, table, BlockMoves())


def test_a_mixed_step_exactly() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    decode, chunk, last = (
        make_request("decode", [10, 11, 12, 13, 14, 15], seed=1),
        make_request("chunk", [20, 21, 22, 23, 24, 25, 26], seed=2),
        make_request("last", [30, 31, 32], seed=3, logit_bias=((5, 1.0),)),
    )
    kv.allocate("decode", 4)
    kv.allocate("chunk", 7)
    kv.allocate("last", 3)
    kv.allocate("decode", 6)
    assert [kv.block_ids(name) for name in ("decode", "chunk", "last")] == [(0, 4), (1, 2), (3,)]
    inputs = build(kv, (decode, 5, 1), (chunk, 2, 4), (last, 0, 3))
    assert inputs.token_ids.tolist() == [15, 22, 23, 24, 25, 30, 31, 32]
    assert inputs.positions.tolist() == [5, 2, 3, 4, 5, 0, 1, 2]
    assert inputs.slot_mapping.tolist() == [17, 6, 7, 8, 9, 12, 13, 14]
    assert inputs.query_lens.tolist() == [1, 4, 3]
    assert inputs.kv_lens.tolist() == [6, 6, 3]
    assert inputs.block_tables.tolist() == [[0, 4], [1, 2], [3, 0]]
    assert inputs.logits_rows.tolist() == [0, 7], "the chunk in the middle samples nothing"
    assert inputs.sampling.seed.tolist() == [1, 3]
    assert inputs.sampling.position.tolist() == [6, 3]
    assert inputs.sampling.adjustments == (LogitAdjustment(row=1, logit_bias=((5, 1.0),)),)
    assert inputs.moves.scrub_blocks == (7,)
    assert inputs.moves.block_copies == ()


def test_array_types() -> None:
    kv = make_kv()
    request = make_request("a", 3)
    kv.allocate("a", 3)
    inputs = build(kv, (request, 0, 3))
    for name in ("token_ids", "positions", "slot_mapping", "logits_rows"):
        assert getattr(inputs, name).dtype == "int64", name
    for name in ("query_lens", "kv_lens", "block_tables"):
        assert getattr(inputs, name).dtype == "int32", name


def test_blocks_held_for_later_tokens_are_not_shown() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    long, prompt = make_request("long", 12), make_request("prompt", 16, arrival=1)
    kv.allocate("long", 12)
    kv.allocate("prompt", 16)
    inputs = build(kv, (long, 11, 1), (prompt, 0, 5))
    assert inputs.block_tables.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert kv.block_tables[1].tolist()[:4] == [3, 4, 5, 6], "the manager's own table is untouched"


def test_a_step_that_samples_nothing() -> None:
    kv = make_kv(block_size=4)
    request = make_request("a", 6)
    kv.allocate("a", 6)
    inputs = build(kv, (request, 0, 4))
    assert inputs.logits_rows.tolist() == []
    assert inputs.sampling.num_rows == 0
    assert inputs.block_tables.tolist() == [[0]]


def test_inputs_do_not_follow_the_table() -> None:
    kv = make_kv(block_size=4)
    request = make_request("a", 4)
    kv.allocate("a", 4)
    inputs = build(kv, (request, 0, 4))
    kv.allocate("b", 4)
    kv.free("a")
    kv.allocate("c", 4)
    assert inputs.block_tables.tolist() == [[0]]


def test_chains_of_drafts_exactly() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    plain, one, two = (
        make_request("plain", [1, 2], seed=1),
        make_request("one", [10, 11, 12], seed=2),
        make_request("two", [20, 21, 22, 23], seed=3, presence_penalty=0.5),
    )
    kv.allocate("plain", 2)
    kv.allocate("one", 5)
    kv.allocate("two", 6)
    probs = object()
    drafts = (DraftedToken(13, probs=probs), DraftedToken(14))
    inputs = build_verify(kv, (plain, ()), (one, drafts), (two, (DraftedToken(24), DraftedToken(25))))
    assert inputs.token_ids.tolist() == [2, 12, 13, 14, 23, 24, 25]
    assert inputs.positions.tolist() == [1, 2, 3, 4, 3, 4, 5]
    assert inputs.slot_mapping.tolist() == [1, 6, 7, 8, 15, 16, 17]
    assert inputs.query_lens.tolist() == [1, 3, 3]
    assert inputs.kv_lens.tolist() == [2, 5, 6]
    assert inputs.logits_rows.tolist() == list(range(7)), "each draft's row is wanted"
    assert inputs.sampling.position.tolist() == [2, 3, 4, 5, 4, 5, 6]
    assert inputs.sampling.seed.tolist() == [1, 2, 2, 2, 3, 3, 3]
    assert [adjustment.row for adjustment in inputs.sampling.adjustments] == [4, 5, 6]
    histories = [adjustment.history for adjustment in inputs.sampling.adjustments]
    counts = [(h.token_ids.tolist(), h.in_output.tolist()) for h in histories if h is not None]
    prompt = [20, 21, 22, 23]
    assert counts == [
        (prompt, [0, 0, 0, 0]),
        ([*prompt, 24], [0, 0, 0, 0, 1]),
        ([*prompt, 24, 25], [0, 0, 0, 0, 1, 1]),
    ]
    found = inputs.drafts
    assert found is not None
    assert found.sequence.tolist() == [1, 2]
    assert found.first_row.tolist() == [1, 4]
    assert found.num_drafts.tolist() == [2, 2]
    assert found.token_ids.tolist() == [13, 14, 24, 25]
    assert found.parents is None
    assert found.probs == (probs, None, None, None)


def test_drafts_that_are_still_to_be_read_exactly() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    one, two = make_request("one", [10, 11, 12]), make_request("two", [20, 21], min_tokens=2)
    kv.allocate("one", 5)
    kv.allocate("two", 4)
    tokens = object()
    unread = tuple(DraftedToken(NO_TOKEN, unread=UnreadToken(tokens, place)) for place in (7, 3, 5))
    inputs = build_verify(kv, (one, (DraftedToken(13), unread[0])), (two, unread[1:]))
    assert inputs.token_ids.tolist() == [12, 13, NO_TOKEN, 21, NO_TOKEN, NO_TOKEN]
    assert inputs.positions.tolist() == [2, 3, 4, 1, 2, 3]
    drafts = inputs.drafts
    assert drafts is not None and drafts.unread is not None
    assert drafts.rows.tolist() == [1, 2, 4, 5]
    assert drafts.unread.tokens is tokens and drafts.unread.places.tolist() == [-1, 7, 3, 5]
    known = drafts.known(np.arange(100, 108))
    assert known.token_ids.tolist() == [13, 107, 103, 105] and known.unread is None
    read = inputs.with_read_drafts(np.arange(100, 108))
    assert read.token_ids.tolist() == [12, 13, 107, 21, 103, 105]
    assert read.drafts is not None and read.drafts.token_ids.tolist() == known.token_ids.tolist()
    failed = drafts.known(np.array([0, 0, 0, NO_TOKEN, 0, 6, 0, 7]))
    assert failed.token_ids.tolist() == [13, 7, NO_DRAFT, 6], "no token, and not what a row without one has"


def test_a_tree_of_drafts_exactly() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    chain, tree = (
        make_request("chain", [1, 2]),
        make_request("tree", [10, 11], min_tokens=2, stop_token_ids=frozenset({9})),
    )
    kv.allocate("chain", 3)
    kv.allocate("tree", 6)
    nodes = (DraftedToken(20, -1), DraftedToken(21, -1), DraftedToken(22, 1), DraftedToken(23, 2))
    inputs = build_verify(kv, (chain, (DraftedToken(3),)), (tree, nodes))
    assert inputs.token_ids.tolist() == [2, 3, 11, 20, 21, 22, 23]
    assert inputs.positions.tolist() == [1, 2, 1, 2, 2, 3, 4], "siblings share a position"
    assert inputs.slot_mapping.tolist() == [1, 2, 5, 6, 7, 8, 9], "and have slots of their own"
    assert inputs.sampling.position.tolist() == [2, 3, 2, 3, 3, 4, 5]
    banned = [a.row for a in inputs.sampling.adjustments if a.banned_token_ids]
    assert banned == [2, 3, 4], "min_tokens is counted along the branch"
    assert inputs.drafts is not None
    assert inputs.drafts.parents is not None
    assert inputs.drafts.parents.tolist() == [-1, -1, -1, 1, 2]


def test_a_token_without_a_block_is_refused_before_it_is_written_into_block_0() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    first, second = make_request("first", 4), make_request("second", 5)
    kv.allocate("first", 4)
    kv.allocate("second", 4)
    with pytest.raises(AssertionError, match="second is scheduled up to token 5 and holds blocks for 4"):
        build(kv, (first, 3, 1), (second, 4, 1))


def test_a_chunk_that_samples_nothing_beside_drafts_has_no_row() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    chunk, decode = make_request("chunk", [1, 2, 3, 4, 5]), make_request("decode", [7, 8])
    kv.allocate("chunk", 5)
    kv.allocate("decode", 4)
    table = SamplingTable(kv.max_num_seqs)
    for request in (chunk, decode):
        table.write(kv.row(request.request_id), request)
    items = [
        ScheduledItem(ScheduledRequest("chunk", 0, 3, False), chunk),
        ScheduledItem(ScheduledRequest("decode", 1, 3, True, 2), decode, (DraftedToken(9), DraftedToken(10))),
    ]
    inputs = build_step_inputs(items, kv, table, BlockMoves())
    assert inputs.logits_rows.tolist() == [3, 4, 5]
    assert inputs.drafts is not None
    assert inputs.drafts.first_row.tolist() == [0]
    assert inputs.drafts.sequence.tolist() == [1]
    assert inputs.state_slots is not None
    assert inputs.state_slots.tolist() == [kv.row("chunk"), kv.row("decode")]


def prompt_rows(inputs: StepInputs) -> list[tuple[int, int, int, int]]:
    """(sequence, row, token, number of the likeliest) of each."""
    found = inputs.prompt_rows
    assert found is not None
    columns = (found.sequence, found.rows, found.token_ids, found.num_top)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_tokens_behind_a_chunk_of_a_scored_prompt_are_named() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    scored = make_request("scored", [20, 21, 22, 23, 24], prompt_logprobs=2)
    plain = make_request("plain", [30, 31, 32])
    last = make_request("last", [40, 41, 42], prompt_logprobs=0)
    for request in (scored, plain, last):
        kv.allocate(request.request_id, 5)
    inputs = build(kv, (scored, 1, 2), (plain, 0, 3), (last, 0, 3))
    assert prompt_rows(inputs) == [(0, 0, 22, 2), (0, 1, 23, 2), (2, 5, 41, 0), (2, 6, 42, 0)]
    assert inputs.logits_rows.tolist() == [4, 7], "they are no rows to draw from"


def test_a_scored_prompt_has_no_rows_behind_its_end() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    scored = make_request("scored", [20, 21], prompt_logprobs=2)
    kv.allocate("scored", 4)
    assert prompt_rows(build(kv, (scored, 0, 1))) == [(0, 0, 21, 2)]
    assert build(kv, (scored, 1, 1)).prompt_rows is None
    table = SamplingTable(kv.max_num_seqs)
    table.write(kv.row("scored"), scored)
    scored.append(22)
    items = [ScheduledItem(ScheduledRequest("scored", 2, 1, True), scored)]
    assert build_step_inputs(items, kv, table, BlockMoves()).prompt_rows is None


def test_a_prompt_that_is_computed_again_behind_its_first_token_is_not_scored_again() -> None:
    kv = make_kv(num_blocks=16, block_size=4)
    scored = make_request("scored", [20, 21, 22], prompt_logprobs=2)
    kv.allocate("scored", 4)
    table = SamplingTable(kv.max_num_seqs)
    table.write(kv.row("scored"), scored)
    items = [ScheduledItem(ScheduledRequest("scored", 0, 3, True), scored)]
    assert len(prompt_rows(build_step_inputs(items, kv, table, BlockMoves()))) == 2
    scored.append(23)  # and then a pass fails, after which it begins at its last whole block
    items = [ScheduledItem(ScheduledRequest("scored", 0, 4, True), scored)]
    assert build_step_inputs(items, kv, table, BlockMoves()).prompt_rows is None
