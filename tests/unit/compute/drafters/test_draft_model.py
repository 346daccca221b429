"""The draft model's accounting around a forward pass that takes no time: blocks, turns, endings, faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.drafters import draft_model
from engine.compute.drafters.draft_model import DraftModelDrafter, DraftSizes, fit_vocabulary
from engine.compute.runner.packed_forward import PackedForward
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import Draft, DraftJob, DraftRequest
from engine.plan.step_records import StepInputs
from tests.support.packed import load_tiny
from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE

STOP = 2
PROMPT = tuple(range(10, 17))


class StubForward(PackedForward):
    """Answers at once: the greedy token after token t is t + 1. Keeps the steps it was given."""

    steps: ClassVar[list[StepInputs]]
    spoil: Callable[[StepInputs, torch.Tensor], None]

    def __call__(self, inputs: StepInputs, kv: KvTensors) -> torch.Tensor:
        self.steps.append(inputs)
        newest = torch.from_numpy(inputs.token_ids[inputs.logits_rows])
        logits = torch.nn.functional.one_hot((newest + 1) % VOCAB_SIZE, VOCAB_SIZE).float()
        self.spoil(inputs, logits)
        return logits


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubForward]:
    class Fresh(StubForward):
        steps: ClassVar[list[StepInputs]] = []

        @staticmethod
        def spoil(inputs: StepInputs, logits: torch.Tensor) -> None:
            """Nothing."""

    monkeypatch.setattr(draft_model, "PackedForward", Fresh)
    return Fresh


def make_drafter(num_blocks: int = 32, max_num_seqs: int = 8, **sizes: Any) -> DraftModelDrafter:
    return DraftModelDrafter(
        load_tiny("llama"),
        DraftSizes(VOCAB_SIZE, num_blocks, block_size=4, max_num_seqs=max_num_seqs, **sizes),
    )


def about(request_id: str, num_prompt_tokens: int = len(PROMPT), **sampling: Any) -> DraftRequest:
    params: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0} | sampling
    return DraftRequest(request_id, num_prompt_tokens, SamplingParams(**params), frozenset({STOP}))


def job(
    request_id: str,
    token_ids: Sequence[int] = PROMPT,
    first: int = 0,
    num_wanted: int = 4,
    request: DraftRequest | None = None,
) -> DraftJob:
    return DraftJob(
        request=request or about(request_id),
        epoch=3,
        first=first,
        token_ids=tuple(token_ids),
        num_committed=first + len(token_ids),
        num_wanted=num_wanted,
    )


def ask(drafter: DraftModelDrafter, *jobs: DraftJob) -> list[Draft]:
    drafts = list(drafter.draft(jobs).drafts)
    assert [draft.request_id for draft in drafts] == [job.request.request_id for job in jobs]
    drafter.check_integrity()
    return drafts


def computed(step: StepInputs) -> list[tuple[int, int]]:
    """(first position, tokens) of each sequence of a step."""
    lengths = step.query_lens.tolist()
    ends = np.cumsum(lengths)
    return [(int(step.positions[end - n]), n) for end, n in zip(ends, lengths, strict=True)]


def test_a_prompt_is_read_and_one_token_drawn_a_call(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    (draft,) = ask(drafter, job("a"))
    assert draft == Draft("a", 3, 7, (17,))
    (draft,) = ask(drafter, job("a", (), first=8, num_wanted=3))
    assert draft == Draft("a", 3, 8, (18,))
    assert [computed(step) for step in stub.steps] == [[(0, 7)], [(7, 1)]]


def test_after_full_acceptance_the_last_draft_and_the_bonus_token_are_read(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    ask(drafter, job("a"))
    ask(drafter, job("a", (), first=8))
    (draft,) = ask(drafter, job("a", (90,), first=9))
    assert draft.token_ids == (91,)
    assert computed(stub.steps[-1]) == [(8, 2)]


def test_a_rejected_draft_is_rewound(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    for first in (0, 8, 9, 10):
        ask(drafter, job("a", PROMPT if first == 0 else (), first=first))
    (draft,) = ask(drafter, job("a", (50,), first=8))
    assert (draft.first, draft.token_ids) == (9, (51,))
    assert computed(stub.steps[-1]) == [(8, 1)]
    assert drafter.num_used_blocks == 3


def test_tokens_told_again_are_not_read_again(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    ask(drafter, job("a"))
    (draft,) = ask(drafter, job("a", (*PROMPT, 17, 18), first=0))
    assert draft.token_ids == (19,)
    assert computed(stub.steps[-1]) == [(7, 2)]


def test_a_cut_alone_draws_the_same_token_again(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    ask(drafter, job("a"))
    (draft,) = ask(drafter, job("a", (), first=7))
    assert draft == Draft("a", 3, 7, (17,))
    assert computed(stub.steps[-1]) == [(6, 1)]


def test_nothing_wanted_is_noted_and_not_computed(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    assert ask(drafter, job("a", num_wanted=0)) == [Draft("a", 3, 7, ())]
    assert not stub.steps
    (draft,) = ask(drafter, job("a", (30,), first=7))
    assert draft == Draft("a", 3, 8, (31,))


def test_long_prompts_are_read_in_chunks_beside_those_that_draw(stub: type[StubForward]) -> None:
    drafter = make_drafter(max_read_tokens=8)
    ask(drafter, job("a"))
    long, other = job("b", range(40, 60)), job("c", range(70, 80))
    b, a, c = ask(drafter, long, job("a", (), first=8), other)
    assert (a.token_ids, a.is_behind) == ((18,), False)
    assert [(d.token_ids, d.is_behind) for d in (b, c)] == [((), True)] * 2
    assert computed(stub.steps[-1]) == [(7, 1), (0, 8)]
    for _ in range(3):
        b, c = ask(drafter, job("b", (), first=20), job("c", (), first=10))
        if b.token_ids:
            break
    assert [computed(step) for step in stub.steps[2:]] == [[(8, 8)], [(16, 4), (0, 4)]]
    assert (b.token_ids, b.is_behind) == ((60,), False)
    (c,) = ask(drafter, job("c", (), first=10))
    assert c.token_ids == (80,)


def test_it_stops_after_a_stop_token_until_something_changes(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    (draft,) = ask(drafter, job("a", (*PROMPT, 1)))
    assert draft.token_ids == (STOP,)
    num_steps = len(stub.steps)
    assert ask(drafter, job("a", (), first=9)) == [Draft("a", 3, 9, ())]
    assert len(stub.steps) == num_steps
    (draft,) = ask(drafter, job("a", (40,), first=8))
    assert draft.token_ids == (41,)


def test_a_stop_token_in_the_prompt_or_below_min_tokens_ends_nothing(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    (draft,) = ask(drafter, job("a", (5, 6, STOP), request=about("a", 3)))
    assert draft.token_ids == (3,)
    (draft,) = ask(drafter, job("b", (5, 6, 1), request=about("b", 3, min_tokens=2)))
    assert draft.token_ids != (STOP,)  # banned, as the target bans it


def test_penalties_see_what_was_drafted(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    request = about("a", frequency_penalty=2.0)
    tokens = [ask(drafter, job("a", (*PROMPT, 16), request=request))[0].token_ids[0]]
    for position in range(9, 12):
        tokens += ask(drafter, job("a", (), first=position, request=request))[0].token_ids
    assert tokens[0] == 17
    (draft,) = ask(drafter, job("a", (17, 16), first=12, request=request))
    assert draft.token_ids[0] != 17


def test_the_draft_models_context_is_its_end(stub: type[StubForward]) -> None:
    drafter = make_drafter(num_blocks=128)
    prompt = [3 + i % 400 for i in range(MAX_POSITIONS)]
    (draft,) = ask(drafter, job("a", prompt))
    assert len(draft.token_ids) == 1  # drawn from the last position there is
    assert ask(drafter, job("a", (), first=MAX_POSITIONS + 1)) == [Draft("a", 3, MAX_POSITIONS + 1, ())]


def test_who_was_drafted_for_longest_ago_gives_way(stub: type[StubForward]) -> None:
    drafter = make_drafter(num_blocks=6)
    for name in "abc":
        ask(drafter, job(name))
    ask(drafter, job("a", (), first=8))
    assert drafter.num_used_blocks == 6
    ask(drafter, job("a", (), first=9))  # takes a third block, from b, which is now the oldest
    assert drafter.num_used_blocks == 5
    assert computed(stub.steps[-1]) == [(8, 1)]
    ask(drafter, job("c", (), first=8))
    assert computed(stub.steps[-1]) == [(7, 1)]
    (draft,) = ask(drafter, job("b", (), first=8))  # reads all it knows again
    assert draft.token_ids == (18,)
    assert computed(stub.steps[-1]) == [(0, 8)]


def test_what_does_not_fit_beside_the_others_of_a_call_gets_no_answer(stub: type[StubForward]) -> None:
    drafter = make_drafter(num_blocks=5)
    drafts = ask(drafter, job("a"), job("b"), job("c"))
    assert [len(draft.token_ids) for draft in drafts] == [1, 1, 0]
    assert not drafts[2].is_behind
    drafter.close(["a"])
    assert ask(drafter, job("c", (), first=7))[0].token_ids == (17,)
    assert ask(drafter, job("d", range(3, 24)))[0].token_ids == ()  # more than all blocks
    assert drafter.num_used_blocks == 4  # and nobody was dropped for it


def test_more_sequences_than_rows_take_turns(stub: type[StubForward]) -> None:
    drafter = make_drafter(max_num_seqs=2)
    for name in "abcab":
        (draft,) = ask(drafter, job(name))
        assert draft.token_ids == (17,)


def test_a_failed_row_is_alone_and_its_blocks_are_scrubbed(stub: type[StubForward]) -> None:
    def spoil(inputs: StepInputs, logits: torch.Tensor) -> None:
        logits[1] = torch.nan

    drafter = make_drafter(num_blocks=8)
    stub.spoil = staticmethod(spoil)
    kv = drafter._kv.tensors
    for tensor in kv.tensors:
        tensor.fill_(torch.nan)
    drafts = ask(drafter, job("a"), job("b"), job("c"))
    assert [draft.token_ids for draft in drafts] == [(17,), (), (17,)]
    assert drafter.num_used_blocks == 4
    clean = [int(block) for block in range(8) if bool(kv.keys[0][block].isfinite().all())]
    assert len(clean) == 2
    stub.spoil = staticmethod(lambda inputs, logits: None)
    assert ask(drafter, job("b", (), first=7)) == [Draft("b", 3, 7, ())]
    drafter.close(["b"])
    assert ask(drafter, job("b"))[0].token_ids == (17,)


def test_a_failed_pass_frees_what_it_was_for_and_goes_on_later(stub: type[StubForward]) -> None:
    def fail(inputs: StepInputs, logits: torch.Tensor) -> None:
        raise RuntimeError("the device is gone")

    drafter = make_drafter()
    ask(drafter, job("a"))
    stub.spoil = staticmethod(fail)
    with pytest.raises(RuntimeError, match="gone"):
        drafter.draft([job("b"), job("c")])
    assert drafter.num_used_blocks == 2
    stub.spoil = staticmethod(lambda inputs, logits: None)
    assert [draft.token_ids for draft in ask(drafter, job("b"), job("c", (), first=7))] == [(17,), (17,)]


def test_a_job_that_leaves_tokens_out_gets_no_answer(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    drafts = ask(drafter, job("a", (5,), first=4), job("b"))
    assert [draft.token_ids for draft in drafts] == [(), (17,)]
    drafter.close(["a"])
    assert ask(drafter, job("a"))[0].token_ids == (17,)


def test_a_token_that_the_draft_model_cannot_read_gets_no_answer(stub: type[StubForward]) -> None:
    drafter = make_drafter()
    assert ask(drafter, job("a", (5, VOCAB_SIZE)))[0].token_ids == ()
    assert ask(drafter, job("a", (6,), first=1))[0].token_ids == ()
    assert not stub.steps


def test_logits_fit_the_targets_vocabulary() -> None:
    logits = torch.tensor([[1.0, 2.0, 9.0]])
    assert fit_vocabulary(logits, 2).tolist() == [[1.0, 2.0]]
    assert fit_vocabulary(logits, 4).tolist() == [[1.0, 2.0, 9.0, -torch.inf]]


@pytest.mark.parametrize("num_sequences", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ten_thousand_sequences_leave_no_block(stub: type[StubForward], num_sequences: int) -> None:
    drafter = make_drafter(num_blocks=12, max_num_seqs=4, max_read_tokens=8)
    rng = random.Random(0)
    open_ids: dict[str, int] = {}  # with the tokens known of each
    for number in range(num_sequences):
        request_id = f"r{number}"
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 14))]
        jobs = [job(request_id, prompt, num_wanted=rng.randrange(3))]
        for other in rng.sample(sorted(open_ids), min(len(open_ids), rng.randrange(3))):
            first = rng.randrange(max(1, open_ids[other] - 3), open_ids[other] + 1)
            jobs.append(job(other, [7] * rng.randrange(2), first=first))
        open_ids[request_id] = 0
        for one, draft in zip(jobs, drafter.draft(jobs).drafts, strict=True):
            open_ids[draft.request_id] = one.next_position + len(draft.token_ids)
        stub.steps.clear()
        while len(open_ids) > 5:
            closed = rng.choice(sorted(open_ids))
            del open_ids[closed]
            drafter.close([closed, "unknown"])
    drafter.check_integrity()
    drafter.close(list(open_ids))
    assert drafter.num_used_blocks == 0
    drafter.check_integrity()
