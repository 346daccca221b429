"""All layers in one call: the bits of one after the other, and left alone wherever that may not hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.compute.loading.loader import LoadedModel
from engine.compute.native import install
from engine.compute.native.decoder import NativeDecoder, gives_head_alone
from engine.compute.native.rotation_table import RotationTable
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from tests.support.native import compiled_kernels
from tests.support.packed import as_loaded, random_schedule, random_tokens, run_schedule
from tests.support.speculated import single_threaded
from tests.support.tiny_models import FURTHER_FAMILIES, tiny_model

JOINED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama wide": {"num_attention_heads": 6, "head_dim": 96, "intermediate_size": 160},
    "mistral": {},
    "qwen2": {},
    "qwen2_window": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3": {},
    "granite": {},
    "olmo2": {},
    "phi3": {"head_dim": 64},  # of which half is rotated
    **{family: {} for family in FURTHER_FAMILIES},
    "glm": {"head_dim": 64},  # likewise
    "glm4": {"head_dim": 64},
    "gpt_oss": {},
    "mixtral": {},
    "olmoe": {"num_attention_heads": 2, "num_key_value_heads": 1},  # of 64 together, as its norms are
    "qwen2_moe": {},
    "qwen3_moe": {},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


def on_kernels(family: str, **changes: Any) -> LoadedModel:
    """Layer by layer."""
    model = tiny_model(family.split()[0], dtype=torch.bfloat16, **{"head_dim": 32, **changes})
    return install.install(as_loaded(model), compiled_kernels())


def joined(loaded: LoadedModel) -> LoadedModel:
    install.join_layers(loaded, compiled_kernels())
    return loaded


def is_joined(loaded: LoadedModel) -> bool:
    return isinstance(loaded.model.base_model, NativeDecoder)


def logits_of(loaded: LoadedModel, chunks: int) -> list[torch.Tensor]:
    """Of three sequences in pieces of up to `chunks` tokens, side by side over scattered blocks."""
    rng = np.random.default_rng(chunks)
    lengths = [33, 5, 20]
    sequences = [random_tokens(rng, length) for length in lengths]
    steps = random_schedule(rng, lengths, max_chunk=chunks)
    return run_schedule(PackedForward(loaded), sequences, steps, 4, rng)


@pytest.mark.by_default(
    *("llama tied", "gemma3", "cohere2", "gpt_oss", "olmo3", "qwen2_moe", "qwen2_window", "phi3", "glm4"),
    *("starcoder2", "granite"),
)
@pytest.mark.parametrize("family", JOINED)
def test_the_bits_are_those_of_layer_after_layer(family: str) -> None:
    apart, together = (on_kernels(family, **JOINED[family]) for _ in range(2))
    assert is_joined(joined(together))
    for chunks in (1, 9, 33):
        for found, expected in zip(logits_of(together, chunks), logits_of(apart, chunks), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["gemma3", "cohere2", "gpt_oss", "olmo3", "qwen2_moe"])
def test_drafts_in_a_tree_have_the_bits_of_layer_after_layer(family: str) -> None:
    """Behind a window, too, that ends among what was there before."""
    tokens = random_tokens(np.random.default_rng(0), 35)
    found = []
    for loaded in (on_kernels(family), joined(on_kernels(family))):
        forward = PackedForward(loaded)
        kv = forward.make_kv(9, 4)
        compute(forward, kv, [Part(tokens, 0, 30, range(9))])
        found.append(compute(forward, kv, [Part(tokens, 30, 35, range(9), (-1, 0, -1, 2))]))
    assert is_joined(loaded) and len(found[0]) == 5
    assert torch.equal(*found)


@pytest.mark.by_default
@pytest.mark.parametrize("context", [3, 62, 510])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_window"])
def test_a_draft_in_a_tree_has_the_bits_that_it_has_in_a_chain(family: str, context: int) -> None:
    """Across blocks of positions and chunks of them, whatever lies between it and its parent."""
    rng = np.random.default_rng(context)
    tokens = random_tokens(rng, context + 13)
    parents = [-1, 0, -1, 1, 1, 2, 5, 0, 6, -1, 8, 10]
    loaded = joined(on_kernels(family))
    forward, blocks = PackedForward(loaded), range(-(-len(tokens) // 4))
    kv = forward.make_kv(len(blocks), 4)
    compute(forward, kv, [Part(tokens, 0, context, blocks)])
    found = compute(forward, kv, [Part(tokens, context, len(tokens), blocks, tuple(parents))])
    for draft in range(len(parents)):
        branch, ancestor = [draft], parents[draft]
        while ancestor >= 0:
            branch.insert(0, ancestor)
            ancestor = parents[ancestor]
        chain = [*tokens[: context + 1], *(tokens[context + 1 + own] for own in branch)]
        expected = compute(forward, kv, [Part(chain, context, len(chain), blocks)])
        assert torch.equal(found[1 + draft], expected[0]), f"draft {draft}"


@pytest.mark.parametrize("change", [0.0, 1e-4])
def test_norms_in_float32_are_taken_where_their_numbers_are_the_models(change: float) -> None:
    """Transformers keeps gpt-oss's so; a file of bfloat16 has no others."""
    model = tiny_model("gpt_oss", dtype=torch.bfloat16, head_dim=32)
    for layer in model.model.layers:
        layer.input_layernorm.float().weight.data.mul_(1 + change)
    assert is_joined(joined(install.install(as_loaded(model), compiled_kernels()))) is (change == 0)


