"""A draft model that is the target itself: whatever it reads, rewinds and draws, it must agree with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.drafters import draft_model
from engine.compute.drafters.draft_model import DraftModelDrafter, DraftSizes
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.sampling.sampler import DrawnDrafts, Sampler
from engine.plan.scheduling.sampling_table import SamplingTable
from engine.plan.speculation.drafter import Draft, DraftJob, DraftRequest, Lane
from engine.plan.speculation.speculation_config import Verification
from engine.plan.step_records import StepInputs
from tests.support.factories import drawn_by, make_request
from tests.support.packed import load_tiny, plain_logits, random_tokens
from tests.support.tiny_models import VOCAB_SIZE

STOP = frozenset({2})
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.7": {"temperature": 0.7},
    "T 1.2 with everything": {
        "temperature": 1.2,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((7, 2.0), (9, -3.0)),
        "min_tokens": 90,
    },
}


def own_copy(family: str = "llama") -> LoadedModel:
    """The target's weights in a module of their own."""
    loaded: LoadedModel = load_tiny.__wrapped__(family)
    return loaded


def make_drafter(
    loaded: LoadedModel | None = None, verification: Verification = "match", **sizes: Any
) -> DraftModelDrafter:
    limits: dict[str, Any] = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 16} | sizes
    return DraftModelDrafter(loaded or own_copy(), DraftSizes(VOCAB_SIZE, **limits), verification)


@cache
def written(prompt: tuple[int, ...], **sampling: Any) -> list[int]:
    """Prompt and output that the target gives without any speculation; computed once for all who ask."""
    request = make_request("written", prompt, max_tokens=200, stop_token_ids=STOP, **sampling)
    loaded, table = load_tiny("llama"), SamplingTable(1)
    sampler = Sampler(VOCAB_SIZE, loaded.device)
    table.write(0, request)
    for _ in range(80):
        logits = plain_logits(loaded, request.token_ids)[-1:]
        inputs = drawn_by(table, np.array([0]), [request], np.array([request.num_tokens]))
        request.token_ids += sampler.sample(logits, inputs).token_ids
    return request.token_ids


class Verified:
    """One request of the in-test loop: `text` is what the target writes, `num_known` of it committed.

    With `is_written` False it is the prompt alone.
    """

    def __init__(
        self, name: str, prompt_len: int, rng: np.random.Generator, is_written: bool = True, **sampling: Any
    ) -> None:
        prompt = tuple(random_tokens(rng, prompt_len))
        sampling = {"seed": int(rng.integers(2**40)), **sampling}
        request = make_request(name, prompt, max_tokens=200, stop_token_ids=STOP, **sampling)
        self.about = DraftRequest(name, prompt_len, request.sampling, STOP)
        self.text = written(prompt, **sampling) if is_written else list(prompt)
        self.num_known = prompt_len
        self.drafts: list[int] = []
        self.told = 0
        self.num_right = self.num_judged = 0

    def job(self, num_wanted: int) -> DraftJob:
        known = self.text[: self.num_known] + self.drafts
        told, self.told = self.told, len(known)
        return DraftJob(self.about, 0, told, tuple(known[told:]), self.num_known, num_wanted)

    def take(self, draft: Draft) -> None:
        assert draft.first == self.num_known + len(self.drafts)
        self.drafts += draft.token_ids
        self.told += len(draft.token_ids)

    def verify(self, num_drafts: int) -> None:
        """Commit as many of the drafts as are right and one token more; others run ahead and may be kept."""
        flying = self.drafts[:num_drafts]
        truth = self.text[self.num_known : self.num_known + len(flying) + 1]
        accepted = 0
        while accepted < min(len(flying), len(truth)) and flying[accepted] == truth[accepted]:
            accepted += 1
        self.num_right += accepted
        self.num_judged += min(accepted + 1, len(flying))
        committed = truth[: accepted + 1]
        if self.drafts[: len(committed)] == committed:
            self.drafts = self.drafts[len(committed) :]
        else:
            if self.drafts[: len(committed)] != committed[: len(self.drafts)]:
                self.told = min(self.told, self.num_known + accepted)
            self.drafts = []
        self.num_known += len(committed)

    @property
    def is_done(self) -> bool:
        return self.num_known >= len(self.text)


