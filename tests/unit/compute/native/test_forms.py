"""Every form of the kernels that this CPU can run, in every dtype: right, and the same bits in any crowd."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.attention import CpuAttention, LayerCall, PagedRows, ReferenceAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.native import install
from engine.compute.native.block_panels import joined
from engine.compute.native.decoder import NativeDecoder
from engine.compute.native.forms import FORMS, CpuForm, NativeUnavailable, choose_build, forms_of
from engine.compute.native.kernels import HeadForm, NativeKernels, NormWeights
from engine.compute.native.quantization import Q4_1, Q8_0
from engine.compute.native.records import Activation, NormKind
from engine.compute.native.state_scans import NativeScans
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.sampling.sampler import Sampler
from tests.support.attention_noise import Chunk, Noise, attend, random_tree
from tests.support.expert_mixtures import Mixture, random_rows
from tests.support.float_codes import every_float, float_numbers
from tests.support.gguf_blocks import BLOCK_FORMATS, in_blocks, random_blocks, unpacked
from tests.support.native import compiled_draw, compiled_kernels, fastest_form
from tests.support.packed import as_loaded, random_schedule, random_tokens, run_schedule
from tests.support.sampling_reference import Row, inputs_of
from tests.support.scan_cases import ScanCase, delta_case, selective_case, structured_case
from tests.support.tiny_models import tiny_model

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-17}
# Each form and each dtype once, but for the fastest in bfloat16, which other modules test. Compiling all
# takes longer.
ALWAYS = ("v3 bfloat16", "avx512 float16", "v3 float32", "neon bfloat16", "neon float16", "neon float32")
# Of these with formats, which take several times as long to compile.
WITH_FORMATS = ("v3 float32", "neon float32")


@dataclass(frozen=True)
class Side:
    """Kernels, and numbers to try them with."""

    kernels: NativeKernels
    form: str

    @property
    def dtype(self) -> torch.dtype:
        return self.kernels.dtype

    @property
    def rounding(self) -> float:
        return ROUNDING[self.dtype]

    def noise(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def assert_close(self, found: torch.Tensor, expected: torch.Tensor, slack: float = 2.0) -> None:
        near = self.rounding * slack
        torch.testing.assert_close(found.double(), expected.double(), rtol=near, atol=near / 4)


# Of what these have and avx512 has not no draw is made, so no library of theirs is compiled for draws alone.
DRAW_AS_AVX512 = {"vnni", "bf16", "amx"} - {fastest_form()}
FORMS_THAT_DRAW = [
    pytest.param(form.name, marks=pytest.mark.slow if form.name in DRAW_AS_AVX512 else ())
    for form in forms_of()
]


def builds(always: tuple[str, ...]) -> list[object]:
    names = [f"{form.name} {n}" for form in forms_of() for n, dtype in DTYPES.items() if dtype in form.dtypes]
    return [pytest.param(name, id=name, marks=() if name in always else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=builds(ALWAYS))
def side(request: pytest.FixtureRequest) -> Side:
    return side_of(request.param, formats=request.param in WITH_FORMATS)


@pytest.fixture(scope="module", params=builds(WITH_FORMATS))
def side_with_formats(request: pytest.FixtureRequest) -> Side:
    return side_of(request.param, formats=True)


def side_of(name: str, formats: bool) -> Side:
    form, dtype = name.split()
    kernels = compiled_kernels(DTYPES[dtype], form, formats=formats)
    kernels.team.resize(2)
    return Side(kernels, form)


@pytest.mark.parametrize(("width", "out"), [(2, 32), (34, 64), (576, 96)])
def test_products(side: Side, width: int, out: int) -> None:
    weight, bias = side.noise(out, width), side.noise(out, seed=1)
    packed = side.kernels.pack(weight, bias)
    x = side.noise(200, width, seed=2) / width**0.5
    whole = side.kernels.linear(x, packed)
    side.assert_close(whole, x.double() @ weight.double().T + bias.double())
    for threads in (1, 3, 2):
        side.kernels.team.resize(threads)
        for n in (1, 2, 5, 6, 7, 8, 9, 17, 33, 95, 97):
            assert torch.equal(side.kernels.linear(x[3 : 3 + n].contiguous(), packed), whole[3 : 3 + n])


def test_experts(side: Side) -> None:
    mixture = Mixture.random(64, 96, side.dtype)
    x, chosen, shares = random_rows(200, 64, side.dtype)
    packed = mixture.packed(side.kernels)
    whole = packed(x, chosen, shares)
    expected = mixture.expected(x, chosen, shares)
    assert ((whole.double() - expected).norm(dim=-1) <= 4 * side.rounding * expected.norm(dim=-1)).all()
    for threads in (1, 3, 2):
        side.kernels.team.resize(threads)
        for n in (1, 5, 13, 97):
            rows = slice(3, 3 + n)
            assert torch.equal(packed(x[rows].contiguous(), chosen[rows], shares[rows]), whole[rows])


def test_experts_with_rounded_weights(side_with_formats: Side) -> None:
    side = side_with_formats
    mixture = Mixture.random(64, 96, side.dtype)
    x, chosen, shares = random_rows(40, 64, side.dtype)
    expected = mixture.expected(in_blocks(x), chosen, shares)
    for block_format, near in ((Q8_0, 0.02), (Q4_1, 0.15)):
        packed = mixture.packed(side.kernels, block_format)
        whole = packed(x, chosen, shares)
        assert (whole.double() - expected).norm() <= near * expected.norm()
        for n in (1, 2, 7):
            rows = slice(3, 3 + n)
            assert torch.equal(packed(x[rows].contiguous(), chosen[rows], shares[rows]), whole[rows])


def test_products_with_rounded_weights(side_with_formats: Side) -> None:
    side = side_with_formats
    weight, x = side.noise(96, 160), side.noise(40, 160, seed=2)
    for block_format, near in ((Q8_0, 0.01), (Q4_1, 0.1)):
        packed = side.kernels.quantize(side.kernels.pack(weight), block_format)
        found = side.kernels.read_rows(packed, torch.arange(96)).float()
        assert (found - weight.float()).norm() <= near * weight.float().norm()
        whole = side.kernels.linear(x, packed).double()
        expected = in_blocks(x) @ found.double().T
        assert (whole - expected).norm() <= (0.001 + side.rounding) * expected.norm()


def test_products_with_stored_blocks(side_with_formats: Side) -> None:
    side = side_with_formats
    x = side.noise(40, 512, seed=2)
    for kind in BLOCK_FORMATS:
        stored = random_blocks(kind, 72, 512)
        packed = joined([side.kernels.pack_blocks(int(kind), stored, 512)])
        exact = unpacked(kind, stored)
        whole = side.kernels.linear(x, packed)
        expected = in_blocks(x) @ exact.double().T
        near = side.rounding * 2
        torch.testing.assert_close(
            whole.double(), expected, rtol=near, atol=1e-5 * float(expected.abs().max())
        )
        for n in (1, 2, 3, 4, 7):
            assert torch.equal(side.kernels.linear(x[3 : 3 + n].contiguous(), packed), whole[3 : 3 + n])
        side.assert_close(side.kernels.read_rows(packed, torch.arange(72)), exact)


def test_one_very_large_input_spoils_no_other(side_with_formats: Side) -> None:
    """As of a channel that a model has made large: wherever it is, its neighbours keep their own scale.

    What the answer's own type rounds of the large product is not theirs.
    """
    side = side_with_formats
    x, places = side.noise(128, 512, seed=2), torch.arange(128)
    x.view(128, 128, 4)[places, places] = 0
    exact_x, at = x.double(), (places, 4 * places + places % 4)
    x[at] = 300
    for kind in BLOCK_FORMATS:
        stored = random_blocks(kind, 64, 512)
        exact = unpacked(kind, stored).double()
        found = side.kernels.linear(x, joined([side.kernels.pack_blocks(int(kind), stored, 512)]))
        rest = found.double() - 300 * exact[:, at[1]].T
        expected = exact_x @ exact.T
        rounding = torch.finfo(x.dtype).eps / 2 * found.double().norm(dim=-1)
        assert ((rest - expected).norm(dim=-1) <= 0.02 * expected.norm(dim=-1) + rounding).all()


def test_products_with_floats_of_8_bits(side_with_formats: Side) -> None:
    side = side_with_formats
    codes, scales = every_float(72, 576), 0.001 + side.noise(72, 5, seed=3).float().abs() / 100
    packed = joined([side.kernels.pack_floats(codes, scales)])
    x = side.noise(40, 576, seed=2) / 24
    whole = side.kernels.linear(x, packed)
    side.assert_close(whole, x.double() @ float_numbers(codes, scales).T)
    for n in (1, 2, 3, 4, 7):
        assert torch.equal(side.kernels.linear(x[3 : 3 + n].contiguous(), packed), whole[3 : 3 + n])


def test_rows(side: Side) -> None:
    x, weight = 3 * side.noise(41, 96), side.noise(96, seed=1)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    side.assert_close(side.kernels.normalize(x, NormWeights(weight, 1e-5)), normed * weight.double(), slack=6)
    gate, up = (4 * side.noise(41, 192, seed=2)).chunk(2, dim=-1)
    gate[0, :4] = torch.tensor([0.0, -0.0, 300.0, -300.0])
    found = side.kernels.activate(torch.cat((gate, up), dim=-1), Activation.SILU)
    side.assert_close(found, torch.nn.functional.silu(gate.double()) * up.double(), slack=8)
    assert side.kernels.activate(torch.full((1, 64), torch.nan).to(side.dtype), Activation.SILU).isnan().all()


@pytest.mark.parametrize("dim", [32, 96])
def test_rotation(side: Side, dim: int) -> None:
    heads, kv_heads, n = 4, 2, 5
    qkv = side.noise(n, (heads + 2 * kv_heads) * dim)
    angles = 3 * torch.randn(n, dim // 2, generator=torch.Generator().manual_seed(4)).repeat(1, 2)
    cos, sin = angles.cos().to(side.dtype), angles.sin().to(side.dtype)
    weights = side.noise(dim, seed=1), side.noise(dim, seed=2)
    form = HeadForm(NormWeights(weights[0], 1e-6), NormWeights(weights[1], 1e-6))
    pages = tuple(torch.zeros(4, kv_heads, 3, dim, dtype=side.dtype) for _ in range(2))
    slots = torch.tensor([11, 0, 4, 7, 8])
    found = side.kernels.rotate_and_write(qkv, (cos, sin), form, (pages[0], pages[1]), slots)
    rows = qkv.view(n, -1, dim).double()
    turned = rows[:, : heads + kv_heads]
    scales = torch.stack([weights[head >= heads].double() for head in range(heads + kv_heads)])
    expected = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + 1e-6) * scales
    left, right = expected.chunk(2, dim=-1)
    expected = expected * cos.double()[:, None] + torch.cat((-right, left), -1) * sin.double()[:, None]
    size = expected.norm(dim=-1, keepdim=True)
    by_slot = [page.transpose(1, 2).flatten(0, 1)[slots] for page in pages]  # [n, kv_heads, dim]
    side.assert_close(found / size[:, :heads], expected[:, :heads] / size[:, :heads], slack=4)
    side.assert_close(by_slot[0] / size[:, heads:], expected[:, heads:] / size[:, heads:], slack=4)
    assert torch.equal(by_slot[1], qkv.view(n, -1, dim)[:, heads + kv_heads :])


@pytest.mark.parametrize("kv_parts", [1, 2])
@pytest.mark.parametrize("dim", [32, 96])
def test_values_are_normed(side: Side, dim: int, kv_parts: int) -> None:
    """As they were projected, where keys are values, too."""
    heads, kv_heads, n = 4, 2, 5
    qkv = side.noise(n, (heads + kv_parts * kv_heads) * dim)
    value = qkv.view(n, -1, dim)[:, -kv_heads:].double()
    weight = side.noise(dim, seed=1)
    norms = [NormWeights(each, 1e-6, NormKind.AT_ONCE) for each in (side.noise(dim, seed=2), weight)]
    form = HeadForm(norms[0], norms[0], norms[1], kv_parts=kv_parts)
    pages = side.noise(4, kv_heads, 3, dim), side.noise(4, kv_heads, 3, dim)
    slots = torch.tensor([11, 0, 4, 7, 8])
    side.kernels.rotate_and_write(qkv, None, form, pages, slots)
    expected = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    side.assert_close(pages[1].transpose(1, 2).flatten(0, 1)[slots], expected)


@pytest.mark.by_default
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("dim", [32, 96, 128])
def test_attention(side: Side, dim: int, softcap: float | None, window: int | None) -> None:
    rng = np.random.default_rng(0)
    chunks = [Chunk(c) for c in (0, 15, 63, 64, 65, 511, 1025)] + [Chunk(5, 70), Chunk(500, 40)]
    chunks += [random_tree(rng, 62, 40, 0.6), random_tree(rng, 600, 30, 0.9)]
    options: dict[str, Any] = {"heads_of_each": 3, "block_size": 7, "softcap": softcap, "dtype": side.dtype}
    noise = Noise(chunks, LayerKv(2, dim, dim, window), **options)
    ours = attend(noise, CpuAttention(side.kernels), CPU, side.dtype, poisoned=True)
    expected = attend(noise, ReferenceAttention(), CPU, torch.float32)
    near = max(2 * side.rounding, 1e-4 if side.dtype is torch.float16 else 0)  # the exponential's own
    torch.testing.assert_close(ours.float(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("dim", [32, 96, 128])
def test_attention_over_integers(side_with_formats: Side, dim: int) -> None:
    side = side_with_formats
    chunks = [Chunk(c) for c in (0, 64, 511, 1025)] + [
        Chunk(5, 70),
        random_tree(np.random.default_rng(0), 62, 40),
    ]
    noise = Noise(chunks, LayerKv(2, dim, dim, 300), block_size=7, dtype=side.dtype)
    ours = attend(noise, CpuAttention(side.kernels), CPU, side.dtype, poisoned=True, kept=torch.int8)
    expected = attend(noise, ReferenceAttention(), CPU, torch.float32, kept=torch.int8)
    # Queries and weights are rounded to a 32767th of their largest. Done in float64, that alone makes 2.6e-4
    # in a few of 200,000 such results; a wrong scale or position makes a hundred times as much.
    near = max(2 * side.rounding, 1e-3)
    torch.testing.assert_close(ours.float(), expected, rtol=near, atol=near)


def test_rotation_writes_integers_as_tensor_operations_do(side_with_formats: Side) -> None:
    side, dim = side_with_formats, 96
    qkv = side.noise(5, (4 + 2 * 2) * dim)
    qkv[1, -dim:], qkv[2, -dim] = 0, torch.nan
    rotation = (torch.ones(5, dim, dtype=side.dtype), torch.zeros(5, dim, dtype=side.dtype))
    slots = torch.tensor([11, 0, 4, 7, 8])
    ours, expected = (KvTensors((LayerKv(2, dim, dim),), 4, 3, side.dtype, CPU, torch.int8) for _ in range(2))
    side.kernels.rotate_and_write(qkv, rotation, HeadForm(), (ours.keys[0], ours.values[0]), slots)
    key, value = qkv.view(5, -1, dim)[:, 4:6], qkv.view(5, -1, dim)[:, 6:]
    expected.write(0, expected.rows_of(slots, 2), key, value)
    pairs = zip(ours.read(0, torch.arange(4)), expected.read(0, torch.arange(4)), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_weights_of_8_bits_need_no_formats(side: Side) -> None:
    weight, x = side.noise(96, 64), side.noise(5, 64, seed=2)
    rounded = side.kernels.quantize(side.kernels.pack(weight), 8)
    found, wanted = side.kernels.linear(x, rounded).double(), x.double() @ weight.double().T
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.02
    assert side.kernels.packs_format(2, 64) is side.kernels.has_formats


def test_kernels_without_formats_refuse_integers(side: Side) -> None:
    if side.kernels.has_formats:
        pytest.skip("these have formats")
    pages = torch.empty(1, 1, 16, 36, dtype=torch.int8)
    ones = torch.ones(1, dtype=torch.int32)
    with pytest.raises(NativeUnavailable, match="int8"):
        side.kernels.attention_record(PagedRows(ones, ones, ones.view(1, 1), None, None), pages, 2)


@pytest.mark.parametrize("kept", [None, torch.int8])
def test_attention_is_the_same_bits_in_any_company(side: Side, kept: torch.dtype | None) -> None:
    if kept is torch.int8 and not side.kernels.has_formats:
        pytest.skip("needs kernels with formats")
    kv = KvTensors((LayerKv(3, 64, 64),), 70, 16, side.dtype, CPU, kept)
    slots = torch.arange(70 * 16)
    numbers = (side.noise(len(slots), 3, 64, seed=seed) for seed in range(2))
    kv.write(0, kv.rows_of(slots, 3), *numbers)
    query, other = side.noise(1100, 9, 64, seed=7), side.noise(1, 9, 64, seed=8)

    def attended(first: int, stop: int, beside: bool = False) -> torch.Tensor:
        parts = [Part([7] * stop, first, stop, range(69))] + [Part([7] * 9, 8, 9, [69])] * beside
        step = CpuAttention(side.kernels).plan(pack_step(parts, 16), kv)
        rows = torch.cat([query[first:stop], other]) if beside else query[first:stop]
        return step.attend(rows, LayerCall(0, 0.2))[: stop - first]

    side.kernels.team.resize(1)
    whole = attended(0, 1100)
    for threads in (2, 3):
        side.kernels.team.resize(threads)
        for first, stop in pairwise([0, 1, 64, 100, 511, 530, 1024, 1100]):
            assert torch.equal(attended(first, stop, beside=threads == 2), whole[first:stop])
        assert torch.equal(attended(1099, 1100), whole[1099:])


@pytest.mark.by_default
@pytest.mark.parametrize("family", ["llama", "qwen2_window", "qwen3", "gemma3"])
def test_a_model(side: Side, family: str) -> None:
    """As its modules in the same dtype, up to rounding; all layers in one call have the bits of each."""

    def logits(apart: bool, on_kernels: bool = True) -> torch.Tensor:
        loaded = as_loaded(tiny_model(family, dtype=side.dtype, head_dim=32))
        if on_kernels:
            loaded = install.install(loaded, side.kernels)
        if not apart:
            install.join_layers(loaded, side.kernels)
            assert isinstance(loaded.model.base_model, NativeDecoder)
        rng = np.random.default_rng(0)
        lengths = [33, 5, 20]
        steps = random_schedule(rng, lengths, max_chunk=9)
        found = run_schedule(
            PackedForward(loaded), [random_tokens(rng, length) for length in lengths], steps, 4, rng
        )
        return torch.cat(found)

    together = logits(apart=False)
    assert torch.equal(together, logits(apart=True))
    plain = logits(apart=True, on_kernels=False)
    near = 0.06 if side.dtype is torch.bfloat16 else 0.01 if side.dtype is torch.float16 else 1e-4
    assert (together - plain).norm() <= near * plain.norm()


@pytest.mark.parametrize("form", FORMS_THAT_DRAW)
def test_draws_are_those_of_tensor_operations(form: str) -> None:
    rng = np.random.default_rng(0)
    # No draw knows the models' numbers: the library that others have compiled will do.
    draw = compiled_draw(form, torch.float16 if f"{form} float16" in ALWAYS else torch.bfloat16)
    rows = [
        Row(
            temperature=float(rng.choice((0.0, 0.3, 1.0, 2.0))),
            top_k=int(rng.choice((0, 1, 40, 1000))),
            top_p=float(rng.choice((1.0, 0.9, 0.5))),
            min_p=float(rng.choice((0.0, 0.05))),
            seed=int(rng.integers(2**62)),
        )
        for _ in range(32)
    ]
    for vocab in (1, 17, 65, 3000):
        logits = torch.randn(32, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
        for given in (logits, logits.bfloat16(), logits.half()):
            found = Sampler(vocab, CPU, draw).sample(given, inputs_of(rows))
            assert found == Sampler(vocab, CPU).sample(given, inputs_of(rows))


def test_the_fastest_form_that_the_cpu_has_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    has = {name for form in FORMS["x86_64"] for name in form.needs}

    def without(*names: str) -> dict[str, bool]:
        return {name: name not in names for name in has}

    def allow(is_allowed: bool) -> None:
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda: is_allowed)

    allow(False)  # as Linux before 5.16 does
    monkeypatch.setattr(torch.cpu, "get_capabilities", without)
    assert choose_build(torch.bfloat16).form.name == "bf16"
    allow(True)
    cases = (
        ((), "amx"),
        (("amx_bf16",), "bf16"),
        (("avx512_bf16",), "vnni"),
        (("avx512_vnni",), "avx512"),
        (("avx512_vl",), "v3"),
    )
    for missing, expected in cases:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda missing=missing: without(*missing))
        assert choose_build(torch.bfloat16).form.name == expected
        assert choose_build(torch.float32).form.name == ("bf16" if expected == "amx" else expected)
        assert choose_build(torch.float16, "v3").form.name == "v3"
    with pytest.raises(
        NativeUnavailable, match=r"--cpu-kernels bf16: this CPU has v3 for models in bfloat16$"
    ):
        choose_build(torch.bfloat16, "bf16")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(NativeUnavailable, match="no instructions for kernels"):
        choose_build(torch.bfloat16)
    assert all(isinstance(form, CpuForm) for form in forms_of("arm64"))


@pytest.mark.parametrize(
    "case",
    [
        delta_case(4, 2, 32, 64),
        delta_case(4, 2, 32, 64, by_channel=True),
        structured_case(4, 2, 20, 32),
        selective_case(40, 16),
    ],
)
def test_states_advance_as_with_torch(side: Side, case: ScanCase) -> None:
    chosen = case.of((9, 1, 30), (4, 0, 0))
    for found, expected in zip(chosen.run(NativeScans(side.kernels)), chosen.run(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
