"""One class of the matrix: made, saved, served, and compared with its own forward pass in float32."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine import Engine, GenerationRequest, SamplingParams, StartRefused
from engine.compute.loading.support import (
    Architecture,
    check_supported,
    find_model_class,
    find_text_half,
    make_model,
)
from engine.compute.meta_device import on_meta_device
from engine.compute.native.families import is_known_class
from tests.matrix.reduced import reduced_config
from tests.support.native import compiled_home
from tests.support.speculated import engine_of, single_threaded
from tests.support.tiny_models import tiny_tokenizer

MAX_TOKENS = 24
TOLERANCE = 1e-3  # of a log-probability
MAX_PARAMETERS = 50_000_000
# Whole prompts take several steps of 16 tokens; blocks of 4 tokens are shared; drafts come from the text.
_FLAGS = (
    *("--max-num-batched-tokens", "16", "--speculative-method", "ngram"),
    *(
        "--max-num-seqs",
        "8",
        "--kv-cache-memory",
        "64MiB",
        "--draft-length-policy",
        "fixed",
        "--min-acceptance-rate",
        "0",
    ),
)
_SHARED = [5, 9, 17, 33, 7, 5, 9, 17, 33, 7, 5, 9, 17, 33]
PROMPTS = [_SHARED + tail for tail in ([40, 41], [77, 5, 9, 17], list(range(100, 116)), [])]


@dataclass(frozen=True)
class Row:
    """What came of one class. `drafts` are those that were accepted, None where nothing was served."""

    model: str
    config: str
    result: str
    reason: str = ""
    drafts: int | None = None


def judge(config_class: type[PreTrainedConfig], model_class: type) -> Row:
    """The class's row of the matrix; never raises."""
    names = (model_class.__name__, config_class.__name__)
    told = ""
    try:
        half = find_text_half(config_class())
        if half is not None:  # that it is loaded from the whole model's files test_loader shows
            config_class, told = type(half), "its language model alone"
            model_class = find_model_class(half)
        config = reduced_config(config_class)
    except Exception as error:  # each class validates in its own way
        return Row(*names, "not made", _line(error))
    try:
        check_supported(Architecture(config, model_class))
        outline = on_meta_device(partial(_outlined, config))
        if sum(each.numel() for each in outline.parameters()) > MAX_PARAMETERS:
            return Row(*names, "not made", "no reduced configuration")
    except StartRefused as error:
        return Row(*names, "refused", _reason(error))
    except Exception as error:
        return Row(*names, "not made", _line(error))
    with TemporaryDirectory() as directory, single_threaded():
        try:
            model = _save(config, Path(directory))
            row = asyncio.run(_serve(names, model, Path(directory)))
            return replace(row, reason=row.reason or told)
        except StartRefused as error:
            return Row(*names, "refused", _reason(error))
        except Exception as error:
            return Row(*names, "failed", _line(error))


def _outlined(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without numbers."""
    with torch.device("meta"):
        return make_model(config)


def _save(config: PreTrainedConfig, directory: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make_model(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases start at one and zero, which would hide errors in them
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model.requires_grad_(False).eval()


async def _serve(names: tuple[str, str], model: PreTrainedModel, directory: Path) -> Row:
    kernels = ("--compile", "auto") if is_known_class(type(model)) else ()
    async with engine_of(directory, *_FLAGS, *kernels, home=compiled_home(torch.float32)) as engine:
        has_kernels = engine.info.kernels.startswith("compiled")
        found = await asyncio.gather(*(_reply(engine, prompt) for prompt in PROMPTS))
        found.append(await _reply(engine, PROMPTS[2]))
        accepted = engine.metrics.speculation.num_accepted
    for prompt, (token_ids, logprobs) in zip((*PROMPTS, PROMPTS[2]), found, strict=True):
        if fault := _difference(model, prompt, token_ids, logprobs):
            return Row(*names, "wrong", fault, accepted)
    result = "served exactly with kernels" if has_kernels else "served exactly"
    return Row(*names, result, "", accepted)


_ids = itertools.count()


async def _reply(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    params = SamplingParams(MAX_TOKENS, temperature=0.0, logprobs=1, ignore_eos=True)
    stream = engine.submit(GenerationRequest(f"matrix-{next(_ids)}", tuple(prompt), params))
    token_ids: list[int] = []
    logprobs: list[float] = []
    async for delta in stream:
        token_ids += delta.token_ids
        logprobs += [each.logprob for each in delta.logprobs]
        if delta.finish is not None and delta.finish.error is not None:
            raise delta.finish.error
    return token_ids, logprobs


@torch.inference_mode()
def _difference(
    model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]
) -> str:
    """How the reply differs from what the model's own forward pass says of it; empty if it does not."""
    if len(token_ids) != MAX_TOKENS or len(logprobs) != MAX_TOKENS:
        return f"{len(token_ids)} tokens and {len(logprobs)} log-probabilities of {MAX_TOKENS}"
    logits = model(torch.tensor([[*prompt, *token_ids]]), use_cache=False).logits[0].float()
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    for place, (token_id, logprob, row) in enumerate(zip(token_ids, logprobs, rows, strict=True)):
        if float(row.max() - row[token_id]) > TOLERANCE:
            return f"token {place} is {token_id}, the model's own is {int(row.argmax())}"
        if abs(float(row[token_id]) - logprob) > TOLERANCE:
            return (
                f"the log-probability at {place} is {logprob:.5f}, the model's own {float(row[token_id]):.5f}"
            )
    return ""


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _reason(error: StartRefused) -> str:
    return str(error).partition("cannot be served exactly: ")[2].rstrip(".") or str(error)