def run(drafter: DraftModelDrafter, requests: Sequence[Verified], asks: int, num_drafts: int) -> None:
    """Serve all to their ends: `asks` micro-steps before each verification of `num_drafts`."""
    while left := [request for request in requests if not request.is_done]:
        for _ in range(asks):
            jobs = [request.job(1) for request in left]
            for request, draft in zip(left, drafter.draft(jobs).drafts, strict=True):
                request.take(draft)
        for request in left:
            request.verify(num_drafts)
    drafter.check_integrity()


@pytest.mark.by_default("exactly-greedy", "running ahead-T 0.7", "running ahead-T 1.2 with everything")
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("asks", [4, 6], ids=["exactly", "running ahead"])
def test_the_targets_own_weights_are_accepted(params: str, asks: int) -> None:
    rng = np.random.default_rng(1)
    requests = [Verified(f"r{i}", int(n), rng, **PARAMS[params]) for i, n in enumerate((5, 17, 30, 44))]
    drafter = make_drafter(max_read_tokens=32)
    run(drafter, requests, asks, num_drafts=4)
    right, judged = (sum(getattr(r, name) for r in requests) for name in ("num_right", "num_judged"))
    assert judged > 200
    assert right / judged > 0.99
    drafter.close([request.about.request_id for request in requests])
    assert drafter.num_used_blocks == 0


class RecordingForward(PackedForward):
    """Keeps the logits of the last pass."""

    last: torch.Tensor

    def __call__(self, inputs: StepInputs, kv: KvTensors) -> torch.Tensor:
        type(self).last = super().__call__(inputs, kv)
        return self.last


@pytest.mark.parametrize(("family", "lanes"), [("llama", 3), ("gemma3", 0), ("qwen2_window", 2)])
def test_after_any_jobs_the_logits_are_those_of_a_fresh_reading(
    family: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "PackedForward", RecordingForward)
    sizes: dict[str, Any] = {"num_blocks": 48, "max_num_seqs": 4, "max_read_tokens": 24}
    drafter = make_drafter(own_copy(family), max_num_lanes=lanes, **sizes)
    rng = np.random.default_rng(2)
    names = [f"r{i}" for i in range(6)]
    known: dict[str, list[int]] = {name: [] for name in names}
    num_compared = 0
    for step in range(120):
        jobs = []
        for name in rng.permutation(names)[: rng.integers(1, 4)].tolist():
            tokens = known[name]
            first = max(0, len(tokens) - int(rng.integers(0, 6)))
            if len(tokens) > 100 or rng.random() < 0.03:
                drafter.close([name])
                tokens.clear()
                first = 0
            new = random_tokens(rng, int(rng.integers(0, 4)) if first else int(rng.integers(1, 50)))
            del tokens[first:]
            tokens += new
            about = make_request(name, 1, temperature=0.0).sampling
            committed = len(tokens) - int(rng.integers(0, min(4, len(tokens))))
            job = DraftJob(DraftRequest(name, 1, about), step, first, tuple(new), committed, 1)
            jobs.append(replace(job, num_lanes=lanes))
        for draft in drafter.draft(jobs).drafts:
            tokens = known[draft.request_id]
            if draft.token_ids:
                expected = plain_logits(load_tiny(family), tokens)[-1]
                distance = (RecordingForward.last - expected).abs().amax(dim=1).min()
                assert distance < 1e-4, f"step {step}: {draft.request_id} is off by {distance}"
                num_compared += 1
            tokens += draft.token_ids
        drafter.check_integrity()
    assert num_compared > 100
    drafter.close(names)
    assert drafter.num_used_blocks == 0


def lanes_after(drafter: DraftModelDrafter, job: DraftJob, calls: int) -> tuple[list[int], tuple[Lane, ...]]:
    """The drafts of so many calls, and the lanes beside them in the end."""
    drafts: list[int] = []
    lanes: tuple[Lane, ...] = ()
    for _ in range(calls):
        (draft,) = drafter.draft([job]).drafts
        drafts += draft.token_ids
        lanes = draft.lanes
        job = replace(job, first=draft.first + len(draft.token_ids), token_ids=())
    return drafts, lanes


