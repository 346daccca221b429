"""The packed forward pass beside its logits: the hidden states that drafters read."""

from __future__ import annotations

import pytest
import torch

from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.layer_taps import layers_of
from engine.compute.runner.packed_forward import PackedForward
from tests.support.packed import load_tiny

BLOCK_SIZE = 4


@pytest.mark.parametrize("keeps_rows", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_features_are_what_the_logits_were_made_from(
    family: str, keeps_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_tiny(family)
    forward = PackedForward(loaded)
    if not keeps_rows:  # as for a model that has no such argument
        monkeypatch.setattr(forward, "_keeps_rows", False)
    tokens = list(range(3, 20))
    parts = [Part(tokens, 0, 1, [5]), Part(tokens, 0, 7, [0, 1]), Part(tokens, 0, 4, [2, 3], [-1, -1, 1])]
    inputs = pack_step(parts, BLOCK_SIZE)
    with torch.inference_mode():
        plain = forward(inputs, forward.make_kv(6, BLOCK_SIZE))
        logits, hidden = forward.with_features(inputs, forward.make_kv(6, BLOCK_SIZE))
        head = loaded.model.get_output_embeddings()
        assert not head._forward_pre_hooks  # the next pass pays nothing
        torch.testing.assert_close(logits, plain, rtol=0, atol=0)
        assert hidden.shape == (1 + 1 + 4, loaded.config.hidden_size)
        torch.testing.assert_close(head(hidden), logits)


def test_a_failed_pass_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tiny("llama")
    forward = PackedForward(loaded)
    kv = forward.make_kv(1, BLOCK_SIZE)
    with pytest.raises(IndexError):
        forward.with_features(pack_step([Part([10_000], 0, 1, [0])], BLOCK_SIZE), kv)
    assert not loaded.model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_features_of_layers_are_what_enters_them(family: str) -> None:
    loaded = load_tiny(family)
    last = loaded.config.num_hidden_layers - 1
    forward = PackedForward(loaded, (last, 0))
    inputs = pack_step([Part(list(range(3, 20)), 0, 7, [0, 1]), Part([5, 6], 0, 1, [2])], BLOCK_SIZE)
    entered: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(layers_of(loaded.model.base_model)):
        layer.register_forward_pre_hook(lambda _, args, index=index: entered.update({index: args[0][0]}))
    with torch.inference_mode():
        logits, hidden = forward.with_features(inputs, forward.make_kv(3, BLOCK_SIZE))
        assert torch.equal(logits, forward(inputs, forward.make_kv(3, BLOCK_SIZE)))
    assert torch.equal(hidden, torch.cat([entered[last], entered[0]], dim=-1))
    assert hidden.shape == (8, 2 * loaded.config.hidden_size)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_leaves_the_last_layer_is_what_the_last_norm_reads(family: str) -> None:
    loaded = load_tiny(family)
    inputs = pack_step([Part(list(range(3, 20)), 0, 7, [0, 1])], BLOCK_SIZE, every_row=True)
    tapped = PackedForward(loaded, (loaded.config.num_hidden_layers,))
    with torch.inference_mode():
        logits, left = tapped.with_features(inputs, tapped.make_kv(2, BLOCK_SIZE))
        plain = PackedForward(loaded)
        _, read_by_head = plain.with_features(inputs, plain.make_kv(2, BLOCK_SIZE))
        assert torch.equal(loaded.model.base_model.norm(left), read_by_head)
    assert len(logits) == len(left) == 7


def test_no_pass_looks_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that would wait for the tokens, and no graph could be recorded."""
    loaded = load_tiny("gpt2")
    loaded.model.config.pad_token_id = 3

    def look(tokens: torch.Tensor, token_id: object) -> bool:
        raise AssertionError(f"looked for {token_id} in {tokens}")

    forward = PackedForward(loaded)
    monkeypatch.setattr(torch.Tensor, "__contains__", look)
    inputs = pack_step([Part([3, 4, 3], 0, 3, [0])], BLOCK_SIZE)
    with torch.inference_mode():
        forward(inputs, forward.make_kv(1, BLOCK_SIZE))
