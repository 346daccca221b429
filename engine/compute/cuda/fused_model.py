"""Puts fused experts and layers into a model on a CUDA device, wherever they give what its own give."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionBackend, AttentionContext
from engine.compute.cuda.fused_experts import FusedExperts, equal_experts, repeated
from engine.compute.cuda.fused_halves import fuse_halves
from engine.compute.cuda.fused_latent import fuse_latent_attentions
from engine.compute.cuda.fused_layer import FusedLayer
from engine.compute.cuda.fused_mlp import ExpertsBeside
from engine.compute.cuda.fused_parts import fuse_parts
from engine.compute.cuda.fused_products import OF_ONE_ROW, OF_ROWS, Products
from engine.compute.cuda.fused_router import equal_router, router_class_of
from engine.compute.cuda.fused_shared import FusedSharing, equal_sharing
from engine.compute.cuda.layer_links import link, mlp_of
from engine.compute.cuda.state_scans import TritonScans
from engine.compute.cuda.triton_attention import TritonAttention
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.closeness import is_close
from engine.compute.native.observation import Observation, Seen, observe
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_difference, packed_sample

log = logging.getLogger("slipstream.model")


def with_fused_layers(loaded: LoadedModel, block_size: int, reload: Callable[[], LoadedModel]) -> LoadedModel:
    """The model with all experts and each layer fused that answer alike; the log says how many.

    `loaded` itself is changed: use what is returned. `reload` gives it anew, for when a kernel cannot be
    compiled or run. Attention that is not Triton's leaves the model as it is. Norms and MLPs of layers that
    stay are fused by themselves: so are all of a model that carries state, whose layers are of many kinds,
    and whose states kernels advance.
    """
    backend = forward_of(loaded).backend
    if not isinstance(backend, TritonAttention):
        return loaded
    try:
        if loaded.keeps_state:
            loaded = with_scans(loaded, block_size)
        fused = fuse_all(loaded, backend, block_size)
    except Exception as error:  # whatever a compiler or a driver may raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning("layers are not fused: %s", reason)
        return replace(reload(), kernels_used=loaded.kernels_used)
    if loaded.state_kernel is not None:
        fused = ["states advanced", *fused]
    if not fused:
        return loaded
    used = ", ".join([loaded.kernels_used or "for CUDA", *fused])
    log.info("kernels: %s", used)
    return replace(loaded, kernels_used=used)


def fuse_all(loaded: LoadedModel, backend: AttentionBackend, block_size: int) -> list[str]:
    """Fuse what can be of the model itself, and say what was. Raises whatever a compiler or driver does."""
    experts = fuse_experts(loaded, block_size)  # first, so that layers are fused around them
    routers = fuse_routers(loaded, block_size)
    layers = 0 if loaded.keeps_state else fuse_layers(loaded, backend, block_size)
    latent = fuse_latent_attentions(loaded, backend, block_size)
    parts = fuse_parts(loaded, block_size)
    fuse_sharing(loaded, block_size)
    around = fuse_halves(loaded, block_size) if latent else 0  # once their norms and MLPs are fused
    counts = {
        f"{layers} of {len(loaded.layers)} layers fused": layers,
        f"experts of {experts} fused": experts,
        f"routers of {routers} fused": routers,
        f"latent attention of {latent} fused": latent,
        f"norms and MLPs fused: {parts}": parts,
        f"sums of {around} layers with latent attention fused": around,
    }
    return [what for what, count in counts.items() if count]


@torch.inference_mode()
def with_scans(loaded: LoadedModel, block_size: int) -> LoadedModel:
    """The model with kernels that advance its states, if it then gives the same logits; by chunks likewise.

    Raises whatever a compiler or driver does.
    """
    one_by_one, in_chunks = (
        replace(loaded, state_kernel=kernel) for kernel in (TritonScans(in_chunks=()), TritonScans())
    )
    difference = _difference(one_by_one, loaded, block_size, in_pieces=True)
    if difference is not None:
        log.warning("states are not advanced by kernels: logits differ %s", difference)
        return loaded
    difference = _difference(in_chunks, loaded, block_size, in_pieces=False)
    if difference is not None:
        log.warning("states take prompts in token by token: by chunks logits differ %s", difference)
        return one_by_one
    return in_chunks


def _difference(changed: LoadedModel, loaded: LoadedModel, block_size: int, *, in_pieces: bool) -> str | None:
    """Of their logits for prompts in pieces, or whole, as `packed_difference` tells it."""
    found, expected = (
        packed_sample(forward_of(each), block_size=block_size, in_pieces=in_pieces)
        for each in (changed, loaded)
    )
    return packed_difference(found, expected, loaded.dtype, has_blocks=False)


def fuse_experts(loaded: LoadedModel, block_size: int) -> int:
    """Replace the experts of each layer that answer alike: how many layers there were.

    Raises whatever a compiler or driver does.
    """
    return _replace(loaded, block_size, FusedExperts.fits, equal_experts)


def fuse_routers(loaded: LoadedModel, block_size: int) -> int:
    """Replace the router of each layer that chooses alike: how many layers there were.

    Raises whatever a compiler or driver does.
    """
    return _replace(loaded, block_size, router_class_of, equal_router)


def fuse_sharing(loaded: LoadedModel, block_size: int) -> int:
    """Have experts that all rows share add to what others answer: in how many layers they do so alike.

    Raises whatever a compiler or driver does.
    """
    return _replace(loaded, block_size, FusedSharing.fits, equal_sharing)


@torch.inference_mode()
def _replace(
    loaded: LoadedModel,
    block_size: int,
    fits: Callable[[Any, torch.dtype], Any],
    make: Callable[[Any, Seen, torch.dtype], nn.Module | None],
) -> int:
    """Have what is made stand for each module that fits, where anything is: how many there were."""
    fitting = [name for name, module in loaded.model.named_modules() if fits(module, loaded.dtype)]
    seen = observe(loaded, fitting, block_size).seen if fitting else {}
    count = 0
    for name in fitting:
        call = seen.get(name)
        made = None if call is None else make(loaded.model.get_submodule(name), call, loaded.dtype)
        if made is None:
            log.debug("%s answers otherwise when fused: it stays", name)
            continue
        loaded.model.set_submodule(name, made)
        count += 1
    return count


@torch.inference_mode()
def fuse_layers(loaded: LoadedModel, backend: AttentionBackend, block_size: int) -> int:
    """Replace each layer that answers alike, freeing its weights: how many there were."""
    fitting = [name for name, module in loaded.model.named_modules() if FusedLayer.fits(module, loaded.dtype)]
    if not fitting:
        return 0
    routers = [_router_of(name) for name in fitting if ExpertsBeside.are_of(loaded.model.get_submodule(name))]
    observation = observe(loaded, [*fitting, *map(mlp_of, fitting), *routers], block_size)
    context = observation.context(backend)
    layers: dict[str, FusedLayer] = {}
    for name in fitting:
        made = _equal_layer(loaded.model.get_submodule(name), name, observation, context)
        if made is None:
            log.debug("%s answers otherwise when fused: the layer stays", name)
            continue
        loaded.model.set_submodule(name, made)
        layers[name] = made
    link(layers, observation.seen)
    return len(layers)


def _equal_layer(
    original: Any, name: str, observation: Observation, context: AttentionContext
) -> FusedLayer | None:
    """The layer fused; None unless its answer, and the keys and values it leaves, are the observed ones.

    What its MLP and its router are given is compared, and what comes of what these were given: a router may
    send rows that are rounded otherwise to other experts. What one row is computed by is compared with what
    computed those.
    """
    seen, call = observation.seen.get(name), observation.calls.get(original.self_attn.layer_idx)
    seen_mlp = observation.seen.get(mlp_of(name))
    if seen is None or seen_mlp is None or call is None or seen.given is None or seen_mlp.given is None:
        return None
    if not FusedLayer.rotates(original, seen.options.get("position_embeddings"), seen.given.dtype):
        return None
    made = FusedLayer(original, call)
    normed, total, beside = made.attended(*seen.args, **(seen.options | {CONTEXT_KEYWORD: context}))
    given = seen_mlp.given[0].contiguous()
    kv, layer = observation.kv, call.layer
    seen_router = observation.seen.get(_router_of(name))
    before = total if seen_router is None or seen_router.given is None else seen_router.given.contiguous()
    brought = next(iter(seen.args[1:]), None)
    if beside is not None:
        assert made.beside is not None, "there are experts who are given it"
        if not all(map(is_close, beside, made.beside.given(total))):
            return None
    pairs = (
        (normed, given),
        (total, before),
        *_finished(made, given, before, brought, seen.output[0]),
        (context.kv.keys[layer], kv.keys[layer]),
        (context.kv.values[layer], kv.values[layer]),
    )
    alike = all(is_close(found, expected) for found, expected in pairs)
    return made if alike and _one_row_is_alike(made, seen.given[0, :1]) else None


def _finished(
    layer: FusedLayer, normed: torch.Tensor, total: torch.Tensor, brought: Any, output: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What `finished` makes of what it takes, and of that repeated in each way there is; what it has to."""
    more = () if layer.beside is None else layer.beside.fewest_rows
    for count in (len(output), *more):
        rows, before = repeated(normed, count), repeated(total, count).clone()
        inputs = None if brought is None else repeated(brought[0], count)[None]
        yield layer.finished(rows, before, OF_ROWS, inputs)[0], repeated(output, count)


def _router_of(layer: str) -> str:
    """The name of what chooses experts beside a layer's MLP."""
    return f"{layer}.router"


def _one_row_is_alike(layer: FusedLayer, hidden: torch.Tensor) -> bool:
    """Whether the products of one row [1, hidden] are those that any number of rows has."""
    if not layer.is_plain:
        return True  # one row is computed as several are
    row = layer.given_to_attention(hidden.contiguous())
    heads = OF_ROWS.project(row, layer.qkv)[:, : layer.output.in_features]

    def answers(products: Products) -> tuple[torch.Tensor, ...]:
        return (
            products.project(row, layer.qkv),
            products.project(heads, layer.output),
            *layer.mlp.answers(row, products),
        )

    return all(map(is_close, answers(OF_ONE_ROW), answers(OF_ROWS)))
