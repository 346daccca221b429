"""The CUDA backend on the CPU, through Triton's interpreter, against the reference; `make test-triton`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.attention import AttentionContext, LayerCall, ReferenceAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_sample
from tests.support.attention_cases import OVER_BYTES, assert_close, decodes, matrix, mixed
from tests.support.attention_noise import (
    DRAFTS,
    Chunk,
    Noise,
    attend,
    check_what_shows,
    random_tree,
    scattered_step,
)
from tests.support.packed import load_tiny, packed_forward, random_schedule, random_tokens, run_schedule
from tests.support.recurrent_classes import loaded_from, model_of

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import triton_attention  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from engine.compute.cuda.triton_tables import Bucket, StepTables  # noqa: E402
from engine.compute.cuda.triton_work import HeadShape  # noqa: E402
from tests.support.interpreter import INTERPRETED, with_all_numbers  # noqa: E402

pytestmark = INTERPRETED

CPU = torch.device("cpu")
LATENT = LayerKv(1, 20, 16, value_in_key=True)
SHARED_MEMORY = 200_000


BYTES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
each_kind = pytest.mark.parametrize("kept", BYTES.values(), ids=BYTES)


@pytest.fixture(autouse=True)
def all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_numbers(monkeypatch)


def backend(processors: int = 4) -> TritonAttention:
    return TritonAttention(Gpu(processors, SHARED_MEMORY))


def check(noise: Noise, processors: int = 4, kept: torch.dtype | None = None) -> None:
    """Ours, with NaN in every slot that it must not read, against the reference in float32.

    Both over K/V `kept` in the same bytes.
    """
    ours = attend(noise, backend(processors), CPU, noise.dtype, poisoned=True, kept=kept)
    expected = attend(noise, ReferenceAttention(), CPU, torch.float32, kept=kept)
    assert_close(ours, expected, noise.dtype if kept is None else weights_of(noise.dtype))


def weights_of(dtype: torch.dtype) -> torch.dtype:
    """What the weights of values in bytes are rounded to."""
    return torch.bfloat16 if dtype.itemsize == 2 else dtype


@pytest.mark.parametrize("name", matrix(4))
def test_a_step_is_attended_as_by_the_reference(name: str) -> None:
    check(matrix(4)[name])


@each_kind
@pytest.mark.parametrize("name", OVER_BYTES)
def test_pages_of_bytes_are_read_as_by_the_reference(name: str, kept: torch.dtype) -> None:
    check(matrix(1)[name], kept=kept)


@each_kind
def test_pages_of_bytes_are_read_by_any_number_of_runs(kept: torch.dtype) -> None:
    chunks = [Chunk(700), Chunk(1), Chunk(600, 5), random_tree(np.random.default_rng(3), 620, 18)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(Noise(chunks, LayerKv(1, 16, 16), heads_of_each=2, dtype=dtype), 1000, kept)


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tokens_are_rounded_as_by_the_reference(dtype: torch.dtype, kept: torch.dtype) -> None:
    """To the bit, and nothing else of the pages is written; a number that is none makes one row sick."""
    layer = LayerKv(3, 12, 20)  # neither heads nor dims fill their tiles
    chunks = [Chunk(5, 40), Chunk(30), Chunk(0, 3)]
    inputs, num_blocks = scattered_step(chunks, 16)
    ours, theirs = (KvTensors((layer,), num_blocks, 16, dtype, CPU, kept) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    sizes = torch.logspace(-7, 4, len(inputs.token_ids))[:, None, None]
    key, value = (
        (sizes * torch.randn(len(inputs.token_ids), 3, dim, generator=generator)).to(dtype)
        for dim in (12, 20)
    )
    key[2], value[7] = 0.0, 1e-36
    for tensor in (*ours.tensors, *theirs.tensors):
        tensor.fill_(60)
    backend().plan(inputs, ours).write(0, key, value)
    ReferenceAttention().plan(inputs, theirs).write(0, key, value)
    assert all(map(torch.equal, ours.tensors, theirs.tensors))
    for wrong in (torch.inf, torch.nan):
        key[4, 1, 3] = wrong
        backend().plan(inputs, ours).write(0, key, value)
        read, _ = ours.read(0, torch.arange(num_blocks))
        assert int((~read.isfinite()).any(-1).sum()) == 1


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("processors", [1, 16, 1000])
def test_any_number_of_runs(processors: int, window: int | None) -> None:
    """From one program for each tile to the shortest runs there are."""
    chunks = [Chunk(700), Chunk(130), Chunk(1), Chunk(600, 5), random_tree(np.random.default_rng(3), 620, 18)]
    check(Noise(chunks, LayerKv(1, 16, 16, window), heads_of_each=2), processors)
    if processors == 1000:
        check(Noise([Chunk(2400)], LayerKv(1, 16, 16, window), heads_of_each=2), processors)
        check(Noise([Chunk(2060, 60)], LayerKv(1, 16, 16, window), heads_of_each=2), processors)


@pytest.mark.parametrize("processors", [1, 1000])
@pytest.mark.parametrize("window", [None, 150])
def test_programs_share_the_queries_of_items_with_wide_values(window: int | None, processors: int) -> None:
    """More of them than one can keep the sums of, whether or not a sequence's new tokens fill all tiles."""
    tree = random_tree(np.random.default_rng(3), 320, 18)
    chunks = [Chunk(300), Chunk(130, 60), Chunk(300, 5), tree, Chunk(0, 90)]
    check(Noise(chunks, LayerKv(1, 16, 260, window), heads_of_each=2), processors)


