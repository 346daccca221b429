"""Models whose weights stay as their GGUF file has them, but for the rounding of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format

from config import ModelSettings, load_settings
from engine.compute.loading import loader, model_source
from engine.compute.loading.gguf_file import read_gguf
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.loading.model_files import gguf_of
from engine.compute.loading.model_source import resolve_model
from engine.compute.loading.stored_weights import StoredEmbedding, StoredExperts, StoredFloats, StoredLinear
from engine.compute.native.decoder import NativeDecoder
from engine.compute.native.experts import NativeExperts
from engine.compute.native.forms import NativeUnavailable
from engine.compute.native.install import with_kernels
from engine.compute.native.modules import NativeEmbedding, NativeLinear
from engine.compute.native.records import BLOCKS, ELEMENTS, NUMBERS
from engine.compute.native.stored import take_weights
from engine.compute.native.weight_formats import weight_bytes_by_format
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import logits_distance, packed_sample
from engine.errors import StartRefused
from tests.support.gguf_blocks import BLOCK_FORMATS
from tests.support.hybrid_gguf import save_hybrid_gguf
from tests.support.native import FLOAT32_FORM, compiled_home
from tests.support.packed import (
    as_loaded,
    is_the_same_in_any_company,
)
from tests.support.quantized_checkpoints import (
    Checkpoint,
    awq,
    compressed_fp8,
    compressed_integers,
    fp8,
    mxfp4,
    save_quantized,
)
from tests.support.speculated import single_threaded
from tests.support.tiny_gguf import save_block_gguf, save_tiny_gguf
from tests.support.tiny_models import tiny_model

_STORED = (StoredLinear, StoredEmbedding, StoredExperts)
MAPS = Path("/proc/self/maps")
Q4_K_M = (Format.Q4_K, Format.Q6_K, Format.Q5_0, Format.Q8_0)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


def settings_of(path: Path, *flags: str) -> ModelSettings:
    return load_settings([str(path), *flags], environ={}).model


def stored(path: Path, dtype: str = "float32") -> LoadedModel:
    """The model with modules that unpack what the file has."""
    settings = settings_of(path, "--dtype", dtype)
    return load_model(resolve_model(settings, path.parent / "home"), settings)


def served(path: Path, dtype: str = "float32") -> LoadedModel:
    """The same on the kernels."""
    form = FLOAT32_FORM if dtype == "float32" else "auto"
    home = compiled_home(getattr(torch, dtype), form, formats=True)
    settings = settings_of(path, "--dtype", dtype, "--cpu-kernels", form)
    loaded = take_weights(stored(path, dtype), settings, home)
    return with_kernels(loaded, settings, home, lambda: pytest.fail("the kernels are of no use"))


def kind_of(linear: NativeLinear) -> int:
    """What its weights are."""
    return linear.weights.kind


@pytest.mark.by_default("Q4_0", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "Q3_K", "Q8_0")
@pytest.mark.parametrize("kind", BLOCK_FORMATS, ids=lambda kind: kind.name)
def test_unpacked_weights_are_the_files(kind: Format, tmp_path: Path) -> None:
    """Their numbers are those of the `gguf` package: the logits are the dequantised model's."""
    path = tmp_path / "model.gguf"
    expected = packed_sample(PackedForward(as_loaded(save_block_gguf(path, "llama", [kind]))))
    loaded = stored(path)
    assert isinstance(loaded.model.get_input_embeddings(), StoredEmbedding)
    assert logits_distance(packed_sample(PackedForward(loaded)), expected) < 1e-5


