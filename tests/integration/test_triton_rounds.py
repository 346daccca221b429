"""Recorded chains over the CUDA kernels, through Triton's interpreter on the CPU; `make test-triton`."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.compute.cuda.graphs.recorded_rounds import RecordedSteps
from tests.support.eagle_rounds import Case, assert_same_rounds, eagle_case, mtp_case

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import INTERPRETED  # noqa: E402

pytestmark = INTERPRETED


@pytest.mark.parametrize("kind", ["eagle", "glm4_moe", "deepseek_v3", "mimo"])
def test_chains_over_the_kernels_are_those_of_operations(kind: str, tmp_path: Path) -> None:
    """A layer that sees a window, a module, one whose K/V are latent rows."""
    directory = tmp_path / "files"
    case: Case = eagle_case(directory) if kind == "eagle" else mtp_case(kind, directory)
    recorded = case.recorded(case.kv(), backend=TritonAttention(Gpu(4, 200_000)))
    assert isinstance(recorded, RecordedSteps) and recorded.sizes
    assert_same_rounds(case, recorded)
