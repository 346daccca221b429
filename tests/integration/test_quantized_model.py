"""Models with weights of 8 or 4 bits: near the plain model in all they compute, or refused with one line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config import load_settings
from engine.compute.loading.loader import LoadedModel
from engine.compute.native import compiler
from engine.compute.native.decoder import NativeDecoder
from engine.compute.native.experts import NativeExperts
from engine.compute.native.install import with_kernels
from engine.compute.native.modules import NativeLinear
from engine.compute.native.quantization import Q4_1, Q8_0, foresee_weights
from engine.compute.native.records import BLOCKS, ELEMENTS
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import logits_distance, packed_sample
from engine.errors import StartRefused
from tests.support.native import compiled_home, pretend_every_instruction
from tests.support.packed import (
    as_loaded,
    is_the_same_in_any_company,
)
from tests.support.speculated import single_threaded
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture
def home() -> Path:
    return compiled_home(formats=True)


def fresh(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LoadedModel:
    return as_loaded(tiny_model(family, dtype=dtype, **{"head_dim": 32, **changes}))


def served(loaded: LoadedModel, home: Path, *flags: str) -> LoadedModel:
    settings = load_settings(["m", *flags], environ={}).model
    return with_kernels(loaded, settings, home, lambda: loaded)


def refusal(loaded: LoadedModel, home: Path) -> str:
    with pytest.raises(StartRefused) as caught:
        served(loaded, home, "--quantization", "int8")
    return (
        str(caught.value).removeprefix("--quantization int8: ").removesuffix(". Leave it out to do without.")
    )


def kinds(loaded: LoadedModel) -> set[int]:
    return {module.weights.kind for module in loaded.model.modules() if isinstance(module, NativeLinear)}


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "mamba", "qwen3_5_hybrid", "lfm2_hybrid"],
)
def test_logits_are_near_the_plain_models(family: str, home: Path) -> None:
    plain = packed_sample(forward_of(fresh(family)))
    loaded = served(fresh(family), home, "--quantization", "int8")
    assert kinds(loaded) == {BLOCKS}
    assert 0.002 < logits_distance(packed_sample(forward_of(loaded)), plain) < 0.1


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_experts_are_rounded_as_foreseen(asked: str, home: Path) -> None:
    plain = fresh("mixtral")
    foreseen = foresee_weights(plain.model, torch.bfloat16, asked)
    loaded = served(plain, home, "--quantization", asked)
    num_bytes = sum(
        part.panels.nbytes
        for module in loaded.model.modules()
        if isinstance(module, NativeLinear)
        for part in module.weights.parts
    )
    assert foreseen.startswith(f"{asked}: {num_bytes / 2**20:.0f} MiB to multiply with")
    experts = [module for module in loaded.model.modules() if isinstance(module, NativeExperts)]
    assert len(experts) == 2
    assert all(part.weights.kind == BLOCKS for each in experts for part in (each.gate_up, each.down))


def test_four_bits_leave_the_head_eight(home: Path) -> None:
    plain = packed_sample(forward_of(fresh()))
    loaded = served(fresh(), home, "--quantization", "int4")
    head = loaded.model.get_output_embeddings()
    formats = {
        module is head: module.weights.parts[0].format
        for module in loaded.model.modules()
        if isinstance(module, NativeLinear)
    }
    assert formats == {True: Q8_0, False: Q4_1}
    assert 0.01 < logits_distance(packed_sample(forward_of(loaded)), plain) < 0.4


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_a_tokens_logits_are_the_same_bits_in_any_company(asked: str, home: Path) -> None:
    """One token a sequence and step, or up to 32 of each: drafts and crowds change no text."""
    assert is_the_same_in_any_company(PackedForward(served(fresh(), home, "--quantization", asked)))


def test_without_the_flag_nothing_is_rounded(home: Path) -> None:
    assert kinds(served(fresh(), home)) == {ELEMENTS}


def test_all_layers_in_one_call_read_the_integers(home: Path) -> None:
    """Their addresses were taken after the weights had moved: nothing that was freed is read."""
    loaded = served(fresh(), home, "--quantization", "int8")
    joined = loaded.model.base_model
    assert isinstance(joined, NativeDecoder)
    found = packed_sample(forward_of(loaded))
    loaded.model.set_submodule(loaded.model.base_model_prefix, joined.plain)
    assert torch.equal(packed_sample(forward_of(loaded)), found)


def test_a_tied_embedding_stays_as_it_is(home: Path) -> None:
    before = fresh(tie_word_embeddings=True).model.get_input_embeddings().weight.clone()
    loaded = served(fresh(tie_word_embeddings=True), home, "--quantization", "int8")
    assert isinstance(loaded.model.get_output_embeddings(), NativeLinear)
    assert torch.equal(loaded.model.get_input_embeddings().weight, before)


def test_what_was_done_is_logged(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "slipstream.model"):
        served(fresh(), home, "--quantization", "int8")
    assert any(line.startswith("weights of 8-bit integers: ") for line in caplog.messages)


def test_a_model_that_it_spoils_is_refused(home: Path) -> None:
    """One input of the head is always zero and has weights so large that the others round to nothing."""
    loaded = fresh(tie_word_embeddings=False)
    with torch.no_grad():
        loaded.model.model.norm.weight[0] = 0
        loaded.model.lm_head.weight[:, 0] = 1000
    reason = refusal(loaded, home)
    assert reason.startswith("it changes the logits by ") and reason.endswith(" of their spread (limit 0.4)")


def on_cuda(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: on_cuda(fresh()), "they are for CPUs, the model is on cuda:0"),
        (
            lambda: fresh(dtype=torch.float64),
            "they do not compute in float64",
        ),
        (
            lambda: as_loaded(tiny_model("gpt2", dtype=torch.bfloat16)),
            "GPT2LMHeadModel is not among the models they were made for",
        ),
    ],
)
def test_models_that_cannot_have_it_are_refused(
    make: Callable[[], LoadedModel], reason: str, tmp_path: Path
) -> None:
    assert refusal(make(), tmp_path) == f"no compiled kernels: {reason}"


def test_a_machine_that_cannot_have_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_COMPILERS", ("no-such-compiler",))
    pretend_every_instruction(monkeypatch)
    assert refusal(fresh(), tmp_path) == "no compiled kernels: there is no C++ compiler (no-such-compiler)"
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert refusal(fresh(), tmp_path).startswith("no compiled kernels: the CPU has no instructions for ")
