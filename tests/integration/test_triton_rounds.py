"""Recorded chains over the CUDA kernels, through Triton's interpreter on the CPU; `make test-triton`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from engine.compute.cuda.graphs.recorded_rounds import RecordedSteps
from engine.compute.drafters.eagle_round import GUESSES
from engine.compute.drafters.layer_chains import EagerSteps
from engine.compute.drafters.slab_rows import RowsTogether
from tests.support.eagle_rounds import Case, assert_same_rounds, eagle_case, made_round, mtp_case
from tests.support.launches import CountedKernel, LaunchCount, run_counted

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import triton_attention  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import INTERPRETED  # noqa: E402

pytestmark = INTERPRETED


def case_of(kind: str, directory: Path) -> Case:
    return eagle_case(directory) if kind == "eagle" else mtp_case(kind, directory)


@pytest.mark.parametrize("kind", ["eagle", "glm4_moe", "deepseek_v3", "mimo"])
def test_chains_over_the_kernels_are_those_of_operations(kind: str, tmp_path: Path) -> None:
    """A layer that sees a window, a module, one whose K/V are latent rows."""
    case = case_of(kind, tmp_path / "files")
    recorded = case.recorded(case.kv(), backend=TritonAttention(Gpu(4, 200_000)))
    assert isinstance(recorded, RecordedSteps) and recorded.sizes
    assert_same_rounds(case, recorded)


@pytest.mark.parametrize(
    ("kind", "most"), [("eagle", 40), ("mimo", 70), ("glm4_moe", 119), ("deepseek_v3", 145)]
)
def test_a_draft_of_many_sequences_takes_few_launches(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one depth; a recording is one more to replay, whatever it holds."""
    case = case_of(kind, tmp_path / "files")
    kv = case.kv(64)
    count = LaunchCount()
    for name in ("attend_kernel", "merge_kernel", "store_kernel"):
        monkeypatch.setattr(triton_attention, name, CountedKernel(name, count))
    backend = TritonAttention(Gpu(4, 200_000))
    ways = case.eager(kv), EagerSteps(case.layer, partial(RowsTogether, backend, kv), GUESSES)
    launches = []
    for steps in ways:
        work = made_round([2] * 64, [2] * 64, [0] * 64, width=case.width)
        steps.start(work)
        tokens = case.layer.token_ids[:64]
        launches.append(len(run_counted(count, partial(steps.go_on, tokens))))
    apart, together = launches
    assert together <= most and apart >= together + 8 * 64
