from engine.kv.paged_kv_manager import PagedKvManager
from engine.outputs import LogitAdjustment, ScheduledRequest, StepInputs
from engine.request import Request
from engine.scheduling.sampling_table import SamplingTable
from engine.scheduling.step_inputs import BlockMoves, build_step_inputs
from tests.factories import make_kv, make_request


def build(kv: PagedKvManager, *work: tuple[Request, int, int]) -> StepInputs:
    """Seat and schedule (request, first position, number of tokens)."""
    table = SamplingTable(kv.max_num_seqs)
    scheduled = []
    for request, first, count in work:
        table.seat(kv.row(request.request_id), request)
        samples = first + count == request.num_tokens
        scheduled.append(ScheduledRequest(request.request_id, first, count, samples))
    return build_step_inputs(
        scheduled, [request for request, _, _ in work], kv, table, BlockMoves(scrub=(7,))
    )


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
    assert inputs.scrub_blocks == (7,)
    assert inputs.block_copies == ()


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