@pytest.mark.parametrize("checkpoint", [awq(), compressed_integers(4)], ids=["awq", "int4"])
def test_quantized_safetensors_are_multiplied_as_they_are(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.load_state_dict(save_quantized(tmp_path / "model", checkpoint))
    expected = packed_sample(PackedForward(as_loaded(model)))
    loaded = served(tmp_path / "model")
    head = loaded.model.get_output_embeddings()
    projections = [part for part in loaded.model.modules() if isinstance(part, NativeLinear)]
    assert {part is head: part.weights.kind for part in projections} == {True: ELEMENTS, False: BLOCKS}
    assert 0 < logits_distance(packed_sample(PackedForward(loaded)), expected) < 0.1


FLOATS = {
    "tensor": compressed_fp8("tensor"),
    "channel": compressed_fp8("channel"),
    "blocks": fp8((128, 128)),
    "powers": fp8((128, 128), powers=True),
    "one": fp8(None),
}


@pytest.mark.by_default
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoint", FLOATS.values(), ids=FLOATS)
def test_eight_bit_floats_are_multiplied_as_they_are(
    checkpoint: Checkpoint, dtype: str, tmp_path: Path
) -> None:
    """Nothing is rounded, neither weights nor inputs: in float32 the logits are the dequantised model's."""
    model = tiny_model("qwen3")
    numbers = save_quantized(tmp_path / "model", checkpoint, "qwen3")
    model.load_state_dict(numbers)
    expected = packed_sample(PackedForward(as_loaded(model)))
    loaded = served(tmp_path / "model", dtype)
    found = weight_bytes_by_format(loaded.model)
    count = sum(each.numel() for name, each in numbers.items() if "_proj." in name)
    assert count < found["F8_E4M3"] <= (1 + 32 / 512) * count
    head = loaded.model.get_output_embeddings()
    projections = [part for part in loaded.model.modules() if isinstance(part, NativeLinear)]
    assert {part is head: part.weights.kind for part in projections} == {True: ELEMENTS, False: NUMBERS}
    limit = 1e-5 if dtype == "float32" else 0.05
    assert logits_distance(packed_sample(PackedForward(loaded)), expected) < limit


def test_eight_bit_floats_with_smaller_blocks_are_unpacked(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.load_state_dict(save_quantized(tmp_path / "model", fp8((32, 32))))
    expected = packed_sample(PackedForward(as_loaded(model)))
    loaded = served(tmp_path / "model")
    assert weight_bytes_by_format(loaded.model).keys() == {"F32"}
    assert logits_distance(packed_sample(PackedForward(loaded)), expected) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_of_eight_bit_floats(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.load_state_dict(save_quantized(tmp_path / "model", fp8((128, 128)), family))
    expected = packed_sample(PackedForward(as_loaded(model)))
    loaded = served(tmp_path / "model")
    experts = [part for part in loaded.model.modules() if isinstance(part, NativeExperts)]
    assert experts and {kind_of(part.gate_up) for part in experts} == {NUMBERS}
    assert logits_distance(packed_sample(PackedForward(loaded)), expected) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpt_oss_keeps_its_experts_in_four_bits(dtype: str, tmp_path: Path) -> None:
    """With their biases and limits; what differs is the rounding of inputs."""
    model = tiny_model("gpt_oss")
    numbers = save_quantized(tmp_path / "model", mxfp4(), "gpt_oss")
    model.load_state_dict(numbers)
    expected = packed_sample(PackedForward(as_loaded(model)))
    unpacked = stored(tmp_path / "model")
    assert sum(isinstance(part, StoredExperts) for part in unpacked.model.modules()) == len(unpacked.layers)
    assert logits_distance(packed_sample(PackedForward(unpacked)), expected) < 1e-5
    loaded = served(tmp_path / "model", dtype)
    experts = [part for part in loaded.model.modules() if isinstance(part, NativeExperts)]
    assert len(experts) == len(loaded.layers)
    assert {kind_of(own) for part in experts for own in (part.gate_up, part.down)} == {BLOCKS}
    weights = sum(each.numel() for name, each in numbers.items() if name.endswith("_proj"))
    assert weight_bytes_by_format(loaded.model)["MXFP4"] == weights * 4.25 / 8
    assert 1e-4 < logits_distance(packed_sample(PackedForward(loaded)), expected) < 0.1


@pytest.mark.parametrize(
    ("checkpoint", "family"), [(fp8((128, 128)), "llama"), (mxfp4(), "gpt_oss")], ids=["fp8", "mxfp4"]
)
def test_a_tokens_logits_are_the_same_bits_in_any_company(
    checkpoint: Checkpoint, family: str, tmp_path: Path
) -> None:
    """One token a sequence and step, or up to 32 of each: drafts and crowds change no text."""
    save_quantized(tmp_path / "model", checkpoint, family, head_dim=32)
    loaded = served(tmp_path / "model", "bfloat16")
    assert isinstance(loaded.model.base_model, NativeDecoder)
    assert is_the_same_in_any_company(PackedForward(loaded))


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not list what is mapped")
def test_kept_weights_lie_in_their_file_until_kernels_take_them(tmp_path: Path) -> None:
    save_quantized(tmp_path / "model", fp8((128, 128)), "qwen3")
    loaded = stored(tmp_path / "model")
    linears = [part.stored for part in loaded.model.modules() if isinstance(part, StoredLinear)]
    assert len(linears) == 7 * len(loaded.layers)
    ranges = [
        line.split()[0].split("-") for line in MAPS.read_text().splitlines() if "model.safetensors" in line
    ]
    mapped = [range(int(first, 16), int(stop, 16)) for first, stop in ranges]
    assert all(
        isinstance(each, StoredFloats) and any(each.place in one for one in mapped) for each in linears
    )


@pytest.mark.by_default("olmoe")
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "qwen3_moe"])
def test_experts_of_quantized_safetensors_are_multiplied_as_they_are(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.load_state_dict(save_quantized(tmp_path / "model", awq(), family))
    expected = packed_sample(PackedForward(as_loaded(model)))
    loaded = served(tmp_path / "model")
    experts = [part for part in loaded.model.modules() if isinstance(part, NativeExperts)]
    assert experts and {kind_of(part.gate_up) for part in experts} == {BLOCKS}
    assert not any(isinstance(part, StoredExperts) for part in loaded.model.modules())
    assert 0 < logits_distance(packed_sample(PackedForward(loaded)), expected) < 0.1


@pytest.mark.by_default("gemma", "qwen3", "olmo2")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "granite", "olmo2", "smollm3"])
def test_the_kernels_differ_by_the_rounding_of_inputs(family: str, tmp_path: Path) -> None:
    """Files mix formats, so that the parts of one product have several."""
    path = tmp_path / "model.gguf"
    expected = packed_sample(PackedForward(as_loaded(save_block_gguf(path, family, Q4_K_M))))
    loaded = served(path)
    assert isinstance(loaded.model.base_model, NativeDecoder)
    assert not any(isinstance(module, StoredLinear | StoredEmbedding) for module in loaded.model.modules())
    assert 1e-4 < logits_distance(packed_sample(PackedForward(loaded)), expected) < 0.05


