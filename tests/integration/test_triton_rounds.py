"""Recorded chains over the CUDA kernels, through Triton's interpreter on the CPU; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from engine.compute.cuda.graphs.recorded_rounds import RecordedSteps
from engine.compute.drafters.eagle_round import GUESSES
from engine.compute.drafters.eagle_torch import TorchEagle
from engine.compute.drafters.layer_chains import DraftLayer, EagerSteps
from engine.compute.drafters.mtp_layer import MtpLayer
from engine.compute.drafters.slab_rows import RowsTogether
from engine.compute.runner import packed_forward
from tests.support.eagle_rounds import Case, assert_same_rounds, eagle_case, made_round, mtp_case
from tests.support.launches import CountedKernel, LaunchCount, run_counted
from tests.support.tiny_mtp import FAMILIES

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import (  # noqa: E402
    fused_experts,
    fused_latent,
    fused_norms,
    fused_products,
    fused_router,
    triton_attention,
)
from engine.compute.cuda.fused_eagle import FusedEagle  # noqa: E402
from engine.compute.cuda.fused_module import fused_layer  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import INTERPRETED  # noqa: E402

pytestmark = INTERPRETED

_LAUNCHING = (triton_attention, fused_latent, fused_norms, fused_products, fused_experts, fused_router)


def case_of(kind: str, directory: Path) -> Case:
    """Of an EAGLE layer, of one past whose attention the normed input goes, of a family's module."""
    if not kind.startswith("eagle"):
        return mtp_case(kind, directory)
    case = eagle_case(directory)
    if kind == "eagle, normed" and isinstance(case.layer, TorchEagle):
        case.layer.weights = replace(case.layer.weights, norms_residual=True)
    return case


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> TritonAttention:
    """For models and layers; no more rows are recorded than the tests read."""
    made = TritonAttention(Gpu(4, 200_000))
    monkeypatch.setattr("engine.compute.cuda.graphs.recorded_rounds._READING", (8, 16))
    monkeypatch.setattr(packed_forward, "choose_backend", lambda *_, **__: made)
    return made


@pytest.mark.parametrize("kind", ["eagle", "glm4_moe", "deepseek_v3", "mimo"])
def test_rounds_over_the_kernels_are_those_of_operations(
    kind: str, tmp_path: Path, backend: TritonAttention
) -> None:
    """A layer that sees a window, a module, one whose K/V are latent rows."""
    case = case_of(kind, tmp_path / "files")
    recorded = case.recorded(case.kv(), backend=backend)
    assert isinstance(recorded, RecordedSteps) and recorded.sizes
    assert_same_rounds(case, recorded)


@pytest.mark.parametrize("kind", ["eagle", "eagle, normed", *FAMILIES])
def test_rounds_of_fused_layers_are_those_of_operations(
    kind: str, tmp_path: Path, backend: TritonAttention
) -> None:
    case = case_of(kind, tmp_path / "files")
    quick = quick_layer(case, backend)
    recorded = case.recorded(case.kv(), backend=backend, layers=[quick])
    assert isinstance(recorded, RecordedSteps) and recorded.layer is quick
    assert_same_rounds(case, recorded, turns=3)


def quick_layer(case: Case, backend: TritonAttention) -> DraftLayer:
    if isinstance(case.layer, TorchEagle):
        return FusedEagle(case.layer.weights)
    assert isinstance(case.layer, MtpLayer) and case.target is not None
    quick = fused_layer(case.layer.module, case.target, 16, backend)
    assert quick is not None
    return quick


@pytest.mark.parametrize(
    ("kind", "most", "fused"),
    [("eagle", 40, 27), ("mimo", 70, 29), ("glm4_moe", 119, 50), ("deepseek_v3", 145, 36)],
)
def test_a_draft_of_many_sequences_takes_few_launches(
    kind: str,
    most: int,
    fused: int,
    tmp_path: Path,
    backend: TritonAttention,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of one depth; a recording is one more to replay, whatever it holds."""
    case = case_of(kind, tmp_path / "files")
    kv = case.kv(64)
    ways = [case.eager(kv), EagerSteps(case.layer, partial(RowsTogether, backend, kv), GUESSES)]
    ways.append(EagerSteps(quick_layer(case, backend), partial(RowsTogether, backend, kv), GUESSES))
    count = LaunchCount()
    for module in _LAUNCHING:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, CountedKernel(name, count))
    launches = []
    for steps in ways:
        work = made_round([2] * 64, [2] * 64, [0] * 64, width=case.width)
        steps.start(work)
        tokens = case.layer.token_ids[:64]
        launches.append(len(run_counted(count, partial(steps.go_on, tokens))))
    apart, together, in_kernels = launches
    assert together <= most and apart >= together + 8 * 64
    assert in_kernels <= fused