@pytest.mark.parametrize("case", range(12))
def test_any_step(case: int) -> None:
    rng = np.random.default_rng(case)
    chunks: list[Chunk] = []
    for _ in range(int(rng.integers(1, 7))):
        context = int(rng.integers(0, rng.choice([3, 70, 400])))
        kind = rng.random()
        if kind < 0.3:
            chunks.append(random_tree(rng, context, int(rng.integers(1, 40))))
        else:
            chunks.append(Chunk(context, 1 if kind < 0.6 else int(rng.integers(1, 80))))
    window = None if rng.random() < 0.5 else int(rng.integers(1, 120))
    layer = LayerKv(int(rng.integers(1, 3)), int(rng.integers(1, 40)), int(rng.integers(1, 40)), window)
    softcap = None if rng.random() < 0.7 else 3.0
    noise = Noise(chunks, layer, int(rng.integers(1, 6)), int(rng.integers(1, 40)), softcap)
    check(noise, int(rng.integers(1, 40)))


@pytest.mark.parametrize(("num_drafts", "has_trees"), [(20, False), (60, True)])
def test_prompts_beside_trees_have_the_kernel_of_prompts_alone(num_drafts: int, has_trees: bool) -> None:
    """Another would be compiled while streams wait for it, unless trees are as long as prompts."""
    chunks = [random_tree(np.random.default_rng(2), 30, num_drafts), Chunk(0, 60)]
    inputs, num_blocks = scattered_step(chunks, 16)
    kv = KvTensors((LayerKv(1, 16, 16),), num_blocks, 16, torch.float32, CPU)
    step = backend().plan(inputs, kv)
    step.attend(torch.randn(len(inputs.token_ids), 1, 16), LayerCall(0, 1.0))
    assert {what[0]: tile.has_trees for what, tile in step._tiles.items()}["prefill"] == has_trees


def test_a_sick_sequence_is_sick_alone() -> None:
    """NaN in one sequence's own keys is its result, and nobody else's."""
    chunks = [Chunk(300), Chunk(40), Chunk(100, 5), Chunk(20, 60)]
    inputs, num_blocks = scattered_step(chunks, 16)
    kv = KvTensors((LayerKv(1, 16, 16),), num_blocks, 16, torch.float32, CPU)
    for tensor in kv.tensors:
        tensor[inputs.block_tables[0, :18].tolist()] = torch.nan
    context = AttentionContext(inputs, kv, backend(16))
    tokens = torch.randn(len(inputs.token_ids), 1, 16)
    attended = context.attend(tokens, tokens, tokens, LayerCall(0, 1.0))
    assert attended[0].isnan().all()
    assert attended[1:].isfinite().all()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("layer", [LayerKv(1, 16, 16), LayerKv(1, 16, 12, window=20), LATENT])
def test_what_is_not_finite_shows_in_no_token_that_does_not_see_it(number: float, layer: LayerKv) -> None:
    check_what_shows(Noise(DRAFTS, layer, heads_of_each=1), backend(), CPU, number, every=3)


@each_kind
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_of_latent_rows_in_bytes_too(number: float, kept: torch.dtype) -> None:
    check_what_shows(Noise(DRAFTS, LATENT, heads_of_each=1), backend(), CPU, number, every=3, kept=kept)


