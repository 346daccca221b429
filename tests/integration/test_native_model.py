"""Models on the compiled kernels: the plain model's logits, and the same tokens whoever sits beside them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from config import load_settings
from engine import GenerationRequest, SamplingParams
from engine.compute.loading.loader import LoadedModel
from engine.compute.native import compiler, install
from engine.compute.native.experts import NativeExperts
from engine.compute.native.forms import NativeUnavailable
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeAttention, NativeLinear, NativeMlp, NativeNorm
from engine.compute.native.padded_linear import PaddedLinear
from engine.compute.native.router import NativeRouter
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.slot_mixers import SlotMixer
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import packed_sample
from engine.errors import StartRefused
from engine.plan.request import SpeculationOptions
from engine.plan.step_records import BlockCopy
from tests.support.native import (
    FLOAT32_FORM,
    PLAIN_FORM,
    build_here,
    compiled_home,
    compiled_kernels,
    pretend_every_instruction,
)
from tests.support.packed import as_loaded, plain_logits, random_schedule, random_tokens, run_schedule
from tests.support.recurrent import load_recurrent, run_pieces
from tests.support.repetitive_world import WORDS, repetitive_model
from tests.support.speculated import engine_of, single_threaded
from tests.support.tiny_models import RECURRENT_FAMILIES, save_tiny_model, tiny_model

OURS = (NativeAttention, NativeMlp, NativeNorm, NativeLinear)
# What each is, and how many of each of OURS stand in it, with those that are inside others.
WHOLE: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "llama": ({}, (2, 2, 5)),
    "llama tied": ({"tie_word_embeddings": True}, (2, 2, 5)),
    "qwen2": ({}, (2, 2, 5)),
    "qwen2_window": ({}, (2, 2, 5)),
    "qwen3": ({}, (2, 2, 5)),
    "mistral": ({}, (2, 2, 5)),
    "granite": ({}, (2, 2, 5)),
    "mixtral": ({}, (2, 0, 5)),
    "phi3": ({"head_dim": 64}, (2, 2, 5)),
    "cohere2": ({}, (2, 2, 3)),
    "exaone4": ({}, (2, 2, 5)),
    "gemma2": ({}, (2, 2, 9)),
    "gemma3": ({}, (4, 4, 17)),
    "gemma": ({}, (2, 2, 5)),
    "glm": ({"head_dim": 64}, (2, 2, 5)),
    "glm4": ({"head_dim": 64}, (2, 2, 9)),
    "ministral": ({}, (2, 2, 5)),
    "gpt_oss": ({}, (2, 0, 5)),
    "olmo2": ({}, (2, 2, 5)),
    "olmo3": ({}, (2, 2, 5)),
    "olmoe": ({"num_attention_heads": 2, "num_key_value_heads": 1}, (2, 0, 5)),
    "qwen3_moe": ({}, (2, 1, 5)),
    "seed_oss": ({}, (2, 2, 5)),
    "smollm3": ({}, (2, 2, 5)),
    "starcoder2": ({}, (2, 2, 5)),
}


# How many of their layers are mixtures.
MIXTURES = {"gpt_oss": 2, "mixtral": 2, "olmoe": 2, "qwen3_moe": 1}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture
def kernels() -> NativeKernels:
    return compiled_kernels()


def fresh(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LoadedModel:
    """A model of its own with heads as wide as the kernels need them."""
    return as_loaded(tiny_model(family.split()[0], dtype=dtype, **{"head_dim": 32, **changes}))


def counts(model: nn.Module) -> tuple[int, ...]:
    return tuple(sum(isinstance(module, kind) for module in model.modules()) for kind in OURS)


def assert_within_rounding(found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from the truth than twice what bfloat16 makes of the plain model."""
    ours, theirs = (found.float() - exact).norm(), (plain.float() - exact).norm()
    assert ours <= 2 * theirs + 1e-3 * exact.norm()