def test_the_bits_are_the_same_on_any_number_of_threads() -> None:
    loaded = joined(on_kernels("llama"))
    expected = logits_of(loaded, 9)
    for threads in (2, 3):
        compiled_kernels().team.resize(threads)
        assert all(map(torch.equal, logits_of(loaded, 9), expected))
    compiled_kernels().team.resize(1)


@pytest.mark.parametrize("rope", [LLAMA3, DYNAMIC])
def test_the_angles_are_the_models_own(rope: dict[str, Any]) -> None:
    apart, together = (on_kernels("llama", rope_parameters=rope) for _ in range(2))
    assert is_joined(joined(together))
    for found, expected in zip(logits_of(together, 5), logits_of(apart, 5), strict=True):
        assert torch.equal(found, expected)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    forward = PackedForward(joined(on_kernels("qwen3")))
    tokens = random_tokens(np.random.default_rng(0), 120)
    kv = forward.make_kv(64, 4)
    every = [Part(tokens[at:], 0, 1 + at % 16, range(at * 4, at * 4 + 4)) for at in range(16)]
    together = compute(forward, kv, every)
    for at, part in enumerate(every):
        assert torch.equal(compute(forward, kv, [part])[-1], together[at])


@torch.inference_mode()
def compute(forward: PackedForward, kv: Any, parts: list[Part]) -> torch.Tensor:
    return forward(pack_step(parts, 4), kv)


def test_hooks_on_the_model_its_base_and_its_head_see_what_they_did() -> None:
    seen: dict[str, list[Any]] = {}
    for kind, loaded in (("apart", on_kernels("llama")), ("together", joined(on_kernels("llama")))):
        notes = seen[kind] = []
        model: Any = loaded.model
        model.base_model.register_forward_hook(lambda *call, to=notes: to.append(call[2].last_hidden_state))
        model.register_forward_hook(lambda *call, to=notes: to.append(call[2].logits))
        logits, hidden = PackedForward(loaded).with_features(*two_tokens(PackedForward(loaded)))
        notes += [logits, hidden]
    assert len(seen["together"]) == 4
    assert all(map(torch.equal, seen["together"], seen["apart"]))


@pytest.mark.parametrize("tokens", [1, 17])
def test_what_enters_layers_is_what_entered_them_one_by_one(tokens: int) -> None:
    entered = []
    for loaded in (on_kernels("llama"), joined(on_kernels("llama"))):
        forward = PackedForward(loaded, (1, 2, 0))  # of two layers: 2 is what leaves the last
        inputs = pack_step([Part(list(range(3, 40)), 0, tokens, range(5))], 4)
        with torch.inference_mode():
            entered.append(forward.with_features(inputs, forward.make_kv(5, 4)))
            plain = PackedForward(loaded)
            assert torch.equal(plain(inputs, plain.make_kv(5, 4)), entered[-1][0])
    (_, apart), (_, together) = entered
    assert is_joined(loaded) and together.shape == (tokens, 3 * loaded.config.hidden_size)
    assert torch.equal(together, apart)


def two_tokens(forward: PackedForward) -> tuple[Any, Any]:
    return pack_step([Part([3, 4], 0, 2, [0])], 4), forward.make_kv(1, 4)


# --- from tokens to logits at once ---


LED = (
    "llama",
    "llama tied",
    "mistral",
    "qwen3",
    "gemma3",
    "olmo2",
    "phi3",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
)
NOT_LED = {
    "gemma2": {"final_logit_softcapping": 30.0},  # a limit behind the head
    "granite": {"logits_scaling": 8.0},  # a factor
}