def test_a_latent_row_is_stored_once() -> None:
    layer = LayerKv(1, 40, 32, value_in_key=True)
    inputs, num_blocks = scattered_step([Chunk(5, 40), Chunk(30), Chunk(0, 3)], 16)
    ours, theirs = (KvTensors((layer,), num_blocks, 16, torch.bfloat16, CPU) for _ in range(2))
    key = torch.randn(len(inputs.token_ids), 1, 40, dtype=torch.bfloat16)
    for kv, attention in ((ours, backend()), (theirs, ReferenceAttention())):
        attention.plan(inputs, kv).write(0, key, key[..., :32])
    assert len(ours.tensors) == 1 and torch.equal(ours.tensors[0], theirs.tensors[0])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_whole_model(family: str) -> None:
    """Windows, soft caps and grouped heads as a model has them, in mixed steps."""
    loaded = load_tiny(family)
    results = []
    for attention in (backend(), ReferenceAttention()):
        rng = np.random.default_rng(1)
        sequences = [random_tokens(rng, length) for length in (20, 7)]
        steps = random_schedule(rng, [20, 7], max_chunk=9)
        results.append(run_schedule(packed_forward(loaded, attention), sequences, steps, 4, rng))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "KimiLinear"])
def test_a_whole_model_of_latent_rows(name: str) -> None:
    loaded = loaded_from(model_of(name))
    assert any(layer.value_in_key for layer in loaded.layers)
    logits = []
    for attention in (backend(), ReferenceAttention()):
        forward = forward_of(loaded)
        forward.backend = attention
        logits.append(packed_sample(forward))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_equal_steps_give_equal_bits() -> None:
    noise = Noise(mixed(4), dtype=torch.float16)
    first, second = (attend(noise, backend(16), CPU, noise.dtype) for _ in range(2))
    assert torch.equal(first, second)


TREES = [Chunk(9, 7), random_tree(np.random.default_rng(0), 200, 30)]
PROMPTS = [Chunk(20, 70), Chunk(3), Chunk(0, 7)]


@pytest.mark.parametrize("layer", [LayerKv(1, 16, 16), LATENT], ids=["plain", "latent"])
@pytest.mark.parametrize(
    ("bucket", "last"),
    [
        (Bucket(12, 80, 40, 48, max_tree_tokens=40, max_places=40), TREES),
        (Bucket(12, 80, 40, max_query_len=80), PROMPTS),
    ],
    ids=["drafts", "prompts"],
)
def test_a_bucket_is_refilled_in_place(bucket: Bucket, last: list[Chunk], layer: LayerKv) -> None:
    """What a recorded launch would read stays where it is, and holds each next step."""
    shape = HeadShape(2, 1, None)
    attention = backend(16)
    kv = KvTensors((layer,), 64, 16, torch.float32, CPU)
    tables = StepTables(CPU, attention.workforce(kv), bucket)
    tables.reserve([shape])
    step = attention.step(tables, kv)
    addresses = [tensor.data_ptr() for tensor in tables.work(shape).items]
    for chunks in ([Chunk(300), Chunk(5)], decodes(2), last, [Chunk(0)]):
        inputs, _ = scattered_step(chunks, 16)
        num_tokens = len(inputs.token_ids)
        for tensor in kv.tensors:
            tensor.normal_()
        before = [tensor.clone() for tensor in kv.tensors]
        query, key = torch.randn(80, 2, layer.key_dim), torch.randn(80, 1, layer.key_dim)
        value = key[..., :16]
        tables.fill(inputs)
        step.write(0, key, value)
        ours = step.attend(query, LayerCall(0, 0.3))[:num_tokens]
        written = [tensor.clone() for tensor in kv.tensors]
        for tensor, was in zip(kv.tensors, before, strict=True):
            tensor.copy_(was)
        reference = AttentionContext(inputs, kv, ReferenceAttention())
        call = LayerCall(0, 0.3)
        expected = reference.attend(query[:num_tokens], key[:num_tokens], value[:num_tokens], call)
        assert_close(ours, expected, torch.float32)
        for tensor, was in zip(kv.tensors, written, strict=True):
            assert torch.equal(tensor, was)
    assert addresses == [tensor.data_ptr() for tensor in tables.work(shape).items]