@pytest.mark.parametrize("family", WHOLE)
def test_logits_are_the_plain_models_in_any_schedule(family: str, kernels: NativeKernels) -> None:
    changes, (attentions, mlps, norms) = WHOLE[family]
    exact, plain = fresh(family, torch.float32, **changes), fresh(family, **changes)
    native = install.install(fresh(family, **changes), kernels)
    assert counts(native.model)[:3] == (attentions, mlps, norms)
    for kind in (NativeExperts, NativeRouter):
        assert sum(isinstance(part, kind) for part in native.model.modules()) == MIXTURES.get(family, 0)
    assert isinstance(native.model.get_output_embeddings(), NativeLinear)
    assert native.kernels is (kernels if attentions else None)
    rng = np.random.default_rng(0)
    lengths = [53, 12, 30]
    sequences = [random_tokens(rng, length) for length in lengths]
    wanted = [plain_logits(plain, tokens) for tokens in sequences]
    truth = [plain_logits(exact, tokens) for tokens in sequences]
    schedules = {
        16: [[(index, length)] for index, length in enumerate(lengths)],
        7: random_schedule(rng, lengths, max_chunk=25),
        4: [[(0, 20), (2, 16)], [(0, 33)], *[[(1, 1), (2, 1)]] * 12],
    }
    for block_size, steps in schedules.items():
        packed = run_schedule(PackedForward(native), sequences, steps, block_size, rng)
        for logits, expected, true in zip(packed, wanted, truth, strict=True):
            assert_within_rounding(logits, expected[: len(logits)], true[: len(logits)])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_tokens_experts_are_the_same_in_any_company(family: str, kernels: NativeKernels) -> None:
    """And so are its logits, bit for bit: no crowd and no draft sends it to other experts."""
    many: dict[str, Any] = {"num_local_experts": 40, "num_experts": 40, "num_experts_per_tok": 4}
    native = PackedForward(install.install(fresh(family, **many), kernels))
    lengths = [70, 5, 40]
    texts = [random_tokens(np.random.default_rng(3), length) for length in lengths]

    def logits(max_chunk: int) -> torch.Tensor:
        rng = np.random.default_rng(max_chunk)
        return torch.cat(run_schedule(native, texts, random_schedule(rng, lengths, max_chunk), 4, rng))

    alone = logits(1)
    assert all(torch.equal(logits(most), alone) for most in (2, 9, 32))


_TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
# Attention whose projections, gates or norms stay as they are; with heads as wide as the kernels need them.
ATTENDED: dict[str, dict[str, Any]] = {
    "bamba_hybrid": _TWO_HEADS,
    "granite_hybrid": _TWO_HEADS,
    "granite_hybrid_moe": _TWO_HEADS,
    "lfm2_hybrid": _TWO_HEADS,
    "llama4": {"head_dim": 32},
    "nemotron_h_hybrid": {"head_dim": 32},
    "phi3": _TWO_HEADS,
    "qwen3_5_hybrid": {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "qwen3_next_hybrid": {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
}


@pytest.mark.by_default(
    *("granite_hybrid_moe", "lfm2_hybrid", "llama4", "nemotron_h_hybrid", "phi3", "qwen3_5_hybrid")
)
@pytest.mark.parametrize("family", ATTENDED)
def test_a_token_has_its_bits_in_any_company_where_attention_is_not_replaced(
    family: str, kernels: NativeKernels
) -> None:
    """The kernels attend all the same: torch rounds a token alone and among drafts differently."""
    loaded = as_loaded(tiny_model(family, dtype=torch.bfloat16, **ATTENDED[family]))
    native = install.install(loaded, kernels)
    assert native.kernels is None and native.row_attention is kernels
    lengths = [50, 5, 30]
    texts = [random_tokens(np.random.default_rng(3), length) for length in lengths]

    def logits(max_chunk: int) -> torch.Tensor:
        rng = np.random.default_rng(max_chunk)
        steps = random_schedule(rng, lengths, max_chunk)
        if not native.keeps_state:
            return torch.cat(run_schedule(PackedForward(native), texts, steps, 4, rng))
        forward = RecurrentForward(native)
        memory = StateMemory(forward, MemorySizes(num_blocks=64, block_size=4, num_slots=3))
        pieces = run_pieces(forward, memory, dict(enumerate(texts)), steps)
        return torch.cat([pieces[seat] for seat in range(3)])

    with torch.inference_mode():
        alone = logits(1)
        assert all(torch.equal(logits(most), alone) for most in (4, 32))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
async def test_a_mixture_speaks_as_without_kernels(family: str, tmp_path: Path) -> None:
    target = save_tiny_model(family, tmp_path / "target")
    tiny_model(family, head_dim=32).save_pretrained(target)
    texts = []
    for compile_kernels in ("off", "on"):
        base = ("--dtype", "float32", "--compile", compile_kernels, "--speculative-method", "none")
        home = compiled_home(torch.float32, FLOAT32_FORM, formats=True)
        async with engine_of(target, *base, "--cpu-kernels", FLOAT32_FORM, home=home) as engine:
            sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
            streams = [
                engine.submit(GenerationRequest(str(seed), [7 + seed, 40 + seed, 300 + seed], sampling))
                for seed in range(6)
            ]
            texts.append(await asyncio.gather(*(_hear(stream) for stream in streams)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", sorted({*RECURRENT_FAMILIES} - {"rwkv"}))  # whose code reads weights
def test_a_models_projections_carry_on_its_states(family: str, kernels: NativeKernels) -> None:
    """In pieces over slots, within bfloat16's rounding of the plain model's logits."""
    plain = packed_sample(RecurrentForward(load_recurrent(family, torch.bfloat16)))
    exact = packed_sample(RecurrentForward(load_recurrent(family)))
    model = tiny_model(family, dtype=torch.bfloat16)
    native = install.install(replace(load_recurrent(family, torch.bfloat16), model=model), kernels)
    mixers = [module for module in native.model.modules() if isinstance(module, SlotMixer)]
    assert mixers and all(any(isinstance(part, NativeLinear) for part in mixer.modules()) for mixer in mixers)
    assert native.kernels is None  # they do not attend
    assert_within_rounding(packed_sample(RecurrentForward(native)), plain, exact)


@pytest.mark.by_default("mamba", "qwen3_5_hybrid")
@pytest.mark.parametrize("family", ["mamba", "qwen3_5_hybrid", "lfm2_hybrid", "granite_hybrid_moe"])
async def test_a_recurrent_model_speaks_as_without_kernels(family: str, tmp_path: Path) -> None:
    """With drafts, too, some of which are taken: they are of the same text with every fifth token changed."""
    target = save_tiny_model(family, tmp_path / "target")
    texts: list[list[list[int]]] = []
    guesses: list[tuple[int, ...]] = [()] * 4
    for compile_kernels, drafter in (("off", "none"), ("on", "none"), ("on", "ngram")):
        flags = ["--dtype", "float32", "--compile", compile_kernels, "--max-num-seqs", "8"]
        flags += ["--speculative-method", drafter]
        flags += [] if drafter == "none" else ["--draft-length-policy", "fixed", "--min-acceptance-rate", "0"]
        flags += ["--cpu-kernels", FLOAT32_FORM]
        home = compiled_home(torch.float32, FLOAT32_FORM, formats=True)
        async with engine_of(target, *flags, home=home) as engine:
            streams = []
            for seed, guess in enumerate(guesses):
                sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
                options = SpeculationOptions(prediction=guess)
                asked = GenerationRequest(str(seed), [7 + seed, 40 + seed, 9], sampling, speculation=options)
                streams.append(engine.submit(asked))
            texts.append(await asyncio.gather(*(_hear(stream) for stream in streams)))
            num_accepted = engine.metrics.speculation.num_accepted
        guesses = [tuple(7 if at % 5 == 4 else token for at, token in enumerate(text)) for text in texts[0]]
    assert texts[0] == texts[1] == texts[2]
    assert num_accepted > 40


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi3", {}),  # half of a head is too little
        ("gpt_neox", {}),
        ("llama", {"head_dim": 16}),
        ("qwen3", {"head_dim": 80}),
    ],
)
def test_attention_that_is_not_theirs_stays(
    family: str, changes: dict[str, Any], kernels: NativeKernels
) -> None:
    exact, plain = fresh(family, torch.float32, **changes), fresh(family, **changes)
    native = install.install(fresh(family, **changes), kernels)
    attentions, _, _, projections = counts(native.model)
    assert attentions == 0 < projections
    assert native.kernels is None
    rng = np.random.default_rng(0)
    sequences = [random_tokens(rng, length) for length in (30, 12)]
    packed = run_schedule(
        PackedForward(native), sequences, random_schedule(rng, [30, 12], max_chunk=20), 4, rng
    )
    for logits, tokens in zip(packed, sequences, strict=True):
        assert_within_rounding(logits, plain_logits(plain, tokens), plain_logits(exact, tokens))


def test_a_model_with_nothing_for_them_is_told(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NativeUnavailable, match="GPT2LMHeadModel is not among the models they were made for"):
        install.usable_build(as_loaded(tiny_model("gpt2", dtype=torch.bfloat16)), "auto")
    odd = fresh("llama", head_dim=18, hidden_size=63, intermediate_size=65, vocab_size=511)
    monkeypatch.setattr(PaddedLinear, "fits", lambda *_: False)  # what follows heads has as many inputs
    with pytest.raises(NativeUnavailable, match="has no module that they could compute"):
        install.install(replace(odd, vocab_size=511), kernels)


def hook(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _module, _args, output: output * 2)
        layer.input_layernorm.forward = lambda x: x * 0.5
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))