def watched_calls(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes what transformers' code is asked for from now on."""
    seen: list[str] = []
    for name, module in {"model": loaded.model, "head": loaded.model.get_output_embeddings()}.items():
        call = type(module).forward

        def noting(self: Any, *args: Any, name: str = name, call: Any = call, **options: Any) -> Any:
            seen.append(name)
            return call(self, *args, **options)

        monkeypatch.setattr(type(module), "forward", noting)
    return seen


@pytest.mark.parametrize("family", LED)
def test_where_nothing_stands_behind_the_head_one_call_gives_the_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = joined(on_kernels(family, **JOINED[family]))
    seen = watched_calls(loaded, monkeypatch)
    logits_of(loaded, 9)
    assert not seen


@pytest.mark.parametrize("family", NOT_LED)
def test_where_something_does_the_model_is_asked(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = joined(on_kernels(family, **NOT_LED[family]))
    seen = watched_calls(loaded, monkeypatch)
    logits_of(loaded, 9)
    assert {"model", "head"} == set(seen)


def test_a_model_that_changes_small_logits_little_is_asked_all_the_same() -> None:
    """A tiny model's logits are below what a limit of thirty shows in bfloat16."""
    loaded = on_kernels("gemma2", final_logit_softcapping=30.0)
    assert not gives_head_alone(loaded.model)
    assert gives_head_alone(on_kernels("llama").model)


@pytest.mark.parametrize("wanted", [[], [0], [1, 4], [0, 1, 2, 3, 4]])
def test_logits_are_those_of_the_rows_asked_for(wanted: list[int]) -> None:
    loaded = joined(on_kernels("llama"))
    forward = PackedForward(loaded)
    inputs = pack_step([Part([3, 4, 5, 6, 7], 0, 5, [0, 1])], 4, every_row=True)
    every = forward(inputs, forward.make_kv(2, 4))
    some = replace(inputs, logits_rows=np.array(wanted, np.int64))
    assert torch.equal(forward(some, forward.make_kv(2, 4)), every[wanted])


@pytest.mark.parametrize("token_id", [-1, 512, 1 << 40])
def test_a_token_that_the_model_does_not_have_is_an_error(token_id: int) -> None:
    loaded = joined(on_kernels("llama"))
    forward = PackedForward(loaded)
    inputs = pack_step([Part([3, 4, 5], 0, 3, [0])], 4)
    wrong = replace(inputs, token_ids=np.array([3, token_id, 5]))
    with pytest.raises(IndexError, match="token 1 of the step is none of the model's 512"):
        forward(wrong, forward.make_kv(1, 4))
    assert torch.isfinite(forward(inputs, forward.make_kv(1, 4))).all()


def test_the_embedding_is_read_only() -> None:
    loaded = joined(on_kernels("llama"))
    before = loaded.model.get_input_embeddings().weight.clone()
    logits_of(loaded, 9)
    assert torch.equal(loaded.model.get_input_embeddings().weight, before)


# --- what stays as it is ---


def hook_a_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda _module, _args, output: output * 2)


def hook_the_base(model: Any) -> None:
    model.model.register_forward_pre_hook(lambda _module, _args: None)


def another_class_of_layer(model: Any) -> None:
    layer = model.model.layers[0]
    layer.__class__ = type("LlamaDecoderLayer", (type(layer),), {})


def leave_a_layer_out(model: Any) -> None:
    model.model.config.num_hidden_layers -= 1


def hook_a_stand_in(model: Any) -> None:
    model.model.layers[1].mlp.down.register_forward_hook(lambda _module, _args, output: output * 2)


@pytest.mark.parametrize(
    "change",
    [hook_a_layer, hook_the_base, another_class_of_layer, leave_a_layer_out, hook_a_stand_in],
)
def test_a_model_that_does_more_is_left_alone(change: Any) -> None:
    loaded = on_kernels("llama")
    change(loaded.model)
    assert not is_joined(joined(loaded))


def test_a_model_that_is_not_all_ours_is_left_alone() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16, head_dim=32)
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    assert not is_joined(joined(install.install(as_loaded(model), compiled_kernels())))


def test_other_logits_bring_the_layers_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = on_kernels("llama")
    base = loaded.model.base_model
    ask = RotationTable._ask
    monkeypatch.setattr(RotationTable, "_ask", lambda self, positions: ask(self, positions + 1)[::-1])
    assert joined(loaded).model.base_model is base
    assert "one call for all layers changes the logits: they are computed one by one" in caplog.messages


def test_the_log_tells_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "slipstream.model"):
        joined(on_kernels("llama"))
    assert caplog.messages[-1] == "one call of a kernel computes all layers"


# --- the table of angles ---


class Angles(nn.Module):
    """A rotary module that counts how often it is asked."""

    def __init__(self, rope_type: str) -> None:
        super().__init__()
        self.rope_type = rope_type
        self.asked: list[int] = []

    def forward(self, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(position_ids.shape[1])
        angles = position_ids[..., None] * torch.linspace(0, 1, 32)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


@pytest.mark.parametrize(("rope_type", "asked"), [("default", [8, 256]), ("dynamic", [3, 2, 2, 1])])
def test_angles_are_computed_once_where_they_depend_on_the_position_alone(
    rope_type: str, asked: list[int]
) -> None:
    rotary, like = Angles(rope_type), torch.zeros(1, dtype=torch.bfloat16)
    table = RotationTable(rotary, like)
    for positions in ([0, 7, 7], [3, 1], [200, 2], [255]):
        at = torch.tensor(positions)
        expected = Angles(rope_type)(like, at[None])
        assert all(map(torch.equal, table.rows(at), (part[0] for part in expected)))
    assert rotary.asked == asked
