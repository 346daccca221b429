"""What a device keeps of quantized checkpoints: the codes of each format, what they stand for, refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from config import ModelSettings
from engine.compute.cuda import weight_rounding
from engine.compute.cuda.coded_choice import NO_KINDS, kept_kinds
from engine.compute.loading import loader, quantized_files
from engine.compute.loading.coded_weights import (
    CodedLinear,
    CodeKind,
    InputRounding,
    are_joinable,
    float_codes,
    integer_codes,
    joined,
    most_expanded_bytes,
    round_inputs,
    round_weights,
    rounds_inputs,
)
from engine.compute.loading.loader import load_model
from engine.compute.loading.outline import outline_model, weight_bytes
from engine.compute.loading.quantized_files import foresee_codes
from engine.compute.loading.support import read_architecture
from engine.compute.loading.weight_formats import read_weight_format
from engine.compute.native.families import called_linears
from engine.compute.native.install import with_kernels
from engine.compute.native.weight_formats import weight_bytes_by_format
from engine.compute.runner import self_check
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import packed_sample
from engine.errors import StartRefused, UnsupportedModel
from tests.support.coded import EVERY, WIDTH, Make, floats, integers, known
from tests.support.packed import as_loaded
from tests.support.quantized_checkpoints import (
    Checkpoint,
    awq,
    bitsandbytes,
    compressed_fp8,
    compressed_integers,
    compressed_w8a8,
    fp8,
    gptq,
    save_quantized,
)
from tests.support.tiny_models import tiny_model

SETTINGS = ModelSettings(dtype="float32", device="cpu", compile="off")
FIXED = InputRounding(scale=torch.tensor([0.5]))


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that keeps every kind of codes, as a GPU does, and unpacks them for each use."""
    monkeypatch.setattr(loader, "kept_kinds", lambda *_: frozenset(CodeKind))
    monkeypatch.setattr(loader, "multiply_codes", lambda *_: None)


def codes_in(model: nn.Module) -> Iterator[tuple[str, CodedLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, CodedLinear))


