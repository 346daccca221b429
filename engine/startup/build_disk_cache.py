"""The prefix cache on disk, from settings: the part of `build` for --prefix-cache-dir."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch
import transformers

import engine.compute
from config import Settings
from engine.compute.attention.block_bytes import block_bytes_of
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.weights_digest import weights_digest
from engine.disk_cache.block_files import BlockFiles, private_directory
from engine.disk_cache.disk_link import DiskLink
from engine.plan.kv.disk_tier import DiskTier
from engine.plan.scheduling.batcher import ContinuousBatcher

log = logging.getLogger("slipstream.engine")


def open_disk_cache(
    settings: Settings, loaded: LoadedModel, model: Path, kv: KvTensors, batcher: ContinuousBatcher
) -> DiskLink | None:
    """What keeps the batcher's prefix cache in --prefix-cache-dir; None without one. Raises StartRefused.

    `model` is the directory of the model, whose blocks are in `kv`.
    """
    directory = settings.cache.prefix_cache_dir
    if directory is None:
        return None
    if batcher.kv.keeps_state or not batcher.config.prefix_caching:
        log.warning("--prefix-cache-dir is not used: this model keeps a state that is in no block of K/V")
        return None
    fingerprint = kv_fingerprint(settings, loaded, weights_digest(model), kv)
    files = BlockFiles(
        private_directory(directory), fingerprint, block_bytes_of(kv), settings.cache.prefix_cache_disk
    )
    tier = DiskTier(batcher.kv, batcher.rates)
    batcher.running.lookup.disk = tier
    return DiskLink(tier, files, kv.block_size)


def kv_fingerprint(settings: Settings, loaded: LoadedModel, weights: str, kv: KvTensors) -> str:
    """32 hexadecimal digits of all that decides the bytes of a block beside its tokens and those before them.

    The weights and their format, what computes them on which device, and how K/V is laid out.
    """
    device = loaded.device
    facts = (
        weights,
        settings.model.quantization,
        loaded.dtype,
        loaded.kernels_used,
        _code_digest(Path(engine.compute.__file__).parent),
        torch.__version__,
        transformers.__version__,
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability(),
        loaded.max_model_len,  # some position embeddings are scaled by it
        kv.block_size,
        kv.dtype,  # what bytes mean
        [(str(tensor.dtype), tuple(tensor.shape[1:])) for tensor in kv.tensors],
    )
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:32]


def _code_digest(package: Path) -> str:
    """Of the code that computes: another version of it may round otherwise."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
