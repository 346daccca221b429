from typing import Any

import numpy as np
import pytest

from engine.plan.request import Request
from engine.plan.scheduling.sampling_table import SamplingTable
from engine.plan.step_records import LogitAdjustment, SamplingInputs
from tests.support.factories import drawn_by, make_request


def gather_one(request: Request) -> SamplingInputs:
    table = SamplingTable(2)
    table.write(1, request)
    return drawn_by(table, np.array([1]), [request], np.array([request.num_tokens]))


def test_columns_follow_the_rows_asked_for() -> None:
    table = SamplingTable(4)
    a = make_request("a", temperature=0.0, seed=7)
    b = make_request("b", 6, temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=9, logprobs=2)
    table.write(2, a)
    table.write(0, b)
    columns = drawn_by(table, np.array([0, 2]), [b, a], np.array([6, 4]))
    assert columns.temperature.tolist() == [0.5, 0.0]
    assert columns.top_k.tolist() == [3, 0]
    assert columns.top_p.tolist() == [0.75, 1.0]
    assert columns.min_p.tolist() == [0.25, 0.0]
    assert columns.seed.tolist() == [9, 7]
    assert columns.position.tolist() == [6, 4]
    assert columns.num_logprobs.tolist() == [2, -1]
    assert columns.adjustments == ()
    assert columns.num_rows == 2
    assert columns.temperature.dtype == columns.top_p.dtype == columns.min_p.dtype == "float32"
    assert columns.top_k.dtype == columns.num_logprobs.dtype == "int32"
    assert columns.seed.dtype == columns.position.dtype == "int64"


def test_a_row_forgets_who_sat_there_before() -> None:
    table = SamplingTable(1)
    table.write(0, make_request("a", logit_bias=((1, 2.0),), logprobs=5, top_k=4))
    b = make_request("b")
    table.write(0, b)
    columns = drawn_by(table, np.array([0]), [b], np.array([4]))
    assert (columns.top_k[0], columns.num_logprobs[0], columns.adjustments) == (0, -1, ())


def test_gathered_columns_do_not_change_with_the_table() -> None:
    table = SamplingTable(1)
    a = make_request("a", temperature=0.5)
    table.write(0, a)
    columns = drawn_by(table, np.array([0]), [a], np.array([4]))
    table.write(0, make_request("b", temperature=0.75))
    assert columns.temperature.tolist() == [0.5]


@pytest.mark.parametrize(
    ("seed", "stored"),
    [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (-1, -1), (-(2**63), -(2**63))],
)
def test_a_seed_keeps_its_64_bits(seed: int, stored: int) -> None:
    assert gather_one(make_request(seed=seed)).seed.tolist() == [stored]


def test_logprobs_zero_is_not_none() -> None:
    assert gather_one(make_request(logprobs=0)).num_logprobs.tolist() == [0]


def test_bias_and_allowed_tokens_make_an_adjustment() -> None:
    assert gather_one(make_request(logit_bias=((3, -1.0),))).adjustments == (
        LogitAdjustment(row=0, logit_bias=((3, -1.0),)),
    )
    assert gather_one(make_request(allowed_token_ids=())).adjustments == (
        LogitAdjustment(row=0, allowed_token_ids=()),
    )


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_carry_counts_of_the_history(penalty: str) -> None:
    sampling: dict[str, Any] = {penalty: 1.5}
    request = make_request("a", [5, 6], **sampling)
    request.append(7)
    (adjustment,) = gather_one(request).adjustments
    request.append(8)
    assert adjustment.history is not None
    assert adjustment.history.token_ids.tolist() == [5, 6, 7]
    assert adjustment.history.in_output.tolist() == [0, 0, 1]
    assert getattr(adjustment, penalty) == 1.5


def test_the_stop_set_is_banned_until_min_tokens_are_out() -> None:
    request = make_request("a", min_tokens=2, stop_token_ids=frozenset((9, 2)))
    table = SamplingTable(1)
    table.write(0, request)
    banned = []
    for _ in range(3):
        columns = drawn_by(table, np.array([0]), [request], np.array([request.num_tokens]))
        banned.append([adjustment.banned_token_ids for adjustment in columns.adjustments])
        request.append(1)
    assert banned == [[(2, 9)], [(2, 9)], []]


def test_min_tokens_without_a_stop_set_needs_nothing() -> None:
    assert gather_one(make_request(min_tokens=2)).adjustments == ()


def test_adjustments_name_their_row() -> None:
    table = SamplingTable(3)
    requests = [
        make_request("a"),
        make_request("b", logit_bias=((1, 1.0),)),
        make_request("c", presence_penalty=1.0),
    ]
    for row, request in enumerate(requests):
        table.write(row, request)
    columns = drawn_by(
        table, np.array([2, 0, 1]), [requests[2], requests[0], requests[1]], np.array([4, 4, 4])
    )
    assert [(adjustment.row, bool(adjustment.logit_bias)) for adjustment in columns.adjustments] == [
        (0, False),
        (2, True),
    ]


def banned_after(request: Request, *path: int) -> tuple[int, ...]:
    """What the row that follows the request's tokens and these drafts may not draw."""
    table = SamplingTable(1)
    table.write(0, request)
    columns = drawn_by(table, np.array([0]), [request], np.array([request.num_tokens]), [path])
    return columns.adjustments[0].banned_token_ids if columns.adjustments else ()


def test_a_bad_word_s_last_token_is_banned_where_its_others_end_the_output() -> None:
    words = ((9,), (1, 2), (1, 2, 3), (2, 2))
    request = make_request("a", [7, 1], bad_words=words)
    assert banned_after(request) == (9,), "the prompt does not count"
    assert banned_after(request, 1) == (9, 2)
    assert banned_after(request, 1, 2) == (9, 3, 2), "drafts do"
    request.append(1)
    assert banned_after(request) == (9, 2)
    assert banned_after(request, 2) == (9, 3, 2)
    assert banned_after(request, 4) == (9,)


def test_bad_words_join_the_stop_set() -> None:
    request = make_request(bad_words=((3,),), min_tokens=1, stop_token_ids=frozenset((8,)))
    assert banned_after(request) == (8, 3)


def test_a_row_that_has_nothing_to_ban_needs_nothing() -> None:
    assert gather_one(make_request(bad_words=((1, 2),))).adjustments == ()


def test_rows_that_score_their_prompt_are_told_until_there_is_output() -> None:
    table = SamplingTable(4)
    done = make_request("done", prompt_logprobs=0)
    done.append(5)
    for row, request in enumerate(
        (make_request("a", prompt_logprobs=0), make_request("b"), done, make_request("c", prompt_logprobs=2))
    ):
        table.write(row, request)
    assert table.scoring(np.array([3, 2, 1, 0])) == [0, 3]
