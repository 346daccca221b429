"""The EAGLE drafter: what a plain pass over everything would draft, however its features came."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.compute.drafters import eagle, eagle_loader, layer_chains
from engine.compute.drafters.eagle import EagleDrafter, plant
from engine.compute.drafters.eagle_layer import CONFIG_FILE, WEIGHTS_FILE
from engine.compute.drafters.eagle_loader import EagleRoom, load_eagle_drafter, shipped_heads
from engine.compute.drafters.eagle_round import Chain, EagleRound, Guess
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.dummy_steps import plain_sampling
from engine.compute.sampling.processors import Filters, Support, process_logits
from engine.compute.sampling.sampler import Sampler
from engine.errors import StartRefused
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import Draft, DraftJob, DraftRequest, TargetFeatures
from tests.support.packed import load_tiny
from tests.support.tiny_eagle import TinyEagle

ROOM = EagleRoom(max_num_seqs=3, kv_bytes=1 << 24)
LENGTH = 90
TOKENS = torch.randint(3, 512, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_tiny("llama")


@pytest.fixture(scope="module")
def tiny(target: LoadedModel) -> TinyEagle:
    return TinyEagle(target, token_ids=torch.arange(3, 300, 3))


@pytest.fixture(scope="module")
def directory(tiny: TinyEagle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("eagle") / "heads")


@pytest.fixture
def drafter(directory: Path, target: LoadedModel) -> EagleDrafter:
    return load_eagle_drafter(directory, target, ROOM)


@pytest.fixture(scope="module")
def features(target: LoadedModel) -> torch.Tensor:
    """Of every position, as if the target had left them there: [LENGTH, 3 * hidden]."""
    draw = torch.Generator().manual_seed(3)
    return torch.randn((LENGTH, 3 * target.config.hidden_size), generator=draw)


class Asking:
    """One sequence whose tokens come to be known bit by bit."""

    def __init__(self, name: str, features: torch.Tensor, **sampling: float) -> None:
        self.features = features
        params: Any = {"temperature": 0.0, **sampling}
        self.request = DraftRequest(name, 4, SamplingParams(max_tokens=99, **params))
        self.num_told = self.num_read = 0

    def job(self, num_known: int, num_wanted: int = 4) -> DraftJob:
        """So many tokens are known by now."""
        run = TargetFeatures(num_known - 1, self.features[self.num_read : num_known - 1])
        self.num_read = num_known - 1
        job = DraftJob(
            self.request,
            0,
            self.num_told,
            tuple(TOKENS[self.num_told : num_known]),
            num_known,
            num_wanted,
            (run,),
        )
        self.num_told = num_known
        return job

    def ask(self, drafter: EagleDrafter, num_known: int, num_wanted: int = 4) -> list[int]:
        """The likeliest chain of the tree that is drafted."""
        (draft,) = drafter.draft([self.job(num_known, num_wanted)]).drafts
        assert draft.first == num_known
        assert draft.parents is not None and len(draft.parents) == len(draft.token_ids) <= num_wanted
        return likeliest(draft)


def likeliest(draft: Draft) -> list[int]:
    """What the first of each draft's children come to."""
    chain: list[int] = []
    parents, above = list(draft.parents or ()), -1
    while above in parents:
        above = parents.index(above)
        chain.append(draft.token_ids[above])
    return chain


def expected(tiny: TinyEagle, features: torch.Tensor, num_known: int, num_wanted: int = 4) -> list[int]:
    return tiny.chain(features[: num_known - 1], TOKENS[:num_known], num_wanted)