def next_job(job: DraftJob, known: Sequence[int], first: int, **changes: Any) -> DraftJob:
    return replace(job, epoch=job.epoch + 1, first=first, token_ids=tuple(known[first:]), **changes)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_lane_is_what_would_be_drafted_if_its_token_came(temperature: float) -> None:
    """In any company; and its second choices are known when it has come."""
    rng = np.random.default_rng(5)
    prompt = random_tokens(rng, 21)
    sampling = make_request("a", 1, temperature=temperature, seed=11).sampling
    about = DraftRequest("a", len(prompt), sampling)
    job = DraftJob(about, 0, 0, tuple(prompt), len(prompt), 9, num_lanes=3)
    drafter = make_drafter(max_num_lanes=3)
    drafts, lanes = lanes_after(drafter, job, 6)
    assert sorted(lane.position for lane in lanes) == [len(prompt), len(prompt) + 1, len(prompt) + 2]
    for lane in lanes:
        assert lane.token_ids[0] != drafts[lane.position - len(prompt)]
        before = [*prompt, *drafts][: lane.position]
        known = [*before, lane.token_ids[0]]
        alone = make_drafter()
        plain = DraftJob(about, 0, 0, tuple(known), len(known), 9)
        assert lanes_after(alone, plain, 5)[0][: len(lane.token_ids) - 1] == list(lane.token_ids[1:])
        assert len(lane.token_ids) >= 3
        if not temperature:
            logits = plain_logits(load_tiny("llama"), before)[-1]
            assert lane.token_ids[0] == logits.topk(2).indices[1]
    # The second outcome comes true: of its drafts, which are verified next, other outcomes are known at once.
    came = lanes[1]
    known = [*prompt, *drafts[:1], *came.token_ids] if came.position == len(prompt) + 1 else []
    job = next_job(job, known, came.position, num_committed=came.position + 1, num_wanted=5)
    drafter.draft([job])
    job = replace(job, first=len(known) + 1, token_ids=())
    assert len(drafter.draft([job]).drafts[0].lanes) == 3
    drafter.check_integrity()
    drafter.close(["a"])
    assert drafter.num_used_blocks == 0


def test_without_free_blocks_there_are_fewer_lanes_and_no_draft_is_missing() -> None:
    prompt = random_tokens(np.random.default_rng(6), 21)
    about = DraftRequest("a", len(prompt), make_request("a", 1, temperature=0.0).sampling)
    job = DraftJob(about, 0, 0, tuple(prompt), len(prompt), 9, num_lanes=3)
    drafts, lanes = lanes_after(make_drafter(), job, 6)
    assert (len(drafts), lanes) == (6, ()), "none were to be kept"
    for num_blocks, expected in ((7, 0), (8, 1), (256, 3)):
        drafter = make_drafter(num_blocks=num_blocks, max_num_lanes=3)
        found, lanes = lanes_after(drafter, job, 6)
        assert found == drafts
        assert len(lanes) == expected, num_blocks
        drafter.check_integrity()


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}])
def test_what_depends_on_all_that_was_drafted_gets_no_lanes(sampling: dict[str, Any]) -> None:
    prompt = random_tokens(np.random.default_rng(7), 9)
    about = DraftRequest("a", len(prompt), make_request("a", 1, temperature=0.0, **sampling).sampling)
    job = DraftJob(about, 0, 0, tuple(prompt), len(prompt), 9, num_lanes=3)
    assert lanes_after(make_drafter(max_num_lanes=3), job, 4)[1] == ()


