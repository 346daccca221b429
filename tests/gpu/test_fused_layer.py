"""Fused layers and their kernels on a GPU, against the modules that they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext, LayerCall
from engine.compute.attention.context import HeadNorms, HeadTurns
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.observation import observe
from engine.compute.native.records import Activation
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import packed_difference, packed_sample
from tests.support.attention_noise import Chunk, scattered_step
from tests.support.packed import as_loaded
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.fused_layer import FusedLayer  # noqa: E402
from engine.compute.cuda.fused_model import fuse_layers, with_fused_layers  # noqa: E402
from engine.compute.cuda.fused_norms import add, add_and_norm, norm  # noqa: E402
from engine.compute.cuda.fused_products import gate  # noqa: E402
from engine.compute.cuda.row_products import added_row_product, gated_row_product, row_product  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402

CUDA = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "granite",
    "exaone4",
    "gpt_oss",
    "olmo2",
    "olmo3",
    "olmoe",
    "cohere2",
    "gemma4",
]
BLOCK_SIZE = 16
EPS = 1e-5


def load(family: str, dtype: torch.dtype) -> LoadedModel:
    return replace(as_loaded(tiny_model(family, dtype=dtype).to(CUDA)), device=CUDA)


def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As near to what float32 gives as `found`'s number format allows."""
    rounding = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), expected, atol=8 * rounding, rtol=4 * rounding)


