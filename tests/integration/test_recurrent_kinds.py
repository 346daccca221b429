"""Every class of recurrent layers: pieces with drafts that are cut off again give the model's own logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.recurrent.mixer_kinds import KINDS
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.dummy_steps import Part
from tests.support.packed import random_tokens
from tests.support.recurrent import pack_slots, with_drafts
from tests.support.recurrent_classes import loaded_from, model_of

CLASSES = {
    "BailingHybrid": "BailingHybridDeltaAttention",
    "Bamba": "BambaMixer",
    "FalconH1": "FalconH1Mixer",
    "FalconMamba": "FalconMambaMixer",
    "GraniteMoeHybrid": "GraniteMoeHybridMambaLayer",
    "Jamba": "JambaMambaMixer",
    "KimiLinear": "KimiLinearDeltaAttention",
    "Lfm2": "Lfm2ShortConv",
    "Lfm2Moe": "Lfm2MoeShortConv",
    "Lfm3": "Lfm3ShortConv",
    "Mamba": "MambaMixer",
    "Mamba2": "Mamba2Mixer",
    "MiniMax": "MiniMaxLightningAttention",
    "NemotronH": "NemotronHMamba2Mixer",
    "OlmoHybrid": "OlmoHybridGatedDeltaNet",
    "Qwen3Next": "Qwen3NextGatedDeltaNet",
    "Qwen3_5": "Qwen3_5GatedDeltaNet",
    "Qwen3_5Moe": "Qwen3_5MoeGatedDeltaNet",
    "RecurrentGemma": "RecurrentGemmaRecurrentBlock",
    "Rwkv": "RwkvBlock",
    "Zamba": "ZambaMambaMixer",
    "Zamba2": "Zamba2MambaMixer",
    "Zaya": "ZayaCCAProjection",
}
MAX_DRAFTS = 5
LENGTHS = (80, 1, 25, 9)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in CLASSES),
        ("BailingHybrid", {"kda_safe_gate": False}),
        ("Rwkv", {"rescale_every": 2}),
        ("Zaya", {"attention_bias": True}),
    ],
)
def test_pieces_with_drafts_equal_the_whole(name: str, changes: Mapping[str, Any]) -> None:
    model, rng = model_of(name, changes), np.random.default_rng(5)
    sequences = [random_tokens(rng, length) for length in LENGTHS]
    expected = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]
    assert CLASSES[name] in {type(module).__name__ for module in model.modules()}
    forward = RecurrentForward(loaded_from(model))
    memory = StateMemory(forward, MemorySizes(22 * len(LENGTHS), 4, len(LENGTHS), MAX_DRAFTS))
    computed, cut = [0] * len(LENGTHS), 0
    while any(left := [len(tokens) - done for tokens, done in zip(sequences, computed, strict=True)]):
        parts, drafts, right = {}, [], {}
        for seat in np.flatnonzero(left).tolist():
            tokens, first = sequences[seat], computed[seat]
            known = 1 if rng.random() < 0.6 else int(rng.integers(1, 41))
            num_drafts = int(rng.integers(0, MAX_DRAFTS + 1)) * (rng.random() < 0.7)
            good = min(known + int(rng.integers(0, num_drafts + 1)), left[seat])
            stop = min(known, left[seat]) + num_drafts
            wrong = random_tokens(rng, stop - good)
            blocks = range(seat * 22, seat * 22 + 22)
            parts[seat] = Part(tokens[: first + good] + wrong, first, first + stop, blocks)
            drafts.append(num_drafts)
            right[seat], cut = good, cut + len(wrong)
        inputs = with_drafts(pack_slots(parts, every_row=True), drafts)
        every = np.arange(len(inputs.token_ids))
        logits = forward(replace(inputs, logits_rows=every), memory)
        rows = torch.split(logits, inputs.query_lens.tolist())
        for (seat, good), mine in zip(right.items(), rows, strict=True):
            own = expected[seat][computed[seat] : computed[seat] + good]
            torch.testing.assert_close(mine[:good], own, rtol=1e-3, atol=1e-3)
            computed[seat] += good
    assert cut > 10


def test_every_kind_of_layers_is_shown() -> None:
    assert set(CLASSES.values()) == set(KINDS)
