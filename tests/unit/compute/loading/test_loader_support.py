"""What packed paged attention would not compute exactly is refused by name, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Cohere2Config,
    DeepseekV3Config,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    NemotronConfig,
    OPTConfig,
    PhimoeConfig,
    PreTrainedModel,
    SmolLM3Config,
    StableLmConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.compute.attention.layer_kv import LayerKv
from engine.compute.loading.layer_probe import probe_layers
from engine.compute.loading.support import Architecture, check_supported, find_model_class, read_architecture
from engine.compute.recurrent.slot_states import LayerState
from engine.errors import UnsupportedModel
from tests.support.tiny_models import (
    FAMILIES,
    PECULIAR_FAMILIES,
    REBOUND_FAMILIES,
    RECURRENT_FAMILIES,
    WINDOW,
    tiny_config,
    tiny_model,
)

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "bart"}, "BartForCausalLM .* encoder-decoder"),
        ({"model_type": "t5"}, "'t5' is not a causal language model"),
        ({"model_type": "no_such_thing"}, r"config\.json is not understood"),
        ({"model_type": "inkling_text"}, "InklingForCausalLM .* layers of type hybrid"),
        ({"model_type": "xlstm"}, "xLSTMForCausalLM .* recurrent state"),
        ({"model_type": "cpmant"}, "CpmAntForCausalLM .* computes attention itself"),
        ({"model_type": "llama", "alibi": True}, "LlamaForCausalLM .*ALiBi"),
        ({"model_type": "doge", "keep_window_size": 64}, "DogeForCausalLM .*keep_window_size"),
        ({"model_type": "doge", "keep_window_size": None}, r"config\.json is not understood"),
        ({"model_type": "moshi"}, r"MoshiForCausalLM .* several models \(audio_encoder_config, depth"),
        ({"model_type": "roberta"}, "RobertaForCausalLM .* an encoder, made to read"),
        ({"model_type": "gemma4_unified_assistant"}, "only drafts for another model"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "later tokens"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "quip"}}, "quantized by 'quip'"),
    ],
)
def test_a_configuration_is_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        read_architecture(tmp_path)
    assert "\n" not in str(refused.value)


def test_an_unknown_rope_is_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* rotary embedding is of type spiral"):
        check_supported(Architecture(config, find_model_class(config)))


@pytest.mark.parametrize("family", FAMILIES + PECULIAR_FAMILIES + REBOUND_FAMILIES + RECURRENT_FAMILIES)
def test_the_common_families_are_not_refused(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    assert read_architecture(tmp_path).config.model_type.startswith(family.split("_")[0])


def make(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config).eval()


class Unknown(DogeForCausalLM):  # type: ignore[misc]  # transformers has no types
    """Attention that nobody rebinds."""


class UnknownTwo(DiffLlamaForCausalLM):  # type: ignore[misc]  # see above
    """Another."""


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (BertLMHeadModel(BertConfig(**SIZES)), "BertLMHeadModel .* attends to later tokens"),
        (Unknown(DogeConfig(**SIZES)), "Unknown .* attention mask or position bias"),
        (
            UnknownTwo(DiffLlamaConfig(**SIZES)),
            "UnknownTwo .* (cannot be told apart by layer|keys that are not its own)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_the_forward_pass_shows_is_refused_by_name(model: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        probe_layers(model.eval(), model.config)


def test_layers_are_read_from_what_they_hand_over() -> None:
    chunked = tiny_config("llama4")
    latent = DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
    )  # fmt: skip
    alternating = Cohere2Config(**SIZES, head_dim=16, sliding_window=8)
    alternating.layer_types = ["sliding_attention", "full_attention"]
    for config, expected in (
        (chunked, (*[LayerKv(2, 16, 16, chunk=WINDOW)] * 3, LayerKv(2, 16, 16))),
        (latent, (LayerKv(1, 48, 32, value_in_key=True),) * 2),
        (alternating, (LayerKv(2, 16, 16, 8), LayerKv(2, 16, 16, None))),
        (SmolLM3Config(**SIZES), (LayerKv(2, 16, 16), LayerKv(2, 16, 16))),
        (
            OPTConfig(
                vocab_size=512, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4
            ),
            (LayerKv(4, 16, 16), LayerKv(4, 16, 16)),
        ),
    ):
        model = make(config)
        assert probe_layers(model, model.config).layers == expected


def test_a_hybrid_tells_its_two_kinds_of_layers_apart() -> None:
    model = tiny_model("granite_hybrid")
    probe = probe_layers(model, model.config)
    assert probe.layers == (LayerKv(2, 16, 16),) and probe.attending == (1,)
    assert probe.states == (LayerState(0, 200, 3, (8, 16, 16)), LayerState(2, 200, 3, (8, 16, 16)))


def test_a_hybrid_architecture_that_only_attends_is_like_any_other() -> None:
    config = tiny_config("granite_hybrid")
    config.layer_types = ["full_attention"] * 3
    model = make(config)
    probe = probe_layers(model, model.config)
    assert probe.layers == (LayerKv(2, 16, 16),) * 3 and probe.states == ()


def test_a_layer_that_neither_attends_nor_is_known_to_be_recurrent_is_refused() -> None:
    model = tiny_model("granite_hybrid")
    block = model.model.layers[2]
    block.mamba = type(
        "SomeOtherLayer", (nn.Module,), {"forward": lambda self, hidden_states, **_: hidden_states}
    )()
    with pytest.raises(UnsupportedModel, match="1 of its 3 layers use attention, 1 are recurrent"):
        probe_layers(model, model.config)


@pytest.mark.parametrize("family", ["gemma3", *RECURRENT_FAMILIES])
def test_the_probe_leaves_the_model_as_it_was(family: str) -> None:
    model = tiny_model(family)
    ids = torch.arange(20)[None]
    before = model(ids).logits
    probe_layers(model, model.config)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, before)


def test_the_width_of_the_logits_is_measured() -> None:
    model = tiny_model("llama")
    model.set_output_embeddings(nn.Linear(64, 640, bias=False))
    assert probe_layers(model, model.config).vocab_size == 640


def swallow_keywords(module: Any) -> None:
    forward = module.forward
    module.forward = lambda hidden_states, position_embeddings, attention_mask, **_: forward(
        hidden_states=hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask
    )


def lose_window(module: Any) -> None:
    module.sliding_window = None


def misfit_output(module: Any) -> None:
    module.o_proj = nn.Linear(96, 64)


def _attend(module: Any, hidden: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> Any:
    query = hidden.view(1, hidden.shape[1], 4, 16).transpose(1, 2)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, None)
    options.pop("position_embeddings")
    output, weights = attend(module, query, key, key, None, **options)
    return output.reshape(1, hidden.shape[1], 64), weights


@pytest.mark.parametrize(
    ("family", "break_it", "reason"),
    [
        ("llama", swallow_keywords, "does not pass keywords on"),
        ("llama", misfit_output, r"does not accept a packed row \(mat1 and mat2 shapes"),
        ("gemma2", lose_window, "layer 0 attends with a window of None, its configuration says 8"),
    ],
)
def test_a_layer_that_does_not_play_by_the_rules_is_caught(
    family: str, break_it: Callable[[Any], None], reason: str
) -> None:
    model = tiny_model(family)
    break_it(model.model.layers[0].self_attn)
    with pytest.raises(UnsupportedModel, match=reason):
        probe_layers(model, model.config)


def test_a_window_as_wide_as_the_context_may_stay_unsaid() -> None:
    def probed(window: int) -> Any:
        config = PhimoeConfig(**SIZES, sliding_window=window, num_local_experts=2, num_experts_per_tok=1)
        return probe_layers(make(config), config)

    width = SIZES["max_position_embeddings"]
    assert [layer.window for layer in probed(width).layers] == [None, None]
    with pytest.raises(UnsupportedModel, match=f"its configuration says {width - 1}"):
        probed(width - 1)


def test_layers_that_attend_to_parts_of_others_keys_are_caught() -> None:
    model = tiny_model("llama")
    key = torch.zeros(1, 2, 2, 16)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.forward = lambda hidden_states, attention=attention, **options: _attend(
            attention,
            hidden_states,
            key[:],  # other tensors over the same memory
            {name: value for name, value in options.items() if name != "attention_mask"},
        )
    with pytest.raises(UnsupportedModel, match="keys that are not its own"):
        probe_layers(model, model.config)


@pytest.mark.parametrize("config", [NemotronConfig(**SIZES, head_dim=16), StableLmConfig(**SIZES)])
def test_layers_that_their_model_leaves_without_keywords_get_them(config: Any) -> None:
    model = make(config)
    ids = torch.arange(9)[None]
    before = model(ids).logits
    assert len(probe_layers(model, model.config).layers) == 2
    assert torch.equal(model(ids).logits, before)
