"""Products with coded weights on a GPU, against the numbers that the codes stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config import ModelSettings
from engine.compute.loading.coded_weights import (
    CodedLinear,
    CodedWeight,
    CodeKind,
    InputRounding,
    float_codes,
    integer_codes,
    round_inputs,
    round_weights,
)
from engine.compute.loading.loader import load_model
from engine.compute.native.closeness import is_close
from engine.compute.native.weight_formats import weight_bytes_by_format
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import check_forward, packed_difference, packed_sample
from tests.support.coded import EVERY, INTEGERS, Make, floats, known, moved
from tests.support.quantized_checkpoints import awq, compressed_fp8, fp8, gptq, save_quantized

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.coded_layout import MOST_TILED  # noqa: E402
from engine.compute.cuda.coded_linear import TritonLinear, equal_linear, expanded, round_rows  # noqa: E402
from engine.compute.cuda.fused_layer import FusedLayer  # noqa: E402
from engine.compute.cuda.fused_model import fuse_layers  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402

CUDA = torch.device("cuda", 0)
CAPABILITY = torch.cuda.get_device_capability(CUDA)
HAS_FP8 = CAPABILITY >= (8, 9)
HERE = EVERY if HAS_FP8 else INTEGERS
COUNTS = [1, 7, 16, 33, 130, MOST_TILED, MOST_TILED + 1, 700]
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="no numbers of 8 bits on this device")


def large(kind: str) -> CodedWeight:
    """Weights in the shape of an 8B's down projection, which is summed in parts."""
    out, width = 4096, 14336
    weights = torch.randn(out, width, device=CUDA) / 64
    if kind == "int4":
        return round_weights(weights, CodeKind.INT4, 128)
    if kind == "int8":
        return round_weights(weights, CodeKind.INT8, 32)
    codes = (weights * 256).clamp(-448, 448).to(torch.float8_e4m3fn)
    if kind == "fp8 by rows":
        return known(float_codes(codes, torch.rand(out, 1, device=CUDA) / 64, InputRounding()))
    blocks = torch.rand(out // 128, width // 128, device=CUDA) / 64
    spread = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return known(float_codes(codes, spread, InputRounding(128)))


LARGE = ["int4", "int8", *(["fp8 by rows", "fp8 by blocks"] if HAS_FP8 else [])]


def assert_right(made: TritonLinear, coded: CodedWeight, dtype: torch.dtype) -> None:
    original = CodedLinear(coded, made.bias)
    for count in COUNTS:
        rows = torch.randn(count, coded.in_features, device=CUDA).to(dtype)
        total = torch.randn(count, coded.out, device=CUDA).to(dtype)
        expected = original(rows)
        assert is_close(made(rows), expected), count
        assert is_close(made.added(rows, total), expected + total), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", HERE.values(), ids=HERE)
def test_products_are_those_of_the_numbers(make: Make, dtype: torch.dtype) -> None:
    coded = moved(make(), CUDA)
    bias = torch.randn(coded.out, device=CUDA).to(dtype)
    assert_right(TritonLinear(coded, bias, scales_rows=False), coded, dtype)


@pytest.mark.parametrize("kind", LARGE)
def test_products_of_large_weights_are_those_of_the_numbers(kind: str) -> None:
    coded = large(kind)
    assert_right(TritonLinear(coded, None, scales_rows=False), coded, torch.bfloat16)


@pytest.mark.parametrize("kind", LARGE)
def test_a_row_has_the_same_bits_in_any_company(kind: str) -> None:
    coded = large(kind)
    made, rows = TritonLinear(coded, None), torch.randn(MOST_TILED, coded.in_features, device=CUDA).bfloat16()
    together = made(rows)
    for count in (1, 2, 16, 17, 32, 33, 64, 65, 200):
        assert torch.equal(made(rows[:count]), together[:count]), count
        assert torch.equal(made(rows[-count:]), together[-count:]), count


@pytest.mark.parametrize("make", HERE.values(), ids=HERE)
def test_weights_are_unpacked_to_their_numbers(make: Make) -> None:
    coded = moved(make(), CUDA)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(expanded(coded, dtype), coded.numbers().to(dtype))


@needs_fp8
@pytest.mark.parametrize(
    "rounding",
    [InputRounding(), InputRounding(128), InputRounding(48), InputRounding(scale=torch.ones(1) / 99)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_are_rounded_to_torchs_bits(rounding: InputRounding, dtype: torch.dtype) -> None:
    coded = moved(floats(0, 1, rounding), CUDA)
    assert coded.rounding is not None
    rows = (
        torch.randn(9, coded.in_features, device=CUDA) * torch.logspace(-6, 3, 9, device=CUDA)[:, None]
    ).to(dtype)
    rows[3] = 0
    rows[5, 7] = float("nan")
    codes, scales = round_rows(rows, coded)
    expected, expected_scales = round_inputs(rows, coded.rounding)
    finite = torch.arange(9, device=CUDA) != 5
    assert torch.equal(codes.float()[finite], expected.float()[finite])
    assert torch.equal(scales[finite], expected_scales[finite])
    assert bool(codes.float()[5].isnan().any())


@needs_fp8
def test_what_is_no_number_stays_in_its_row() -> None:
    coded = moved(floats(128, 32, InputRounding(128)), CUDA)
    made = TritonLinear(coded, None)
    rows = torch.randn(6, coded.in_features, device=CUDA).bfloat16()
    right = made(rows)
    rows[2, 0] = float("nan")
    found = made(rows)
    others = torch.tensor([0, 1, 3, 4, 5], device=CUDA)
    assert torch.equal(found[others], right[others]) and bool(found[2].isnan().all())


@pytest.mark.skipif(CAPABILITY < (9, 0), reason="torch multiplies rows with scales from capability 9.0 on")
def test_many_rows_of_8_bits_are_multiplied_by_torch() -> None:
    original = CodedLinear(large("fp8 by rows"), None)
    made = equal_linear(original, torch.bfloat16)
    assert made is not None and made.scales_rows


@pytest.mark.parametrize("kind", LARGE)
def test_a_recorded_product_is_the_product(kind: str) -> None:
    coded = large(kind)
    made = TritonLinear(coded, None)
    for count in (1, 40, MOST_TILED + 44):
        rows = torch.randn(count, coded.in_features, device=CUDA).bfloat16()
        expected = made(rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = made(rows)
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


CHECKPOINTS = {
    "awq": (awq(), "INT4"),
    "gptq by act-order": (gptq(act_order=True), "INT4"),
    "gptq-8": (gptq(8), "INT8"),
    "fp8 by outputs": (compressed_fp8("channel"), "FP8"),
    "fp8 by blocks": (fp8((32, 32)), "FP8"),
}


@pytest.mark.parametrize(
    "name", [name for name, (_, kind) in CHECKPOINTS.items() if HAS_FP8 or kind != "FP8"]
)
def test_a_checkpoint_is_served_from_its_codes(name: str, tmp_path: Path) -> None:
    checkpoint, kind = CHECKPOINTS[name]
    save_quantized(tmp_path, checkpoint)
    loaded = load_model(tmp_path, ModelSettings(dtype="bfloat16", device="cuda:0"))
    assert kind in weight_bytes_by_format(loaded.model)
    assert all(type(module) is not CodedLinear for module in loaded.model.modules())
    check_forward(PackedForward(loaded), 16)
    before = packed_sample(PackedForward(loaded))
    fuse_layers(loaded, TritonAttention(Gpu.of(CUDA)), 16)
    after = packed_sample(PackedForward(loaded))
    assert packed_difference(after, before, loaded.dtype, has_blocks="fp8" in name) is None


def test_layers_over_codes_are_fused(tmp_path: Path) -> None:
    save_quantized(tmp_path, awq())
    loaded = load_model(tmp_path, ModelSettings(dtype="bfloat16", device="cuda:0"))
    assert fuse_layers(loaded, TritonAttention(Gpu.of(CUDA)), 16) == len(loaded.layers)
    assert any(isinstance(module, FusedLayer) for module in loaded.model.modules())


def test_codes_by_order_are_those_without_one() -> None:
    """Of the same numbers, whose inputs come in another order."""
    codes = torch.randint(-8, 8, (64, 256), device=CUDA).float()
    scales = (0.01 + torch.rand(64, 2, device=CUDA)).half().float().repeat_interleave(128, 1)
    plain = known(integer_codes(codes, scales))
    order = torch.randperm(256, device=CUDA)
    ordered = replace(plain, order=order.int())
    rows = torch.randn(20, 256, device=CUDA).bfloat16()
    given = torch.empty_like(rows)
    given[:, order] = rows
    assert torch.equal(TritonLinear(ordered, None)(given), TritonLinear(plain, None)(rows))
