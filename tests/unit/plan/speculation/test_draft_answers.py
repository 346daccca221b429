"""Whatever a drafter answers, what cannot be used is refused, and nothing is raised but what is declared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult, Lane, fault_of, read_answers
from tests.support.draft_jobs import draft_request

VOCAB = 100


def job_for(name: str = "r", *, num_drafts: int = 0) -> DraftJob:
    """Three known tokens, the last of them drafts; four more are wanted, and two other outcomes."""
    return DraftJob(draft_request(name), 5, 0, (1, 2, 3), 3 - num_drafts, 4, num_lanes=2)


GOOD = Draft("r", 5, 3, (7, 8))
ABSURD = object()


class Hostile:
    """Raises whatever is done with it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "draft",
    [
        GOOD,
        Draft("r", 5, 3, ()),
        Draft("r", 5, 3, (), is_behind=True),
        Draft("r", 5, 3, (0, 99, 5, 5)),
        Draft("r", 5, 3, (7, 8), (-1, -1)),
        Draft("r", 5, 3, (7, 8), (-1, 0), ("p", "q")),
        Draft("r", 5, 3, (7, 8), chances=(1.0, 0.0)),
        Draft("r", 5, 3, (), ()),
        Draft("r", 5, 3, (7, 8), lanes=(Lane(3, (9, 99)), Lane(4, (0,)))),
    ],
)
def test_a_fitting_answer_has_no_fault(draft: Draft) -> None:
    assert fault_of(job_for(), draft, VOCAB) is None
    answers = read_answers([job_for()], DraftResult((draft,), 0.5), VOCAB)
    assert answers.fitting == [(job_for(), draft)]
    assert (answers.unfit, answers.fault, answers.num_unfit_tokens, answers.seconds) == ([], None, 0, 0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (1, 2, 3, 4, 5)},
        {"token_ids": (100,)},
        {"lanes": (Lane(5, (7, 8)),)},
        {"lanes": (Lane(2, (7, 8)),)},
        {"lanes": (Lane(3, (100,)),)},
        {"lanes": (Lane(3, (7, -1)),)},
        {"lanes": (Lane(3, ()),)},
        {"lanes": (Lane(3, cast(Any, [7])),)},
        {"lanes": (Lane(3, cast(Any, ("7",))),)},
        {"lanes": (Lane(cast(Any, 3.0), (7,)),)},
        {"lanes": [Lane(3, (7,))]},
        {"lanes": (((3, (7,))),)},
        {"lanes": None},
        {"token_ids": (-1,)},
        {"token_ids": ("7",)},
        {"token_ids": (7.0,)},
        {"token_ids": (np.int64(7),)},
        {"token_ids": (True,)},
        {"token_ids": (None,)},
        {"token_ids": [7, 8]},
        {"token_ids": np.array([7, 8])},
        {"token_ids": "78"},
        {"token_ids": None},
        {"token_ids": 7},
        {"first": 2},
        {"first": 4},
        {"first": "3"},
        {"first": np.int64(3)},
        {"epoch": 4},
        {"epoch": 6},
        {"epoch": None},
        {"epoch": 4, "token_ids": ()},
        {"first": 4, "token_ids": ()},
        {"epoch": 6, "token_ids": (), "is_behind": True},
        {"parents": (0, 0)},
        {"parents": (-1, 1)},
        {"parents": (-2, 0)},
        {"parents": (-1,)},
        {"parents": (-1, -1, -1)},
        {"parents": [-1, 0]},
        {"parents": ("-1", 0)},
        {"parents": 3},
        {"parents": (-1, 0), "first": 2},
        {"parents": (-1, 0), "epoch": 4},
        {"probs": ("p",)},
        {"probs": ["p", "q"]},
        {"probs": None},
        {"chances": (0.5,)},
        {"chances": (0.5, 1.5)},
        {"chances": (0.5, -0.1)},
        {"chances": (0.5, float("nan"))},
        {"chances": (0.5, 1)},
        {"chances": [0.5, 0.5]},
        {"chances": None},
        {"is_behind": 1},
        {"is_behind": np.array([True, False])},
        {"method": None},
        {"method": ["ngram"]},
    ],
    ids=str,
)
def test_a_fault_is_found_and_costs_only_its_own_request(changes: dict[str, Any]) -> None:
    wrong = replace(GOOD, **changes)
    assert fault_of(job_for(), wrong, VOCAB)
    other = Draft("other", 5, 3, (7,))
    answers = read_answers([job_for(), job_for("other")], DraftResult((wrong, other), 0.0), VOCAB)
    assert answers.fitting == [(job_for("other"), other)]
    assert answers.unfit == [job_for()]
    assert answers.fault
    assert answers.num_unfit_tokens == (len(wrong.token_ids) if type(wrong.token_ids) is tuple else 0)


