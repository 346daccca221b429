"""Fused layers on the CPU, through Triton's interpreter, against transformers' own; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext
from engine.compute.attention.context import HeadNorms, HeadTurns
from engine.compute.attention.kv_rows import to_bytes
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.closeness import is_close
from engine.compute.native.observation import observe
from engine.compute.native.records import Activation
from engine.compute.runner import packed_forward
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import logits_distance, packed_difference, packed_sample
from tests.support.attention_noise import Chunk, scattered_step
from tests.support.launches import CountedKernel, LaunchCount, run_counted
from tests.support.packed import as_loaded
from tests.support.tiny_models import GEMMA4_EXPERTS, tiny_model

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import (  # noqa: E402
    fused_experts,
    fused_model,
    fused_norms,
    fused_products,
    fused_router,
    triton_attention,
)
from engine.compute.cuda.fused_experts import FusedExperts  # noqa: E402
from engine.compute.cuda.fused_layer import FusedLayer  # noqa: E402
from engine.compute.cuda.fused_model import fuse_experts, fuse_layers, fuse_routers, with_fused_layers  # noqa: E402
from engine.compute.cuda.fused_norms import Beside, Sum, add, add_and_norm, norm, sum_and_norm  # noqa: E402
from engine.compute.cuda.fused_products import OF_ONE_ROW, OF_ROWS, gate, gate_apart  # noqa: E402
from engine.compute.cuda.fused_router import FusedScaledRouter  # noqa: E402
from engine.compute.cuda.row_products import (  # noqa: E402
    added_row_product,
    gated_row_product,
    row_product,
)
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from engine.compute.cuda.triton_tables import Bucket, StepTables  # noqa: E402
from engine.compute.cuda.triton_work import HeadShape  # noqa: E402
from tests.support.interpreter import WITH_GATES, with_all_numbers  # noqa: E402

pytestmark = WITH_GATES

# How many launches a layer takes for two decodes, but for merging, of which there is none where it has a
# window; and how many transformers' own takes at least, around its experts where these take its MLP's place.
FAMILIES = {
    "llama": (9, 30),
    "qwen3": (9, 40),
    "granite": (9, 30),
    "gemma": (9, 35),
    "gemma2": (9, 50),
    "gemma3": (9, 60),
    "exaone4": (9, 40),
    "phi3": (9, 30),
    "glm4": (9, 50),
    "olmo2": (9, 45),
    "olmo3": (9, 45),
    "cohere2": (9, 30),
    "gemma4": (13, 55),
    "gemma4 of values that are keys": (9, 55),
    "gemma4 with experts": (10, 100),
    "qwen3_moe": (10, 35),
    "gpt_oss": (10, 35),
}
# Gemma 4's large models: their layers are given nothing alone.
LARGE_GEMMA4 = "gemma4 of values that are keys"
ODD_GEMMA4 = "gemma4 of shared values that are keys"
GEMMA4_WITH_EXPERTS = "gemma4 with experts"
CHANGES: dict[str, dict[str, Any]] = {
    LARGE_GEMMA4: {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True},
    ODD_GEMMA4: {"attention_k_eq_v": True},
    GEMMA4_WITH_EXPERTS: {**GEMMA4_EXPERTS, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
}
# Rotated by float32's angles, normed together, by their means, or values too.
ROUNDED_ONCE = ("olmo2", "olmo3", "olmoe", "cohere2", "gemma4", LARGE_GEMMA4, GEMMA4_WITH_EXPERTS)
BLOCK_SIZE = 4
BYTES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def backend() -> TritonAttention:
    return TritonAttention(Gpu(4, 200_000))


def tiny(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A model of its own, with factors behind its layers where its family has them."""
    model = tiny_model(family.split()[0], dtype=dtype, **CHANGES.get(family, {}))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
    return as_loaded(model)


class Scale:
    """What a norm kernel reads of a norm."""

    def __init__(self, width: int, *, is_centred: bool = False) -> None:
        self.weight = torch.randn(width)
        self.variance_epsilon = 1e-5
        self.is_centred = is_centred