@pytest.mark.parametrize(
    "layer",
    [LayerKv(1, 16, 16), LayerKv(1, 16, 16, window=40), LayerKv(1, 16, 16, chunk=64)],
    ids=["all", "window", "chunk"],
)
@pytest.mark.parametrize("processors", [1, 16])
def test_work_laid_out_for_keys_to_come_serves_the_steps_that_bring_them(
    layer: LayerKv, processors: int
) -> None:
    """Only lengths, positions and slots are put anew; what lies behind the keys of a step may be anything."""
    call = LayerCall(0, 0.3, layer.window, None, layer.chunk)
    attention = backend(processors)
    kv = KvTensors((layer,), 80, 16, torch.float32, CPU)
    tables = StepTables(CPU, attention.workforce(kv), Bucket(6, 6, 40))
    tables.reserve([HeadShape(2, 1, layer.reach)])
    step = attention.step(tables, kv)
    contexts = [300, 126, 63, 0]
    last, _ = scattered_step([Chunk(context + 3) for context in contexts], 16)  # it has the blocks of all
    for tensor in kv.tensors:
        tensor.normal_()
    for number in range(4):
        positions = np.array(contexts) + number
        blocks = last.block_tables[np.arange(4), positions // 16].astype(np.int64)
        inputs = replace(
            last,
            positions=positions,
            slot_mapping=blocks * 16 + positions % 16,
            kv_lens=(positions + 1).astype(np.int32),
        )
        if number == 0:
            for context, row in zip(contexts, last.block_tables, strict=True):
                for to_come in range(context, context + 4):
                    for tensor in kv.tensors:
                        tensor[row[to_come // 16], :, to_come % 16] = torch.nan
            tables.fill(inputs, num_to_come=3)
        for name, array in (
            ("positions", positions),
            ("slots", inputs.slot_mapping),
            ("kv_lens", inputs.kv_lens),
        ):
            tables.arrays[name][:4] = torch.from_numpy(array)
        query, key = torch.randn(6, 2, 16), torch.randn(6, 1, 16)
        step.write(0, key, key)
        ours = step.attend(query, call)[:4]
        reference = AttentionContext(inputs, kv, ReferenceAttention())
        assert_close(ours, reference.attend(query[:4], key[:4], key[:4], call), torch.float32)


def test_places_that_no_token_fills_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after attention reads them: a router would send them, a scale would be taken from them."""

    new_empty = torch.Tensor.new_empty

    def not_filled(like: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        made = new_empty(like, *shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", not_filled)
    attention = backend(16)
    kv = KvTensors((LayerKv(1, 16, 24),), 64, 16, torch.float32, CPU)
    tables = StepTables(CPU, attention.workforce(kv), Bucket(12, 12, 40))
    tables.reserve([HeadShape(2, 1, None)])
    step = attention.step(tables, kv)
    tables.clear()
    assert not step.attend(torch.randn(12, 2, 16), LayerCall(0, 0.3)).any()
    for chunks in (decodes(1)[:5], [Chunk(700)]):
        tables.fill(scattered_step(chunks, 16)[0])
        step.write(0, torch.randn(12, 1, 16), torch.randn(12, 1, 24))
        attended = step.attend(torch.randn(12, 2, 16), LayerCall(0, 0.3))
        assert attended[: len(chunks)].isfinite().all() and attended[: len(chunks)].any()
        assert not attended[len(chunks) :].any()


class Launches:
    """A kernel, and the grids that it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


def test_any_number_of_items_and_merges_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first dimension of a grid takes more than 65,535 programs."""
    launched = {name: Launches(getattr(triton_attention, name)) for name in ("attend_kernel", "merge_kernel")}
    for name, launches in launched.items():
        monkeypatch.setattr(triton_attention, name, launches)
    check(Noise([Chunk(5), Chunk(700), Chunk(30, 60)], LayerKv(2, 16, 16), heads_of_each=2), 16)
    for launches in launched.values():
        assert launches.grids and all(len(grid) == 1 for grid in launches.grids)


def test_what_a_bucket_cannot_hold_is_refused() -> None:
    attention = backend()
    kv = KvTensors((LayerKv(1, 16, 16),), 4, 16, torch.float32, CPU)
    tables = StepTables(CPU, attention.workforce(kv), Bucket(2, 2, 4))
    tables.reserve([HeadShape(2, 1, None)])
    with pytest.raises(ValueError, match=r"kv_lens|query_starts"):
        tables.fill(scattered_step([Chunk(1)] * 3, 16)[0])
    with pytest.raises(ValueError, match="verify"):
        tables.fill(scattered_step([Chunk(1, 2)], 16)[0])


@pytest.mark.timeout(600)
def test_the_kernels_compile_for_the_gpus_they_are_meant_for() -> None:
    """In a process of its own, where nothing is interpreted; see what it runs."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.triton_compiled"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
