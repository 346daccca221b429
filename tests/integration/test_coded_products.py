"""Products with coded weights, through Triton's interpreter, against float32 ones; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.loading.coded_weights import (
    CodedLinear,
    CodedWeight,
    CodeKind,
    InputRounding,
    round_inputs,
    round_weights,
)
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import packed_sample
from tests.support.coded import EVERY, FLOATS, INTEGERS, OUT, WIDTH, Make, floats, integers
from tests.support.packed import as_loaded
from tests.support.tiny_models import tiny_model

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import coded_linear  # noqa: E402
from engine.compute.cuda.coded_choice import multiply_codes  # noqa: E402
from engine.compute.cuda.coded_layout import large_layout, tiled_layout  # noqa: E402
from engine.compute.cuda.coded_linear import (  # noqa: E402
    TritonLinear,
    equal_linear,
    expanded,
    joined_linear,
    round_rows,
)
from engine.compute.cuda.fused_layer import FusedLayer  # noqa: E402
from engine.compute.cuda.fused_model import fuse_layers  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import INTERPRETED, with_even_products  # noqa: E402

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def rounded_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs: the interpreter does not carry where it rounds to 8 bits, which a device does."""
    torch.manual_seed(0)

    def rounded(rows: torch.Tensor, coded: CodedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        assert coded.rounding is not None
        return round_inputs(rows, coded.rounding)

    monkeypatch.setattr(coded_linear, "round_rows", rounded)


def answers(made: CodedLinear, rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = made(rows)
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("count", [1, 5, 17, 40])
@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_products_are_those_of_the_numbers(make: Make, count: int) -> None:
    coded, bias = make(), torch.randn(OUT)
    rows, total = torch.randn(count, coded.in_features), torch.randn(count, OUT)
    expected = coded.rounded(rows) @ coded.numbers().T + bias
    made = TritonLinear(coded, bias)
    close(answers(made, rows), expected)
    close(made.added(rows, total), expected + total)
    close(answers(TritonLinear(coded, None), rows[None]), (expected - bias)[None])


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_a_row_has_the_same_bits_in_any_company(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside more rows a tile is larger, and one program sums what several did before."""
    with_even_products(monkeypatch)
    coded = make()
    made, rows = TritonLinear(coded, torch.randn(OUT)), torch.randn(70, coded.in_features)
    alone = torch.cat([answers(made, rows[place : place + 1]) for place in (0, 16, 33, 69)])
    for count in (2, 16, 31, 70):
        together = answers(made, rows[-count:])
        assert torch.equal(together[-1], alone[3])
    assert torch.equal(answers(made, rows)[[0, 16, 33, 69]], alone)


def test_the_order_of_sums_is_that_of_the_weight_alone() -> None:
    coded = round_weights(torch.randn(256, 4096), CodeKind.INT4, 128)
    layouts = [tiled_layout(coded, count) for count in (1, 16, 32, 33, 256)]
    assert {(each.num_parts, each.chunks_of_part, each.step, each.outs) for each in layouts} == {
        (8, 4, 64, 64)
    }
    assert [each.is_split for each in layouts] == [True, True, True, False, False]
    assert [each.rows for each in layouts] == [16, 16, 32, 64, 64]


def test_no_float32_is_summed_by_units_that_keep_fewer_bits() -> None:
    coded = floats(128, 32, InputRounding(128))
    assert large_layout(coded, 2).is_native and not large_layout(coded, 4).is_native


def test_many_rows_are_multiplied_by_torch_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_linear, "MOST_TILED", 4)
    for make in INTEGERS.values():
        coded = make()
        rows, bias, total = torch.randn(5, coded.in_features), torch.randn(OUT), torch.randn(5, OUT)
        made, plain = TritonLinear(coded, bias), CodedLinear(coded, bias).plain(torch.float32)
        assert torch.equal(answers(made, rows), plain(rows))
        close(made.added(rows, total), plain(rows) + total)


@pytest.mark.parametrize("make", FLOATS.values(), ids=FLOATS)
def test_many_rows_of_8_bits_without_torchs_product(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_linear, "MOST_TILED", 4)
    coded = make()
    rows = torch.randn(140, coded.in_features)
    close(answers(TritonLinear(coded, None), rows), coded.rounded(rows) @ coded.numbers().T)


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_weights_are_unpacked_to_their_numbers(make: Make) -> None:
    coded = make()
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(expanded(coded, dtype), coded.numbers().to(dtype))


@pytest.mark.parametrize("rounding", [InputRounding(), InputRounding(48), InputRounding(128)])
def test_inputs_become_8_bits_and_scales_as_by_torch(rounding: InputRounding) -> None:
    """Of numbers that 8 bits hold once they are scaled, since the interpreter does not carry in rounding."""
    coded = floats(0, 1, rounding)
    group = rounding.width(WIDTH)
    rows = torch.randn(5, WIDTH).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    rows[:, ::group] = 448
    rows *= torch.exp2(torch.arange(5.0))[:, None]
    rows[3] = 0
    codes, scales = round_rows(rows, coded)
    expected, expected_scales = round_inputs(rows, rounding)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.float(), expected.float())


def test_inputs_beyond_a_fixed_scale_are_the_largest_number() -> None:
    coded = floats(0, 1, InputRounding(scale=torch.tensor([0.5])))
    codes, scales = round_rows(torch.full((1, WIDTH), -1000.0), coded)
    assert torch.equal(codes.float(), torch.full((1, WIDTH), -448.0)) and scales.tolist() == [[0.5]]


def test_nothing_is_the_product_of_no_rows() -> None:
    assert answers(TritonLinear(integers(128), None), torch.randn(0, WIDTH)).shape == (0, OUT)


def test_joined_weights_answer_as_each_alone() -> None:
    coded = [integers(128), integers(128, zeros=False)]
    linears = [TritonLinear(coded[0], torch.randn(OUT)), TritonLinear(coded[1], None)]
    rows = torch.randn(3, WIDTH)
    found = answers(joined_linear(linears), rows)
    close(found, torch.cat([answers(linear, rows) for linear in linears], dim=1))


@pytest.mark.parametrize("wrong", [range(1, 2), range(2, 256), range(257, 1000)])
def test_a_projection_that_answers_otherwise_is_not_used(
    wrong: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CodedLinear(integers(128), None)
    assert equal_linear(original, torch.float32) is not None
    right = TritonLinear._product

    def product(self: TritonLinear, rows: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        return right(self, rows, added) * (1.01 if len(rows) in wrong else 1)

    monkeypatch.setattr(TritonLinear, "_product", product)
    assert equal_linear(original, torch.float32) is None


@pytest.mark.parametrize("is_refused", [False, True])
def test_where_torchs_product_of_8_bits_is_no_good_the_kernel_stays(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled_mm(rows: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if is_refused:
            raise RuntimeError("not on this device")
        return torch.zeros(len(rows), 64)

    codes = torch.randn(64, 256).to(torch.float8_e4m3fn)
    coded = CodedWeight(
        CodeKind.FP8, codes, torch.rand(64, 1) + 0.1, None, 256, 256, rounding=InputRounding()
    )
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    made = equal_linear(CodedLinear(coded, None), torch.float32)
    assert made is not None and not made.scales_rows


def coded_model(family: str, change: Any = lambda name, coded: coded) -> Any:
    """A tiny model, its projections as codes but the head."""
    model = tiny_model(family)
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and module is not model.get_output_embeddings():
            coded = round_weights(module.weight, CodeKind.INT4, 32)
            model.set_submodule(name, CodedLinear(change(name, coded), module.bias))
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_model_of_fused_layers_over_codes_is_the_model(family: str) -> None:
    loaded = as_loaded(coded_model(family))
    before = packed_sample(PackedForward(loaded))
    multiply_codes(loaded.model, loaded.dtype)
    assert fuse_layers(loaded, TritonAttention(Gpu(4, 200_000)), 4) == len(loaded.layers)
    parts = [module for module in loaded.model.modules() if isinstance(module, FusedLayer)]
    assert all(isinstance(each.qkv, TritonLinear) and not each.is_plain for each in parts)
    forward = PackedForward(loaded)
    forward.backend = TritonAttention(Gpu(4, 200_000))
    torch.testing.assert_close(packed_sample(forward), before, atol=1e-4, rtol=1e-4)


def test_a_layer_whose_projections_read_inputs_differently_is_not_fused() -> None:
    def change(name: str, coded: CodedWeight) -> CodedWeight:
        order = torch.arange(coded.in_features).flip(0).int()
        return replace(coded, order=order) if name.endswith("k_proj") else coded

    loaded = as_loaded(coded_model("llama", change))
    multiply_codes(loaded.model, loaded.dtype)
    assert fuse_layers(loaded, TritonAttention(Gpu(4, 200_000)), 4) == 0


def test_what_kernels_get_wrong_is_unpacked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = as_loaded(coded_model("llama"))
    before = packed_sample(PackedForward(loaded))
    monkeypatch.setattr(coded_linear, "equal_linear", lambda *_: None)
    multiply_codes(loaded.model, loaded.dtype)
    assert not any(isinstance(module, CodedLinear) for module in loaded.model.modules())
    assert "kernels do not multiply with the codes of model.layers.0.self_attn.q_proj" in caplog.text
    torch.testing.assert_close(packed_sample(PackedForward(loaded)), before, atol=1e-4, rtol=1e-4)