def test_a_crowd_changes_no_draft() -> None:
    rng = np.random.default_rng(3)
    params = list(PARAMS.values())
    requests = [Verified(f"r{i}", 4 + 9 * i, rng, False, **params[i % len(params)]) for i in range(6)]

    def drafts_of(some: Sequence[Verified], **sizes: Any) -> dict[str, list[int]]:
        drafter = make_drafter(**sizes)
        found: dict[str, list[int]] = {one.about.request_id: [] for one in some}
        jobs = [
            DraftJob(one.about, 0, 0, tuple(one.text[: one.num_known]), one.num_known, 20) for one in some
        ]
        for _ in range(60):
            results = drafter.draft(jobs).drafts
            for draft in results:
                found[draft.request_id] += draft.token_ids
            jobs = [
                replace(
                    job,
                    first=job.next_position + len(draft.token_ids),
                    token_ids=(),
                    num_wanted=20 - len(found[draft.request_id]),
                )
                for job, draft in zip(jobs, results, strict=True)
            ]
        return found

    together = drafts_of(requests)
    assert all(len(tokens) == 20 for tokens in together.values())
    alone = {name: tokens for request in requests for name, tokens in drafts_of([request]).items()}
    assert together == alone
    assert drafts_of(requests, max_read_tokens=7) == alone
    assert drafts_of(requests, num_blocks=110, max_num_seqs=6, block_size=3) == alone
    squeezed = drafts_of(requests, num_blocks=40, max_num_seqs=3)
    assert {name: alone[name][: len(tokens)] for name, tokens in squeezed.items()} == squeezed
    assert sum(len(tokens) == 20 for tokens in squeezed.values()) in range(2, 6)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_other_rules_get_the_law_that_a_draft_was_drawn_from(verification: Verification) -> None:
    rng = np.random.default_rng(4)
    greedy = Verified("greedy", 9, rng, False, temperature=0.0)
    sampled = Verified("sampled", 12, rng, False, temperature=0.8, top_k=20, repetition_penalty=1.3)
    drafter = make_drafter(verification=verification)
    for _ in range(5):
        requests = [greedy, sampled]
        for request, draft in zip(
            requests, drafter.draft([request.job(4) for request in requests]).drafts, strict=True
        ):
            (token_id,), (probs,) = draft.token_ids, draft.probs
            assert isinstance(probs, torch.Tensor)
            assert probs.shape == (VOCAB_SIZE,)
            assert probs.dtype is torch.float32
            assert probs.untyped_storage().nbytes() == 4 * VOCAB_SIZE, "it holds no other's"
            assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
            assert float(probs[token_id]) > 0
            assert int((probs > 0).sum()) == (1 if request is greedy else 20)
            request.take(draft)


def test_laws_are_drawn_from_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 those of 256 sequences of 128,256 tokens are 260 MB, several times over."""

    def drafts(*, at_once: int) -> list[Draft]:
        rng = np.random.default_rng(4)
        requests = [Verified(name, 9, rng, False, temperature=0.8, seed=7) for name in "abc"]
        drafter, seen = make_drafter(verification="rejection"), []
        draw = drafter._sampler.sample_with_probs

        def watched(logits: torch.Tensor, *more: Any) -> DrawnDrafts:
            seen.append(len(logits))
            return draw(logits, *more)

        monkeypatch.setattr(drafter._sampler, "sample_with_probs", watched)
        monkeypatch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", at_once * VOCAB_SIZE)
        found = list(drafter.draft([request.job(1) for request in requests]).drafts)
        assert seen == ([3] if at_once > 2 else [2, 1])
        return found

    for few, all_at_once in zip(drafts(at_once=2), drafts(at_once=3), strict=True):
        assert few.token_ids == all_at_once.token_ids
        (probs,), (expected,) = few.probs, all_at_once.probs
        assert isinstance(probs, torch.Tensor) and isinstance(expected, torch.Tensor)
        assert torch.equal(probs, expected)


def test_a_smaller_and_a_larger_vocabulary_of_logits_fit_the_targets() -> None:
    rng = np.random.default_rng(5)
    request = Verified("a", 6, rng, False, temperature=1.0)
    for vocab_size in (VOCAB_SIZE - 8, VOCAB_SIZE + 8):
        sizes = DraftSizes(vocab_size, num_blocks=16, block_size=4, max_num_seqs=2)
        drafter = DraftModelDrafter(own_copy(), sizes, "rejection")
        request.told = 0
        (draft,) = drafter.draft([request.job(1)]).drafts
        assert isinstance(draft.probs[0], torch.Tensor)
        assert draft.probs[0].shape == (vocab_size,)
        assert draft.token_ids[0] < min(vocab_size, VOCAB_SIZE)
