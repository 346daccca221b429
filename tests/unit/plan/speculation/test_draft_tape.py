"""The tape against a world in which drafters are right, wrong, late and stale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.plan.speculation.draft_tape import (
    DraftedToken,
    DraftTape,
    TapeOutcome,
    num_levels,
    stated_chances,
)
from engine.plan.speculation.drafter import Draft, Lane

KNOWN = [1, 2, 3]


def draft(first: int, *token_ids: int, epoch: int = 0, parents: tuple[int, ...] | None = None) -> Draft:
    return Draft("r", epoch, first, token_ids, parents)


def tape_with(*token_ids: int) -> DraftTape:
    tape = DraftTape()
    assert tape.put(draft(3, *token_ids), KNOWN, "ngram") == 0
    return tape


def tokens(tape: DraftTape) -> list[int]:
    return [drafted.token_id for drafted in tape.drafted]


def test_drafts_are_appended_where_the_tape_ends() -> None:
    tape = tape_with(4, 5)
    assert tape.put(draft(5, 6), KNOWN, "draft_model") == 0
    assert tokens(tape) == [4, 5, 6]
    assert tape.method == "ngram", "who drafted first"
    assert not tape.is_tree


def test_a_gap_or_an_overlap_is_wrong_and_changes_nothing() -> None:
    tape = tape_with(4, 5)
    assert tape.put(draft(6, 7), KNOWN, "ngram") is None
    assert tape.put(draft(4, 5), KNOWN, "ngram") is None
    assert tokens(tape) == [4, 5]
    assert tape.epoch == 0


def test_what_goes_on_after_all_that_was_committed_is_a_hit_and_stays() -> None:
    tape = tape_with(4, 5, 6, 7)
    assert tape.commit([4, 5]) == (TapeOutcome.HIT, 2)
    assert (tokens(tape), tape.epoch) == ([6, 7], 0)


def test_a_tape_that_was_right_but_too_short_keeps_its_epoch() -> None:
    tape = tape_with(4)
    assert tape.commit([4, 5]) == (TapeOutcome.LATE, 1)
    assert (tokens(tape), tape.epoch) == ([], 0)


def test_an_empty_tape_is_late_not_wrong() -> None:
    tape = DraftTape()
    assert tape.commit([4]) == (TapeOutcome.LATE, 0)
    assert tape.epoch == 0


def test_a_miss_drops_everything_and_begins_an_epoch() -> None:
    tape = tape_with(4, 5, 6)
    assert tape.commit([4, 9]) == (TapeOutcome.MISS, 1)
    assert (tokens(tape), tape.epoch) == ([], 1)
    assert tape.put(draft(6, 7), [*KNOWN, 4, 9], "ngram") is None


def test_late_drafts_that_agree_are_confirmed_and_go_on() -> None:
    tape = DraftTape()
    tape.commit([4, 5])
    known = [*KNOWN, 4, 5]
    assert tape.put(draft(3, 4), known, "ngram") == 1
    assert (tokens(tape), tape.epoch) == ([], 0)
    assert tape.put(draft(4, 5, 6, 7), known, "ngram") == 1
    assert (tokens(tape), tape.epoch) == ([6, 7], 0)


def test_late_drafts_that_disagree_begin_an_epoch() -> None:
    tape = DraftTape()
    tape.commit([4, 5])
    assert tape.put(draft(3, 4, 9, 7), [*KNOWN, 4, 5], "ngram") is None
    assert (tokens(tape), tape.epoch) == ([], 1)


def test_a_tree_is_for_one_round_and_its_drafter_goes_on() -> None:
    tape = DraftTape()
    tree = draft(3, 4, 5, 6, parents=(-1, -1, 0))
    assert tape.put(tree, KNOWN, "medusa") == 0
    assert tape.is_tree
    assert tape.put(draft(6, 7), KNOWN, "ngram") is None, "nothing follows a tree"
    assert tape.commit([4, 6, 8]) == (TapeOutcome.LATE, 0)
    assert (tokens(tape), tape.epoch) == ([], 0)


def test_of_a_late_tree_the_branch_that_came_true_is_kept() -> None:
    tape = DraftTape()
    tape.commit([5])
    tree = draft(3, 4, 5, 6, 7, 8, 9, parents=(-1, -1, 0, 1, 1, 3))
    assert tape.put(tree, [*KNOWN, 5], "medusa") == 1
    assert tape.drafted == [DraftedToken(7, -1), DraftedToken(8, -1), DraftedToken(9, 0)]


def test_a_late_tree_without_the_branch_that_came_true_is_wrong() -> None:
    tape = DraftTape()
    tape.commit([11])
    tree = draft(3, 4, 5, parents=(-1, -1))
    assert tape.put(tree, [*KNOWN, 11], "medusa") is None


def test_levels_are_the_longest_way_down() -> None:
    tape = tape_with(4, 5, 6)
    assert num_levels(tape.drafted) == 3
    assert num_levels([]) == 0
    tree = DraftTape()
    assert tree.put(draft(3, 4, 5, 6, 7, 8, parents=(-1, -1, 0, 0, 3)), KNOWN, "medusa") == 0
    assert num_levels(tree.drafted) == 3


def test_a_chance_is_that_of_a_draft_and_all_before_it() -> None:
    chain = [DraftedToken(4, chance=0.8), DraftedToken(5, chance=0.5), DraftedToken(6, chance=0.25)]
    assert stated_chances(chain) == pytest.approx([0.8, 0.4, 0.1])
    tree = [DraftedToken(4, -1, chance=0.8), DraftedToken(5, 0, chance=0.5), DraftedToken(6, -1, chance=0.2)]
    assert stated_chances(tree) == pytest.approx([0.8, 0.4, 0.2])
    assert stated_chances(chain[1:]) == pytest.approx([0.5, 0.125])  # once the first has come
    assert stated_chances([]) == []


def test_of_drafts_without_a_word_or_that_were_sampled_no_chance_is_known() -> None:
    """Whether a sampled draft is verified must not depend on which one it is."""
    told = DraftedToken(4, chance=0.8)
    assert stated_chances([told, DraftedToken(5)]) == []
    assert stated_chances([told, DraftedToken(5, probs="p", chance=0.5)]) == []


# Lanes: drafts for other outcomes.


def tape_with_lanes() -> DraftTape:
    """Drafts 4, 5 for positions 3 and 4; 7, 8 in case that 6 comes in place of the 5; 11 behind a 10."""
    tape = DraftTape()
    lanes = (Lane(4, (6, 7, 8)), Lane(3, (10, 11)), Lane(3, (12,)))
    assert tape.put(replace(draft(3, 4, 5), lanes=lanes), KNOWN, "draft_model") == 0
    return tape


def test_where_another_outcome_was_foreseen_its_drafts_are_there_in_a_new_epoch() -> None:
    tape = tape_with_lanes()
    assert tape.commit([4, 6], first=3) == (TapeOutcome.LANE, 1)
    assert (tokens(tape), tape.epoch, tape.lanes) == ([7, 8], 1, {})
    tape = tape_with_lanes()
    assert tape.commit([10], first=3) == (TapeOutcome.LANE, 0)
    assert (tokens(tape), tape.epoch) == ([11], 1)


@pytest.mark.parametrize(
    ("committed", "outcome"),
    [
        ([4, 9], TapeOutcome.MISS),  # no lane foresaw it
        ([6], TapeOutcome.MISS),  # a lane did, one position further
        ([4, 5, 6], TapeOutcome.LATE),
        ([10, 11], TapeOutcome.MISS),  # more came than the one token that a lane is for
        ([12], TapeOutcome.MISS),  # nothing was drafted behind it
    ],
)
def test_a_lane_is_for_one_token_at_one_position(committed: list[int], outcome: TapeOutcome) -> None:
    tape = tape_with_lanes()
    assert tape.commit(committed, first=3)[0] is outcome
    assert (tokens(tape), tape.lanes) == ([], {})


def test_lanes_are_those_of_the_newest_answer_and_go_with_the_drafts() -> None:
    tape = tape_with_lanes()
    assert tape.put(draft(5, 9), KNOWN, "draft_model") == 0
    assert tape.lanes == {}
    tape = tape_with_lanes()
    tape.drop_drafts()
    assert tape.lanes == {}


def test_after_a_hit_what_was_foreseen_further_on_still_holds() -> None:
    tape = tape_with_lanes()
    assert tape.commit([4], first=3) == (TapeOutcome.HIT, 1)
    assert tape.commit([6], first=4) == (TapeOutcome.LANE, 0)
    assert tokens(tape) == [7, 8]
