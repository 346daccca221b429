"""Which draws a device gets, and why not the fast ones."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import torch

from engine.compute.cuda.device_draw import (
    TORCH_DRAWS,
    DeviceDraws,
    DrawColumns,
    FilteredDraw,
    PlainDraw,
    column_words,
    draw_filtered,
    draw_plain,
    filtered_rows,
)
from engine.plan.step_records import SamplingInputs

log = logging.getLogger("slipstream.model")

_TRIED_ROWS, _TRIED_TOKENS = 8, 5000
_TRIED_TEMPERATURES = (0.01, 0.7, 1.0, 1e6)
_TRIED_FILTERS = (  # top-k and top-p
    (1, 1.0),
    (20, 0.9),
    (700, 1.0),
    (3000, 0.8),
    (4999, 0.999),
    (0, 0.0),
    (0, 0.5),
    (0, 1 - 2**-24),
)


def choose_draws(device: torch.device) -> DeviceDraws:
    """The fastest draws that work on `device`: Triton's on CUDA, if it is there and draws the same tokens."""
    draws = TORCH_DRAWS
    if device.type != "cuda" or find_spec("triton") is None:
        return draws
    with _told(f"Tokens are drawn on {device} by many operations"):
        from engine.compute.cuda.triton_draw import draw_plain_at_once

        check_draw(draw_plain_at_once, device)
        draws = draws._replace(plain=draw_plain_at_once)
    with _told(f"Tokens that top-k or top-p filter are drawn on {device} by sorting"):
        from engine.compute.cuda.triton_filter import draw_filtered_at_once

        check_filtered_draw(draw_filtered_at_once, device)
        draws = draws._replace(filtered=draw_filtered_at_once)
    return draws


@contextmanager
def _told(consequence: str) -> Iterator[None]:
    """Go on after whatever a compiler or a driver may raise, with a warning."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", consequence, (str(error).strip().splitlines() or [type(error).__name__])[0])


@torch.inference_mode()
def check_draw(draw: PlainDraw, device: torch.device) -> None:
    """Raise RuntimeError unless `draw` draws the tokens of `draw_plain`, of greedy rows and others."""
    rows = np.arange(_TRIED_ROWS)
    inputs = SamplingInputs(
        temperature=(rows / 4).astype(np.float32),
        top_k=np.zeros(_TRIED_ROWS, np.int32),
        top_p=np.ones(_TRIED_ROWS, np.float32),
        min_p=(rows % 3 / 20).astype(np.float32),
        seed=rows - 3,
        position=rows * 1000,
        num_logprobs=np.full(_TRIED_ROWS, -1, np.int32),
    )
    words = column_words(inputs, rows, _TRIED_ROWS)
    columns = DrawColumns.of({name: torch.from_numpy(word).to(device) for name, word in words.items()})
    logits = _tried_logits(_TRIED_ROWS, _TRIED_TOKENS, device)
    for dtype in (torch.float32, torch.bfloat16):
        if not torch.equal(draw(logits.to(dtype), columns), draw_plain(logits.to(dtype), columns)):
            raise RuntimeError("triton's kernel draws other tokens here")


@torch.inference_mode()
def check_filtered_draw(draw: FilteredDraw, device: torch.device, num_tokens: int = _TRIED_TOKENS) -> None:
    """Raise RuntimeError unless `draw` draws the tokens of `draw_filtered`.

    Of rows with many ties, all equal, with infinities and with NaN, each filtered little, much and in between
    at temperatures from next to greedy to next to uniform. A vocabulary of fewer tokens is for the impatient.
    """
    cases = [(*each, heat) for each, heat in itertools.product(_TRIED_FILTERS, _TRIED_TEMPERATURES)]
    top_k, top_p, temperature = (np.array(column) for column in zip(*cases, strict=True))
    rows = np.arange(len(cases))
    inputs = SamplingInputs(
        temperature=temperature.astype(np.float32),
        top_k=top_k.astype(np.int32),
        top_p=top_p.astype(np.float32),
        min_p=(rows % 5 == 4).astype(np.float32) / 2,
        seed=rows - 3,
        position=rows * 1000,
        num_logprobs=np.full(len(rows), -1, np.int32),
    )
    filtered = filtered_rows(inputs, num_tokens)
    assert filtered is not None
    sent = {name: torch.from_numpy(word).to(device) for name, word in filtered.words.items()}
    places = torch.from_numpy(len(rows) - 1 - filtered.rows).to(device)
    logits = _tried_logits(len(rows), num_tokens, device)
    flat, cut = logits.clone(), logits.clone()
    flat[:, 1:] = flat[:, :1]
    cut[:, ::2] = -torch.inf
    flat[0], cut[1, 7] = -torch.inf, torch.nan
    for tried in (logits, flat, cut, logits.bfloat16()):
        asked = (tried, places, filtered.filters(sent), sent["keys"])
        if not torch.equal(draw(*asked), draw_filtered(*asked)):
            raise RuntimeError("triton's kernels draw other tokens here")


def _tried_logits(num_rows: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Float32 [rows, tokens] of few different numbers, and a NaN in the last row."""
    numbers = torch.arange(num_rows * num_tokens, device=device).view(num_rows, num_tokens)
    logits = (numbers * 7919 % 10007 % 97).float() / 10
    logits[-1, 0] = torch.nan
    return logits
