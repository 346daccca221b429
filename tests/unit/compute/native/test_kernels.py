"""Each kernel against the same in float32, over shapes that are odd where they may be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.compute.attention.huge_pages import PAGE_BYTES
from engine.compute.native.forms import NativeUnavailable
from engine.compute.native.kernels import HeadForm, NativeKernels, NormWeights
from engine.compute.native.records import Activation, NormKind

# Half a unit in the last place of bfloat16, and as much for what is rounded on the way.
ROUNDING = 2**-8

pytestmark = pytest.mark.usefixtures("two_threads")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_close(found: torch.Tensor, expected: torch.Tensor, slack: float = 1.0) -> None:
    """Within rounding of each number, and of the rows' size where terms cancel."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=ROUNDING * slack, atol=2e-3 * slack)


@pytest.mark.parametrize("n", [0, 1, 2, 11, 12, 13, 95, 96, 97, 200])
@pytest.mark.parametrize(("width", "out"), [(2, 32), (34, 32), (576, 96), (64, 224)])
def test_linear(kernels: NativeKernels, n: int, width: int, out: int) -> None:
    weight, bias, x = noise(out, width), noise(out, seed=1), noise(n, width, seed=2) / width**0.5
    for added in (None, bias):
        expected = x.float() @ weight.float().T + (0 if added is None else added.float())
        assert_close(kernels.linear(x, kernels.pack(weight, added)), expected)


def test_what_can_be_packed() -> None:
    for out, width, fits in [(32, 2, True), (33, 2, False), (31, 2, False), (32, 3, False), (64, 34, True)]:
        assert NativeKernels.packs(torch.zeros(out, width), torch.float32) is fits
    assert not NativeKernels.packs(torch.zeros(32, 2), torch.bfloat16)


def test_pack_takes_weights_in_any_layout(kernels: NativeKernels) -> None:
    weight = noise(64, 96)
    sideways = weight.T.contiguous().T
    assert not sideways.is_contiguous()
    assert torch.equal(kernels.pack(sideways).packed, kernels.pack(weight).packed)


def flags_of_mapping(address: int) -> list[str] | None:
    """What Linux knows of the mapping that holds `address`; None on a system without huge pages."""
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        return None
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(found[1], 16) <= address < int(found[2], 16)
        elif holds and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is in no mapping")


def test_large_weights_lie_in_huge_pages(kernels: NativeKernels) -> None:
    weight = noise(64, 64).repeat(64, 64)  # 32 MiB
    packed = kernels.pack(weight)
    assert packed.packed.untyped_storage().nbytes() >= weight.nbytes + PAGE_BYTES, (
        "a region, with its alignment"
    )
    flags = flags_of_mapping(packed.packed.data_ptr())
    assert flags is None or "hg" in flags, "the system was not asked for huge pages"
    x = noise(3, 4096, seed=2) / 64
    assert_close(kernels.linear(x, packed), x.float() @ weight.float().T)


@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize("n", [0, 1, 5, 130])
@pytest.mark.parametrize("width", [16, 48, 576])
def test_normalize(kernels: NativeKernels, n: int, width: int, kind: NormKind) -> None:
    x, weight, bias = 3 * noise(n, width) + 1, noise(width, seed=1), noise(width, seed=2)
    norm = NormWeights(weight, 1e-5, kind, bias if kind is NormKind.CENTRED else None)
    rows = x.float() - (x.float().mean(-1, keepdim=True) if kind is NormKind.CENTRED else 0)
    expected = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
    expected = expected * (weight.float() + (kind is NormKind.ONE_MORE))
    if kind is NormKind.CENTRED:
        expected += bias.float()
    assert_close(kernels.normalize(x, norm), expected, slack=2)
    nothing = torch.zeros(1, width, dtype=torch.bfloat16)
    moved = bias[None] if kind is NormKind.CENTRED else nothing
    assert torch.equal(kernels.normalize(nothing, norm), moved)