@pytest.mark.by_default("qwen2_moe")
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "qwen3_moe"])
def test_experts_stay_in_their_blocks(family: str, tmp_path: Path) -> None:
    """Gates, ups and downs of several formats, as files of Q4_K_M have them, and of plain numbers."""
    path = tmp_path / "model.gguf"
    kinds = (Format.Q4_K, Format.Q6_K, Format.Q8_0, Format.Q4_0, Format.Q5_K)
    expected = packed_sample(PackedForward(as_loaded(save_block_gguf(path, family, kinds))))
    unpacked = stored(path)
    assert sum(isinstance(part, StoredExperts) for part in unpacked.model.modules()) == len(unpacked.layers)
    assert logits_distance(packed_sample(PackedForward(unpacked)), expected) < 1e-5
    assert weight_bytes_by_format(unpacked.model).keys() == {"F32", *(kind.name for kind in kinds)}
    loaded = served(path)
    experts = [part for part in loaded.model.modules() if isinstance(part, NativeExperts)]
    assert [kind_of(part.down) for part in experts] == [BLOCKS] * len(loaded.layers)
    assert 1e-4 < logits_distance(packed_sample(PackedForward(loaded)), expected) < 0.05
    in_file = {name: size for name, size in read_gguf(path).format_bytes.items() if name != "F32"}
    for name, size in weight_bytes_by_format(loaded.model).items():
        assert name == "F32" or in_file[name] <= size <= 1.15 * in_file[name]


def _as_it_is(writer: Any) -> None:
    pass


def _with_module_for_drafts(writer: Any) -> None:
    writer.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))