def test_a_tree_does_not_follow_drafts() -> None:
    tree = Draft("r", 5, 3, (7, 8), (-1, 0))
    assert fault_of(job_for(num_drafts=1), GOOD, VOCAB) is None
    assert fault_of(job_for(num_drafts=1), tree, VOCAB) == "a tree behind other drafts"
    assert fault_of(job_for(num_drafts=1), Draft("r", 5, 3, (), ()), VOCAB) is None


def test_who_is_not_answered_has_an_answer_without_tokens() -> None:
    answers = read_answers([job_for()], DraftResult((), 0.0), VOCAB)
    assert answers.fitting == [(job_for(), Draft("r", 5, 3, ()))]
    assert answers.fault is None


def test_an_answer_for_nobody_is_a_fault_of_nobody_else() -> None:
    stray = Draft("stray", 5, 3, (1, 2, 3))
    answers = read_answers([job_for()], DraftResult((stray, GOOD), 0.0), VOCAB)
    assert answers.fitting == [(job_for(), GOOD)]
    assert answers.unfit == []
    assert answers.fault is not None and "stray" in answers.fault
    assert answers.num_unfit_tokens == 3


class DraftLike(Draft):
    """Passes for a Draft, and is none."""


@pytest.mark.parametrize(
    "result",
    [
        None,
        (),
        "draft",
        (GOOD,),
        ABSURD,
        DraftResult,
        DraftResult(cast(Any, None), 0.0),
        DraftResult(cast(Any, [GOOD]), 0.0),
        DraftResult(cast(Any, GOOD), 0.0),
        DraftResult(cast(Any, (None,)), 0.0),
        DraftResult(cast(Any, ({"request_id": "r"},)), 0.0),
        DraftResult((DraftLike("r", 5, 3, (7,)),), 0.0),
        DraftResult((replace(GOOD, request_id=cast(Any, None)),), 0.0),
        DraftResult((replace(GOOD, request_id=cast(Any, ["r"])),), 0.0),
        DraftResult((GOOD,), cast(Any, None)),
        DraftResult((GOOD,), cast(Any, "1")),
        DraftResult((GOOD,), float("nan")),
        DraftResult((GOOD,), float("inf")),
        DraftResult((GOOD,), -1.0),
    ],
    ids=lambda result: type(result).__name__,
)
def test_what_is_no_result_is_a_value_error(result: Any) -> None:
    with pytest.raises(ValueError):
        read_answers([job_for()], result, VOCAB)


@pytest.mark.parametrize(
    "field", ["epoch", "first", "token_ids", "parents", "probs", "is_behind", "method", "chances"]
)
def test_nothing_of_a_hostile_field_is_touched(field: str) -> None:
    hostile = Hostile()
    wrong = Draft(**{**{name: getattr(GOOD, name) for name in Draft.__slots__}, field: cast(Any, hostile)})
    assert fault_of(job_for(), wrong, VOCAB) == "an answer with fields of other types"
    inside = replace(GOOD, token_ids=cast(Any, (hostile, 3)), parents=cast(Any, (hostile, 0)))
    assert fault_of(job_for(), inside, VOCAB) == "an answer with fields of other types"
    for result in (hostile, DraftResult(cast(Any, (hostile,)), 0.0), DraftResult((), cast(Any, hostile))):
        with pytest.raises(ValueError):
            read_answers([job_for()], cast(Any, result), VOCAB)