class Scale:
    """What a norm kernel reads of a norm."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.weight = noise(width, dtype=dtype)
        self.variance_epsilon = EPS
        self.is_centred = False


def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(rows.float(), rows.shape[-1:], weight.float(), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 896, 4096, 8192])
@pytest.mark.parametrize("count", [1, 300])
def test_norms_are_torchs(count: int, width: int, dtype: torch.dtype) -> None:
    rows, added, scale = (
        noise(count, width, dtype=dtype),
        noise(count, width, dtype=dtype),
        Scale(width, dtype),
    )
    assert_rounded(norm(rows, scale), normed(rows, scale.weight))
    total, found = add_and_norm(rows, added, scale)
    assert torch.equal(total, rows + added) and torch.equal(add(rows, added), total)
    assert_rounded(found, normed(total, scale.weight))
    other = Scale(width, dtype)
    total, found = add_and_norm(rows, added, scale, other, 0.25)
    assert_rounded(total, rows.float() + 0.25 * normed(added, other.weight).to(dtype).float())
    assert_rounded(found, normed(total, scale.weight))
    assert torch.equal(add(rows, added, other, 0.25), total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 4864, 14336])
def test_gates_are_torchs(width: int, dtype: torch.dtype) -> None:
    both = noise(300, 2 * width, dtype=dtype)
    first, second = both.float().chunk(2, dim=1)
    assert_rounded(gate(both), torch.nn.functional.silu(first) * second)
    expected = torch.nn.functional.gelu(first, approximate="tanh") * second
    assert_rounded(gate(both, Activation.GELU_TANH), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [48, 896, 4096, 14336])
def test_products_of_one_row_are_torchs(width: int, has_bias: bool, dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(width, 200, bias=has_bias, device=CUDA, dtype=dtype).requires_grad_(False)
    row, added = noise(1, width, dtype=dtype), noise(1, 200, dtype=dtype)
    expected = torch.nn.functional.linear(
        row.double(), linear.weight.double(), linear.bias.double() if has_bias else None
    )
    assert_rounded(row_product(row, linear), expected.float())
    assert_rounded(added_row_product(row, linear, added), (expected + added).float())
    first, second = expected.to(dtype).float().chunk(2, dim=1)
    assert_rounded(gated_row_product(row, linear), torch.nn.functional.silu(first) * second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (3, 3, 80)])
def test_heads_are_rotated_and_written(
    heads: int, kv_heads: int, dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    inputs, num_blocks = scattered_step([Chunk(40, 7), Chunk(0), Chunk(100, 200)], BLOCK_SIZE)
    count = len(inputs.token_ids)
    kv = KvTensors((LayerKv(kv_heads, dim, dim),), num_blocks, BLOCK_SIZE, dtype, CUDA)
    step = TritonAttention(Gpu.of(CUDA)).plan(inputs, kv)
    qkv = noise(count, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(count, dim // 2, device=CUDA).repeat(1, 2) * 6
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = HeadNorms(noise(dim, dtype=dtype), noise(dim, dtype=dtype), EPS) if has_norms else None
    found = step.rotate_and_write(0, qkv, HeadTurns(cosines, sines, dim), norms)

    query, key, value = torch.tensor_split(qkv.float().view(count, -1, dim), (heads, heads + kv_heads), dim=1)
    if norms is not None:
        query, key = normed(query, norms.query), normed(key, norms.key)
    turn = cosines.float()[:, None], sines.float()[:, None]
    assert_rounded(found, rotated(query, *turn))
    rows = kv.rows_of(torch.tensor(inputs.slot_mapping, device=CUDA), kv_heads)
    written = kv.keys[0].view(-1, dim)[rows].view_as(key)
    assert_rounded(written, rotated(key, *turn))
    assert torch.equal(kv.values[0].view(-1, dim)[rows].view_as(value).float(), value)


@pytest.mark.parametrize("of_neighbours", [False, True])
def test_half_of_each_head_is_turned(of_neighbours: bool) -> None:
    inputs, num_blocks = scattered_step([Chunk(40, 7), Chunk(0)], BLOCK_SIZE)
    count, dim, turned = len(inputs.token_ids), 128, 64
    kv = KvTensors((LayerKv(8, dim, dim),), num_blocks, BLOCK_SIZE, torch.bfloat16, CUDA)
    qkv = noise(count, 48 * dim, dtype=torch.bfloat16)
    angles = torch.rand(count, turned // 2, device=CUDA).repeat(1, 2) * 6
    cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()
    turns = HeadTurns(cosines, sines, turned, of_neighbours)
    found = TritonAttention(Gpu.of(CUDA)).plan(inputs, kv).rotate_and_write(0, qkv, turns, None)
    query = qkv.float().view(count, -1, dim)[:, :32]
    part = query[..., :turned]
    if of_neighbours:  # as halves, and back
        part = torch.unflatten(part, -1, (-1, 2)).mT.flatten(-2)
    part = rotated(part, cosines.float()[:, None], sines.float()[:, None])
    if of_neighbours:
        part = torch.unflatten(part, -1, (2, -1)).mT.flatten(-2)
    assert_rounded(found, torch.cat((part, query[..., turned:]), dim=-1))


def rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    low, high = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-high, low), dim=-1) * sines


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_fused_layers_is_the_model(family: str, dtype: torch.dtype) -> None:
    loaded = load(family, dtype)
    before = packed_sample(PackedForward(loaded))
    assert fuse_layers(loaded, TritonAttention(Gpu.of(CUDA)), BLOCK_SIZE) == len(loaded.layers)
    after = packed_sample(PackedForward(loaded))
    assert packed_difference(after, before, dtype, has_blocks=False) is None


def test_the_log_and_the_model_say_how_many_layers_are_fused() -> None:
    loaded = load("llama", torch.bfloat16)
    fused = with_fused_layers(loaded, BLOCK_SIZE, lambda: pytest.fail("the kernels do not run"))
    assert "layers fused" in fused.kernels_used


@pytest.mark.parametrize(
    ("family", "most"), [("llama", 10), ("qwen3", 10), ("gemma3", 11), ("olmo2", 10), ("cohere2", 10)]
)
def test_a_layer_is_ten_launches(family: str, most: int) -> None:
    """As the profiler counts them."""
    loaded = load(family, torch.bfloat16)
    name = next(name for name, part in loaded.model.named_modules() if FusedLayer.fits(part, loaded.dtype))
    observation = observe(loaded, [name], BLOCK_SIZE)
    call: LayerCall = observation.calls[0]
    made, seen = FusedLayer(loaded.model.get_submodule(name), call), observation.seen[name]
    context = AttentionContext(observation.inputs, observation.kv, TritonAttention(Gpu.of(CUDA)))
    options: dict[str, Any] = seen.options | {CONTEXT_KEYWORD: context}
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.inference_mode():
        made(*seen.args, **options)  # compiles
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            made(*seen.args, **options)
            torch.cuda.synchronize()
    launches = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert 0 < len(launches) <= most, launches
