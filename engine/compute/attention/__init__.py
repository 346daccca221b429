"""Paged attention under transformers' attention interface: one context a step, one backend a device.

`AttentionContext.attend` is the only entry, so timing it gives attention's share of a step.
"""

from __future__ import annotations

from engine.compute.attention.backend import AttentionBackend, LayerCall, StepAttention
from engine.compute.attention.choice import choose_backend
from engine.compute.attention.context import AttentionContext
from engine.compute.attention.cpu import CpuAttention
from engine.compute.attention.hf_interface import ATTENTION_NAME, CONTEXT_KEYWORD, OUR_NAMES, register
from engine.compute.attention.paged_rows import PagedRows, RowAttention
from engine.compute.attention.reference import ReferenceAttention

__all__ = [
    "ATTENTION_NAME",
    "CONTEXT_KEYWORD",
    "OUR_NAMES",
    "AttentionBackend",
    "AttentionContext",
    "CpuAttention",
    "LayerCall",
    "PagedRows",
    "ReferenceAttention",
    "RowAttention",
    "StepAttention",
    "choose_backend",
    "register",
]