@pytest.mark.parametrize("setting", ["rope.scaling.factor", "ssm.decay"])
def test_a_setting_of_a_hybrid_that_would_be_lost_is_refused(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_hybrid_gguf(
        path, "qwen3_5_hybrid", extra=lambda writer: writer.add_float32(f"qwen35.{setting}", 2.0)
    )
    with pytest.raises(StartRefused, match=f"qwen35.{setting} = 2.0 cannot be carried over"):
        stored(path)


def test_a_tensor_of_a_hybrid_without_a_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    added = np.zeros((64, 64), np.float32)
    save_hybrid_gguf(path, "lfm2_hybrid", extra=lambda writer: writer.add_tensor("blk.0.extra.weight", added))
    with pytest.raises(StartRefused, match=r"blk.0.extra.weight has no place in Lfm2ForCausalLM"):
        stored(path)


@pytest.mark.by_default("qwen3_5_moe", "lfm2_hybrid")
@pytest.mark.parametrize("family", ["qwen3_5_hybrid", "qwen3_5_moe", "lfm2_hybrid"])
def test_hybrids_are_what_their_files_say(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = save_hybrid_gguf(path, family, extra=_with_module_for_drafts if "qwen" in family else _as_it_is)
    expected = packed_sample(forward_of(as_loaded(model)))
    unpacked = stored(path)
    assert any(isinstance(part, StoredLinear) for part in unpacked.model.modules())
    assert logits_distance(packed_sample(forward_of(unpacked)), expected) < 1e-5
    settings = settings_of(path, "--compile", "off", "--dtype", "float32")
    converted = load_model(resolve_model(settings, tmp_path / "home"), settings)
    assert logits_distance(packed_sample(forward_of(converted)), expected) < 0.05, "rounded to bfloat16"
    loaded = served(path)
    assert not any(isinstance(part, _STORED) for part in loaded.model.modules())
    assert 1e-4 < logits_distance(packed_sample(forward_of(loaded)), expected) < 0.05


def test_a_tied_head_reads_the_embeddings_panels(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = save_block_gguf(path, "llama", [Format.Q6_K], tie_word_embeddings=True)
    loaded = served(path)
    head, embedding = loaded.model.get_output_embeddings(), loaded.model.base_model.embed_tokens
    assert isinstance(head, NativeLinear) and isinstance(embedding, NativeEmbedding)
    assert head.weights.parts[0] is embedding.weights.parts[0]
    expected = packed_sample(PackedForward(as_loaded(model)))
    assert logits_distance(packed_sample(PackedForward(loaded)), expected) < 0.05


def test_the_same_file_elsewhere_is_found_there(tmp_path: Path) -> None:
    path, moved = tmp_path / "model.gguf", tmp_path / "there" / "model.gguf"
    save_block_gguf(path, "llama", [Format.Q8_0])
    home = tmp_path / "home"
    first = resolve_model(settings_of(path), home)
    assert gguf_of(first) == path.resolve()
    moved.parent.mkdir()
    path.rename(moved)
    assert resolve_model(settings_of(moved), home) == first
    assert gguf_of(first) == moved.resolve()


def test_without_kernels_the_file_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    save_block_gguf(path, "llama", [Format.Q8_0])
    assert gguf_of(resolve_model(settings_of(path, "--compile", "off"), tmp_path / "home")) is None

    def no_compiler() -> str:
        raise NativeUnavailable("none")

    monkeypatch.setattr(loader, "find_compiler", no_compiler)
    assert not model_source.runs_as_it_is(path, settings_of(path))


def test_a_file_of_plain_numbers_is_converted(tmp_path: Path) -> None:
    path = save_tiny_gguf(tmp_path / "plain.gguf")
    assert gguf_of(resolve_model(settings_of(path), tmp_path / "home")) is None


def test_weights_that_are_stored_in_few_bits_are_not_rounded_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_block_gguf(path, "llama", [Format.Q8_0])
    settings, home = settings_of(path, "--quantization", "int8"), compiled_home(formats=True)
    loaded = take_weights(load_model(resolve_model(settings, home), settings), settings, home)
    with pytest.raises(StartRefused, match="--quantization int8: the weights are quantized already"):
        with_kernels(loaded, settings, home, lambda: loaded)
