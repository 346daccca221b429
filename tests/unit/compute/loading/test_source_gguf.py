"""Reading and converting GGUF files: the same weights and tokens come out, and nothing is lost in silence."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.compute.loading.conversion_store import convert_once
from engine.compute.loading.gguf_convert import convert_gguf, prepare_gguf
from engine.compute.loading.gguf_file import GgufList, read_gguf
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.compute.loading.loader import read_eos_token_ids
from engine.compute.loading.model_files import check_model_files
from engine.compute.meta_device import _KERNELS, _DeferredKernels
from engine.errors import StartRefused, UnsupportedModel
from engine.text.tokenizer import Tokenizer
from tests.support.tiny_gguf import save_block_gguf, save_tiny_gguf, split_gguf
from tests.support.tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    convert_gguf(tiny_gguf, directory)
    return directory


def test_every_weight_is_the_models_own_in_bfloat16(converted: Path) -> None:
    check_model_files(converted)
    written = load_file(converted / "model.safetensors")
    expected = tiny_model("llama", dtype=torch.bfloat16).state_dict()
    assert written.keys() == expected.keys()
    for name, weights in expected.items():
        assert written[name].dtype is torch.bfloat16
        assert torch.equal(written[name], weights), name


def test_quantized_weights_come_out_as_their_blocks_say(tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType.Q4_1
    path = save_tiny_gguf(tmp_path / "q4.gguf", quantization=quantization)
    convert_gguf(path, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    exact = tiny_model("llama").state_dict()["model.layers.1.mlp.up_proj.weight"]
    blocks = gguf.quants.quantize(exact.numpy(), quantization)
    unpacked = torch.tensor(gguf.dequantize(blocks, quantization)).to(torch.bfloat16)
    assert torch.equal(written, unpacked)
    assert not torch.equal(written, exact.to(torch.bfloat16))


def test_tokens_and_special_tokens_survive(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = "<|im_start|>user\nThe quick brown fox, naïve café\n<|im_end|>"
    assert tokenizer.encode(text) == tiny_tokenizer().encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == 1
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def test_digits_stand_alone_where_the_vocabulary_was_learned_so(converted: Path) -> None:
    backend = AutoTokenizer.from_pretrained(converted).backend_tokenizer
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  12")]
    assert pieces == ["a", "ĠĠ", "1", "2"]


def _with_rule(rule: str, *, add_bos: bool | None = None) -> Callable[[Any], None]:
    """As llama.cpp's converter names how a vocabulary's texts are split."""

    def change(writer: Any) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = rule
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    return change


@pytest.mark.parametrize(
    ("rule", "add_bos", "begins"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("smollm", None, False),
    ],
)
def test_a_text_begins_with_bos_where_llama_cpp_has_it_so(
    tmp_path: Path, rule: str, add_bos: bool | None, begins: bool
) -> None:
    path = save_tiny_gguf(tmp_path / "bos.gguf", extra=_with_rule(rule, add_bos=add_bos))
    convert_gguf(path, tmp_path / "out")
    tokenizer = Tokenizer(tmp_path / "out")
    assert (tokenizer.encode("river")[0] == tokenizer.bos_token_id == 1) is begins
    assert tokenizer.encode("river", add_special_tokens=False)[0] != 1


@pytest.mark.parametrize(("rule", "is_whole"), [("llama-bpe", True), ("qwen2", False)])
def test_a_word_that_no_merges_lead_to_is_a_token_where_llama_cpp_has_it_so(
    tmp_path: Path, rule: str, is_whole: bool
) -> None:
    def without_merges(writer: Any) -> None:
        _with_rule(rule)(writer)
        writer.kv_data[0]["tokenizer.ggml.merges"].value = ["Ġ r"]

    convert_gguf(save_tiny_gguf(tmp_path / "words.gguf", extra=without_merges), tmp_path / "out")
    tokenizer = Tokenizer(tmp_path / "out")
    assert (len(tokenizer.encode(" river", add_special_tokens=False)) == 1) is is_whole


def test_every_end_of_turn_is_written_down(converted: Path) -> None:
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2]
    assert json.loads((converted / "config.json").read_text())["max_position_embeddings"] == 256


@pytest.mark.parametrize("is_control", [True, False])
@pytest.mark.parametrize("text", ["<end_of_turn>", "<|end|>", "<|eot_id|>"])
def test_an_end_of_turn_that_the_file_does_not_name_is_known_by_its_text(
    tmp_path: Path, text: str, is_control: bool
) -> None:
    """Files of Gemma and of Phi-3 have no `eot_token_id`, and Gemma's have it among the ordinary tokens."""

    def renamed(writer: Any) -> None:
        values = writer.kv_data[0]
        values["tokenizer.ggml.tokens"].value[500] = text
        values["tokenizer.ggml.token_type"].value[500] = 3 if is_control else 1
        values["tokenizer.ggml.merges"].value = ["Ġ r"]

    path = save_tiny_gguf(tmp_path / "ends.gguf", extra=renamed)
    for prepare in (convert_gguf, prepare_gguf):
        directory = tmp_path / prepare.__name__
        directory.mkdir()
        prepare(path, directory)
        assert read_eos_token_ids(directory, AutoConfig.from_pretrained(directory)) == {0, 2, 500}
        tokenizer = Tokenizer(directory)
        assert tokenizer.encode(f"a{text}") == [*tokenizer.encode("a"), 500]
        assert tokenizer.decode([500], skip_special_tokens=True) == ""
        assert tokenizer.vocab_size == 512