@pytest.mark.parametrize("width", [1, 48, 64])
def test_norms_and_gates_are_torchs(width: int) -> None:
    rows, added, scale = torch.randn(5, width), torch.randn(5, width), Scale(width)
    expected = torch.nn.functional.rms_norm(rows, (width,), scale.weight, 1e-5)
    torch.testing.assert_close(norm(rows, scale), expected)
    total, normed = add_and_norm(rows, added, scale)
    assert torch.equal(total, rows + added) and torch.equal(add(rows, added), total)
    expected = torch.nn.functional.rms_norm(total, (width,), scale.weight, 1e-5)
    torch.testing.assert_close(normed, expected)
    other = Scale(width)
    total, normed = add_and_norm(rows, added, scale, other, 0.25)
    expected = rows + 0.25 * torch.nn.functional.rms_norm(added, (width,), other.weight, 1e-5)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (width,), scale.weight, 1e-5))
    assert torch.equal(add(rows, added, other, 0.25), total)
    assert torch.equal(add(rows, added, other, 0.25, 0.7), total * 0.7)
    others = torch.randn(5, width)
    beside = Beside(others, Scale(width), Scale(width))
    answers = add(norm(added, other), others, beside.by)
    expected = add(rows, answers, beside.norm_of_both, 0.25, 0.7)
    of = Sum(rows, added, other, 0.25, 0.7, beside)
    total, normed = sum_and_norm(of, scale)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, norm(expected, scale))
    assert torch.equal(of.computed()[0], total)
    both = torch.randn(5, 2 * width)
    expected = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
    torch.testing.assert_close(gate(both), expected)
    wide = torch.randn(5, 3, width)
    expected = torch.nn.functional.silu(rows) * wide[:, 1]
    torch.testing.assert_close(gate_apart(rows, wide[:, 1], Activation.SILU), expected)
    for activation, tanh in ((Activation.GELU, "none"), (Activation.GELU_TANH, "tanh")):
        expected = torch.nn.functional.gelu(both[:, :width], approximate=tanh) * both[:, width:]
        torch.testing.assert_close(gate(both, activation), expected)


@pytest.mark.parametrize("width", [1, 48, 64])
def test_centred_norms_are_torchs(width: int) -> None:
    rows, added, scale = torch.randn(5, width) + 3.0, torch.randn(5, width), Scale(width, is_centred=True)
    expected = torch.nn.functional.layer_norm(rows, (width,), scale.weight, None, 1e-5)
    torch.testing.assert_close(norm(rows, scale), expected)
    total, normed = add_and_norm(rows, added, scale)
    expected = torch.nn.functional.layer_norm(rows + added, (width,), scale.weight, None, 1e-5)
    assert torch.equal(total, rows + added)
    torch.testing.assert_close(normed, expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [48, 2500])
def test_products_of_one_row_are_torchs(width: int, has_bias: bool) -> None:
    linear = torch.nn.Linear(width, 30, bias=has_bias).requires_grad_(False)
    row, added = torch.randn(1, width), torch.randn(1, 30)
    expected = linear(row)
    torch.testing.assert_close(row_product(row, linear), expected)
    torch.testing.assert_close(added_row_product(row, linear, added), expected + added)
    torch.testing.assert_close(added_row_product(row, linear, added, 0.22), 0.22 * expected + added)
    gates, ups = expected.chunk(2, dim=1)
    torch.testing.assert_close(gated_row_product(row, linear), torch.nn.functional.silu(gates) * ups)
    found = gated_row_product(row, linear, Activation.GELU_TANH)
    torch.testing.assert_close(found, torch.nn.functional.gelu(gates, approximate="tanh") * ups)


def test_an_mlp_wider_than_a_program_is_gated() -> None:
    both = torch.randn(2, 2 * 1500)
    torch.testing.assert_close(gate(both), torch.nn.functional.silu(both[:, :1500]) * both[:, 1500:])


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2", "mistral", "smollm3", "glm", "olmoe", ODD_GEMMA4])
def test_a_model_of_fused_layers_is_the_model(family: str) -> None:
    loaded = tiny(family)
    before = packed_sample(PackedForward(loaded))
    assert fuse_layers(loaded, backend(), BLOCK_SIZE) == len(loaded.layers)
    forward = PackedForward(loaded)
    forward.backend = backend()
    torch.testing.assert_close(packed_sample(forward), before, atol=1e-4, rtol=1e-4)
    assert packed_difference(packed_sample(forward), before, loaded.dtype, has_blocks=False) is None


