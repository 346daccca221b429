"""The CUDA backend on a GPU against the reference: the same cases, larger, and what only a GPU shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute.attention import AttentionContext, LayerCall, ReferenceAttention, choose_backend
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from tests.support.attention_cases import OVER_BYTES, assert_close, matrix, mixed
from tests.support.attention_noise import (
    DRAFTS,
    Chunk,
    Noise,
    attend,
    check_what_shows,
    random_tree,
    scattered_step,
)
from tests.support.device_waits import waiting_refused

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from engine.compute.cuda.triton_tables import Bucket, StepTables  # noqa: E402
from engine.compute.cuda.triton_work import HeadShape  # noqa: E402

CUDA = torch.device("cuda", 0)
LLAMA_8B = LayerKv(8, 128, 128)
GEMMA = LayerKv(4, 256, 256, 1024)
BYTES = {"int8": torch.int8}
if torch.cuda.get_device_capability(CUDA) >= (8, 9):
    BYTES["fp8"] = torch.float8_e4m3fn
each_kind = pytest.mark.parametrize("kept", BYTES.values(), ids=BYTES)


def backend() -> TritonAttention:
    return TritonAttention(Gpu.of(CUDA))


def check(noise: Noise, kept: torch.dtype | None = None) -> None:
    """Ours, with NaN in every slot that it must not read, against the reference in float32.

    Both over K/V `kept` in the same bytes; weights of bytes are bfloat16 where numbers are of 16 bits.
    """
    ours = attend(noise, backend(), CUDA, noise.dtype, poisoned=True, kept=kept)
    expected = attend(noise, ReferenceAttention(), CUDA, torch.float32, kept=kept)
    if kept is not None and noise.dtype.itemsize == 2:
        assert_close(ours, expected, torch.bfloat16)
    else:
        assert_close(ours, expected, noise.dtype)


@pytest.mark.parametrize("kept", [None, *BYTES.values()])
def test_it_is_chosen(kept: torch.dtype | None) -> None:
    assert isinstance(choose_backend(CUDA, kept=kept), TritonAttention)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_no_token_that_does_not_see_it(number: float) -> None:
    noise = Noise(DRAFTS, LayerKv(2, 64, 64), dtype=torch.bfloat16)
    check_what_shows(noise, backend(), CUDA, number, every=4)


@pytest.mark.parametrize("name", matrix(20))
def test_a_step_is_attended_as_by_the_reference(name: str) -> None:
    check(matrix(20)[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("layer", "heads_of_each"), [(LLAMA_8B, 4), (GEMMA, 2), (LayerKv(3, 64, 64), 3)])
def test_models_as_they_are(layer: LayerKv, heads_of_each: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    chunks = [
        *[Chunk(int(length)) for length in rng.integers(0, 9000, 24)],
        Chunk(0, 2000),
        Chunk(8192, 512),
        Chunk(3000, 33),
        *[Chunk(int(length), 5) for length in rng.integers(0, 4000, 8)],
        random_tree(rng, 5000, 63),
    ]
    softcap = 50.0 if layer is GEMMA else None
    noise = Noise(chunks, layer, heads_of_each, dtype=dtype, softcap=softcap)
    for kept in (None, *BYTES.values()):
        check(noise, kept)


@each_kind
@pytest.mark.parametrize("name", OVER_BYTES)
def test_pages_of_bytes_are_read_as_by_the_reference(name: str, kept: torch.dtype) -> None:
    check(matrix(20)[name], kept)


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tokens_are_rounded_as_by_the_reference(dtype: torch.dtype, kept: torch.dtype) -> None:
    """To the bit of what a CPU makes of them, and nothing else of the pages is written."""
    layer, cpu = LayerKv(3, 12, 20), torch.device("cpu")
    inputs, num_blocks = scattered_step([Chunk(5, 400), Chunk(30), Chunk(0, 3)], 16)
    ours, theirs = (KvTensors((layer,), num_blocks, 16, dtype, device, kept) for device in (CUDA, cpu))
    sizes = torch.logspace(-7, 4, len(inputs.token_ids))[:, None, None]
    key, value = ((sizes * torch.randn(len(inputs.token_ids), 3, dim)).to(dtype) for dim in (12, 20))
    key[2], value[7] = 0.0, 1e-36
    for tensor in (*ours.tensors, *theirs.tensors):
        tensor.fill_(60)
    backend().plan(inputs, ours).write(0, key.to(CUDA), value.to(CUDA))
    ReferenceAttention().plan(inputs, theirs).write(0, key, value)
    for mine, expected in zip(ours.tensors, theirs.tensors, strict=True):
        assert torch.equal(mine.cpu(), expected)


@pytest.mark.parametrize("length", [1, 1000, 40_000])
def test_one_decode(length: int) -> None:
    check(Noise([Chunk(length)], LLAMA_8B, 4, dtype=torch.bfloat16))


def test_many_decodes() -> None:
    check(Noise([Chunk(1000 + row) for row in range(128)], LLAMA_8B, 4, dtype=torch.bfloat16))


def test_equal_steps_give_equal_bits() -> None:
    noise = Noise(mixed(40), LLAMA_8B, 4, dtype=torch.bfloat16)
    first, *others = (attend(noise, backend(), CUDA, noise.dtype) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_nothing_waits_for_the_device() -> None:
    """From the plan to the last layer of a step, once the kernels are compiled."""
    inputs, num_blocks = scattered_step(mixed(40), 16)
    layers = (LLAMA_8B, LayerKv(8, 128, 128, 512))
    kv = KvTensors(layers, num_blocks, 16, torch.bfloat16, CUDA)
    new = torch.randn(len(inputs.token_ids), 8, 128, dtype=kv.dtype, device=CUDA)
    query = torch.randn(len(inputs.token_ids), 32, 128, dtype=kv.dtype, device=CUDA)

    def run() -> None:
        context = AttentionContext(inputs, kv, attention)
        for index, layer in enumerate(layers):
            context.attend(query, new, new, LayerCall(index, 0.1, layer.window))

    attention = backend()
    run()
    with waiting_refused():
        run()


def test_a_recorded_step_is_replayed_over_refilled_tables() -> None:
    """One CUDA graph serves every step that fits its bucket."""
    shape, call = HeadShape(32, 8, None), LayerCall(0, 0.1)
    attention = backend()
    kv = KvTensors((LLAMA_8B,), 2048, 16, torch.bfloat16, CUDA)
    tables = StepTables(CUDA, attention.workforce(kv), Bucket(32, 64, 512, max_query_len=5))
    tables.reserve([shape])
    step = attention.step(tables, kv)
    query = torch.zeros(64, 32, 128, dtype=kv.dtype, device=CUDA)
    key, value = (torch.zeros(64, 8, 128, dtype=kv.dtype, device=CUDA) for _ in range(2))
    tables.fill(scattered_step([Chunk(100), Chunk(50, 5)], 16)[0])
    step.write(0, key, value)
    step.attend(query, call)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.write(0, key, value)
        output = step.attend(query, call)
    for chunks in ([Chunk(7000)], [Chunk(900)] * 30, [Chunk(40, 5), Chunk(3000, 5), Chunk(0)]):
        inputs, _ = scattered_step(chunks, 16)
        count = len(inputs.token_ids)
        for tensor in (*kv.tensors, query, key, value):
            tensor.normal_()
        tables.fill(inputs)
        graph.replay()
        ours = output[:count].float().cpu()
        context = AttentionContext(inputs, kv, ReferenceAttention())
        expected = context.attend(query[:count], key[:count], value[:count], call)
        assert_close(ours, expected.float().cpu(), kv.dtype)


def test_more_sequences_than_a_grid_has_rows() -> None:
    check(Noise([Chunk(row % 7) for row in range(70_000)], LayerKv(1, 16, 16), dtype=torch.float16))
