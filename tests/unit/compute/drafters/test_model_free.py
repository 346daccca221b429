"""ModelFreeDrafter: who speaks, and what every model-free drafter owes to the protocol."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest

from engine.compute.drafters.known_tokens import KnownTokens
from engine.compute.drafters.model_free import ModelFreeDrafter, ModelFreeSource
from engine.compute.drafters.ngram import NgramDrafter, NgramSource
from engine.compute.drafters.prediction import PredictionDrafter, PredictionSource
from engine.compute.drafters.suffix import SuffixDrafter, SuffixSource
from engine.compute.drafters.text_source import READ_PIECE, Proposal, ReadAllowance, TextDrafter
from engine.plan.speculation.drafter import Drafter, DraftJob, DraftRequest
from tests.support.draft_jobs import ToldSequence, draft_request

DRAFTERS = (NgramDrafter, SuffixDrafter, PredictionDrafter, ModelFreeDrafter)
TEXT = list(range(10, 80))


def job(request: DraftRequest, first: int, tokens: list[int], num_wanted: int = 4) -> DraftJob:
    return DraftJob(request, 3, first, tuple(tokens), first + len(tokens), num_wanted)


def test_the_prediction_speaks_while_it_is_followed_then_the_automaton() -> None:
    prediction = list(range(200, 220))
    request = draft_request(num_prompt_tokens=len(TEXT), prediction=prediction)
    sequence = ToldSequence(ModelFreeDrafter(), TEXT, request)
    draft = sequence.ask(4)
    assert (draft.method, list(draft.token_ids)) == ("prediction", prediction[:4])
    sequence.commit([*prediction[:6], *TEXT[10:16]])
    draft = sequence.ask(4)
    assert (draft.method, list(draft.token_ids)) == ("suffix", TEXT[16:20])
    sequence.commit([*TEXT[16:20], *prediction[7:9]])
    assert sequence.ask(4).method == "prediction"


def test_n_grams_speak_while_a_long_prompt_is_being_read() -> None:
    draw = random.Random(2)
    prompt = [draw.randrange(1000) for _ in range(READ_PIECE + 100)]
    sequence = ToldSequence(ModelFreeDrafter(), [*prompt, *prompt[50:60]])
    draft = sequence.ask(4)
    assert (draft.method, list(draft.token_ids), draft.is_behind) == ("ngram", prompt[60:64], True)
    draft = sequence.ask(4)
    assert (draft.method, list(draft.token_ids), draft.is_behind) == ("suffix", prompt[64:68], False)


def test_nobody_speaks_without_an_idea() -> None:
    draft = ToldSequence(ModelFreeDrafter(), TEXT).ask(4)
    assert draft.token_ids == () and not draft.is_behind


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_is_cheap_and_takes_many_jobs(kind: type[Drafter]) -> None:
    drafter = kind()
    assert drafter.is_cheap and not drafter.is_stepwise and not drafter.reads_features
    requests = [draft_request(f"r{n}", 12, prediction=range(500, 520)) for n in range(5)]
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]
    result = drafter.draft([job(request, 0, [n, *text]) for n, request in enumerate(requests)])
    assert [draft.request_id for draft in result.drafts] == [f"r{n}" for n in range(5)]
    assert all(draft.token_ids for draft in result.drafts)
    assert all((draft.first, draft.epoch) == (12, 3) for draft in result.drafts)
    assert all(type(token) is int for draft in result.drafts for token in draft.token_ids)
    assert 0 < result.draft_s < 1


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_job_that_leaves_something_out_gets_no_answer_and_spoils_none(kind: type[Drafter]) -> None:
    drafter = kind()
    known, unknown = draft_request("known", 8), draft_request("unknown", 8)
    text = [1, 2, 3, 4, 1, 2, 3, 4]
    drafter.draft([job(known, 0, text, 0)])
    gap = job(known, 20, [1])
    assert [d.request_id for d in drafter.draft([gap, job(draft_request("new"), 0, text)]).drafts] == ["new"]
    assert drafter.draft([job(unknown, 3, [1])]).drafts == ()
    assert [draft.first for draft in drafter.draft([job(known, 8, [])]).drafts] == [8]  # as if nothing was


@pytest.mark.parametrize("kind", DRAFTERS)
def test_closing_frees_everything(kind: type[Drafter]) -> None:
    drafter, kinds = kind(), (NgramSource, SuffixSource, PredictionSource, ModelFreeSource)
    gc.freeze()  # what other tests' engines hold does not count, as from the next module on anyway
    for n in range(3):
        request = draft_request(f"r{n}", 8, prediction=TEXT)
        drafter.draft([job(request, 0, [1, 2, 3, 4, 1, 2, 3, 4])])
    held = [weakref.ref(value) for value in gc.get_objects() if issubclass(type(value), kinds)]
    assert len(held) >= 3
    drafter.close(["r0", "r1", "r2", "never heard of"])
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []
    assert drafter.draft([job(draft_request("r0", 8), 8, [1])]).drafts == ()


def test_a_source_that_says_too_much_is_not_told_off_by_the_table() -> None:
    """What a source proposes is cut at a stop token, and remembered as answered."""

    class Fixed:
        def propose(self, known: KnownTokens, num_wanted: int) -> Proposal:
            return Proposal([5, 6, 7][:num_wanted], 1, "fixed")

    drafter = TextDrafter(lambda request: Fixed(), ReadAllowance())
    request = draft_request(stop_token_ids=[6])
    assert drafter.draft([job(request, 0, [1, 2])]).drafts[0].token_ids == (5, 6)
    ahead = DraftJob(request, 3, 4, (), 2, 4)
    assert drafter.draft([ahead]).drafts[0].token_ids == ()


def test_known_tokens_notice_when_committed_ones_change() -> None:
    known, request = KnownTokens(), draft_request()
    assert known.sync(job(request, 0, [1, 2, 3]))
    known.append([4, 5])
    assert (known.num_tokens, known.num_committed, known.drafts()) == (5, 3, [4, 5])
    assert known.sync(DraftJob(request, 0, 4, (6,), 4, 0))  # 4 was right
    assert (known.committed(0, 9), known.drafts(), known.revision) == ([1, 2, 3, 4], [6], 0)
    assert known.sync(job(request, 1, [2, 3, 4, 7]))  # sent again, the same
    assert (known.committed(0, 9), known.revision) == ([1, 2, 3, 4, 7], 0)
    assert known.sync(job(request, 1, [2, 9, 4, 7]))
    assert (known.committed(0, 9), known.revision) == ([1, 2, 9, 4, 7], 1)
    assert known.sync(job(request, 1, []))
    assert (known.committed(0, 9), known.revision) == ([1], 2)
    assert not known.sync(job(request, 2, [1]))
    assert known.sync(job(request, 1, list(range(2000))))
    assert known.num_tokens == 2001


def test_no_torch_is_loaded() -> None:
    program = "import sys, engine.compute.drafters.model_free; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_quiet_sequence_is_read_only_once_its_end_repeats() -> None:
    drafter, request = ModelFreeDrafter(), draft_request()
    text = list(range(40))
    drafter.draft([replace(job(request, 0, text), is_quiet=True)])
    (nothing,) = drafter.draft([replace(job(request, 40, [7, 8, 9]), is_quiet=True)]).drafts
    assert nothing.token_ids == () and not nothing.is_behind, "three tokens are no repetition yet"
    (found,) = drafter.draft([replace(job(request, 43, [10]), is_quiet=True)]).drafts
    assert found.token_ids == (11, 12, 13, 14)
    loud = ModelFreeDrafter()
    loud.draft([job(request, 0, text)])
    (sooner,) = loud.draft([job(request, 40, [7, 8, 9])]).drafts
    assert sooner.token_ids, "what is not quiet is asked whatever its end"


def test_a_prediction_is_looked_at_however_quiet_the_sequence() -> None:
    drafter = ModelFreeDrafter()
    request = draft_request(prediction=list(range(100, 140)))
    (draft,) = drafter.draft([replace(job(request, 0, [1, 2, 100, 101, 102, 103]), is_quiet=True)]).drafts
    assert draft.token_ids == (104, 105, 106, 107)