@pytest.mark.parametrize("family", ROUNDED_ONCE)
def test_a_model_of_fused_layers_rounds_as_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_numbers(monkeypatch)
    loaded = tiny(family, torch.bfloat16)
    before = packed_sample(PackedForward(loaded))
    fuse_routers(loaded, BLOCK_SIZE)
    assert fuse_layers(loaded, backend(), BLOCK_SIZE) == len(loaded.layers)
    forward = PackedForward(loaded)
    forward.backend = backend()
    assert packed_difference(packed_sample(forward), before, loaded.dtype, has_blocks=False) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_that_is_some_more_experts_answers_as_beside_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all_numbers(monkeypatch)
    loaded = tiny(GEMMA4_WITH_EXPERTS, dtype)
    name = next(name for name, part in loaded.model.named_modules() if FusedLayer.fits(part, dtype))
    seen = observe(loaded, [name, f"{name}.mlp", f"{name}.router"], BLOCK_SIZE)
    layer: Any = loaded.model.get_submodule(name)
    layer.experts, layer.router = FusedExperts(layer.experts), FusedScaledRouter(layer.router)
    made = FusedLayer(layer, seen.calls[0])
    assert made.beside is not None and made.beside.fewest_rows
    mlp, router = (seen.seen[f"{name}.{part}"].given for part in ("mlp", "router"))
    assert mlp is not None and router is not None
    expected = seen.seen[name].output[0, :6]
    for count in (1, 6):
        given = mlp[0, :count].contiguous(), router[:count].clone()
        assert is_close(made.finished(*given, OF_ROWS)[0], expected[:count])


def test_heads_that_are_clipped_stay() -> None:
    loaded = as_loaded(tiny_model("olmoe"))
    loaded.config.clip_qkv = 0.5
    assert fuse_layers(loaded, backend(), BLOCK_SIZE) == 0


