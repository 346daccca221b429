"""A draft model that draws whole chains: the tokens, and what it knows after, are those of single steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.device_tokens import DeviceTokens
from engine.compute.drafters.draft_loader import on_device
from engine.compute.drafters.draft_model import MAX_CHAIN, DraftModelDrafter, DraftSizes
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.following_steps import FollowingSteps
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import DraftJob, DraftRequest, UnreadChains
from engine.plan.speculation.speculation_config import Verification
from engine.plan.step_records import StepInputs
from tests.support import played_back
from tests.support.packed import load_tiny, random_tokens
from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE

# Enough of the vocabulary for some chains to end in their middle.
STOPS = frozenset(range(2, VOCAB_SIZE, 12))
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 6},
    {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 7},
    {"temperature": 0.7, "min_tokens": 12, "seed": 8},
    {"temperature": 0.9, "bad_words": ((7, 9), (11,)), "seed": 9},
]


def fresh_model() -> LoadedModel:
    """Weights of its own, as both drafters and the target's tests set how a model attends."""
    loaded: LoadedModel = load_tiny.__wrapped__("llama")
    return loaded


def chaining(sizes: DraftSizes, verification: Verification = "match") -> DraftModelDrafter:
    """A drafter that runs as on a GPU, over recordings that a CPU plays back."""
    loaded = fresh_model()
    return DraftModelDrafter(loaded, sizes, verification, played_back.on_device(loaded, sizes))


def sizes_with(**changes: int) -> DraftSizes:
    limits = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 8} | changes
    return DraftSizes(VOCAB_SIZE, **limits)


class Sequences:
    """What one drafter is told of some sequences, all in the same calls."""

    def __init__(self, drafter: DraftModelDrafter, prompts: dict[str, list[int]]) -> None:
        self.drafter = drafter
        self.num_calls = 0
        self.committed = {name: list(prompt) for name, prompt in prompts.items()}
        self.drafts: dict[str, list[int]] = {name: [] for name in prompts}
        self._told = dict.fromkeys(prompts, 0)
        self._about = {
            name: DraftRequest(name, len(prompt), SamplingParams(max_tokens=99, **PARAMS[index]), STOPS)
            for index, (name, prompt) in enumerate(prompts.items())
        }

    def draft(self, wanted: dict[str, int]) -> None:
        """Ask until all have as many drafts as wanted, or no more to say."""
        left = dict(wanted)
        while left:
            jobs = [self._job(name, count - len(self.drafts[name])) for name, count in left.items()]
            answers = self.drafter.draft(jobs).drafts
            self.drafter.check_integrity()
            self.num_calls += 1
            for draft in answers:
                name = draft.request_id
                assert len(draft.token_ids) <= left[name] - len(self.drafts[name])
                self.drafts[name] += draft.token_ids
                self._told[name] += len(draft.token_ids)
                is_silent = not (draft.token_ids or draft.is_behind)
                if is_silent or len(self.drafts[name]) == left[name]:
                    del left[name]

    def _job(self, name: str, num_wanted: int) -> DraftJob:
        known = self.committed[name] + self.drafts[name]
        told, self._told[name] = self._told[name], len(known)
        committed = len(self.committed[name])
        return DraftJob(self._about[name], 0, told, tuple(known[told:]), committed, num_wanted)

    def commit(self, name: str, num_kept: int, token_id: int) -> None:
        """So many of the drafts were right, and this comes behind them."""
        kept = self.drafts[name][:num_kept]
        self._told[name] = min(self._told[name], len(self.committed[name]) + len(kept))
        self.committed[name] += [*kept, token_id]
        self.drafts[name] = []


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 64, "max_num_seqs": 6}], ids=["roomy", "tight"])
def test_chains_are_what_single_steps_draw(changes: dict[str, int]) -> None:
    rng = np.random.default_rng(11)
    prompts = {f"r{i}": random_tokens(rng, 5 + 7 * i) for i in range(len(PARAMS))}
    single = Sequences(DraftModelDrafter(fresh_model(), sizes_with()), prompts)
    chains = Sequences(chaining(sizes_with(**changes)), prompts)
    assert single.drafter.is_stepwise and not chains.drafter.is_stepwise
    num_ended = 0
    for _ in range(12):
        wanted = {name: int(rng.integers(1, 7)) for name in prompts}
        for sequences in (single, chains):
            sequences.draft(wanted)
        for name, count in wanted.items():
            expected, found = single.drafts[name], chains.drafts[name]
            assert found == expected[: len(found)], name
            assert len(found) == len(expected) or changes, name
            num_ended += 0 < len(expected) < count
            num_kept, token_id = int(rng.integers(0, len(found) + 1)), int(rng.choice(list(prompts["r5"])))
            for sequences in (single, chains):
                sequences.commit(name, num_kept, token_id)
    assert num_ended > 3, "some chains end before they are as long as was asked for"
    chains.drafter.close(list(prompts))
    assert chains.drafter.num_used_blocks == 0


def test_one_call_draws_the_whole_chain() -> None:
    rng = np.random.default_rng(12)
    prompts = {f"r{i}": random_tokens(rng, 9) for i in range(3)}
    chains = Sequences(chaining(sizes_with()), prompts)
    chains.draft(dict.fromkeys(prompts, MAX_CHAIN))
    assert chains.num_calls == 1 or any(len(drafts) < MAX_CHAIN for drafts in chains.drafts.values())
    assert max(map(len, chains.drafts.values())) == MAX_CHAIN


