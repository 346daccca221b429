"""Which plain draw a device gets, and why not the fast one."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import numpy as np
import torch

from engine.compute.cuda.device_draw import DrawColumns, PlainDraw, column_words, draw_plain
from engine.plan.step_records import SamplingInputs

log = logging.getLogger("slipstream.model")

_TRIED_ROWS, _TRIED_TOKENS = 8, 5000


def choose_draw(device: torch.device) -> PlainDraw:
    """The fastest plain draw that works on `device`: Triton's on CUDA, if it is there and draws the same."""
    if device.type != "cuda" or find_spec("triton") is None:
        return draw_plain
    try:
        from engine.compute.cuda.triton_draw import draw_plain_at_once

        check_draw(draw_plain_at_once, device)
    except Exception as error:  # whatever a compiler or a driver may raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning("Tokens are drawn on %s by many operations: %s", device, reason)
        return draw_plain
    return draw_plain_at_once


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
    numbers = torch.arange(_TRIED_ROWS * _TRIED_TOKENS, device=device).view(_TRIED_ROWS, _TRIED_TOKENS)
    logits = (numbers * 7919 % 10007 % 97).float() / 10
    logits[-1, 0] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        if not torch.equal(draw(logits.to(dtype), columns), draw_plain(logits.to(dtype), columns)):
            raise RuntimeError("triton's kernel draws other tokens here")