def begins(found: list[int], chain: list[int]) -> bool:
    """True for a chain, of which others may have taken the places of the last."""
    return bool(found) and found == chain[: len(found)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random layers are never sure of anything."""
    monkeypatch.setattr(eagle_loader, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(eagle, "LEAST_CHANCE", 0.0)


def test_chains_are_those_of_a_pass_over_everything(
    drafter: EagleDrafter, tiny: TinyEagle, features: torch.Tensor
) -> None:
    """Past the window, past the end of the slab, after every draft was refused, whatever came at once."""
    asking = Asking("a", features)
    for num_known in (7, 8, 9, 13, 14, 30, 31, 35, 36, 50, 51, 60, 61, 66, 80, 89):
        found = asking.ask(drafter, num_known)
        assert begins(found, expected(tiny, features, num_known)), num_known


def test_a_batch_drafts_what_each_does_alone(
    directory: Path, target: LoadedModel, features: torch.Tensor
) -> None:
    alone, together = (load_eagle_drafter(directory, target, ROOM) for _ in range(2))
    names, lengths, wanted = ("a", "b", "c"), (9, 20, 14), (2, 5, 0)
    jobs = [Asking(name, features).job(*each) for name, *each in zip(names, lengths, wanted, strict=True)]
    drafts = together.draft(jobs).drafts
    assert [len(draft.token_ids) for draft in drafts] == [2, 5, 0]
    for job, draft in zip(jobs, drafts, strict=True):
        assert alone.draft([job]).drafts == (draft,)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_features_that_are_not_finite_leave_their_own_sequence_without_drafts(
    temperature: float, directory: Path, target: LoadedModel, features: torch.Tensor
) -> None:
    alone, together = (load_eagle_drafter(directory, target, ROOM) for _ in range(2))
    sound = Asking("a", features, temperature=temperature, seed=1).job(9)
    sick = Asking("b", torch.full_like(features, torch.nan), temperature=temperature, seed=1).job(9)
    found, other = together.draft([sound, sick]).drafts
    assert other.token_ids == () and found.token_ids
    assert alone.draft([sound]).drafts == (found,)


@pytest.mark.parametrize(
    ("most", "rounds"), [(1, [16, 16, 8]), (23, [16, 16, 8]), (24, [24, 16]), (40, [40])]
)
def test_no_more_rows_are_read_at_a_time_than_memory_is_meant_for(
    most: int,
    rounds: list[int],
    directory: Path,
    target: LoadedModel,
    features: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a pause every sequence has a window of them; what is drafted is the same."""
    asked = [(Asking(name, features), num) for name, num in (("a", 40), ("b", 9), ("c", 60))]
    jobs = [asking.job(num_known, 3) for asking, num_known in asked]
    whole = load_eagle_drafter(directory, target, ROOM).draft(jobs).drafts
    drafter = load_eagle_drafter(directory, target, ROOM)
    monkeypatch.setattr(eagle, "MOST_ROWS", most)
    run, seen = drafter.compute.run, []

    def watched(work: EagleRound) -> list[Chain]:
        seen.append(len(work.features))
        return run(work)

    monkeypatch.setattr(drafter.compute, "run", watched)
    assert drafter.draft(jobs).drafts == whole
    assert sorted(seen, reverse=True) == rounds and all(draft.token_ids for draft in whole)
    assert drafter.draft([]).drafts == () and len(seen) == len(rounds)


def test_it_starts_with_the_features_there_are(
    drafter: EagleDrafter, tiny: TinyEagle, features: torch.Tensor
) -> None:
    asking = Asking("a", features)
    asking.num_read = 20
    found = asking.ask(drafter, 33)
    moved = tiny.chain(features[20:32], TOKENS[20:33], 4)
    assert begins(found, moved), "angles tell distances only"


def test_closed_sequences_are_forgotten_and_the_oldest_give_way(
    drafter: EagleDrafter, tiny: TinyEagle, features: torch.Tensor
) -> None:
    for name in "abcd":
        assert Asking(name, features).ask(drafter, 9)
    again = Asking("a", features)
    drafter.close(["a", "nobody"])
    assert begins(again.ask(drafter, 12), expected(tiny, features, 12))


def test_without_new_features_there_is_no_draft(drafter: EagleDrafter, features: torch.Tensor) -> None:
    asking = Asking("a", features)
    job = asking.job(9)
    bare = DraftJob(job.request, 0, 0, job.token_ids, 9, 4)
    assert drafter.draft([bare]).drafts[0].token_ids == ()
    late = DraftJob(job.request, 0, 9, (1, 2), 11, 4, job.features)
    assert drafter.draft([late]).drafts[0].token_ids == (), "they are of an older token"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_behind_a_chain_that_is_verified_it_goes_on(
    drafter: EagleDrafter, directory: Path, target: LoadedModel, features: torch.Tensor, temperature: float
) -> None:
    """As if the whole had been drafted at once; and what it kept is as it was."""
    plain = load_eagle_drafter(directory, target, ROOM)
    params = {"temperature": temperature, "seed": 3}
    first, other = Asking("a", features, **params), Asking("a", features, **params)
    job = replace(first.job(9, 2), may_branch=False)
    whole = plain.draft([replace(other.job(9, 5), may_branch=False)]).drafts[0]
    begun = drafter.draft([job]).drafts[0]
    assert begun.parents is None and begun.token_ids == whole.token_ids[:2]
    run = TargetFeatures(8, features[:8])
    ahead = replace(job, first=11, token_ids=(), num_wanted=3, features=(run,))
    beyond = drafter.draft([ahead]).drafts[0]
    assert (beyond.first, beyond.token_ids) == (11, whole.token_ids[2:])
    for each in (first, other):
        each.num_told = 9
    assert drafter.draft([first.job(12)]).drafts == plain.draft([other.job(12)]).drafts


def test_it_bets_on_no_chain_that_it_would_not_draw_any_longer(
    drafter: EagleDrafter, tiny: TinyEagle, features: torch.Tensor
) -> None:
    right = expected(tiny, features, 9, 2)
    job = replace(Asking("a", features).job(9, 2), may_branch=False)
    assert drafter.draft([job]).drafts[0].token_ids == tuple(right)
    run = TargetFeatures(8, features[:8])
    wrong = replace(job, first=9, token_ids=(right[0], right[1] + 1), features=(run,))
    assert drafter.draft([wrong]).drafts[0].token_ids == ()
    good = replace(wrong, token_ids=tuple(right))
    assert len(drafter.draft([good]).drafts[0].token_ids) == 2


def test_a_draft_ends_with_what_ends_the_request(
    drafter: EagleDrafter, tiny: TinyEagle, features: torch.Tensor
) -> None:
    first, second, *_ = expected(tiny, features, 7)
    asking = Asking("a", features)
    asking.request = replace(asking.request, stop_token_ids=frozenset({second}))
    assert first != second
    (draft,) = drafter.draft([asking.job(7, 6)]).drafts
    assert likeliest(draft) == [first, second]
    assert draft.parents is not None
    levels = [0 if parent < 0 else 1 for parent in draft.parents]
    assert set(levels) == {0, 1} and len(levels) == 6, (
        "its place is taken by others, and nothing is behind it"
    )


def test_a_tree_has_the_best_guesses_of_all_in_order(features: torch.Tensor) -> None:
    job = Asking("a", features).job(9, num_wanted=5)
    chain = [
        [Guess(10, 0.5), Guess(11, 0.3), Guess(12, 0.1)],
        [Guess(20, 0.4), Guess(21, 0.06), Guess(22, 0.01)],
        [Guess(30, 0.35), Guess(31, 0.02)],
    ]
    draft = plant(job, chain)
    assert draft.token_ids == (10, 20, 30, 11, 12)
    assert draft.parents == (-1, 0, 1, -1, -1)
    ending = replace(job, request=replace(job.request, stop_token_ids=frozenset({20})))
    assert plant(ending, chain).token_ids == (10, 20, 11, 12, 21)
    assert plant(replace(job, num_wanted=2), chain).parents == (-1, 0)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}])