@pytest.mark.parametrize("num_wanted", [1, MAX_CHAIN])
def test_it_tells_where_its_drafts_will_lie_before_they_are_read(num_wanted: int) -> None:
    rng = np.random.default_rng(12)
    prompts = {f"r{i}": random_tokens(rng, 9 + i) for i in range(len(PARAMS))}
    drafter, told = chaining(sizes_with()), list[UnreadChains]()
    sequences = Sequences(drafter, prompts)
    jobs = [sequences._job(name, num_wanted) for name in prompts]
    drafts = drafter.draft_and_tell(jobs, told.append).drafts
    (chains,) = told
    assert isinstance(chains.tokens, DeviceTokens)
    tokens = chains.tokens.read()
    num_cut = 0
    for draft in drafts:
        found = tokens[list(chains.places[draft.request_id])].tolist()
        assert found[: len(draft.token_ids)] == list(draft.token_ids)
        num_cut += len(found) > len(draft.token_ids)
    counts = [len(places) for places in chains.places.values()]
    assert counts == [num_wanted] * 3 + [1] * 3, "what hangs on all tokens before it comes by itself"
    assert num_cut or num_wanted == 1, "some chain goes on behind its end"


def test_it_tells_of_nothing_while_anyone_is_behind_or_no_step_of_the_target_could_read_it() -> None:
    rng = np.random.default_rng(12)
    prompts = {"short": random_tokens(rng, 6), "long": random_tokens(rng, 40)}
    told: list[UnreadChains] = []
    sequences = Sequences(chaining(sizes_with(max_read_tokens=16)), prompts)
    jobs = [sequences._job(name, 3) for name in prompts]
    drafts = sequences.drafter.draft_and_tell(jobs, told.append).drafts
    assert [draft.is_behind for draft in drafts] == [False, True] and drafts[0].token_ids and not told
    loaded = fresh_model()
    beside = played_back.on_device(loaded, sizes_with())
    apart = DraftModelDrafter(loaded, sizes_with(), on_device=beside, shares_device=False)
    single = DraftModelDrafter(fresh_model(), sizes_with())
    for drafter in (apart, single, chaining(sizes_with(), "rejection")):
        job = Sequences(drafter, {"r0": prompts["short"]})._job("r0", 3)
        (draft,) = drafter.draft_and_tell([job], told.append).drafts
        assert draft.token_ids and not told


def test_what_a_chain_computed_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = chaining(sizes_with())
    sequences = Sequences(drafter, {"r0": random_tokens(np.random.default_rng(12), 9)})
    assert drafter._device is not None
    runner, sent = drafter._device.runner, []

    def launch(inputs: StepInputs) -> Any:
        sent.append(inputs.positions.tolist())
        return CudaRunner.launch(runner, inputs)  # type: ignore[arg-type]

    def follow(steps: FollowingSteps) -> Any:
        sent.extend(steps.positions.tolist())
        return CudaRunner.follow(runner, steps)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "launch", launch)
    monkeypatch.setattr(runner, "follow", follow)
    sequences.draft({"r0": 3})
    sequences.draft({"r0": 5})
    assert sent == [list(range(9)), [9], [10], [11], [12]]
    sequences.commit("r0", 5, 9)  # the last draft was never read
    sequences.draft({"r0": 2})
    sequences.commit("r0", 0, 10)
    sequences.draft({"r0": 1})
    assert sent[5:] == [[13, 14], [15], [15]]


def test_no_chain_goes_past_the_models_context() -> None:
    rng = np.random.default_rng(13)
    prompt = {"r0": random_tokens(rng, MAX_POSITIONS - 2)}
    for drafter in (chaining(sizes_with()), DraftModelDrafter(fresh_model(), sizes_with())):
        sequences = Sequences(drafter, prompt)
        sequences.draft({"r0": 6})
        assert len(sequences.drafts["r0"]) == 3


@pytest.mark.parametrize("name", ["launch", "follow"])
def test_a_failed_launch_costs_what_the_sequences_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(14)
    prompts = {"r0": random_tokens(rng, 9)}
    drafter = chaining(sizes_with())
    sequences = Sequences(drafter, prompts)
    assert drafter._device is not None

    def lost(_: object) -> Any:
        raise RuntimeError("lost")

    monkeypatch.setattr(drafter._device.runner, name, lost)
    with pytest.raises(RuntimeError, match="lost"):
        sequences.draft({"r0": 4})
    assert drafter.num_used_blocks == 0
    drafter.check_integrity()


def test_laws_are_drawn_one_at_a_time() -> None:
    drafter = chaining(sizes_with(), "rejection")
    assert drafter.is_stepwise
    sequences = Sequences(drafter, {"r0": random_tokens(np.random.default_rng(15), 9)})
    (draft,) = drafter.draft([sequences._job("r0", 4)]).drafts
    assert len(draft.token_ids) == len(draft.probs) == 1


def test_a_cpu_has_no_stream_to_draft_in() -> None:
    assert on_device(load_tiny("llama"), sizes_with()) is None
