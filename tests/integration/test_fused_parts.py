"""Norms, MLPs and projections of models that carry state, fused, in the interpreter; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.compute.attention import ReferenceAttention
from engine.compute.native.closeness import is_close
from engine.compute.recurrent import mixer_kinds, pass_rows, recurrent_forward
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.dummy_steps import Part
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_difference, packed_sample
from tests.support.launches import CountedKernel, LaunchCount, run_counted
from tests.support.packed import as_loaded
from tests.support.recurrent import pack_slots
from tests.support.tiny_models import tiny_model

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import fused_norms, fused_parts, fused_products, state_scans  # noqa: E402
from engine.compute.cuda.fused_norms import FusedGatedNorm, FusedNorm  # noqa: E402
from engine.compute.cuda.fused_parts import FusedMlp, fuse_parts  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import INTERPRETED, with_all_numbers  # noqa: E402

pytestmark = INTERPRETED

# Each with its norms, gated norms and MLPs.
FAMILIES = {
    "qwen3_5_hybrid": (9, 2, 3),
    "granite_hybrid": (7, 2, 0),
    "bamba_hybrid": (7, 2, 3),
    "mamba2": (3, 2, 0),
    "lfm2_hybrid": (9, 0, 0),
}


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_numbers(monkeypatch)
    backend = TritonAttention(Gpu(4, 200_000))
    monkeypatch.setattr(recurrent_forward, "choose_backend", lambda *_, **__: backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "counts"), FAMILIES.items())
def test_all_that_answer_alike_are_fused(
    family: str, counts: tuple[int, int, int], dtype: torch.dtype
) -> None:
    loaded = as_loaded(noisy(tiny_model(family, dtype=dtype)))
    before = packed_sample(forward_of(loaded))
    assert fuse_parts(loaded, 4) == sum(counts)
    kinds = [type(module) for module in loaded.model.modules()]
    assert tuple(map(kinds.count, (FusedNorm, FusedGatedNorm, FusedMlp))) == counts
    after = packed_sample(forward_of(loaded))
    assert packed_difference(after, before, dtype, has_blocks=False) is None
    if dtype is torch.float32:
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def noisy(model: Any) -> Any:
    """The model with norms that are no ones and zeros."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data += torch.randn(weight.shape, generator=generator).to(weight.dtype) / 5
    return model


def test_a_delta_net_projects_its_rows_at_once_and_keeps_no_second_copy() -> None:
    loaded = as_loaded(tiny_model("qwen3_5_hybrid"))
    num_bytes = sum(weight.nbytes for weight in loaded.model.parameters())
    fuse_parts(loaded, 4)
    layer: Any = next(module for module in loaded.model.modules() if hasattr(module, "in_proj_together"))
    hidden = torch.randn(3, 64)
    parts = (layer.in_proj_qkv(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden))
    torch.testing.assert_close(layer.in_proj_together(hidden), torch.cat(parts, dim=-1))
    storages = {weight.untyped_storage().data_ptr() for weight in loaded.model.parameters()}
    stored = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for weight in loaded.model.parameters()
    }
    assert len(stored) == len(storages) and sum(stored.values()) <= num_bytes + 2**12


class Shifted(nn.Module):
    """Called a norm, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64), requires_grad=False)
        self.eps = 1e-6

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight + 1.0


def test_what_answers_otherwise_stays() -> None:
    loaded = as_loaded(tiny_model("mamba2"))
    layer: Any = loaded.model.base_model.layers[0]
    layer.norm = type("ShiftedRMSNorm", (Shifted,), {})()
    assert fuse_parts(loaded, 4) == 4
    assert isinstance(layer.norm, Shifted)
    assert is_close(layer.norm(torch.ones(1, 64)), torch.full((1, 64), 2.0))


# Of a layer that carries state, with its MLP: launches of decodes in bfloat16, by torch's operations and by
# kernels.
LAUNCHES = {"qwen3_5_hybrid": (97, 15), "granite_hybrid": (72, 18), "bamba_hybrid": (71, 15)}


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("family", LAUNCHES)
def test_a_layer_takes_few_launches(family: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = as_loaded(tiny_model(family, dtype=torch.bfloat16))
    forward = forward_of(loaded)
    assert isinstance(forward, RecurrentForward)
    if is_fused:
        fuse_parts(loaded, 4)
        forward.loaded = replace(loaded, state_kernel=state_scans.TritonScans())
    forward.backend = ReferenceAttention()
    memory = StateMemory(forward, MemorySizes(num_blocks=8, block_size=4, num_slots=2))
    parts = [Part([5, 6, 7], 0, 2, range(4)), Part([8, 9, 7], 0, 2, range(4, 8))]
    count, found = LaunchCount(), list[list[str]]()
    for module in (state_scans, fused_products, fused_norms, fused_parts):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, CountedKernel(name, count))
    for module in (mixer_kinds, pass_rows):  # on a device a number is rounded alike wherever it is
        monkeypatch.setattr(module, "alike", lambda function, rows: function(rows))
    layer = loaded.model.base_model.layers[0]
    layer.register_forward_pre_hook(lambda *_: count.names.clear())
    layer.register_forward_hook(lambda *_: found.append([*count.names]))
    run_counted(count, lambda: forward(pack_slots(dict(enumerate(parts))), memory))
    decodes = {seat: part._replace(first=2, stop=3) for seat, part in enumerate(parts)}
    run_counted(count, lambda: forward(pack_slots(decodes), memory))
    assert len(found) == 2 and len(found[1]) == LAUNCHES[family][is_fused], found[1]
