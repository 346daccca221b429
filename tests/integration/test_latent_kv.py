"""Multi-head latent attention over the rows that it stores gives the logits of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from config import ModelSettings
from engine import GenerationRequest, SamplingParams
from engine.compute.attention.kv_tensors import bytes_per_block
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.loading import loader
from engine.compute.loading.coded_weights import CodedLinear, CodeKind
from engine.compute.loading.loader import load_model
from engine.compute.native.install import install
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import check_forward
from tests.matrix.reduced import causal_classes, reduced_config
from tests.support.native import compiled_kernels
from tests.support.packed import (
    as_loaded,
    is_the_same_in_any_company,
    plain_logits,
    random_schedule,
    random_tokens,
    run_schedule,
)
from tests.support.quantized_checkpoints import gptq
from tests.support.speculated import engine_of, single_threaded
from tests.support.tiny_models import tiny_tokenizer

FAMILIES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "MiniCPM3ForCausalLM")
RANK, ROTATED = 32, 8


@pytest.fixture(autouse=True, scope="module")
def small() -> Any:
    with single_threaded():
        yield


def model_of(
    name: str, changes: Mapping[str, int] | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    config = reduced_config(next(config for config, model in causal_classes() if model.__name__ == name))
    for attribute, value in (changes or {}).items():
        setattr(config, attribute, value)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    return model.to(dtype).requires_grad_(False).eval()


@pytest.mark.by_default("DeepseekV3ForCausalLM")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_transformers_own_in_any_schedule(name: str) -> None:
    loaded = as_loaded(model_of(name))
    assert set(loaded.layers) == {LayerKv(1, RANK + ROTATED, RANK, value_in_key=True)}
    rng = np.random.default_rng(0)
    lengths = [53, 12, 30]
    sequences = [random_tokens(rng, length) for length in lengths]
    wanted = [plain_logits(loaded, tokens) for tokens in sequences]
    for block_size, most in ((16, 60), (4, 9), (5, 1)):
        schedule = random_schedule(rng, lengths, max_chunk=most)
        packed = run_schedule(PackedForward(loaded), sequences, schedule, block_size, rng)
        for logits, expected in zip(packed, wanted, strict=True):
            torch.testing.assert_close(logits, expected[: len(logits)], rtol=1e-4, atol=1e-4)


WIDE = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 32, "qk_head_dim": 48}  # as kernels need them


@pytest.mark.by_default("DeepseekV3ForCausalLM")
@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_attend_to_latents_and_a_token_has_its_bits_in_any_company(name: str) -> None:
    plain, exact = model_of(name, WIDE, torch.bfloat16), model_of(name, WIDE)
    native = install(as_loaded(model_of(name, WIDE, torch.bfloat16)), compiled_kernels())
    assert set(native.layers) == {LayerKv(1, 96, 64, value_in_key=True)} and native.row_attention is not None
    assert is_the_same_in_any_company(PackedForward(native))
    tokens = random_tokens(np.random.default_rng(2), 40)
    (ours,) = run_schedule(
        PackedForward(native), [tokens], [[(0, 25)], [(0, 15)]], 4, np.random.default_rng(3)
    )
    theirs, true = (plain_logits(as_loaded(each), tokens).float() for each in (plain, exact))
    assert (ours.float() - true).norm() <= 2 * (theirs - true).norm()


def test_a_token_has_its_bits_with_as_many_heads_as_deepseek_v3_has() -> None:
    sizes = WIDE | {"num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 1024}
    native = install(as_loaded(model_of("DeepseekV3ForCausalLM", sizes, torch.bfloat16)), compiled_kernels())
    assert native.row_attention is not None
    assert is_the_same_in_any_company(PackedForward(native))
    router: Any = native.model.get_submodule("model.layers.3.mlp.gate")
    rows = torch.randn(9, 1024, dtype=torch.bfloat16)
    alone, together = router(rows[4:5]), router(rows)
    assert all(torch.equal(part[0], whole[4]) for part, whole in zip(alone, together, strict=True))


@torch.inference_mode()
def test_a_branch_of_a_tree_is_as_a_chain() -> None:
    forward = PackedForward(as_loaded(model_of("DeepseekV3ForCausalLM")))
    tokens = random_tokens(np.random.default_rng(1), 12)

    def rows(chain: list[int], parents: tuple[int, ...]) -> torch.Tensor:
        kv = forward.make_kv(8, 4)
        forward(pack_step([Part(tokens, 0, 11, range(8))], 4), kv)
        return forward(pack_step([Part([*tokens, *chain], 11, 12 + len(chain), range(8), parents)], 4), kv)

    tree = rows([7, 9, 11], (-1, 0, -1))  # 7 and 9 behind it, and 11 in place of 7
    torch.testing.assert_close(tree[[0, 1, 2]], rows([7, 9], (-1, 0)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tree[[0, 3]], rows([11], (-1,)), rtol=1e-4, atol=1e-4)


def test_a_token_costs_its_latent_row() -> None:
    layer = LayerKv(1, 576, 512, value_in_key=True)
    assert bytes_per_block([layer], 16, torch.bfloat16) == 16 * 576 * 2
    assert bytes_per_block([replace(layer, value_in_key=False)], 16, torch.bfloat16) == 16 * 1088 * 2


def test_projections_in_few_bits_are_expanded_as_before() -> None:
    class Stored(nn.Linear):
        """Weights that are no tensor of the model's dtype, as far as anybody can tell."""

    model = model_of("DeepseekV3ForCausalLM")
    for layer in model.model.layers:
        plain = layer.self_attn.kv_b_proj
        stored = Stored(plain.in_features, plain.out_features, bias=False)
        stored.weight = plain.weight
        layer.self_attn.kv_b_proj = stored
    loaded = as_loaded(model)
    assert {layer.num_kv_heads for layer in loaded.layers} == {model.config.num_attention_heads}
    tokens = random_tokens(np.random.default_rng(0), 20)
    (logits,) = run_schedule(PackedForward(loaded), [tokens], [[(0, 20)]], 4, np.random.default_rng(0))
    torch.testing.assert_close(logits, plain_logits(loaded, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_in_few_bits_is_served_with_what_its_rows_expand_to(name: str, tmp_path: Path) -> None:
    """Its layers are told from a model without weights, which does not show what is stored how."""
    store_in_few_bits(model_of(name), tmp_path)
    loaded = load_model(tmp_path, ModelSettings(dtype="float32", device="cpu"))
    kept = {layer.value_in_key for layer in loaded.layers}
    assert kept == {type(layer.kv_b_proj) is nn.Linear for layer in attentions(loaded.model)}
    check_forward(PackedForward(loaded))


@pytest.mark.parametrize("asked", [None, "int8", "int4"])
def test_what_rows_are_expanded_by_stays_in_numbers_where_a_device_keeps_codes(
    asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a checkpoint's weights will take is foreseen so."""
    monkeypatch.setattr(loader, "kept_kinds", lambda *_: frozenset(CodeKind))
    monkeypatch.setattr(loader, "multiply_codes", lambda *_: None)
    model = model_of("DeepseekV3ForCausalLM", WIDE)
    if asked is None:
        settings = ModelSettings(dtype="float32", device="cpu", compile="off")
        store_in_few_bits(model, tmp_path)
    else:
        settings = ModelSettings(dtype="float32", device="cpu", quantization=asked)
        model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(tmp_path, settings)
    assert all(layer.value_in_key for layer in loaded.layers)
    for layer in attentions(loaded.model):
        assert type(layer.kv_b_proj) is nn.Linear and type(layer.o_proj) is CodedLinear
    check_forward(PackedForward(loaded))


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def store_in_few_bits(model: PreTrainedModel, directory: Path) -> None:
    """A checkpoint of the model with its projections, as far as the format takes them, in GPTQ's codes."""
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    checkpoint, generator = gptq(), torch.Generator().manual_seed(0)
    stored = load_file(directory / "model.safetensors")
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or linear is model.get_output_embeddings():
            continue
        if f"{name}.weight" not in stored or linear.in_features % 32 or linear.out_features % 8:
            continue
        del stored[f"{name}.weight"]
        made = checkpoint.store(linear.out_features, linear.in_features, generator)
        stored |= {f"{name}.{ending}": each.contiguous() for ending, each in made.tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": checkpoint.settings}))


async def test_prefixes_forks_swaps_and_drafts_change_no_token(tmp_path: Path) -> None:
    """In a pool that is too small for all, against a request alone."""
    model_of("DeepseekV3ForCausalLM").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    shared = random_tokens(np.random.default_rng(2), 40)
    prompts = [[*shared, 7 + seed] for seed in range(6)]

    async def said(*flags: str, together: bool) -> list[list[int]]:
        base = ("--dtype", "float32", "--compile", "off", "--max-num-seqs", "6", *flags)
        async with engine_of(tmp_path, *base) as engine:
            sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            streams, texts = [], []
            for seed, prompt in enumerate(prompts):
                streams.append(engine.submit(GenerationRequest(str(seed), prompt, sampling)))
                if not together:
                    texts.append([token async for delta in streams[-1] for token in delta.token_ids])
            return texts or [[token async for delta in each for token in delta.token_ids] for each in streams]

    alone = await said("--speculative-method", "none", "--no-prefix-caching", together=False)
    tight = ("--kv-cache-memory", "100KiB", "--swap-space", "1MiB", "--preemption", "swap")
    crowd = await said(*tight, "--speculative-method", "ngram", "--min-acceptance-rate", "0", together=True)
    assert crowd == alone