def test_layers_that_norm_with_a_bias_stay() -> None:
    loaded = as_loaded(tiny_model("starcoder2"))
    assert fuse_layers(loaded, backend(), BLOCK_SIZE) == 0


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("order", ["halves", "neighbours", "neighbours in order"])
@pytest.mark.parametrize(("turned", "num_angles"), [(12, 12), (12, 6), (8, 8), (8, 4), (0, 0)])
def test_heads_are_turned_by_the_angles_there_are(
    turned: int, num_angles: int, order: str, has_norms: bool
) -> None:
    of_neighbours, in_order = order != "halves", order == "neighbours in order" and num_angles == turned
    inputs, num_blocks = scattered_step([Chunk(3, 5), Chunk(9)], BLOCK_SIZE)
    count, device = len(inputs.token_ids), torch.device("cpu")
    kv = KvTensors((LayerKv(1, 12, 12),), num_blocks, BLOCK_SIZE, torch.float32, device)
    qkv, angles = torch.randn(count, 4 * 12), torch.rand(count, turned // 2)
    given = angles if num_angles < turned else angles.repeat(1, 2)
    if in_order:
        given = angles.repeat_interleave(2, dim=1)
    turns = HeadTurns(given.cos(), given.sin(), turned, of_neighbours, in_order) if turned else None
    norms = HeadNorms(torch.rand(12), torch.rand(12), 1e-5) if has_norms else None
    found = backend().plan(inputs, kv).rotate_and_write(0, qkv, turns, norms)
    heads = qkv[:, :36].view(count, 3, 12)
    if norms is not None:
        weights = torch.stack((norms.query, norms.query, norms.key))
        heads = torch.nn.functional.rms_norm(heads, (12,), None, 1e-5) * weights
    pairs = torch.unflatten(heads[..., :turned], -1, (-1, 2) if of_neighbours else (2, turned // 2))
    low, high = pairs.unbind(-1 if of_neighbours else -2)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    both = torch.stack((low * cosine - high * sine, high * cosine + low * sine), -1 if of_neighbours else -2)
    expected = torch.cat((both.flatten(-2), heads[..., turned:]), -1)
    torch.testing.assert_close(found, expected[:, :2])
    rows = kv.rows_of(torch.from_numpy(inputs.slot_mapping), 1)
    torch.testing.assert_close(kv.keys[0].view(-1, 12)[rows], expected[:, 2])


@pytest.mark.parametrize("normed_together", [False, True])
def test_places_that_no_token_fills_write_nothing(normed_together: bool) -> None:
    kv = KvTensors((LayerKv(1, 8, 8),), 20, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    tables = StepTables(kv.device, backend().workforce(kv), Bucket(4, 4, 20))
    tables.reserve([HeadShape(2, 1, None)])
    step = backend().step(tables, kv)
    tables.clear()
    qkv, turn = torch.randn(4, 4 * 8), torch.rand(4, 4)
    turns = HeadTurns(turn.cos(), turn.sin(), 8)
    norms = HeadNorms(torch.rand(16), torch.rand(8), 1e-5) if normed_together else None
    step.rotate_and_write(0, qkv, turns, norms)
    assert not any(tensor.any() for tensor in kv.tensors)
    inputs, _ = scattered_step([Chunk(3), Chunk(9)], BLOCK_SIZE)
    tables.fill(inputs)
    query = step.rotate_and_write(0, qkv, turns, norms)
    rows = kv.rows_of(torch.from_numpy(inputs.slot_mapping), 1)
    assert torch.equal(kv.values[0].view(-1, 8)[rows], qkv[:2, 24:])
    assert int(kv.values[0].view(-1, 8).any(1).sum()) == 2
    queries = qkv[:, :16]
    if norms is not None:
        queries = torch.nn.functional.rms_norm(queries, (16,), norms.query, 1e-5)
    low, high = queries[:, :8].chunk(2, dim=1)
    expected = torch.cat((low * turn.cos() - high * turn.sin(), high * turn.cos() + low * turn.sin()), 1)
    torch.testing.assert_close(query[:, 0], expected)


@pytest.mark.parametrize("kept", BYTES.values(), ids=BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_rounded_to_the_bytes_that_a_plain_layer_stores(
    dtype: torch.dtype, kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as what its rotated keys, rounded to the model's numbers, become by themselves."""
    with_all_numbers(monkeypatch)
    inputs, num_blocks = scattered_step([Chunk(3, 5), Chunk(9)], BLOCK_SIZE)
    count, layer = len(inputs.token_ids), LayerKv(2, 12, 12)
    kv, plain, expected = (
        KvTensors((layer,), num_blocks, BLOCK_SIZE, dtype, torch.device("cpu"), kind)
        for kind in (kept, None, kept)
    )
    qkv = torch.randn(count, 8 * 12).to(dtype)
    qkv[2, 6 * 12] = torch.inf  # of a value
    turn = torch.rand(count, 6).repeat(1, 2)
    turns = HeadTurns(turn.cos().to(dtype), turn.sin().to(dtype), 12)
    for each in (kv, plain):
        backend().plan(inputs, each).rotate_and_write(0, qkv, turns, None)
    rows = kv.rows_of(torch.from_numpy(inputs.slot_mapping), 2)
    stored = [pages.view(-1, 12)[rows].view(count, 2, 12) for pages in plain.tensors]
    expected.write(0, rows, *stored)
    sick = int(inputs.slot_mapping[2]) // BLOCK_SIZE
    healthy = [block for block in range(num_blocks) if block != sick]
    for found, wanted in zip(kv.tensors, expected.tensors, strict=True):
        assert torch.equal(found[healthy], wanted[healthy])
    key, value = kv.read(0, torch.tensor([sick]))
    assert int((~key.isfinite()).all(-1).sum()) == 1 and value.isfinite().all()
    assert kv.read(0, torch.tensor(healthy))[1].isfinite().all()
    scales = to_bytes(stored[0], kept)[1]
    assert int((scales > 0).sum()) == scales.numel() - 1  # of the key that tells of the value


@pytest.mark.parametrize("kept", BYTES.values(), ids=BYTES)
def test_fused_layers_keep_what_plain_ones_keep_in_bytes(
    kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all_numbers(monkeypatch)
    loaded = replace(as_loaded(tiny_model("llama")), kept_kv=kept)
    forward = PackedForward(loaded)
    plain, kept_plain = packed_sample(forward), packed_sample(forward, kept)
    assert fuse_layers(loaded, backend(), BLOCK_SIZE) == len(loaded.layers)
    forward = PackedForward(loaded)
    forward.backend = backend()
    distance = logits_distance(packed_sample(forward, kept), kept_plain)
    assert distance < logits_distance(kept_plain, plain) / 10


@pytest.mark.parametrize("part", ["input_layernorm", "self_attn.q_norm", "mlp.down_proj"])
def test_a_layer_that_does_more_than_its_class_says_is_not_fused(part: str) -> None:
    layer = as_loaded(tiny_model("qwen3")).model.base_model.layers[0]
    assert FusedLayer.fits(layer, torch.float32)
    assert not FusedLayer.fits(layer, torch.bfloat16)
    layer.get_submodule(part).register_forward_hook(lambda *_: None)
    assert not FusedLayer.fits(layer, torch.float32)


def test_a_layer_that_answers_otherwise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = as_loaded(tiny_model("llama"))
    monkeypatch.setattr(fused_products, "gate", lambda *call: 1.1 * gate(*call))
    assert fuse_layers(loaded, backend(), BLOCK_SIZE) == 0
    assert not any(isinstance(module, FusedLayer) for module in loaded.model.modules())


@pytest.mark.parametrize("name", OF_ONE_ROW._fields)
def test_a_layer_whose_one_row_answers_otherwise_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = as_loaded(tiny_model("llama"))
    right = getattr(OF_ONE_ROW, name)
    wrong = OF_ONE_ROW._replace(**{name: lambda *call: 1.1 * right(*call)})
    monkeypatch.setattr(fused_model, "OF_ONE_ROW", wrong)
    assert fuse_layers(loaded, backend(), BLOCK_SIZE) == 0


@pytest.mark.parametrize(("family", "num_parts"), [("gemma3n", 38), ("llama", 1), ("cohere2", 1)])
def test_norms_and_mlps_that_no_layer_has_taken_in_are_fused_by_themselves(
    family: str, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_forward, "choose_backend", lambda *_, **__: backend())
    loaded = as_loaded(tiny_model(family))
    before = packed_sample(PackedForward(loaded))
    found = with_fused_layers(loaded, BLOCK_SIZE, lambda: pytest.fail("the kernels do not run"))
    assert found.kernels_used.endswith(f"norms and MLPs fused: {num_parts}")
    after = packed_sample(PackedForward(found))
    assert packed_difference(after, before, loaded.dtype, has_blocks=False) is None


def test_kernels_that_do_not_run_leave_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of registers")

    loaded = replace(as_loaded(tiny_model("llama")), kernels_used="for CUDA")
    monkeypatch.setattr(packed_forward, "choose_backend", lambda *_, **__: backend())
    monkeypatch.setattr(fused_products, "gate", broken)
    fresh = as_loaded(tiny_model("llama"))
    found = with_fused_layers(loaded, BLOCK_SIZE, lambda: fresh)
    assert found.model is fresh.model and found.kernels_used == "for CUDA"


@pytest.mark.parametrize(("family", "bounds"), FAMILIES.items())
def test_a_layer_is_ten_launches(
    family: str, bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is the merging of contexts that were cut into runs; experts are some more."""
    loaded = tiny(family)
    fuse_experts(loaded, BLOCK_SIZE), fuse_routers(loaded, BLOCK_SIZE)
    name = next(name for name, part in loaded.model.named_modules() if FusedLayer.fits(part, loaded.dtype))
    observation = observe(loaded, [name], BLOCK_SIZE)
    original = loaded.model.get_submodule(name)
    made = FusedLayer(original, observation.calls[0])
    made.next_norm = made.input_norm if made.ends_in_sum else None  # it stands for the one behind it, too
    count = LaunchCount()
    for module in (triton_attention, fused_products, fused_norms, fused_experts, fused_router):
        for kernel in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, CountedKernel(kernel, count))
    inputs, num_blocks = scattered_step([Chunk(700), Chunk(3)], BLOCK_SIZE)
    kv = PackedForward(loaded).make_kv(num_blocks, BLOCK_SIZE)
    context = AttentionContext(inputs, kv, backend())
    seen = observation.seen[name]
    hidden, rotation = torch.randn(1, 2, loaded.config.hidden_size), seen.options["position_embeddings"]
    brought = [part if part is None else part[:, :2] for part in seen.args[1:]]
    options: dict[str, Any] = {
        **seen.options,
        "position_embeddings": tuple(part[:, :2] for part in rotation),
        "attention_mask": None,
        CONTEXT_KEYWORD: context,
    }
    run_counted(count, lambda: original(hidden, *brought, **options))  # lays out the step's work
    before = run_counted(count, lambda: original(hidden, *brought, **options))
    answers = [hidden]
    for _ in range(2):
        ours = run_counted(count, lambda: answers.append(made(answers[-1], *brought, **options)))
    (num_launches, least), merges = bounds, int(made.call.window is None)
    assert len(ours) == num_launches + merges and ours.count("attend_kernel") == 1, ours
    assert ours.count("merge_kernel") == merges, ours
    assert len(before) >= least
