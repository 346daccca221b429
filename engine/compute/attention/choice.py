"""Which attention backend a device gets, and why not the fast one."""

from __future__ import annotations

import logging
from collections.abc import Collection
from importlib.util import find_spec

import torch

from engine.compute.attention.backend import AttentionBackend, LayerCall
from engine.compute.attention.context import AttentionContext
from engine.compute.attention.cpu import CpuAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.attention.paged_rows import RowAttention
from engine.compute.attention.reference import ReferenceAttention
from engine.compute.runner.dummy_steps import Part, pack_step

log = logging.getLogger("slipstream.model")

_SCALE_ROUNDING = 2**-8  # of a weight times its row's scale, in bfloat16
_LEAST_CAPABILITY = (8, 0)  # the first with bfloat16 products and asynchronous copies


def choose_backend(
    device: torch.device,
    rows: RowAttention | None = None,
    *,
    layers: Collection[LayerKv] = (),
    kept: torch.dtype | None = None,
) -> AttentionBackend:
    """The fastest backend that works on `device`; `rows` attends from all rows on a CPU, if there is such.

    A model with biased `layers`, whose keys are scored by their positions, gets one without compiled kernels.
    On CUDA the fastest is Triton's, tried with small steps over K/V `kept` as it will be, and over latent
    rows where layers store such; where it cannot be had, one line of the log says why.
    """
    biased = any(layer.biased for layer in layers)
    if device.type == "cpu":
        return CpuAttention(None if biased else rows)
    if device.type != "cuda":
        return ReferenceAttention()
    try:
        if biased:
            raise RuntimeError("it knows no bias by position (ALiBi)")
        return _triton(device, {layer for layer in layers if layer.value_in_key}, kept)
    except Exception as error:  # whatever a compiler, a driver or a missing package may raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning("Attention on %s is the slow reference: %s", device, reason)
        return ReferenceAttention()


def _triton(device: torch.device, latent: Collection[LayerKv], kept: torch.dtype | None) -> AttentionBackend:
    if torch.version.cuda is None:
        raise RuntimeError("this build of torch is not for CUDA")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise RuntimeError(f"its compute capability is {capability}, the kernels need {_LEAST_CAPABILITY}")
    if find_spec("triton") is None:
        raise RuntimeError("triton is not installed (the extra 'cuda' has it)")
    from engine.compute.cuda.triton_attention import Gpu, TritonAttention

    backend = TritonAttention(Gpu.of(device))
    for layer in (LayerKv(1, 64, 64), *latent):
        _try(backend, layer, device, kept)
    return backend


def _try(backend: AttentionBackend, layer: LayerKv, device: torch.device, kept: torch.dtype | None) -> None:
    """Attend from one token to itself, and wait for it. Its numbers are kept in bytes without loss."""
    kv = KvTensors((layer,), 1, 16, torch.float16, device, kept)
    context = AttentionContext(pack_step([Part([0], 0, 1, [0])], 16), kv, backend)
    key = torch.ones(1, layer.num_kv_heads, layer.key_dim, dtype=kv.compute_dtype, device=device)
    value = key[..., : layer.value_dim]
    attended = context.attend(key, key, value, LayerCall(0, 1.0 / layer.key_dim, layer.window))
    rounding = 0.0 if kept is None else _SCALE_ROUNDING
    if not torch.allclose(attended, value, rtol=rounding, atol=0.0):
        raise RuntimeError("triton's kernels compute wrong results here")