def test_sampled_drafts_are_the_draws_of_the_positions_own_noise(
    filters: dict[str, float], drafter: EagleDrafter, tiny: TinyEagle, features: torch.Tensor
) -> None:
    """As the target would draw from the same logits."""
    asking = Asking("a", features, temperature=0.9, seed=17, **filters)
    (draft,) = asking.ask(drafter, 12, num_wanted=1)
    hidden = features[:11] @ tiny.tensors["fc.weight"].T
    known = tiny.logits(tiny.forward(hidden, torch.tensor(TOKENS[1:12]))[-1:])
    logits = torch.full((1, 512), -1e9)
    logits[0, tiny.token_ids] = known
    inputs = plain_sampling(np.array([12]), 0.9)
    inputs.seed[:] = 17
    for name, value in filters.items():
        getattr(inputs, name)[:] = value
    assert Sampler(512, torch.device("cpu")).sample(logits, inputs).token_ids == [draft]


def test_few_sequences_are_drawn_for_at_a_time(
    directory: Path, target: LoadedModel, features: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for rows of the target: all of 256 that sample would be filtered in gigabytes."""
    jobs = [
        Asking(name, features, temperature=0.9, seed=seed).job(9 + seed, 3) for seed, name in enumerate("abc")
    ]
    whole = load_eagle_drafter(directory, target, ROOM).draft(jobs).drafts
    seen: list[int] = []

    def watched(logits: torch.Tensor, filters: Filters) -> Support:
        seen.append(len(logits))
        return process_logits(logits, filters)

    monkeypatch.setattr(layer_chains, "process_logits", watched)
    monkeypatch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", 1)
    assert load_eagle_drafter(directory, target, ROOM).draft(jobs).drafts == whole
    assert len(seen) >= 3 and set(seen) == {1} and all(draft.token_ids for draft in whole)


@pytest.mark.parametrize("layout", ["original", "speculators"])
@pytest.mark.parametrize("options", [{}, {"hidden": 96}, {"hidden": 32, "token_ids": torch.arange(5, 105)}])
def test_others_checkpoints_draft_what_they_would_elsewhere(
    layout: str, options: dict[str, object], target: LoadedModel, features: torch.Tensor, tmp_path: Path
) -> None:
    other = TinyEagle(target, seed=4, **options)  # type: ignore[arg-type]
    drafter = load_eagle_drafter(other.save(tmp_path / "other", layout), target, ROOM)
    assert begins(Asking("a", features).ask(drafter, 15), expected(other, features, 15))


def test_heads_are_known_to_be_for_this_very_model(
    tiny: TinyEagle, directory: Path, target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_loader, "SHIPPED", directory.parent)
    assert shipped_heads(target) == directory
    assert shipped_heads(load_tiny("qwen2")) is None
    tiny.target.model.get_output_embeddings().weight.data *= 1.5
    try:
        assert shipped_heads(target) is None
        with pytest.raises(StartRefused, match="trained for another model of the same shape"):
            load_eagle_drafter(directory, target, ROOM)
    finally:
        tiny.target.model.get_output_embeddings().weight.data /= 1.5
    monkeypatch.setattr(eagle_loader, "SHIPPED", tmp_path)
    assert shipped_heads(target) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slipstream": {"target": {"vocab_size": 9}}}, "is for a model of .*'vocab_size': 9"),
        ({"slipstream": {}, "architectures": ["Other"]}, "expected LlamaForCausalLMEagle3"),
        (
            {"slipstream": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            r"feature_layers is \[0, 1, 2\], expected 3",
        ),
        ({"speculators_model_type": "mlp"}, "expected 'eagle3'"),
        ({"num_key_value_heads": 1}, r"k_proj.weight is \[64, 128\], expected \[32, 128\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change: dict[str, object], message: str, directory: Path, target: LoadedModel, tmp_path: Path
) -> None:
    values = json.loads((directory / CONFIG_FILE).read_text()) | change
    (tmp_path / CONFIG_FILE).write_text(json.dumps(values))
    (tmp_path / WEIGHTS_FILE).write_bytes((directory / WEIGHTS_FILE).read_bytes())
    with pytest.raises(StartRefused, match=message):
        load_eagle_drafter(tmp_path, target, ROOM)


def test_what_is_missing_or_damaged_is_refused(directory: Path, target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match=r"there is no config.json"):
        load_eagle_drafter(tmp_path, target, ROOM)
    (tmp_path / CONFIG_FILE).write_text((directory / CONFIG_FILE).read_text())
    with pytest.raises(StartRefused, match=r"model.safetensors is missing"):
        load_eagle_drafter(tmp_path, target, ROOM)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"nothing")
    with pytest.raises(StartRefused, match="missing or damaged"):
        load_eagle_drafter(tmp_path, target, ROOM)


class PlayedStream:
    """Stands for a stream of a device; it is entered as `in_stream` would have it."""

    is_entered = False
    is_done = True

    def __enter__(self) -> None:
        self.is_entered, self.is_done = True, False

    def __exit__(self, *_: object) -> None:
        self.is_entered = False

    def synchronize(self) -> None:
        self.is_done = True


class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations, but for views, that are queued in a stream, and those that are not."""

    def __init__(self, stream: PlayedStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream
        self.within: set[str] = set()
        self.outside: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            noted = self.within if self._stream.is_entered else self.outside
            noted.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_all_of_a_call_is_in_the_drafters_stream(
    directory: Path, target: LoadedModel, features: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features of several are put together, and full slabs slide: elsewhere they would wait for a pass."""
    stream = PlayedStream()
    for module in (eagle, layer_chains):
        monkeypatch.setattr(module, "own_stream", lambda _: stream, raising=False)
        monkeypatch.setattr(module, "in_stream", lambda entered: entered, raising=False)
    drafter = load_eagle_drafter(directory, target, ROOM)
    askings = [Asking(name, features) for name in ("a", "b")]
    with Noting(stream) as noted:
        for num_known in (12, 24, 36, 48):
            drafts = drafter.draft([asking.job(num_known) for asking in askings]).drafts
            assert all(draft.token_ids for draft in drafts)
            assert not stream.is_entered and stream.is_done
    assert {"cat", "clone"} <= noted.within
    assert not noted.outside
