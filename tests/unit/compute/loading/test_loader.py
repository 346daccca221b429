"""A directory becomes a model with every choice made; what does not fit stops the start with one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    BloomConfig,
    Emu3Config,
    Emu3ForConditionalGeneration,
    Gemma3Config,
    Mistral3Config,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MptConfig,
    Phi4MultimodalConfig,
    Phi4MultimodalForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
)

from config import ModelSettings
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.attention.own_attention import attend_with
from engine.compute.loading import loader
from engine.compute.loading.loader import choose_dtype, choose_max_model_len, load_model, read_eos_token_ids
from engine.errors import StartRefused
from tests.support.tiny_models import (
    FAMILIES,
    MAX_POSITIONS,
    VOCAB_SIZE,
    WINDOW,
    save_tiny_model,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

CPU = torch.device("cpu")
FLOAT32 = ModelSettings(dtype="float32", device="cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "llama")


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_whole(family: str, tmp_path: Path) -> None:
    loaded = load_model(save_tiny_model(family, tmp_path), FLOAT32)
    expected = tiny_model(family).state_dict()
    assert loaded.model.state_dict().keys() == expected.keys()
    for name, weights in loaded.model.state_dict().items():
        assert torch.equal(weights, expected[name]), name
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "slipstream"
    assert (loaded.dtype, loaded.device) == (torch.float32, CPU)
    assert (loaded.max_model_len, loaded.vocab_size, loaded.eos_token_ids) == (256, 512, frozenset({2}))


COMPOSITES: dict[str, tuple[type[PreTrainedConfig], str, dict[str, Any]]] = {
    "gemma3": (
        Gemma3Config,
        "gemma3",
        {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    ),
    "qwen3_5": (
        Qwen3_5Config,
        "qwen3_5_hybrid",
        {"depth": 1, "num_heads": 2, "out_hidden_size": 64},
    ),
    "mistral3": (Mistral3Config, "mistral", {"model_type": "pixtral", "image_size": 28, "patch_size": 14}),
}


def save_composite(name: str, directory: Path, *, is_tied: bool) -> PreTrainedModel:
    """A tiny model that sees as well, with a tokenizer."""
    config_class, family, vision = COMPOSITES[name]
    text = tiny_config(family, tie_word_embeddings=is_tied).to_dict()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = config_class(text_config=text, vision_config=vision | sizes, tie_word_embeddings=is_tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", COMPOSITES)
def test_of_a_model_that_sees_the_language_model_is_loaded_alone(
    name: str, is_tied: bool, tmp_path: Path
) -> None:
    whole = save_composite(name, tmp_path, is_tied=is_tied)
    tokens = torch.tensor([[5, 9, 17, 33, 7, 5, 9, 17, 33, 7, 5, 9]])
    with torch.inference_mode():
        expected = whole(input_ids=tokens, use_cache=False).logits
        weights = load_file(tmp_path / "model.safetensors")
        for names in ("as they are", "as older files have them"):
            if names != "as they are":
                renamed = {
                    re.sub(
                        r"^lm_head",
                        "language_model.lm_head",
                        re.sub(
                            r"^(?:model\.language_model|language_model\.model)\.",
                            "language_model.model.",
                            key,
                        ),
                    ): tensor
                    for key, tensor in weights.items()
                }
                save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
            loaded = load_model(tmp_path, FLOAT32)
            assert not any("vision" in key for key in loaded.model.state_dict())
            loaded.model.set_attn_implementation("eager")
            assert torch.allclose(loaded.model(tokens).logits, expected, atol=1e-5), names


_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
WHOLE_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "emu3": lambda: Emu3ForConditionalGeneration(
        Emu3Config(
            text_config=_SIZES,
            vq_config={"base_channels": 32, "embed_dim": 4, "channel_multiplier": [1], "num_res_blocks": 1},
            vocabulary_map={"<image>": 3},
        )
    ),
    # Without images the second layer is passed by.
    "mllama": lambda: MllamaForConditionalGeneration(
        MllamaConfig(
            text_config=_SIZES | {"cross_attention_layers": [1]},
            vision_config=_SMALL | {"num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2},
        )
    ),
    "phi4": lambda: Phi4MultimodalForCausalLM(
        Phi4MultimodalConfig(
            **_SIZES,
            partial_rotary_factor=0.5,
            original_max_position_embeddings=MAX_POSITIONS // 2,
            rope_scaling={
                "rope_type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [4.0] * 4,
            },
            vision_config=_SMALL | {"num_hidden_layers": 2, "image_size": 28, "image_token_id": 500},
            audio_config=_SMALL | {"num_blocks": 1, "audio_token_id": 501},
        )
    ),
}


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_of_a_model_with_no_text_class_of_its_own_the_language_model_is_loaded_alone(
    name: str, tmp_path: Path
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = WHOLE_MODELS[name]().eval()
    whole.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tokens = torch.tensor([[5, 9, 17, 33, 7, 5, 9, 17, 33, 7, 5, 9]])
    with torch.inference_mode():
        expected = whole(input_ids=tokens, use_cache=False).logits
        loaded = load_model(tmp_path, ModelSettings(dtype="float32", device="cpu", max_model_len=64))
        assert sum(map(torch.numel, loaded.model.parameters())) < sum(map(torch.numel, whole.parameters()))
        attend_with(loaded.model, "eager")
        assert torch.allclose(loaded.model(tokens).logits, expected, atol=1e-5)
    assert len(loaded.layers) == (2 if name == "mllama" else 3)


WINDOWS = {
    "qwen2_window": (None, WINDOW),
    "mistral": (WINDOW, WINDOW),
    "gemma2": (WINDOW, None),
    "gemma3": (WINDOW, WINDOW, None, WINDOW),
    "phi3": (WINDOW, WINDOW),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_what_the_family_attends_with(family: str, tmp_path: Path) -> None:
    loaded = load_model(save_tiny_model(family, tmp_path), FLOAT32)
    heads = 4 if family in ("gpt2", "gpt_neox") else 2
    windows = WINDOWS.get(family, (None, None))
    assert loaded.layers == tuple(LayerKv(heads, 16, 16, window) for window in windows)


def test_models_of_one_directory_share_nothing(llama: Path) -> None:
    first, second = load_model(llama, FLOAT32), load_model(llama, FLOAT32)
    first.model.set_attn_implementation("eager")
    assert second.model.config._attn_implementation == "slipstream"
    assert first.config is first.model.config
    assert first.config is not second.config


@pytest.mark.parametrize(
    ("asked", "stored", "native", "chosen"),
    [
        ("auto", torch.bfloat16, True, torch.bfloat16),
        ("auto", torch.bfloat16, False, torch.float32),
        ("auto", torch.float16, True, torch.bfloat16),
        ("auto", torch.float16, False, torch.float32),
        ("auto", torch.float32, True, torch.float32),
        ("bfloat16", torch.float32, False, torch.bfloat16),
        ("float16", torch.bfloat16, True, torch.float16),
        ("float32", torch.bfloat16, True, torch.float32),
    ],
)
def test_the_dtype_suits_the_cpu_unless_asked(
    asked: str, stored: torch.dtype, native: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_cpu_has_bfloat16", lambda: native)
    assert choose_dtype(asked, stored, CPU) is chosen


def test_another_dtype_than_the_stored_one_is_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "_cpu_has_bfloat16", lambda: False)
    with caplog.at_level("INFO", "slipstream.model"):
        choose_dtype("auto", torch.float16, CPU)
    assert "float16, which cpu computes slowly or not at all: using float32" in caplog.text


def test_weights_are_loaded_in_the_chosen_dtype(llama: Path) -> None:
    loaded = load_model(llama, ModelSettings(dtype="bfloat16", device="cpu"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.dtype is torch.bfloat16


def test_a_configuration_without_dtype_takes_the_weights_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_cpu_has_bfloat16", lambda: True)
    directory = save_tiny_model("llama", tmp_path, dtype=torch.bfloat16)
    edit_json(directory / "config.json", dtype=None, torch_dtype=None)
    assert load_model(directory, ModelSettings(device="cpu")).dtype is torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(llama: Path) -> None:
    with pytest.raises(StartRefused, match="--device cuda: no CUDA device"):
        load_model(llama, ModelSettings(device="cuda"))


def test_the_context_is_the_models_own_or_less() -> None:
    config = tiny_config("llama")
    assert choose_max_model_len(None, config) == 256
    assert choose_max_model_len(100, config) == 100
    with pytest.raises(StartRefused, match="--max-model-len 257 is more than the model's own 256"):
        choose_max_model_len(257, config)


def test_the_context_of_learned_positions_is_known() -> None:
    assert choose_max_model_len(None, tiny_config("gpt2")) == 256


def test_the_context_is_known_by_other_names() -> None:
    assert choose_max_model_len(None, MptConfig(max_seq_len=70)) == 70
    assert choose_max_model_len(None, BloomConfig(seq_length=80)) == 80
    with pytest.raises(StartRefused, match="give --max-model-len"):
        choose_max_model_len(None, BloomConfig())


def test_longrope_is_served_only_where_it_does_not_switch() -> None:
    config = tiny_config("phi3")
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    config.rope_parameters |= factors | {"rope_type": "longrope"}
    assert choose_max_model_len(64, config) == 64
    with pytest.raises(StartRefused, match="give --max-model-len 64 or less, not 256"):
        choose_max_model_len(None, config)


def test_every_name_for_the_end_is_an_eos(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[7, 8])
    edit_json(llama / "tokenizer_config.json", eos_token="<|endoftext|>")
    config = tiny_config("llama")
    assert read_eos_token_ids(llama, config) == {2, 7, 8, 0}
    config.eos_token_id = None
    edit_json(llama / "generation_config.json", eos_token_id=9)
    edit_json(llama / "tokenizer_config.json", eos_token={"content": "<|im_start|>"})
    assert read_eos_token_ids(llama, config) == {9, 1}


def test_a_model_without_a_tokenizer_still_has_its_eos(llama: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (llama / name).unlink()
    assert load_model(llama, FLOAT32).eos_token_ids == {2}


def test_a_missing_weight_is_refused_not_made_up(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartRefused, match=r"missing_keys model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(llama, FLOAT32)


def test_a_weight_of_another_shape_is_refused(llama: Path) -> None:
    edit_json(llama / "config.json", intermediate_size=96)
    with pytest.raises(StartRefused) as refused:
        load_model(llama, FLOAT32)
    assert "\n" not in str(refused.value)