def test_a_centred_norm_without_a_bias(kernels: NativeKernels) -> None:
    x, weight = noise(5, 64), noise(64, seed=1)
    found = kernels.normalize(x, NormWeights(weight, 1e-5, NormKind.CENTRED))
    assert_close(found, torch.nn.functional.layer_norm(x.float(), (64,), weight.float(), eps=1e-5), slack=2)


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """In float64."""
    if activation is Activation.SILU:
        return torch.nn.functional.silu(x.double())
    return torch.nn.functional.gelu(
        x.double(), approximate="tanh" if activation is Activation.GELU_TANH else "none"
    )


ALONE = (Activation.SILU, Activation.GELU_TANH, Activation.GELU)  # that need nothing to be multiplied with


@pytest.mark.parametrize("activation", ALONE)
@pytest.mark.parametrize("n", [0, 1, 7, 40])
@pytest.mark.parametrize("width", [16, 96, 1536])
def test_activate(kernels: NativeKernels, n: int, width: int, activation: Activation) -> None:
    x = 4 * noise(n, 2 * width)
    gate, up = x.chunk(2, dim=-1)
    assert_close(kernels.activate(x, activation), activated(gate, activation) * up, slack=2)
    alone = kernels.activate(gate.contiguous(), activation, is_gated=False)
    assert_close(alone, activated(gate, activation))


