"""A drafter of one layer on a GPU: it drafts beside a pass that is at work, and says what it says alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from config import ModelSettings
from engine.compute.attention import AttentionBackend
from engine.compute.cuda.graphs.recorded_rounds import RecordedSteps
from engine.compute.cuda.layer_choice import quick_layer
from engine.compute.cuda.round_choice import fastest_steps
from engine.compute.drafters import eagle, eagle_loader
from engine.compute.drafters.eagle import EagleDrafter
from engine.compute.drafters.eagle_layer import CONFIG_FILE
from engine.compute.drafters.eagle_loader import EagleRoom, load_eagle_drafter
from engine.compute.drafters.eagle_round import EagleRound
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.layer_chains import LayerChains
from engine.compute.drafters.mtp_layer import MtpLayer
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.closeness import is_close
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import Draft, DraftJob, DraftRequest, TargetFeatures
from tests.bench.gpu.made_models import make_model
from tests.bench.gpu.sizes import LlamaShape
from tests.support.eagle_rounds import mtp_case
from tests.support.tiny_eagle import TinyEagle
from tests.support.tiny_mtp import FAMILIES

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.fused_eagle import FusedEagle  # noqa: E402

CUDA = torch.device("cuda", 0)
SHAPE = LlamaShape("tiny", 512, 1024, 4, 8, 2, 4096, tied=False)
ROOM = EagleRoom(max_num_seqs=4, kv_bytes=1 << 24)
BUSY_CYCLES = 2_000_000_000  # of the device's clock: about a second
LENGTH = 12


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return make_model(SHAPE.config(), torch.float32, CUDA, 512, 0)


@pytest.fixture(scope="module")
def directory(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyEagle(target).save(tmp_path_factory.mktemp("eagle") / "heads")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random layers are never sure of anything."""
    monkeypatch.setattr(eagle_loader, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(eagle, "LEAST_CHANCE", 0.0)


def drafts_of(drafter: EagleDrafter, features: torch.Tensor) -> list[Draft]:
    """A chain, and what goes on behind it."""
    about = DraftRequest("a", 4, SamplingParams(max_tokens=99, temperature=0.0))
    run = (TargetFeatures(LENGTH - 1, features),)
    job = DraftJob(about, 0, 0, tuple(range(5, 5 + LENGTH)), LENGTH, 2, run, may_branch=False)
    (begun,) = drafter.draft([job]).drafts
    first = LENGTH + len(begun.token_ids)
    (beyond,) = drafter.draft([DraftJob(about, 0, first, (), LENGTH, 2, run, may_branch=False)]).drafts
    return [begun, beyond]


def chains_of(drafter: EagleDrafter) -> LayerChains:
    chains = drafter.compute
    assert isinstance(chains, LayerChains)
    return chains


def recorded(drafter: EagleDrafter, *, is_fused: bool = False) -> EagleDrafter:
    """With rounds that are replayed."""
    chains = chains_of(drafter)
    make = partial(_fused, drafter) if is_fused else None
    chains.steps = fastest_steps(chains.steps, drafter.kv, 3 * SHAPE.hidden, make)
    assert isinstance(chains.steps, RecordedSteps) and chains.steps.sizes
    assert isinstance(chains.steps.layer, FusedEagle) == is_fused
    return drafter


def _fused(drafter: EagleDrafter, _backend: AttentionBackend) -> FusedEagle:
    assert isinstance(drafter.weights, EagleWeights)
    return FusedEagle(drafter.weights)


@pytest.mark.parametrize("way", [lambda drafter: drafter, recorded])
def test_it_drafts_beside_a_pass(
    way: Callable[[EagleDrafter], EagleDrafter], target: LoadedModel, directory: Path
) -> None:
    idle, beside = (load_eagle_drafter(directory, target, ROOM) for _ in range(2))
    beside = way(beside)
    features = torch.randn((LENGTH - 1, 3 * SHAPE.hidden), device=CUDA)
    expected = drafts_of(idle, features)
    assert [len(draft.token_ids) for draft in expected] == [2, 2]
    drafts_of(beside, features)  # libraries are loaded by now
    beside.close(["a"])
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # stands for the target's pass
    verified = torch.cuda.Event()  # type: ignore[no-untyped-call]
    verified.record()
    assert [draft.token_ids for draft in drafts_of(beside, features)] == [
        draft.token_ids for draft in expected
    ]
    assert not verified.query(), "it did not wait"  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_fused", [False, True])
def test_recorded_rounds_are_those_of_operations(is_fused: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a layer that sees 512 positions: a slab has 1,040 slots."""
    target = make_model(SHAPE.config(), dtype, CUDA, 2048, 0)
    files = TinyEagle(target).save(tmp_path / "heads")
    config = json.loads((files / CONFIG_FILE).read_text())
    config["slipstream"]["window"] = 512
    (files / CONFIG_FILE).write_text(json.dumps(config))
    plain, replayed = (load_eagle_drafter(files, target, ROOM) for _ in range(2))
    recorded(replayed, is_fused=is_fused)
    rng = np.random.default_rng(3)
    all_kept = [0] * 4
    for turn, rows in enumerate([[200, 3, 40, 1], [1, 2, 3, 4], [7, 1, 1, 1], [48, 30, 1, 1], [1], [600]]):
        count = len(rows)
        kept = all_kept[:count]
        work = EagleRound(
            features=torch.randn((sum(rows), 3 * SHAPE.hidden), device=CUDA, dtype=dtype),
            token_ids=rng.integers(3, SHAPE.vocab, sum(rows)).tolist(),
            positions=[first + row for first, some in zip(kept, rows, strict=True) for row in range(some)],
            num_rows=rows,
            num_kept=kept,
            slabs=list(range(count)),
            num_drafts=[5, 4, 4, 1][:count],
            num_wanted=[15] * count,
        )
        told = []
        for steps in (chains_of(plain).steps, chains_of(replayed).steps):
            logits = [steps.start(work).logits.to(dtype, copy=True)]
            drafts = torch.arange(10, 10 + count, device=CUDA)
            logits += [steps.go_on(drafts[:some]).logits.to(dtype, copy=True) for some in work.drawing[1:]]
            told.append(logits)
        for depth, (expected, found) in enumerate(zip(*told, strict=True)):
            assert is_close(found, expected), (turn, depth)
        all_kept[:count] = [first + some for first, some in zip(kept, rows, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_of_modules_are_fused_and_recorded(family: str, tmp_path: Path) -> None:
    """What is put in was compared with operations: here it must be put in."""
    case = mtp_case(family, tmp_path / "files", "--device", "cuda")
    assert isinstance(case.layer, MtpLayer) and case.target is not None
    kv, module = case.kv(), case.layer.module
    make = quick_layer(module, case.target, ModelSettings(model="tiny"), 16)
    steps = fastest_steps(case.eager(kv), kv, case.width, make)
    assert isinstance(steps, RecordedSteps) and steps.layer is not case.layer