KEPT: dict[str, tuple[Checkpoint, CodeKind, InputRounding | None]] = {
    "gptq": (gptq(), CodeKind.INT4, None),
    "gptq-act-order": (gptq(act_order=True), CodeKind.INT4, None),
    "gptq-8": (gptq(8), CodeKind.INT8, None),
    "gptq-2": (gptq(2), CodeKind.INT4, None),
    "gptq-v2": (gptq(version=2), CodeKind.INT4, None),
    "awq": (awq(), CodeKind.INT4, None),
    "int4": (compressed_integers(4), CodeKind.INT4, None),
    "int4-act-order": (
        compressed_integers(4, symmetric=False, act_order=True),
        CodeKind.INT4,
        None,
    ),
    "int8": (compressed_integers(8), CodeKind.INT8, None),
    "w8a8": (compressed_w8a8(), CodeKind.INT8, None),
    "fp8-tensor": (compressed_fp8("tensor"), CodeKind.FP8, FIXED),
    "fp8-channel": (compressed_fp8("channel"), CodeKind.FP8, FIXED),
    "fp8-block": (compressed_fp8("block"), CodeKind.FP8, FIXED),
    "deepseek": (fp8((24, 48)), CodeKind.FP8, InputRounding(48)),
    "deepseek-powers": (fp8((32, 32), powers=True), CodeKind.FP8, InputRounding(32)),
    "deepseek-tensor": (fp8(None), CodeKind.FP8, InputRounding()),
}


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize(("checkpoint", "kind", "rounding"), KEPT.values(), ids=KEPT)
def test_codes_stand_for_what_the_format_says(
    checkpoint: Checkpoint, kind: CodeKind, rounding: InputRounding | None, tmp_path: Path
) -> None:
    expected = save_quantized(tmp_path, checkpoint)
    found = dict(codes_in(load_model(tmp_path, SETTINGS).model))
    assert len(found) == 14  # all projections of two layers
    for name, linear in found.items():
        assert linear.coded.kind is kind
        torch.testing.assert_close(linear.coded.numbers(), expected[f"{name}.weight"], rtol=1e-6, atol=1e-9)
        ours = linear.coded.rounding
        assert (ours is None) == (rounding is None)
        if ours is not None and rounding is not None:
            assert (ours.group, ours.scale) == (rounding.group, rounding.scale)


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("checkpoint", [awq(), gptq(act_order=True), compressed_w8a8()])
def test_a_model_over_codes_is_the_model(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(tmp_path, checkpoint)
    found = packed_sample(PackedForward(load_model(tmp_path, SETTINGS)))
    monkeypatch.setattr(loader, "kept_kinds", lambda *_: NO_KINDS)
    plain = load_model(tmp_path, SETTINGS)
    assert not any(codes_in(plain.model))
    torch.testing.assert_close(found, packed_sample(PackedForward(plain)), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("keeping")
def test_what_is_no_code_becomes_numbers_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_quantized(tmp_path, bitsandbytes("nf4"))
    with caplog.at_level(logging.INFO, "slipstream.model"):
        assert not any(codes_in(load_model(tmp_path, SETTINGS).model))
    assert "14 projections become numbers of float32" in caplog.messages


@pytest.mark.usefixtures("keeping")
def test_a_class_that_changes_weights_gets_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = save_quantized(tmp_path, awq())
    from_weights = loader._from_weights

    def changed(*given: Any) -> Any:
        model = from_weights(*given)
        linear = model.get_submodule("model.layers.1.mlp.up_proj")
        linear.weight.data = linear.weight.data.clone()
        return model

    monkeypatch.setattr(loader, "_from_weights", changed)
    model = load_model(tmp_path, SETTINGS).model
    assert not any(codes_in(model)) and "the weights are unpacked" in caplog.text
    name = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(model.state_dict()[name], expected[name])


@pytest.mark.usefixtures("keeping")
def test_the_codes_are_what_memory_counts(tmp_path: Path) -> None:
    save_quantized(tmp_path, awq())
    model = load_model(tmp_path, SETTINGS).model
    found = weight_bytes_by_format(model)
    assert set(found) == {"INT4", "F32"}
    weights = sum(linear.in_features * linear.out_features for _, linear in codes_in(model))
    assert found["INT4"] == sum(linear.coded.nbytes for _, linear in codes_in(model))
    assert weights / 2 < found["INT4"] < weights  # half a byte each, and scales in groups of 32
    parameters = sum(each.nbytes for each in model.parameters())
    buffers = sum(each.nbytes for each in model.buffers())
    assert weight_bytes(model) == found["INT4"] + parameters + buffers


def outline_of(directory: Path) -> nn.Module:
    model: nn.Module = outline_model(read_architecture(directory), torch.float32, SETTINGS).model
    return model


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("name", sorted(set(KEPT) - {"gptq-2"}))
def test_what_codes_take_is_foreseen(name: str, tmp_path: Path) -> None:
    checkpoint = KEPT[name][0]
    save_quantized(tmp_path, checkpoint)
    outline, loaded = outline_of(tmp_path), load_model(tmp_path, SETTINGS).model
    plain = weight_bytes(outline)
    foresee_codes(outline, tmp_path, read_weight_format(checkpoint.settings), frozenset(CodeKind))
    assert weight_bytes(loaded) / plain < 0.8
    assert abs(weight_bytes(outline) - weight_bytes(loaded)) < 0.05 * plain


def test_what_becomes_numbers_is_foreseen_as_numbers(tmp_path: Path) -> None:
    for checkpoint, kinds in ((bitsandbytes("nf4"), frozenset(CodeKind)), (fp8(None), {CodeKind.INT4})):
        save_quantized(tmp_path, checkpoint)
        outline = outline_of(tmp_path)
        plain = weight_bytes(outline)
        foresee_codes(outline, tmp_path, read_weight_format(checkpoint.settings), kinds)
        assert weight_bytes(outline) == plain


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_what_rounded_weights_take_is_foreseen(asked: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    settings = ModelSettings(dtype="float32", device="cpu", quantization=asked)
    outline, loaded = outline_of(tmp_path), load_model(tmp_path, settings).model
    assert weight_rounding.foresee_rounding(outline, asked).startswith(f"{asked}: 0 MiB to multiply with")
    assert weight_bytes(outline) == weight_bytes(loaded)


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_a_projection_over_codes_computes_with_their_numbers(make: Make) -> None:
    coded = make()
    linear, rows = CodedLinear(coded, torch.randn(coded.out)), torch.randn(3, coded.in_features)
    plain = linear.plain(torch.float32)
    torch.testing.assert_close(linear(rows), plain(coded.rounded(rows)), rtol=1e-5, atol=1e-4)


def test_four_bits_are_two_codes_a_byte_and_shared_zero_points_take_none() -> None:
    coded = integers(128)
    assert coded.codes.shape == (70, 192) and coded.zeros is not None  # 300 columns, filled up to 3 * 128
    assert integers(128, zeros=False).zeros is None
    assert coded.scales.dtype is torch.float16


def test_codes_that_eight_bits_do_not_hold_are_none() -> None:
    scales = torch.ones(2, 1)
    assert integer_codes(torch.tensor([[0.0, 256.0]] * 2), scales) is None
    assert integer_codes(torch.tensor([[0.0, 0.5]] * 2), scales) is None
    wide = known(integer_codes(torch.tensor([[0.0, 255.0], [-255.0, 0.0]]), scales))
    assert wide.kind is CodeKind.INT8 and wide.numbers().tolist() == [[0, 255], [-255, 0]]


def test_groups_too_narrow_for_kernels_are_none() -> None:
    scales = torch.arange(1, 9).repeat_interleave(8)[None].float()
    codes = torch.ones(1, 64)
    assert integer_codes(codes, scales) is None
    assert float_codes(codes.to(torch.float8_e4m3fn), scales) is None


@pytest.mark.parametrize("rounding", [InputRounding(), InputRounding(48), FIXED])
def test_rounded_inputs_are_within_half_a_step(rounding: InputRounding) -> None:
    rows = torch.randn(4, WIDTH)
    rows[2] = 0
    found = floats(0, 1, rounding).rounded(rows)
    step = torch.full((4, 1), 0.5) if rounding.scale is not None else round_inputs(rows, InputRounding())[1]
    assert bool(((found - rows).abs() <= (rows.abs() / 16).maximum(step * 2.0**-10) * 1.001).all())
    assert not found[2].any()


def test_what_is_no_number_stays_none() -> None:
    rows = torch.randn(2, WIDTH)
    rows[1, 7] = float("nan")
    found = floats(0, 1, InputRounding()).rounded(rows)
    assert found[0].isfinite().all() and found[1].isnan().any()


def test_joined_weights_are_those_of_each() -> None:
    parts = [integers(128), integers(128, zeros=False), integers(128)]
    assert are_joinable(parts)
    assert torch.equal(joined(parts).numbers(), torch.cat([each.numbers() for each in parts]))


def test_weights_that_read_inputs_differently_are_not_joined() -> None:
    assert not are_joinable([integers(128), integers(32)])
    assert not are_joinable([integers(128), integers(128, ordered=True)])
    assert not are_joinable([floats(0, 1, None), floats(0, 1, InputRounding())])
    assert not are_joinable([floats(0, 1, FIXED), floats(0, 1, InputRounding(scale=torch.tensor([0.25])))])
    assert are_joinable([floats(0, 1, FIXED), floats(0, 1, InputRounding(scale=torch.tensor([0.5])))])
    assert not are_joinable([floats(128, 32, None)] * 2)  # 70 outputs: a block would hold some of both


@pytest.mark.parametrize(("asked", "limit"), [("int8", 0.01), ("int4", 0.1)])
def test_rounded_weights_are_near(asked: str, limit: float) -> None:
    weights = torch.randn(48, 128, generator=torch.Generator().manual_seed(1))
    weights[3] = 0
    weights[4] += 5
    coded = round_weights(weights, weight_rounding.KINDS[asked], 32)
    change = (coded.numbers() - weights).norm(dim=1)
    assert bool((change <= limit * weights.norm(dim=1) + 1e-6).all()) and float(change.sum()) > 0
    assert coded.nbytes == 48 * 128 * (5 if asked == "int4" else 8.5) / 8


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_weights_are_rounded_as_they_are_loaded(asked: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    settings = ModelSettings(dtype="float32", device="cpu", quantization=asked)
    loaded = load_model(tmp_path, settings)
    assert {linear.coded.kind.value for _, linear in codes_in(loaded.model)} == {asked.upper()}
    assert type(loaded.model.get_output_embeddings()) is nn.Linear
    on_gpu = as_loaded(loaded.model)
    object.__setattr__(on_gpu, "device", torch.device("cuda", 0))
    assert (
        with_kernels(on_gpu, settings, tmp_path, lambda: on_gpu).kernels_used
        == f"for CUDA, weights as {asked.upper()}"
    )


@pytest.mark.usefixtures("keeping")
def test_what_cannot_be_rounded_refuses_the_start(tmp_path: Path) -> None:
    settings = ModelSettings(dtype="float32", device="cpu", quantization="int4")
    save_quantized(tmp_path / "awq", awq())
    with pytest.raises(StartRefused, match=r"--quantization int4: the weights are quantized already\."):
        load_model(tmp_path / "awq", settings)


@pytest.mark.parametrize("asked", ["int8", "int4"])
@pytest.mark.parametrize("number", [1e6, float("nan")])
def test_weights_that_rounding_spoils_refuse_the_start(number: float, asked: str) -> None:
    """One input of each group has weights so large that those of the others become nothing."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_submodule("model.layers.0.mlp.up_proj").weight[:, ::32] = number
    with pytest.raises(StartRefused, match=r"it changes the weights of model\.layers\.0\.mlp\.up_proj by"):
        weight_rounding.round_linears(model, asked, torch.device("cpu"))


@pytest.mark.usefixtures("keeping")
def test_rounded_inputs_are_checked_by_the_limit_of_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(tmp_path, fp8((32, 32)))
    forward = PackedForward(load_model(tmp_path, SETTINGS))
    assert rounds_inputs(forward.loaded.model)
    for difference, is_served in ((0.25, True), (0.35, False)):
        monkeypatch.setattr(self_check, "logits_distance", lambda *_, found=difference: found)
        with nullcontext() if is_served else pytest.raises(UnsupportedModel, match=r"limit 0\.3"):
            self_check.check_forward(forward)


def test_weights_that_a_model_reads_itself_stay_as_they_are() -> None:
    model = tiny_model("llama")
    linears = called_linears(model)
    assert len(linears) == 15 and "lm_head" in linears
    layer: Any = model.get_submodule("model.layers.0.self_attn")
    layer.dt_proj = nn.Linear(2, 2)
    assert called_linears(model).keys() == linears.keys()
    assert called_linears(nn.Sequential(nn.Linear(2, 2))) == {}


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize(
    ("checkpoint", "ending"), [(fp8((32, 32)), "weight_scale_inv"), (gptq(act_order=True), "g_idx")]
)
def test_a_damaged_checkpoint_is_refused(checkpoint: Checkpoint, ending: str, tmp_path: Path) -> None:
    """Of scales or an order that end too early a kernel would read what lies behind them."""
    save_quantized(tmp_path, checkpoint)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.0.mlp.down_proj.{ending}"
    tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StartRefused, match=r"model\.layers\.0\.mlp\.down_proj is not stored as "):
        load_model(tmp_path, SETTINGS)


def test_room_is_left_for_the_largest_weights_that_are_unpacked() -> None:
    model = nn.ModuleList(
        [CodedLinear(integers(128), None), CodedLinear(floats(0, 1, InputRounding()), None)]
    )
    assert most_expanded_bytes(model, torch.bfloat16) == 70 * WIDTH * 2
    assert most_expanded_bytes(model[1], torch.bfloat16) == 0


def test_a_cpu_keeps_no_codes() -> None:
    assert kept_kinds(torch.device("cpu"), ModelSettings()) == NO_KINDS


@pytest.mark.parametrize(
    ("capability", "kinds"),
    [((7, 5), NO_KINDS), ((8, 6), {CodeKind.INT4, CodeKind.INT8}), ((9, 0), set(CodeKind))],
)
def test_a_gpu_keeps_the_codes_that_it_has_instructions_for(
    capability: tuple[int, int], kinds: set[CodeKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr("engine.compute.cuda.coded_choice.find_spec", lambda _: True)
    device = torch.device("cuda", 0)
    assert kept_kinds(device, ModelSettings()) == kinds
    assert kept_kinds(device, ModelSettings(compile="off")) == NO_KINDS


SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "rounded": (fp8((128, 128)).settings, "inputs are rounded to 8 bits as it says"),
    "integers": (compressed_w8a8().settings, "inputs are not rounded to 8 bits"),
}


@pytest.mark.parametrize(("settings", "words"), SCHEMES.values(), ids=SCHEMES)
def test_the_words_say_whether_inputs_are_rounded(settings: dict[str, Any], words: str) -> None:
    weight_format = read_weight_format(settings)
    assert words in weight_format.words(frozenset(CodeKind))
    assert "inputs are not rounded" in weight_format.words()


def test_weights_alone_in_8_bits_leave_inputs_as_they_are() -> None:
    settings = json.loads(json.dumps(compressed_fp8("channel").settings))
    settings["config_groups"]["group_0"]["input_activations"] = None
    assert read_weight_format(settings).inputs is None


def test_a_fixed_scale_that_is_missing_leaves_the_weights_to_be_unpacked() -> None:
    weight_format = read_weight_format(compressed_fp8("channel").settings)
    parts = compressed_fp8("channel").store(64, 64, torch.Generator().manual_seed(0)).tensors
    assert weight_format.coded(parts, frozenset(CodeKind)) is not None
    del parts["input_scale"]
    assert weight_format.coded(parts, frozenset(CodeKind)) is None
    assert quantized_files.NO_CODES.kinds == frozenset()