@pytest.mark.parametrize("n", [0, 1, 40])
def test_a_limited_gate(kernels: NativeKernels, n: int) -> None:
    """Rounded as often as torch rounds it, so that the bits are the same but where a sigmoid's are."""
    x = 6 * noise(n, 192)
    gate, up = x.chunk(2, dim=-1)
    assert n == 0 or ((gate > 7).any() and (up.abs() > 7).any())
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    found = kernels.activate(x, Activation.SWIGLU_LIMITED)
    assert (found == expected).float().mean() > 0.99 or n == 0
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("activation", ALONE)
def test_activate_far_out(kernels: NativeKernels, activation: Activation) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-3, -1e-3, 80.0, -80.0, 300.0, -300.0] * 2).bfloat16()
    found = kernels.activate(gate[None], activation, is_gated=False)
    assert_close(found[0], activated(gate, activation))


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (9, 3)])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rotate_and_write(
    kernels: NativeKernels, dim: int, heads: int, kv_heads: int, with_norms: bool
) -> None:
    n, blocks, block_size = 5, 4, 3
    qkv = noise(n, (heads + 2 * kv_heads) * dim)
    angles = 3 * noise(n, dim // 2, seed=4).float().repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    weights = [noise(dim, seed=seed) for seed in (1, 2)]
    form = head_form(*weights) if with_norms else HeadForm()
    pages = (noise(blocks, kv_heads, block_size, dim), noise(blocks, kv_heads, block_size, dim, seed=3))
    before = tuple(page.clone() for page in pages)
    slots = torch.tensor([11, 0, 4, 7, 8])
    found = kernels.rotate_and_write(qkv, (cos, sin), form, pages, slots)

    heads_of = qkv.view(n, -1, dim)
    query, key = heads_of[:, :heads], heads_of[:, heads : heads + kv_heads]
    value = heads_of[:, heads + kv_heads :]
    if with_norms:
        query, key = normed(query, weights[0]), normed(key, weights[1])
    assert_same_vectors(found, rotated(query, cos, sin), exact=not with_norms)
    written = torch.zeros(blocks * block_size, dtype=torch.bool)
    written[slots] = True
    by_slot = [page.transpose(1, 2).flatten(0, 1) for page in (*pages, *before)]  # [slots, kv_heads, dim]
    assert_same_vectors(by_slot[0][slots], rotated(key, cos, sin), exact=not with_norms)
    assert torch.equal(by_slot[1][slots], value)
    for page, old in zip(by_slot[:2], by_slot[2:], strict=True):
        assert torch.equal(page[~written], old[~written])


@pytest.mark.parametrize("form", [HeadForm(), HeadForm(at_once=True), HeadForm(in_pairs=True)])
@pytest.mark.parametrize("rotary", [0, 32, 64, 96])
def test_part_of_a_head_is_rotated(kernels: NativeKernels, rotary: int, form: HeadForm) -> None:
    n, heads, dim = 3, 2, 96
    qkv = noise(n, 3 * heads * dim)
    angles = 3 * noise(n, rotary // 2, seed=4).float().repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    query = qkv.view(n, -1, dim)[:, :heads].float()
    turned = query[..., :rotary]
    if form.in_pairs:  # neighbours brought half a head apart, and back
        turned = turned.view(n, heads, -1, 2).transpose(-1, -2).flatten(-2)
    turned = rotated(turned, cos, sin)
    if form.in_pairs:
        turned = turned.view(n, heads, 2, -1).transpose(-1, -2).flatten(-2)
    pages = noise(1, heads, n, dim), noise(1, heads, n, dim)
    rotation = (cos, sin) if rotary else None
    found = kernels.rotate_and_write(qkv, rotation, form, pages, torch.arange(n))
    assert torch.equal(found[..., rotary:].float(), query[..., rotary:])
    assert_same_vectors(found, torch.cat((turned, query[..., rotary:]), dim=-1), exact=False)
    if form.at_once:
        assert torch.equal(found[..., :rotary], turned.bfloat16())


def test_norms_of_all_heads_together(kernels: NativeKernels) -> None:
    n, heads, kv_heads, dim = 3, 4, 2, 32
    qkv = noise(n, (heads + 2 * kv_heads) * dim)
    weights = noise(heads * dim, seed=1), noise(kv_heads * dim, seed=2)
    form = replace(head_form(*weights), norms_rows=True)
    query, key, value = torch.tensor_split(qkv.clone(), [heads * dim, (heads + kv_heads) * dim], dim=-1)
    pages = noise(1, kv_heads, n, dim), noise(1, kv_heads, n, dim)
    found = kernels.rotate_and_write(qkv, None, form, pages, torch.arange(n))
    assert_same_vectors(found, normed(query, weights[0]).view(n, heads, dim), exact=False)
    assert_same_vectors(
        pages[0][0].transpose(0, 1), normed(key, weights[1]).view(n, kv_heads, dim), exact=False
    )
    assert torch.equal(pages[1][0].transpose(0, 1), value.view(n, kv_heads, dim))


@pytest.mark.parametrize("norms_rows", [False, True])
@pytest.mark.parametrize("kv_parts", [1, 2])
@pytest.mark.parametrize("dim", [32, 96, 512])
def test_values_are_normed_and_may_be_keys(
    kernels: NativeKernels, dim: int, kv_parts: int, norms_rows: bool
) -> None:
    """Keys as they were projected, whatever becomes of them."""
    n, heads, kv_heads = 5, 4, 2
    qkv = noise(n, (heads + kv_parts * kv_heads) * dim)
    parts = qkv.clone().view(n, -1, dim)
    query, key, value = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, -kv_heads:]
    widths = (heads * dim, kv_heads * dim, dim) if norms_rows else (dim, dim, dim)
    weights = [noise(width, seed=seed) for seed, width in enumerate(widths, 1)]
    norms = [NormWeights(weight, 1e-6, NormKind.AT_ONCE) for weight in weights]
    form = HeadForm(norms[0], norms[1], norms[2], norms_rows=norms_rows, kv_parts=kv_parts)
    pages = noise(1, kv_heads, n, dim), noise(1, kv_heads, n, dim)
    found = kernels.rotate_and_write(qkv, None, form, pages, torch.arange(n))
    written = [page[0].transpose(0, 1) for page in pages]  # [n, kv_heads, dim]
    for ours, theirs, weight in zip((found, *written), (query, key, value), weights, strict=True):
        rows = theirs.reshape(n, -1, len(weight))  # of a head, or of all of a token
        assert_same_vectors(ours, normed_at_once(rows, weight).view(theirs.shape), exact=False)


def test_another_layers_keys_and_values_are_not_written(kernels: NativeKernels) -> None:
    n, heads, kv_heads, dim = 5, 6, 2, 64
    queries, rest = noise(n, heads * dim), noise(n, 2 * kv_heads * dim, seed=1)
    angles = 3 * noise(n, dim // 2, seed=4).float().repeat(1, 2)
    rotation = angles.cos().bfloat16(), angles.sin().bfloat16()
    form = HeadForm(NormWeights(noise(dim, seed=2), 1e-6))
    pages = noise(2, kv_heads, 3, dim), noise(2, kv_heads, 3, dim, seed=3)
    before = [page.clone() for page in pages]
    slots = torch.tensor([5, 0, 4, 1, 2])
    found = kernels.rotate_and_write(queries.clone(), rotation, replace(form, kv_parts=0), pages, slots)
    assert all(map(torch.equal, pages, before))
    both = torch.cat((queries, rest), dim=-1)
    assert torch.equal(found, kernels.rotate_and_write(both, rotation, form, pages, slots))


def head_form(query: torch.Tensor, key: torch.Tensor) -> HeadForm:
    return HeadForm(NormWeights(query, 1e-6), NormWeights(key, 1e-6))


def normed(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As transformers computes it in bfloat16."""
    wide = heads.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()


def normed_at_once(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = heads.float()
    return (weight.float() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers computes it in bfloat16."""
    left, right = heads.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return heads * cos[:, None] + turned * sin[:, None]


def assert_same_vectors(found: torch.Tensor, expected: torch.Tensor, exact: bool) -> None:
    """Bit for bit, or but for a root that is rounded otherwise."""
    if exact:
        assert torch.equal(found, expected)
    distances = (found.float() - expected.float()).norm(dim=-1)
    assert (distances <= ROUNDING * expected.float().norm(dim=-1)).all()


def test_what_is_not_finite_is_not_hidden(kernels: NativeKernels) -> None:
    broken = torch.full((1, 64), float("nan"), dtype=torch.bfloat16)
    assert kernels.activate(broken, Activation.SILU).isnan().all()
    assert kernels.normalize(broken, NormWeights(noise(64), 1e-5)).isnan().all()
    assert kernels.linear(broken, kernels.pack(noise(32, 64))).isnan().all()


def test_a_row_is_the_same_bits_in_any_company(kernels: NativeKernels) -> None:
    for threads in (1, 2, 3):
        kernels.team.resize(threads)
        for width in (2, 34, 576):  # with and without inputs that fill no step of a matrix unit
            check_company(kernels, width)


def check_company(kernels: NativeKernels, width: int) -> None:
    x, weights = noise(210, width), kernels.pack(noise(192, width, seed=1), noise(192, seed=2))
    together = kernels.linear(x, weights)
    for n in (1, 2, 3, 5, 12, 13, 16, 17, 33, 96, 97):
        for first in (0, 100):
            alone = kernels.linear(x[first : first + n].contiguous(), weights)
            assert torch.equal(alone, together[first : first + n])
    x, weight = noise(210, 576), noise(576, seed=3)
    assert torch.equal(
        kernels.normalize(x, NormWeights(weight, 1e-5))[7:8],
        kernels.normalize(x[7:8], NormWeights(weight, 1e-5)),
    )
    assert torch.equal(kernels.activate(x, Activation.SILU)[9:10], kernels.activate(x[9:10], Activation.SILU))


@pytest.mark.parametrize("width", [68, 576])
def test_sums_are_taken_in_one_order(kernels: NativeKernels, width: int) -> None:
    """All terms cancel: what is left is how sums were rounded, which no rounding to bfloat16 hides."""
    x, weight = noise(97, width // 2), noise(192, width // 2, seed=1)
    x, packed = torch.cat((x, -x), dim=1), kernels.pack(torch.cat((weight, weight), dim=1))
    together = kernels.linear(x, packed)
    assert (together != 0).float().mean() > 0.1
    for n in (1, 2, 3, 16, 17, 33):
        for first in range(0, 64, n):
            rows = slice(first, first + n)
            assert torch.equal(kernels.linear(x[rows].contiguous(), packed), together[rows])


def test_what_is_no_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"#!/bin/sh")
    with pytest.raises(NativeUnavailable, match=r"kernels.so cannot be loaded"):
        NativeKernels(tmp_path / "kernels.so")
