"""A drafter of one layer on a GPU: it drafts beside a pass that is at work, and says what it says alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.compute.drafters import eagle, eagle_loader
from engine.compute.drafters.eagle import EagleDrafter
from engine.compute.drafters.eagle_loader import EagleRoom, load_eagle_drafter
from engine.compute.loading.loader import LoadedModel
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import Draft, DraftJob, DraftRequest, TargetFeatures
from tests.bench.gpu.made_models import make_model
from tests.bench.gpu.sizes import LlamaShape
from tests.support.tiny_eagle import TinyEagle

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

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


def test_it_drafts_beside_a_pass(target: LoadedModel, directory: Path) -> None:
    idle, beside = (load_eagle_drafter(directory, target, ROOM) for _ in range(2))
    features = torch.randn((LENGTH - 1, 3 * SHAPE.hidden), device=CUDA)
    expected = drafts_of(idle, features)
    assert [len(draft.token_ids) for draft in expected] == [2, 2]
    drafts_of(beside, features)  # libraries are loaded by now
    beside.close(["a"])
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # stands for the target's pass
    verified = torch.cuda.Event()  # type: ignore[no-untyped-call]
    verified.record()
    assert drafts_of(beside, features) == expected
    assert not verified.query(), "it did not wait"  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
