"""Compile Triton's attention for GPUs that need not be there: `python -m tests.support.triton_compiled`.

Prints what each kernel takes of a processor. Fails where one does not compile, needs more shared memory than
was reckoned, or keeps so much outside its registers that it would crawl.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.compute.cuda.coded_kernels import (
    coded_product_kernel,
    expand_kernel,
    merge_parts_kernel,
    round_kernel,
)
from engine.compute.cuda.coded_layout import CodedShape, ProductLayout, large_layout, tiled_layout
from engine.compute.cuda.conv_kernels import convolve_kernel, keep_kernel
from engine.compute.cuda.expert_kernels import (
    choose_kernel,
    expert_down_kernel,
    expert_gate_kernel,
    expert_sum_kernel,
    route_kernel,
    scaled_norm_kernel,
    three_norms_kernel,
)
from engine.compute.cuda.expert_layout import Choice, ExpertShape, layout_for, step_of
from engine.compute.cuda.latent_kernels import (
    APART,
    HALVES,
    NEIGHBOURS,
    NEIGHBOURS_TO_HALVES,
    latent_kernel,
    query_rest_kernel,
)
from engine.compute.cuda.layer_kernels import (
    gate_kernel,
    gated_norm_kernel,
    norm_kernel,
)
from engine.compute.cuda.rotation_kernels import rotate_kernel, rotate_rows_kernel
from engine.compute.cuda.row_products import row_product_kernel
from engine.compute.cuda.state_chunks import (
    delta_chunks_kernel,
    gated_delta_chunks_kernel,
    gated_structured_chunks_kernel,
    structured_chunks_kernel,
)
from engine.compute.cuda.state_kernels import (
    delta_kernel,
    gated_delta_kernel,
    gated_structured_kernel,
    selective_kernel,
    structured_kernel,
)
from engine.compute.cuda.state_scans import CHUNK, WARPS_BY_CHANNEL, ConvSizes, part_of
from engine.compute.cuda.triton_border import digit_kernel, survey_kernel, tie_kernel
from engine.compute.cuda.triton_draw import score_kernel
from engine.compute.cuda.triton_filter import kept_score_kernel, pick_kernel
from engine.compute.cuda.triton_kernels import attend_kernel, merge_kernel
from engine.compute.cuda.triton_pages import store_kernel
from engine.compute.cuda.triton_tile import TritonTile
from engine.compute.cuda.triton_work import Workforce
from engine.compute.loading.coded_weights import CodedWeight, CodeKind, InputRounding
from engine.compute.native.records import Activation

# Bytes of shared memory that one program gets, by compute capability.
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}
MOST_STACK_BYTES = 512
STAGES = 3
_WHOLE_IN_PTX = "0f4B400000"  # WHOLE of triton_pages
INTEGERS = (
    *("stride", "words", "window", "size", "outputs", "step", "chunks"),
    *("num_parts", "num_rows", "num_tiles", "num_pairs"),
)
ALIGNED = ("query_", "key_", "value_", "row_stride", "vocab_size")
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FP8_CAPABILITY = 89


class Model(NamedTuple):
    """A layer as models have them."""

    dim: int
    group: int
    dtype: str = "bf16"
    has_window: bool = False
    has_cap: bool = False
    has_sinks: bool = False
    pages: str = "plain"
    rest: int = 0  # of a key behind its value, which is in it


MODELS = (
    Model(128, 4),
    Model(64, 8, has_window=True, has_sinks=True),
    Model(256, 2, has_window=True, has_cap=True),
    Model(64, 9),
    Model(64, 1, "fp16"),  # what a device is tried with
    Model(256, 8),
    Model(512, 8),  # Gemma 4's, in layers without a window
    Model(128, 4, "fp32"),
    *(
        Model(dim, group, dtype, pages=pages)
        for pages in ("int8", "fp8")
        for dim, group, dtype in (
            *((128, 4, "bf16"), (64, 9, "fp16"), (256, 2, "bf16")),
            *((512, 8, "bf16"), (128, 4, "fp32")),
        )
    ),
    # Latent rows of DeepSeek-V2-Lite, Kimi-Linear, GLM-4.7-Flash and MiniCPM3.
    *(Model(512, group, pages=pages, rest=64) for group in (16, 32) for pages in ("plain", "int8", "fp8")),
    Model(512, 20, rest=64),
    Model(256, 40, rest=32),
)


def kinds_of_pages(capability: int) -> tuple[str, ...]:
    """What K/V may be kept in on such a GPU."""
    return ("plain", "int8", "fp8") if capability >= FP8_CAPABILITY else ("plain", "int8")


def tiles(capability: int) -> Iterator[tuple[str, TritonTile, int]]:
    """Every tile of every model: (what it is, the tile, bytes of a number)."""
    for model in MODELS:
        if model.pages not in kinds_of_pages(capability):
            continue
        itemsize = ITEM_BYTES[model.dtype]
        is_latent = model.rest > 0
        for kind in Workforce.of(132, itemsize).kinds:
            tile = TritonTile(
                kind.queries,
                kind.heads(model.group),
                kind.keys_at_once(has_trees=kind.expects_trees, in_bytes=model.pages != "plain"),
                model.group,
                num_kv_heads=1 if is_latent else 8,
                key_dim=model.dim + model.rest,
                value_dim=model.dim,
                block_size=16,
                has_cap=model.has_cap,
                has_window=model.has_window,
                has_trees=kind.expects_trees,
                has_sinks=model.has_sinks,
                most_stages=kind.stages,
                pages=model.pages,
                value_in_key=is_latent,
            ).fitted(itemsize, SHARED_MEMORY[capability])
            dims = f"{tile.key_dim} in " * is_latent + f"{model.dim}x{model.group}"
            yield f"{kind.name} {dims} {model.pages} {model.dtype}", tile, itemsize


def compile_kernel(
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    capability: int,
    types: Mapping[str, str] | None = None,
    **options: int,
) -> tuple[int, int, int]:
    """(registers of a thread, its bytes of stack, the program's bytes of shared memory).

    `types` are those of arguments that have others than their names say.
    """
    named = {name: _type(name, dtype, constants) for name in kernel.arg_names}
    types = {name: (types or {}).get(name, kind) for name, kind in named.items()}
    if _pages(constants) != "plain":
        types |= {name: "*i8" for name in ("keys", "values", "pages") if name in types}
    aligned = [["tt.divisibility", 16]]
    hints = {
        (place,): aligned
        for place, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or (name.startswith(ALIGNED) and kind == "i32")
    }
    source = ASTSource(kernel, types, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if _pages(constants) == "int8":
        assert _WHOLE_IN_PTX not in compiled.asm["ptx"], "a product and its rounding became one operation"
    registers, stack = _usage(compiled.asm["cubin"])
    return registers, stack, compiled.metadata.shared


def _pages(constants: dict[str, Any]) -> str:
    pages: str = constants["TILE"].pages if "TILE" in constants else constants.get("PAGES", "plain")
    return pages


LAYERS: list[tuple[Any, dict[str, Any]]] = [
    *(
        (
            norm_kernel,
            {"HAS_ADDED": added, "NORMS_ADDED": normed, "HAS_NORM": has_norm, "IS_CENTRED": centred}
            | {"HAS_BESIDE": beside, "EACH": each, "EACH_BESIDE": each_beside, "COUNT": 128}
            | {"WIDTH": 4096, "PADDED": 4096},
        )
        for added, normed, has_norm, centred, beside, each, each_beside in (
            *((False, False, True, False, False, 0, 0), (False, False, True, True, False, 0, 0)),
            *((True, False, True, False, False, 0, 0), (True, True, True, False, False, 0, 0)),
            *((True, True, False, False, False, 0, 0), (True, True, True, False, True, 0, 0)),
            *((True, False, True, False, False, 8, 0), (True, True, True, False, True, 8, 0)),
            (True, True, True, False, True, 11, 3),
        )
    ),
    *(
        (
            rotate_rows_kernel,
            {"NUM_HEADS": 40, "NUM_KV_HEADS": kv_heads, "DIM": 128, "TURNED": turned, "ANGLES": turned}
            | {"OF_NEIGHBOURS": False, "IN_ORDER": False, "PADDED_HEADS": 64, "PADDED_KV_HEADS": padded}
            | {"PADDED_DIM": 128, "BLOCK_SIZE": 16, "PAGES": pages},
        )
        for kv_heads, padded, turned, pages in (
            *((8, 8, 128, "plain"), (40, 64, 128, "plain"), (8, 8, 64, "int8"), (8, 8, 128, "fp8")),
        )
    ),
    *(
        (
            gate_kernel,
            {"GATES_APART": apart, "UPS_APART": ups_apart, "FIRST_UP": apart - width, "WIDTH": width}
            | {"CHUNKS": -(-width // 1024), "CHUNK": 1024, "ACTIVATION": int(activation)},
        )
        for width, apart, ups_apart, activation in (
            *(
                (14336, 28672, 28672, each)
                for each in (Activation.SILU, Activation.GELU_TANH, Activation.GELU)
            ),
            (256, 256, 8960, Activation.GELU_TANH),
        )
    ),
    *(
        (
            rotate_kernel,
            {"HAS_NORMS": norms, "NORMS_VALUES": pages == "int8", "NUM_HEADS": 32}
            | {"NUM_KV_HEADS": 0 if turned == 96 else 8}
            | {"DIM": 128, "TURNED": turned, "ANGLES": angles, "OF_NEIGHBOURS": turned == 64 or in_order}
            | {"IN_ORDER": in_order}
            | {"PADDED_HALF": 64, "BLOCK_SIZE": 16, "PAGES": pages},
        )
        for norms, pages, turned, angles, in_order in (
            *((False, "plain", 128, 128, False), (True, "plain", 128, 128, False)),
            *((True, "int8", 128, 128, False), (True, "fp8", 128, 128, False)),
            *((False, "plain", 128, 64, False), (True, "plain", 0, 0, False)),
            *((False, "plain", 96, 96, False), (True, "plain", 64, 64, False)),
            (False, "plain", 128, 128, True),
        )
    ),
    (
        gated_norm_kernel,
        {"STRIDE": 128, "WIDTH": 128, "GROUP": 128, "PADDED": 128}
        | {"GATES_FIRST": False, "BY_SIGMOID": False},
    ),
    (
        gated_norm_kernel,
        {"STRIDE": 16768, "WIDTH": 8192, "GROUP": 8192, "PADDED": 8192}
        | {"GATES_FIRST": True, "BY_SIGMOID": False},
    ),
    *(
        (
            row_product_kernel,
            {"WIDTH": width, "COLUMNS": 2048, "IS_GATED": gated, "ACTIVATION": int(activation)}
            | {"HAS_BIAS": False, "HAS_ADDED": not gated},
        )
        for width, gated, activation in (
            *((4096, True, Activation.SILU), (4096, True, Activation.GELU_TANH)),
            (14336, False, Activation.SILU),
        )
    ),
]
FILTER: list[tuple[Any, dict[str, Any]]] = [
    (survey_kernel, {"CHUNK": 256}),
    (digit_kernel, {"CHUNK": 1024}),
    (tie_kernel, {"CHUNK": 1024}),
    (kept_score_kernel, {"CHUNK": 1024, "MOST_PARTS": 512}),
    (pick_kernel, {"NONE": -1, "MOST": 512}),
]
_ROWS = (
    *("query", "key", "value", "keys", "values", "output", "sinks", "logits", "best"),
    *(
        "row",
        "bias",
        "product",
        "given",
        "added",
        "added_weight",
        "beside",
        "beside_weight",
        "both_weight",
        "weight",
        "total",
        "normed",
        "gate_up",
        "ups",
        "gated",
    ),
    *("gates", "qkv", "cosines", "sines", "query_norm", "key_norm"),
)


def _type(name: str, dtype: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in ("log_min_p", "top_k", "top_p", "scores"):
        return "*fp64"
    if name in ("places", "surveyed", "states", "tallies", "borders", "drawn"):
        return "*i64"
    if name in _ROWS:
        return f"*{dtype}"
    if name in ("partial_sums", "partial_weights", "temperature", "gaps"):
        return "*fp32"
    if name in ("scale", "cap", "eps", "added_eps", "beside_eps", "both_eps", "multiplier", "factor"):
        return "fp32"
    return "i32" if name.endswith(INTEGERS) else "*i32"


class CodedCase(NamedTuple):
    """A product with coded weights: what it is, its shape and layout, and the types of its arguments."""

    name: str
    shape: CodedShape
    layout: ProductLayout
    types: dict[str, str]


_WIDTH, _OUT = 4096, 14336
_FIXED_TYPES = {
    name: kind
    for names, kind in (("x_scales scales parts fixed", "*fp32"), ("zeros", "*fp16"), ("order", "*i32"))
    for name in names.split()
}


def coded_cases(capability: int) -> Iterator[CodedCase]:
    """Every kind of codes that a device with this capability multiplies with, by few rows and by many."""
    codes = torch.empty((_OUT, _WIDTH // 2), dtype=torch.uint8, device="meta")
    groups = torch.empty((_OUT, _WIDTH // 128), device="meta")
    for order in (None, torch.empty(_WIDTH, device="meta")):
        int4 = CodedWeight(CodeKind.INT4, codes, groups, groups, _WIDTH, 128, order=order)
        yield from _cases(f"int4{' by act-order' if order is not None else ''}", int4)
    codes = torch.empty((_OUT, _WIDTH), dtype=torch.uint8, device="meta")
    groups = torch.empty((_OUT, _WIDTH // 32), device="meta")
    yield from _cases("int8", CodedWeight(CodeKind.INT8, codes, groups, None, _WIDTH, 32))
    if capability < 89:
        return
    rows, blocks = torch.empty((_OUT, 1), device="meta"), torch.empty((_OUT // 128, 32), device="meta")
    yield from _cases("fp8", CodedWeight(CodeKind.FP8, codes, rows, None, _WIDTH, _WIDTH))
    fp8 = CodedWeight(CodeKind.FP8, codes, rows, None, _WIDTH, _WIDTH, rounding=InputRounding())
    yield from _cases("fp8 by rows", fp8)
    by_blocks = CodedWeight(CodeKind.FP8, codes, blocks, None, _WIDTH, 128, 128, rounding=InputRounding(128))
    yield from _cases("fp8 by blocks", by_blocks)


def _cases(name: str, coded: CodedWeight) -> Iterator[CodedCase]:
    shape = CodedShape.of(coded)
    codes = "*fp8e4nv" if coded.kind is CodeKind.FP8 else "*u8"
    types = _FIXED_TYPES | {"codes": codes, "x": "*bf16" if coded.rounding is None else "*fp8e4nv"}
    types["numbers"] = "*bf16"
    layouts = [tiled_layout(coded, count) for count in (1, 32, 128)]
    if coded.rounding is not None:
        layouts += [large_layout(coded, itemsize) for itemsize in (2, 4)]
    for layout in layouts:
        yield CodedCase(f"{name}, tiles of {layout.rows}", shape, layout, types)


def compile_coded(capability: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Compile all that multiplies with codes: what it is, and what it takes."""
    ends = {"HAS_BIAS": True, "HAS_ADDED": True}
    for case in coded_cases(capability):
        constants = {"WEIGHT": case.shape, "LAYOUT": case.layout, **ends}
        options = {"num_warps": case.layout.num_warps, "num_stages": STAGES}
        taken = compile_kernel(coded_product_kernel, "bf16", constants, capability, case.types, **options)
        yield case.name, taken
        if case.layout.rows == 16:
            constants = {"WEIGHT": case.shape, "STEP": case.layout.step, "OUTS": 64}
            yield (
                f"{case.name}, expanded",
                compile_kernel(expand_kernel, "bf16", constants, capability, case.types),
            )
    merge = {"NUM_PARTS": 8, "CHUNK": 1024, **ends}
    yield "merged", compile_kernel(merge_parts_kernel, "bf16", merge, capability, _FIXED_TYPES)
    if capability >= 89:
        types = _FIXED_TYPES | {"x": "*bf16", "codes": "*fp8e4nv"}
        for group in (128, 14336):
            sizes = {"WIDTH": 14336, "GROUP": group, "PADDED": triton.next_power_of_2(group)}
            constants = {**sizes, "HAS_FIXED": False}
            yield (
                f"rounded by {group}",
                compile_kernel(round_kernel, "bf16", constants, capability, types, num_warps=8),
            )


# Experts of Qwen3-30B-A3B, of gpt-oss, some gated by GELU, and Nemotron 3 Nano's, without gates: with how
# many of them a row goes through, and by how many rows.
MIXTURES = (
    (ExpertShape(128, 2048, 768), 8, "bf16", (1, 64, 512, 4096)),
    (ExpertShape(128, 2048, 768), 8, "fp32", (1, 4096)),
    (ExpertShape(32, 2880, 2880, 1.702, 7.0), 4, "bf16", (1,)),
    (ExpertShape(128, 2816, 704, activation=Activation.GELU_TANH), 8, "bf16", (1, 4096)),
    (ExpertShape(128, 2816, 704, activation=Activation.GELU_TANH, num_shared=3), 11, "bf16", (1, 64)),
    (ExpertShape(64, 2048, 1536, num_shared=1), 5, "bf16", (1, 64)),
    (ExpertShape(128, 2048, 768, activation=Activation.GELU), 8, "bf16", (1,)),
    (ExpertShape(128, 2688, 1856, activation=Activation.RELU_SQUARED, is_gated=False), 6, "bf16", (1, 4096)),
)
# Of Qwen3-Next, of Gemma 4, whose experts' shares have scales, and of DeepSeek-V3 and GLM 4.7.
CHOICES: tuple[tuple[Choice, str, str, dict[str, bool]], ...] = (
    (Choice(512, 10), "bf16", "bf16", {}),
    (Choice(128, 8), "bf16", "fp32", {"HAS_SCALES": True}),
    (Choice(256, 8, True, True, 8, 4, 1e-20, 2.5), "fp32", "fp32", {"HAS_BIASES": True}),
    (Choice(160, 8, True, True, 1, 1, 1e-20, 2.5), "fp32", "fp32", {"HAS_BIASES": True}),
    (Choice(64, 4, True, True, 1, 1, 1e-20, 1.8, 1), "fp32", "fp32", {"HAS_BIASES": True}),
)
_MIXED = (
    *("x", "shared_x", "weights", "shared_weights", "biases", "activated", "answers", "shares"),
    "summed",
)


def compile_experts(capability: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Compile all that computes experts: what it is, and what it takes."""
    for shape, each, dtype, counts in MIXTURES:
        types = dict.fromkeys(_MIXED, f"*{dtype}") | {"chosen": "*i64"}
        name = f"{shape.count} and {shape.num_shared} experts, {shape.activation.name}, {dtype}"
        for count in counts:
            layout = layout_for(count, each, shape)
            options = {"num_warps": layout.num_warps, "num_stages": layout.num_stages}
            given = {"SHAPE": shape, "LAYOUT": layout}
            for kernel, width, more in (
                (expert_gate_kernel, shape.hidden, {"EACH": each}),
                (expert_down_kernel, shape.width, {}),
            ):
                constants = given | more | {"STEP": step_of(width, ITEM_BYTES[dtype], layout)}
                taken = compile_kernel(kernel, dtype, constants, capability, types, **options)
                yield f"{name}, {kernel.__name__}, tiles of {layout.rows}, {count} rows", taken
        constants = {
            "COUNT": shape.num_experts,
            "EACH": each,
            "HIDDEN": shape.hidden,
            "CHUNKS": 4,
            "CHUNK": 1024,
        }
        yield f"{name} summed", compile_kernel(expert_sum_kernel, dtype, constants, capability, types)
        constants = {"COUNT": shape.num_experts, "ROWS": 16, "CHUNK": 1024}
        yield f"{name} sorted", compile_kernel(route_kernel, dtype, constants, capability, types)


def compile_routers(capability: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Compile all that chooses experts: what it is, and what it takes."""
    for choice, dtype, shares, more in CHOICES:
        types = {"logits": f"*{dtype}", "biases": "*fp32", "scales": "*bf16", "shares": f"*{shares}"}
        constants = {
            "CHOICE": choice,
            "GROUPS": triton.next_power_of_2(choice.num_groups),
            "SIZE": triton.next_power_of_2(choice.size),
            "PLACES": triton.next_power_of_2(choice.each),
            "HAS_BIASES": False,
            "HAS_SCALES": False,
            **more,
        }
        name = f"{choice.each} of {choice.count} experts in {choice.num_groups}"
        types["chosen"] = "*i64"
        yield name, compile_kernel(choose_kernel, dtype, constants, capability, types, num_warps=1)
    sizes = {"WIDTH": 2816, "PADDED": 4096}
    types = {"root": "fp32", "given": "*bf16", "scale": "*bf16", "normed": "*bf16"}
    yield (
        "rows for a router",
        compile_kernel(scaled_norm_kernel, "bf16", sizes, capability, types, num_warps=8),
    )
    names = ("given", "added", "scale", "total", "normed", "other", "scaled")
    types = dict.fromkeys(names, "*bf16") | dict.fromkeys(("root", "other_eps", "scale_eps"), "fp32")
    yield (
        "rows for a router and two more",
        compile_kernel(three_norms_kernel, "bf16", sizes, capability, types, num_warps=8),
    )


def compile_latent(capability: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Compile what is before latent attention: what it is, and what it takes."""
    rows = ("given", "query_weight", "latent_weight", "normed", "query", "pages")
    for order, angles, step, dtype in (
        *((APART, 64, 1, "bf16"), (HALVES, 64, 1, "bf16"), (NEIGHBOURS_TO_HALVES, 64, 1, "fp16")),
        (NEIGHBOURS, 64, 2, "fp32"),
    ):
        types = dict.fromkeys(rows, "*bf16") | dict.fromkeys(("cosines", "sines"), f"*{dtype}")
        types |= {"query_eps": "fp32", "latent_eps": "fp32"}
        sizes: dict[str, Any] = {"RANK": 512, "ROTATED": 64, "ANGLES": angles, "STEP": step, "ORDER": order}
        for pages in kinds_of_pages(capability):
            constants = sizes | {"STRIDE": 2112, "QUERIES": 1536, "HAS_QUERIES": True, "PADDED_QUERIES": 2048}
            constants |= {"PADDED_RANK": 512, "PADDED_ROTATED": 64, "BLOCK_SIZE": 16, "PAGES": pages}
            yield (
                f"latent rows {order} {pages}",
                compile_kernel(latent_kernel, "bf16", constants, capability, types),
            )
        constants = {**sizes, "STRIDE": 3840, "HEADS": 20, "PLAIN": 128, "PADDED_ROTATED": 64}
        taken = compile_kernel(query_rest_kernel, "bf16", constants, capability, types, num_warps=1)
        yield f"ends of queries {order}", taken


# Layers of Qwen3-Next, Kimi-Linear, Granite 4 and Falcon-Mamba, in parts as TritonScans cuts them.
STATES: list[tuple[str, Any, dict[str, Any]]] = [
    *(
        (
            f"delta{' by channel' if by_channel else ''}",
            delta_kernel,
            {"HEADS": 32, "SHARE": 1 if by_channel else 2, "KEYS": 128, "VALUES": 128}
            | {"BY_CHANNEL": by_channel, "KEYS_PADDED": 128, "COLUMNS": part_of(128, 128)},
        )
        for by_channel in (False, True)
    ),
    (
        "structured",
        structured_kernel,
        {"HEADS": 128, "SHARE": 128, "DIM": 64, "SIZE": 128, "ROWS": part_of(64, 128), "SIZE_PADDED": 128},
    ),
    (
        "selective",
        selective_kernel,
        {"CHANNELS": 8192, "SIZE": 16, "ROWS": part_of(8192, 16), "SIZE_PADDED": 16},
    ),
]
# Behind their convolutions, Qwen3.5's and Granite 4's layers: rows of a convolution in bfloat16.
GATED_STATES: list[tuple[str, Any, dict[str, Any]]] = [
    (
        "gated delta",
        gated_delta_kernel,
        {"STRIDE": 8256, "HEADS": 32, "SHARE": 2, "KEYS": 128, "VALUES": 128, "SCALE": 128**-0.5}
        | {"BETA": 1.0, "KEYS_PADDED": 128, "COLUMNS": part_of(128, 128)},
    ),
    (
        "gated structured",
        gated_structured_kernel,
        {"STRIDE": 8576, "HEADS": 128, "SHARE": 128, "DIM": 64, "SIZE": 128}
        | {"ROWS": part_of(64, 128), "SIZE_PADDED": 128},
    ),
]
IN_CHUNKS = {
    delta_kernel: delta_chunks_kernel,
    structured_kernel: structured_chunks_kernel,
    gated_delta_kernel: gated_delta_chunks_kernel,
    gated_structured_kernel: gated_structured_chunks_kernel,
}
_CHUNKS = {"CHUNK": CHUNK, "RUNS_PADDED": 1024}
_CONVOLVED = ConvSizes(8256, 8192, 4, 3, 11, 8256, has_bias=True, activated=True)
_SCANNED = (
    *("query", "key", "value", "logs", "beta"),
    *("inputs", "steps", "rates", "b", "c", "output", "state"),
)


def compile_states(capability: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Compile all that advances states: what it is, and what it takes."""
    types = dict.fromkeys(_SCANNED, "*fp32") | {"runs": "*i64", "num_runs": "i32", "slot_stride": "i32"}
    types["chunk"] = "i32"
    halves = {delta_kernel: ("value", "output"), structured_kernel: ("inputs", "b", "c", "output")}
    for name, kernel, constants in STATES:
        own = types | dict.fromkeys(halves.get(kernel, ()), "*bf16")
        yield f"states, {name}", compile_kernel(kernel, "fp32", constants, capability, own)
        if kernel in IN_CHUNKS and constants.get("BY_CHANNEL", True):
            warps = {"num_warps": WARPS_BY_CHANNEL} if kernel is delta_kernel else {}
            taken = compile_kernel(IN_CHUNKS[kernel], "fp32", constants | _CHUNKS, capability, own, **warps)
            yield f"states, {name}, in chunks", taken
    joined = {"joins": "*i64", "num_mixed": "i32", "least": "fp32", "most": "fp32"}
    gated = types | joined | dict.fromkeys(("rows", "kept", "weight", "bias"), "*bf16")
    gated |= dict.fromkeys(("decays", "direct"), "*bf16")
    for name, kernel, constants in GATED_STATES:
        own = gated | ({"output": "*bf16"} if kernel is gated_delta_kernel else {})
        yield f"states, {name}", compile_kernel(kernel, "bf16", constants, capability, own)
        taken = compile_kernel(IN_CHUNKS[kernel], "bf16", constants | _CHUNKS, capability, own)
        yield f"states, {name}, in chunks", taken
    for rows, num_runs in ((1, 16), (8, 256)):
        constants = {"SIZES": _CONVOLVED, "RUNS_PADDED": num_runs, "ROWS": rows, "COLUMNS": 256}
        own = gated | {"output": "*bf16"}
        taken = compile_kernel(convolve_kernel, "bf16", constants, capability, own)
        yield f"states, a convolution of {rows} rows", taken
    kept = {"SIZES": _CONVOLVED, "COLUMNS": 256}
    yield "states, kept", compile_kernel(keep_kernel, "bf16", kept, capability, gated)


def _usage(cubin: bytes) -> tuple[int, int]:
    dump = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(dump), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found is not None, shown
    return int(found[1]), int(found[2])


def main() -> int:
    """Compile all, print a line for each; 1 when one is not as it should be."""
    bad = 0
    for capability, limit in SHARED_MEMORY.items():
        for name, tile, itemsize in tiles(capability):
            stages = max(1, tile.stages(itemsize, limit))
            warps = tile.num_warps
            registers, stack, shared = compile_kernel(
                attend_kernel,
                name.split()[-1],
                {"TILE": tile},
                capability,
                num_warps=warps,
                num_stages=stages,
            )
            is_good = shared <= limit and stack <= MOST_STACK_BYTES
            bad += not is_good
            print(
                f"{capability} {name}: rows {tile.rows}, keys {tile.keys}, {stages} stages, {warps} warps, "
                f"{registers} registers, {stack} bytes of stack, {shared} of {limit} shared"
                f"{'' if is_good else ' <- too much'}"
            )
        merge = {
            "HAS_SINKS": True,
            "HAS_PADDING": True,
            "NUM_HEADS": 32,
            "DIM": 128,
            "PADDED": 128,
            "AT_ONCE": 16,
        }
        print(capability, "merge:", *compile_kernel(merge_kernel, "bf16", merge, capability))
        dims = dict.fromkeys(("KEY_DIM", "VALUE_DIM", "PADDED_KEY_DIM", "PADDED_VALUE_DIM"), 128)
        for pages in kinds_of_pages(capability):
            store = {"NUM_KV_HEADS": 8, "BLOCK_SIZE": 16, "HEADS": 8, "PAGES": pages, **dims}
            latent = {"KEY_DIM": 576, "VALUE_DIM": 512, "PADDED_KEY_DIM": 1024, "PADDED_VALUE_DIM": 512}
            for what in (store, store | latent | {"NUM_KV_HEADS": 1, "HEADS": 1}):
                what["VALUE_IN_KEY"] = what["KEY_DIM"] != what["VALUE_DIM"]
                print(capability, f"store {pages}:", *compile_kernel(store_kernel, "bf16", what, capability))
        print(capability, "draw:", *compile_kernel(score_kernel, "bf16", {"CHUNK": 1024}, capability))
        for kernel, constants in (*FILTER, *LAYERS):
            if _pages(constants) not in kinds_of_pages(capability):
                continue
            print(capability, kernel.__name__, *compile_kernel(kernel, "bf16", constants, capability))
        compiled = (
            *compile_coded(capability),
            *compile_experts(capability),
            *compile_routers(capability),
            *compile_latent(capability),
            *compile_states(capability),
        )
        for name, (registers, stack, shared) in compiled:
            is_good = shared <= limit and stack <= MOST_STACK_BYTES
            bad += not is_good
            print(capability, name, registers, stack, shared, "" if is_good else "<- too much")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
