"""SuffixDrafter: what it reads, what it only walks through, and what it holds."""

from __future__ import annotations

import random

from engine.compute.drafters.suffix import SuffixDrafter
from engine.compute.drafters.text_source import READ_PIECE, READ_SHARE
from engine.plan.speculation.drafter import DraftJob
from tests.support.draft_jobs import ToldSequence, draft_request, drafted

SENTENCE = list(range(10, 80))


def test_goes_on_as_the_longest_repeat_did() -> None:
    assert drafted(SuffixDrafter(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], 5) == [6, 7, 8, 9, 1]
    assert drafted(SuffixDrafter(), SENTENCE) == []


def test_a_copy_is_drafted_in_longer_and_longer_pieces() -> None:
    sequence = ToldSequence(SuffixDrafter(), [*SENTENCE, *SENTENCE[:2]])
    lengths, place = [], 2
    while place < len(SENTENCE):
        token_ids = list(sequence.ask(min(32, len(SENTENCE) - place)).token_ids)
        lengths.append(len(token_ids))
        assert token_ids == SENTENCE[place : place + len(token_ids)]
        sequence.commit(SENTENCE[place : place + len(token_ids) + 1])
        place += len(token_ids) + 1
    *grown, _ = lengths  # the text ends within the last
    assert len(grown) > 1 and grown == sorted(grown) and max(lengths) >= 16


def test_drafts_are_walked_through_but_never_learnt() -> None:
    sequence = ToldSequence(SuffixDrafter(), [*SENTENCE, *SENTENCE[:8]])
    sequence.redraft(0, SENTENCE[8:10])
    assert list(sequence.ask(4).token_ids) == SENTENCE[10:14]
    for _ in range(5):  # the same wrong draft again and again leaves no trace
        sequence.redraft(0, [1, 2, 3])
        assert sequence.ask(4).token_ids == ()
    sequence.redraft(0, [])
    sequence.commit([1, 2])
    assert sequence.ask(4).token_ids == ()


def test_drafts_in_pieces_are_no_longer_than_drafts_at_once() -> None:
    tokens = [*SENTENCE, *SENTENCE[:5]]
    at_once = drafted(SuffixDrafter(), tokens, 32)
    sequence = ToldSequence(SuffixDrafter(), tokens)
    while sequence.ask(2).token_ids:
        pass
    assert sequence.drafts == SENTENCE[5 : 5 + len(sequence.drafts)]
    assert len(at_once) <= len(sequence.drafts) <= len(at_once) + 2


def test_a_long_prompt_is_read_in_pieces() -> None:
    draw = random.Random(1)
    text = [draw.randrange(1000) for _ in range(2 * READ_PIECE + 10)]
    sequence = ToldSequence(SuffixDrafter(), [*text, *text[100:110]])
    answers = [sequence.ask(4) for _ in range(3)]
    assert [answer.is_behind for answer in answers] == [True, True, False]
    assert [answer.token_ids for answer in answers] == [(), (), tuple(text[110:114])]


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    drafter = SuffixDrafter()
    draw = random.Random(1)
    text = tuple(draw.randrange(1000) for _ in range(2 * READ_PIECE))
    short = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4)
    assert len(short) <= READ_SHARE
    jobs = [DraftJob(draft_request(name), 0, 0, tokens, len(tokens), 2) for name, tokens in
            (("long", text), ("longer", text), ("short", short))]  # fmt: skip
    answers = drafter.draft(jobs).drafts
    assert [(answer.request_id, answer.is_behind) for answer in answers] == [
        ("long", True), ("longer", True), ("short", False)]  # fmt: skip
    assert answers[2].token_ids == (5, 6)


def test_past_its_limit_it_matches_what_it_has() -> None:
    drafter = SuffixDrafter(max_tokens=40)
    sequence = ToldSequence(drafter, SENTENCE[:40])
    sequence.commit(range(1000, 1030))
    sequence.commit(range(1000, 1010))
    assert sequence.ask(4).token_ids == ()  # that repeat lies past the limit
    sequence.commit(SENTENCE[20:26])
    assert list(sequence.ask(4).token_ids) == SENTENCE[26:30]


def test_stops_with_a_token_that_stops_the_request() -> None:
    request = draft_request(num_prompt_tokens=70, stop_token_ids=[SENTENCE[12]])
    sequence = ToldSequence(SuffixDrafter(), [*SENTENCE, *SENTENCE[:10]], request)
    assert list(sequence.ask(32).token_ids) == SENTENCE[10:13]
    assert sequence.ask(32).token_ids == ()