def test_the_marks_of_phi_3_take_the_whitespace_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in its tokenizer.json: the newlines of its chat template are not tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "▁H", "▁Hi"]
    marks = ["<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>"]
    fill = [f"w{number}" for number in range(VOCAB_SIZE - len(words) - len(marks))]

    def add_tokenizer(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*words, *fill, *marks])
        kinds = [2, 3, 4, *[6] * 256, *[1] * (len(words) - 259 + len(fill)), *[3] * len(marks)]
        writer.add_token_types(kinds)
        writer.add_token_scores([-float(place) for place in range(VOCAB_SIZE)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(VOCAB_SIZE - len(marks))
        writer.add_unk_token_id(0)

    monkeypatch.setattr("tests.support.tiny_gguf.add_tokenizer", add_tokenizer)
    kinds = [gguf.GGMLQuantizationType.Q8_0]
    save_block_gguf(tmp_path / "phi.gguf", "phi3", kinds, partial_rotary_factor=1.0)
    (tmp_path / "out").mkdir()
    prepare_gguf(tmp_path / "phi.gguf", tmp_path / "out")
    tokenizer = Tokenizer(tmp_path / "out")
    prompt = "<|user|>\nHi<|end|>\n<|assistant|>\n<|endoftext|>\n"
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    names = [tokenizer.token_name(token_id) for token_id in token_ids]
    assert names == ["<|user|>", "▁Hi", "<|end|>", "<|assistant|>", "<|endoftext|>", "▁", "<0x0A>"]


def test_the_end_of_a_message_of_gpt_oss_ends_no_reply(tmp_path: Path) -> None:
    """Its thoughts end in it, and the answer comes behind them."""

    def renamed(writer: Any) -> None:
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[500], tokens[501] = "<|end|>", "<|return|>"
        writer.kv_data[0]["tokenizer.ggml.merges"].value = ["Ġ r"]

    convert_gguf(save_tiny_gguf(tmp_path / "ends.gguf", extra=renamed), tmp_path / "out")
    assert read_eos_token_ids(tmp_path / "out", AutoConfig.from_pretrained(tmp_path / "out")) == {0, 2}


def test_files_beside_the_gguf_are_not_mixed_in(tiny_gguf: Path, tmp_path: Path) -> None:
    beside = tmp_path / "in"
    beside.mkdir()
    (beside / "tiny.gguf").write_bytes(tiny_gguf.read_bytes())
    (beside / "chat_template.jinja").write_text("not this one")
    (beside / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    convert_gguf(beside / "tiny.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template.startswith("{% for message")


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = save_tiny_gguf(tmp_path / "short.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(StartRefused, match=r"holds no model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(path, tmp_path / "out")


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    extra = np.ones(4, dtype=np.float32)
    path = save_tiny_gguf(
        tmp_path / "more.gguf", extra=lambda writer: writer.add_tensor("blk.0.attn_sinks", extra)
    )
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_sinks has no place"):
        convert_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope.scaling.factor", 4.0), ("attention.scale", 0.5), ("attention.value_length", 32.0)],
)
def test_a_setting_that_would_be_lost_is_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    path = save_tiny_gguf(
        tmp_path / "odd.gguf", extra=lambda writer: writer.add_float32(f"llama.{name}", value)
    )
    with pytest.raises(UnsupportedModel, match=f"llama.{name}"):
        convert_gguf(path, tmp_path / "out")


def llama3_factors(theta: float, factor: float) -> NDArray[np.float32]:
    """What the frequencies of a head of 16 are divided by, as Llama 3's report gives it."""
    wavelengths = 2 * np.pi * theta ** (np.arange(8) / 8)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def test_llama3_frequency_factors_become_its_rope_settings(tmp_path: Path) -> None:
    factors = llama3_factors(theta=500_000.0, factor=32.0)
    path = save_tiny_gguf(
        tmp_path / "three.gguf",
        rope_theta=500_000.0,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    convert_gguf(path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_a_model_that_needs_torch_s_kernels_for_the_meta_device_gets_them(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deferred(_DeferredKernels):
        loaded = False

        def stand_in(self) -> None:
            pass

        def load(self) -> ModuleType:
            self.loaded = True
            return self

    kernels, from_config = Deferred(_KERNELS), AutoModelForCausalLM.from_config

    def needs_kernels(*args: Any, **options: Any) -> Any:
        if not kernels.loaded:
            raise NotImplementedError("aten::where.self: no Meta kernel is registered")
        return from_config(*args, **options)

    monkeypatch.setitem(sys.modules, _KERNELS, kernels)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", needs_kernels)
    convert_gguf(tiny_gguf, tmp_path)
    assert kernels.loaded
    assert (tmp_path / "model.safetensors").exists()


def test_other_frequency_factors_are_refused(tmp_path: Path) -> None:
    factors = llama3_factors(theta=500_000.0, factor=32.0)
    factors[4] *= 1.1
    path = save_tiny_gguf(
        tmp_path / "other.gguf",
        rope_theta=500_000.0,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    with pytest.raises(UnsupportedModel, match="is not Llama 3's"):
        convert_gguf(path, tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 3, 40, 5000, 100_000])
def test_a_cut_off_file_is_refused_in_one_line(tiny_gguf: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:keep])
    with pytest.raises(StartRefused) as refused:
        convert_gguf(cut, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert str(cut) in str(refused.value)


def test_header_agrees_with_the_reference_reader(tiny_gguf: Path) -> None:
    ours, reference = read_gguf(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in reference.tensors]
    for tensor, expected in zip(ours.tensors, reference.tensors, strict=True):
        assert np.array_equal(tensor.values(), gguf.dequantize(expected.data, expected.tensor_type))
    assert ours.values["llama.block_count"] == 2
    assert ours.values["tokenizer.ggml.tokens"] == GgufList(512)


def test_a_window_is_refused_for_a_model_that_would_not_heed_it(tmp_path: Path) -> None:
    path = save_tiny_gguf(tmp_path / "window.gguf", extra=lambda writer: writer.add_sliding_window(8))
    with pytest.raises(UnsupportedModel, match=r"llama\.attention\.sliding_window = 8"):
        convert_gguf(path, tmp_path / "out")


def test_ids_the_file_does_not_name_are_not_made_up(tmp_path: Path) -> None:
    path = save_tiny_gguf(tmp_path / "tiny.gguf")
    file = read_gguf(path)
    file.values.pop("tokenizer.ggml.eos_token_id")
    config, _ = read_gguf_config(file)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, None, None)


@pytest.mark.parametrize("architecture", ["no-such", "general", "tokenizer"])
def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path, architecture: str) -> None:
    file = read_gguf(save_tiny_gguf(tmp_path / "tiny.gguf"))
    file.values["general.architecture"] = architecture
    with pytest.raises(UnsupportedModel, match=f"architecture '{architecture}' is not known"):
        read_gguf_config(file)


def bare_gguf(path: Path, *tensors: tuple[tuple[int, ...], int], num_bytes: int = 128) -> Path:
    """A file of float32 tensors of these shapes, innermost first, at these offsets in `num_bytes` of data."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0)
    for number, (shape, offset) in enumerate(tensors):
        head += struct.pack("<Q1sI", 1, b"%d" % number, len(shape))
        head += struct.pack(f"<{len(shape)}QIQ", *shape, 0, offset)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(num_bytes))
    return path


def test_tensors_may_come_in_any_order_and_with_gaps(tmp_path: Path) -> None:
    path = bare_gguf(tmp_path / "a.gguf", ((4, 2), 64), ((1,), 0))
    assert [each.blocks.shape for each in read_gguf(path).tensors] == [(2, 16), (4,)]


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([((8,), 0), ((8,), 0)], "its tensors 0 and 1 overlap"),
        ([((8,), 32), ((16,), 0)], "its tensors 1 and 0 overlap"),
        ([((32,), 0), ((1,), 96)], "its tensors 0 and 1 overlap"),
        ([((1,), 4)], "its tensor 0 lies at 4"),
        ([((8,), 128)], "it ends within its tensor 0"),
        ([((64,), 0)], "it ends within its tensor 0"),
        ([((0, 2**60), 0)], "its tensor 0 is empty"),
        ([((), 0)], "its tensor 0 has 0 dimensions"),
    ],
)
def test_no_bytes_are_counted_twice_or_lie_elsewhere(
    tmp_path: Path, tensors: list[tuple[tuple[int, ...], int]], why: str
) -> None:
    """Else a small file claims many times its size, once its blocks are unpacked."""
    with pytest.raises(ValueError, match=why):
        read_gguf(bare_gguf(tmp_path / "hostile.gguf", *tensors))


@pytest.fixture
def parts(tiny_gguf: Path, tmp_path: Path) -> list[Path]:
    whole = tmp_path / "tiny.gguf"
    whole.write_bytes(tiny_gguf.read_bytes())
    return split_gguf(whole, 3)


def test_the_parts_of_a_split_file_are_one_model(parts: list[Path], converted: Path, tmp_path: Path) -> None:
    convert_gguf(parts[0], tmp_path / "out")
    whole, written = (load_file(folder / "model.safetensors") for folder in (converted, tmp_path / "out"))
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], weights) for name, weights in whole.items())
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (converted / name).read_text()


def test_a_changed_later_part_is_converted_anew(parts: list[Path], tmp_path: Path) -> None:
    made: list[Path] = []
    for _ in range(2):
        made += {convert_once(parts[0], tmp_path / "models", lambda *_: None, 1) for _ in range(2)}
        os.utime(parts[2], ns=(1, 1))
    assert len(set(made)) == len(made) == 2


def test_a_split_file_that_is_not_whole_is_refused_by_name(parts: list[Path], tmp_path: Path) -> None:
    def why() -> str:
        with pytest.raises(StartRefused) as refused:
            convert_gguf(parts[0], tmp_path / "out")
        assert "\n" not in str(refused.value)
        return str(refused.value)

    with pytest.raises(
        StartRefused, match="a later part of a split model: name the first, tiny-00001-of-00003"
    ):
        convert_gguf(parts[1], tmp_path / "out")
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    assert "tiny-00002-of-00003.gguf is not part 2 of 3" in why()
    parts[1].write_bytes(second[: len(second) // 2])
    assert "tiny-00002-of-00003.gguf: it ends within" in why()
    parts[1].unlink()
    assert "its part tiny-00002-of-00003.gguf is missing" in why()
    alone = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(StartRefused, match="the first of 3 parts, which its name does not say"):
        convert_gguf(alone, tmp_path / "out")


# Where in the file a number lies: so many bytes behind its name.
HUGE, NEGATIVE = 2**63, 2**64 - 1
HOSTILE = {
    "tensors": (b"GGUF", 4, "<Q", HUGE),
    "values": (b"GGUF", 12, "<Q", HUGE),
    "length of the first name": (b"GGUF", 20, "<Q", HUGE),
    "version": (b"GGUF", 0, "<I", 99),
    "dimensions": (b"token_embd.weight", 0, "<I", 2**31),
    "a dimension": (b"token_embd.weight", 4, "<Q", HUGE),
    "an empty dimension": (b"token_embd.weight", 4, "<Q", 0),
    "two dimensions whose product overflows": (b"token_embd.weight", 4, "<QQ", (2**32, 2**32)),
    "a type nobody knows": (b"token_embd.weight", 20, "<I", 9999),
    "a type of larger blocks": (b"token_embd.weight", 20, "<I", 10),
    "an offset into another tensor": (b"blk.1.ffn_up.weight", 24, "<Q", 0),
    "an offset": (b"token_embd.weight", 24, "<Q", HUGE),
    "an offset that is negative to some": (b"token_embd.weight", 24, "<Q", NEGATIVE),
    "length of a list": (b"tokenizer.ggml.tokens", 8, "<Q", HUGE),
    "a list of lists": (b"tokenizer.ggml.tokens", 4, "<I", 9),
    "length of a text in a list": (b"tokenizer.ggml.tokens", 16, "<Q", HUGE),
    "a list of numbers that is no longer there": (b"tokenizer.ggml.tokens", 4, "<IQ", (0, 2**40)),
    "layers": (b"llama.block_count", 4, "<I", 2**32 - 1),
    "no layers": (b"llama.block_count", 4, "<I", 0),
    "width": (b"llama.embedding_length", 4, "<I", 2**32 - 1),
    "heads": (b"llama.attention.head_count", 4, "<I", 0),
    "an end beyond the vocabulary": (b"tokenizer.ggml.eos_token_id", 4, "<I", 2**31),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_number_that_lies_is_refused_in_one_line(tiny_gguf: Path, tmp_path: Path, what: str) -> None:
    name, distance, layout, numbers = HOSTILE[what]
    content = bytearray(tiny_gguf.read_bytes())
    place = content.index(name) + len(name) + distance
    struct.pack_into(layout, content, place, *(numbers if isinstance(numbers, tuple) else (numbers,)))
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(content)
    with pytest.raises(StartRefused) as refused:
        convert_gguf(hostile, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