def share(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def double(model: Any) -> None:
    """As if the class did more than it did when it was read."""
    for layer in model.model.layers:
        theirs = type(layer.self_attn)
        layer.self_attn.__class__ = type(
            theirs.__name__, (theirs,), {"forward": _doubled, "__module__": theirs.__module__}
        )


def _doubled(self: Any, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
    theirs: Any = type(self).__bases__[0]
    return theirs.forward(self, hidden_states * 1.1, *args, **options)


@pytest.mark.parametrize(("change", "left"), [(hook, (0, 0, 3)), (share, (2, 0, 5)), (double, (0, 2, 5))])
def test_modules_that_do_more_stay_as_they_are(
    change: Any, left: tuple[int, ...], kernels: NativeKernels
) -> None:
    plain, changed, exact = fresh("llama"), fresh("llama"), fresh("llama", torch.float32)
    for loaded in (plain, changed, exact):
        change(loaded.model)
    native = install.install(changed, kernels)
    assert counts(native.model)[:3] == left
    tokens = random_tokens(np.random.default_rng(0), 30)
    theirs, ours, true = (
        run_schedule(PackedForward(loaded), [tokens], [[(0, 30)]], 4, np.random.default_rng(1))[0]
        for loaded in (plain, native, exact)
    )
    assert_within_rounding(ours, theirs, true)


# --- one token's bits ---


@dataclass
class Speaker:
    """One sequence of a native model over paged memory: what it says next, greedily, and with what logits."""

    loaded: LoadedModel
    block_size: int = 4

    def __post_init__(self) -> None:
        self.forward = PackedForward(self.loaded)
        self.kv = self.forward.make_kv(64, self.block_size)

    @torch.inference_mode()
    def compute(self, *parts: Part) -> torch.Tensor:
        return self.forward(pack_step(parts, self.block_size, every_row=True), self.kv)


BLOCKS = list(range(40, 5, -1))


@pytest.fixture(scope="module")
def native() -> LoadedModel:
    return install.install(fresh("qwen3"), compiled_kernels())


def decoded(native: LoadedModel, tokens: Sequence[int], first: int) -> torch.Tensor:
    """The logits of tokens[first:], each computed alone; those before in one piece."""
    speaker = Speaker(native)
    speaker.compute(Part(tokens, 0, first, BLOCKS))
    return torch.cat([speaker.compute(Part(tokens, at, at + 1, BLOCKS)) for at in range(first, len(tokens))])


def test_drafts_in_a_chain_have_the_bits_of_tokens_alone(native: LoadedModel) -> None:
    tokens = random_tokens(np.random.default_rng(0), 30 + 64)
    expected = decoded(native, tokens, 30)
    for drafts in (1, 3, 15, 31, 63):
        speaker = Speaker(native)
        speaker.compute(Part(tokens, 0, 30, BLOCKS))
        chain = range(-1, drafts - 1)
        found = speaker.compute(Part(tokens, 30, 31 + drafts, BLOCKS, chain), Part(tokens, 0, 9, [1, 2, 3]))
        assert torch.equal(found[: drafts + 1], expected[: drafts + 1])


def test_drafts_in_a_tree_have_the_bits_of_those_in_a_chain(native: LoadedModel) -> None:
    tokens = random_tokens(np.random.default_rng(0), 33)
    one, other = tokens[:31] + tokens[31:], tokens[:31] + random_tokens(np.random.default_rng(7), 2)
    expected = [decoded(native, branch, 30) for branch in (one, other)]
    speaker = Speaker(native)
    speaker.compute(Part(one, 0, 30, BLOCKS))
    both = Part([*one, *other[31:]], 30, 35, BLOCKS, (-1, 0, -1, 2))
    found = speaker.compute(both, Part(tokens, 0, 5, [1, 2]))
    assert torch.equal(found[:5], torch.cat((expected[0], expected[1][1:])))


def test_moved_blocks_change_nothing(native: LoadedModel) -> None:
    tokens = random_tokens(np.random.default_rng(0), 36)
    expected = decoded(native, tokens, 30)
    speaker = Speaker(native)
    speaker.compute(Part(tokens, 0, 30, BLOCKS))
    moved = list(range(50, 50 + 9))
    speaker.kv.copy_blocks([BlockCopy(*pair) for pair in zip(BLOCKS, moved, strict=False)])
    speaker.kv.scrub_blocks(BLOCKS)
    found = torch.cat([speaker.compute(Part(tokens, at, at + 1, moved)) for at in range(30, 36)])
    assert torch.equal(found, expected)


async def spoken(target: Path, home: Path, seats: int, *flags: str) -> list[list[int]]:
    """What the whole engine makes of a few prompts, so many of them at once."""
    prompts = [[WORDS[(seed * 5 + at * at) % len(WORDS)] for at in range(3 + seed)] for seed in range(8)]
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    base = ("--dtype", "bfloat16", "--compile", "on", "--max-num-seqs", str(seats), "--no-prefix-caching")
    async with engine_of(target, *base, *flags, home=home) as engine:
        streams = [
            engine.submit(GenerationRequest(str(index), prompt, sampling))
            for index, prompt in enumerate(prompts)
        ]
        heard = await asyncio.gather(*(_hear(stream) for stream in streams))
        stats = engine.metrics.speculation
        assert (min(stats.num_accepted, stats.num_proposed - stats.num_accepted) > 10) is (
            "none" not in flags
        )
    return heard


async def _hear(stream: Any) -> list[int]:
    return [token for delta in [delta async for delta in stream] for token in delta.token_ids]


@pytest.mark.by_default("--quantization=int8", "--kv-cache-dtype=int8")
@pytest.mark.parametrize("kept", ["--quantization=none", "--quantization=int8", "--kv-cache-dtype=int8"])
async def test_greedy_text_is_the_same_with_drafts_and_in_a_crowd(kept: str, tmp_path: Path) -> None:
    """In bfloat16, bit for bit; without the kernels many rows may be rounded otherwise than few."""
    target = save_tiny_model("llama", tmp_path / "target")
    repetitive_model(head_dim=32).bfloat16().save_pretrained(target)
    home = compiled_home(formats=kept == "--kv-cache-dtype=int8")
    without = (kept, "--speculative-method", "none")
    alone = await spoken(target, home, 1, *without)
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    always = ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0")
    assert await spoken(target, home, 8, *without) == alone
    for seats in (1, 8):
        lookup = ("--speculative-method", "ngram", "--num-speculative-tokens", "5", *always)
        assert await spoken(target, home, seats, kept, *lookup) == alone


# --- --compile ---


def with_kernels(
    asked: str, home: Path, loaded: LoadedModel | None = None, form: str = "auto"
) -> LoadedModel:
    settings = load_settings(["m", "--compile", asked, "--cpu-kernels", form], environ={}).model
    return install.with_kernels(loaded or fresh("llama"), settings, home, lambda: fresh("llama"))


def test_compile_on_and_auto_use_them_and_off_does_not(tmp_path: Path) -> None:
    expected = compiler.file_name(build_here(form=PLAIN_FORM))
    assert with_kernels("off", tmp_path).kernels is None
    assert not any(tmp_path.iterdir())
    for asked in ("on", "auto"):
        assert with_kernels(asked, tmp_path, form=PLAIN_FORM).kernels is not None
    assert [path.name for path in (tmp_path / "native").iterdir()] == [expected]


def refused(home: Path, caplog: pytest.LogCaptureFixture, loaded: LoadedModel | None = None) -> str:
    """Why there are no kernels: `on` says so and stops, `auto` says the same and goes on with the model."""
    with pytest.raises(StartRefused) as caught:
        with_kernels("on", home, loaded)
    reason = str(caught.value).removeprefix("--compile on: ").removesuffix(". Leave it out to do without.")
    with caplog.at_level(logging.DEBUG, "slipstream.model"):
        served = with_kernels("auto", home, loaded)
    assert served.kernels is None and counts(served.model) == (0, 0, 0, 0)
    assert f"compiled kernels are not used: {reason}" in caplog.messages
    return reason


@pytest.fixture
def fit_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no kernel to run is tested on every machine."""
    pretend_every_instruction(monkeypatch)


def test_a_cpu_without_the_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert refused(tmp_path, caplog) == "the CPU has no instructions for amx or bf16 or vnni or avx512 or v3"


@pytest.mark.usefixtures("fit_cpu")
def test_another_number_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wide = fresh("llama", torch.float64)
    assert refused(tmp_path, caplog, wide) == "they do not compute in float64"


@pytest.mark.usefixtures("fit_cpu")
def test_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_COMPILERS", ("no-such-compiler",))
    assert refused(tmp_path, caplog) == "there is no C++ compiler (no-such-compiler)"


@pytest.mark.usefixtures("fit_cpu")
def test_a_compiler_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = tmp_path / "failing"
    failing.write_text(
        "#!/bin/sh\necho In file included from here >&2\necho error: no such flag >&2\nexit 1\n"
    )
    failing.chmod(0o755)
    monkeypatch.setattr(compiler, "_COMPILERS", (str(failing),))
    assert refused(tmp_path / "home", caplog) == f"{failing} failed: error: no such flag"
    assert not any((tmp_path / "home" / "native").iterdir())


@pytest.mark.usefixtures("fit_cpu")
def test_a_home_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_COMPILERS", ("true",))
    (tmp_path / "file").touch()
    told = refused(tmp_path / "file", caplog)
    assert told == f"{tmp_path / 'file' / 'native'} cannot be written to (Not a directory)"


def test_a_damaged_library_is_compiled_again(tmp_path: Path, kernels: NativeKernels) -> None:
    made = compiler.library(tmp_path, build_here(formats=True))
    whole = made.read_bytes()
    for damaged in (b"", whole[:-1], whole[:9000] + b"x" + whole[9001:], whole[:20_000]):
        made.unlink()
        made.write_bytes(damaged)
        assert compiler.find_library(tmp_path, build_here(formats=True)) is None
    assert compiler.library(tmp_path, build_here(formats=True)) == made
    NativeKernels(made)
    assert compiler.find_library(tmp_path, build_here(formats=True)) == made


def test_an_installation_brings_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: NativeKernels
) -> None:
    bundled = compiler.bundled_library(tmp_path / "prefix", build_here(formats=True))
    compiler.compile_into(bundled, build_here(formats=True))
    monkeypatch.setattr(compiler, "_COMPILERS", ())
    assert compiler.library(tmp_path / "home", build_here(formats=True), tmp_path / "prefix") == bundled
    assert not (tmp_path / "home").exists()


def test_what_is_served_is_compared_with_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: with the kernels in it where they compute, else as the check of a forward pass does."""
    home, checked = compiled_home(form=PLAIN_FORM), list[LoadedModel]()
    monkeypatch.setattr(install, "check_forward", lambda forward, _: checked.append(forward.loaded))

    def checked_kernels(asked: str) -> LoadedModel:
        settings = load_settings(["m", "--compile", asked, "--cpu-kernels", PLAIN_FORM], environ={}).model
        return install.with_checked_kernels(fresh("llama"), settings, home, lambda: fresh("llama"), 16)

    assert checked_kernels("auto").kernels is not None and not checked
    plain = checked_kernels("off")
    assert plain.kernels is None and [each.model for each in checked] == [plain.model]
    # A model that computes otherwise in pieces does so with the kernels, too, and without them is refused.
    monkeypatch.setattr(install, "plain_sample", lambda _: torch.randn(39, fresh("llama").vocab_size))
    again = checked_kernels("auto")
    assert again.kernels is None and checked[-1] is again


def test_changed_logits_bring_the_model_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No module is replaced that answers otherwise; should they together, nobody is left without a server."""
    home = compiled_home(form=PLAIN_FORM)
    monkeypatch.setattr(install, "packed_difference", lambda *_: "by 3 of their spread (limit 0.1)")
    with pytest.raises(StartRefused, match="the kernels change the logits by 3 of their spread"):
        with_kernels("on", home, form=PLAIN_FORM)
    assert counts(with_kernels("auto", home, form=PLAIN_FORM).model) == (0, 0, 0, 0)
    assert (
        "compiled kernels are not used: they change the logits by 3 of their spread (limit 0.1)"
        in caplog.messages
    )
