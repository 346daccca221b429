"""Tiny models that repeat themselves, and requests to them with everything that a request can ask for.

What follows a token hangs mostly on that token, and a few tokens are said most of the time. So n-grams come
back, a like model guesses well and heads can be trained, but none of them always: there are drafts to accept
and drafts to refuse.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from config import load_settings
from engine import GenerationRequest, SamplingParams, SpeculationOptions
from engine.compute.drafters.draft_tree import default_tree
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.training.fitting import FitOptions, frequent_token_ids
from engine.training.medusa_training import fit_heads
from engine.training.sample_generator import SampleGenerator, SampleSizes
from engine.training.samples import Positions, Sample
from tests.support.native import WITHOUT_KERNELS
from tests.support.tiny_eagle import TinyEagle
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE, save_tiny_model, tiny_model

LOUD = range(EOS_ID, EOS_ID + 17)  # EOS and 16 printable characters
WORDS = LOUD[1:]
KINDS = ("greedy", "T 0.7", "T 1.2")  # the last with all filters, penalties and biases


def repetitive_model(noise: float = 0.0, **changes: Any) -> PreTrainedModel:
    """A tiny Llama whose context matters less than its last token; `noise` makes another one like it.

    `changes` are set in its configuration.
    """
    model = tiny_model("llama", **changes)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.15
        layer.mlp.down_proj.weight.data *= 0.15
    model.lm_head.weight.data *= 0.2
    model.lm_head.weight.data[LOUD.start : LOUD.stop] *= 15.0
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters() if noise else ():
        weight.data *= 1 + noise * torch.randn(weight.shape, generator=generator)
    return model


def save_repetitive_model(directory: Path, noise: float = 0.0) -> Path:
    """As a directory that can be served."""
    save_tiny_model("llama", directory)
    repetitive_model(noise).save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class World:
    """A target, another like it, heads of both kinds for it, as directories; and what the target says."""

    target: Path
    near: Path
    medusa_heads: Path
    eagle_heads: Path
    phrases: list[list[int]]


def make_world(directory: Path) -> World:
    """Some seconds of work, most of it for the heads."""
    target = save_repetitive_model(directory / "target")
    near = save_repetitive_model(directory / "near", noise=0.04)
    settings = load_settings([str(target), "--dtype", "float32"], environ=WITHOUT_KERNELS)
    loaded = load_model(target, settings.model)
    samples = target_samples(loaded)
    positions = Positions(samples)
    token_ids = frequent_token_ids(positions.token_ids, VOCAB_SIZE, 64)
    heads = MedusaHeads(loaded, 3, token_ids, default_tree(3, 8))
    fit_heads(heads, positions, FitOptions(num_epochs=40), _Unwatched())
    heads.save(directory / "heads")
    eagle = fit_eagle(loaded, samples[:40], token_ids).save(directory / "eagle")
    phrases = [sample.token_ids.tolist()[:-1] for sample in samples if len(sample.token_ids) > 12]
    return World(target, near, directory / "heads", eagle, phrases)


def fit_eagle(loaded: LoadedModel, samples: Sequence[Sample], token_ids: torch.Tensor) -> TinyEagle:
    """An EAGLE layer that knows these tokens, and is often right about what the target says."""
    eagle = TinyEagle(loaded, token_ids=token_ids.sort().values)
    forward = PackedForward(loaded, eagle.layers)
    read = []
    for sample in (each for each in samples if len(each.token_ids) > 12):
        inputs = pack_step([Part(sample.token_ids.tolist(), 0, len(sample.token_ids), range(32))], 4)
        with torch.no_grad():
            _, features = forward.with_features(inputs, forward.make_kv(32, 4))
        read.append((features[:-2], sample.token_ids))
    eagle.fit(read, num_epochs=4)
    return eagle


def target_samples(loaded: LoadedModel) -> list[Sample]:
    """A hundred texts of the target's own."""
    draw = random.Random(0)
    prompts = [draw.choices(WORDS, k=6) for _ in range(30)]
    generator = SampleGenerator(loaded, prompts, sizes=SampleSizes(30, 50), seed=0, keeps_hidden=True)
    samples: list[Sample] = []
    for finished in generator.steps(set()):
        samples += finished
        if len(samples) >= 100:
            break
    return samples


class _Unwatched:
    def update(self, stage: str, done: float, total: float, note: str) -> None: ...

    def is_stopped(self) -> bool:
        return False


@dataclass(frozen=True)
class Ask:
    """One request, and when its reader loses interest: after so many tokens, never with None.

    `kind` is one of KINDS. `leaves` is how: by closing the stream, or else by cancelling.
    """

    request: GenerationRequest
    kind: str
    cut: int | None = None
    leaves: bool = False

    @property
    def name(self) -> str:
        return self.request.request_id


Family = list[Ask]  # choices of one reply: all fork from the first


def make_families(world: World, count: int, seed: int = 0) -> list[Family]:
    """`count` requests or two more, of all kinds by turns."""
    draw = random.Random(seed)
    families: list[Family] = []
    while sum(map(len, families)) < count:
        kind = KINDS[len(families) % len(KINDS)]
        families.append(make_family(f"{seed}.{len(families)}", kind, prompt_of(world, draw), draw))
    return families


def make_family(name: str, kind: str, prompt: list[int], draw: random.Random) -> Family:
    """One request, or a few that fork from the first."""
    params = params_of(kind, draw)
    family = []
    for choice in range(draw.choice((1, 1, 1, 1, 1, 1, 1, 3))):
        request = GenerationRequest(
            request_id=f"{name}.{choice}",
            prompt_token_ids=prompt,
            sampling=replace(params, seed=draw.getrandbits(63)) if choice else params,
            group=name,
            fork_of=f"{name}.0" if choice else None,
        )
        cut = draw.randrange(1 + params.max_tokens // 2) if draw.random() < 0.2 else None
        family.append(Ask(request, kind, cut, draw.random() < 0.5))
    return family


def prompt_of(world: World, draw: random.Random) -> list[int]:
    """A beginning that others share, then something the target might have said, maybe twice."""
    first, second = draw.choice(world.phrases[:3]), draw.choice(world.phrases)
    said = second[: draw.randint(2, 16)]
    return [*first[: draw.choice((0, 1, 8, 17))], *said, *said[: draw.choice((0, 0, 3, 16))]]


def params_of(kind: str, draw: random.Random) -> SamplingParams:
    """Every parameter there is, each on in some requests and off in others."""

    def maybe(chance: float, value: object, off: object) -> object:
        return value if draw.random() < chance else off

    max_tokens = draw.choice((1, 2, 9, 30, 40, 46, 46))
    fields: dict[str, object] = {
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, draw.choice((0, 0, 0, 5, 15))),
        "seed": draw.getrandbits(63),
        "ignore_eos": draw.random() < 0.75,
        "stop_token_ids": maybe(0.1, frozenset(draw.sample(LOUD, 1)), frozenset()),
        "stop": maybe(0.25, tuple(text_of(draw.choices(WORDS, k=2)) for _ in range(6)), ()),
        "include_stop_str_in_output": draw.random() < 0.5,
        "logprobs": maybe(0.4, draw.choice((0, 2, 5)), None),
        "temperature": {"greedy": 0.0, "T 0.7": 0.7, "T 1.2": 1.2}[kind],
    }
    if kind != "T 0.7":
        fields |= {
            "repetition_penalty": maybe(0.4, 1.2, 1.0),
            "presence_penalty": maybe(0.4, 0.5, 0.0),
            "frequency_penalty": maybe(0.4, 0.3, 0.0),
            "logit_bias": maybe(0.4, tuple((token, draw.uniform(-4, 4)) for token in LOUD[::3]), ()),
            "allowed_token_ids": maybe(0.2, tuple(draw.sample(LOUD, 12)), None),
        }
    if kind == "T 1.2":
        fields |= {
            "top_k": maybe(0.6, draw.choice((3, 8)), 0),
            "top_p": maybe(0.6, 0.9, 1.0),
            "min_p": maybe(0.6, 0.05, 0.0),
        }
    return SamplingParams(**fields)  # type: ignore[arg-type]


def text_of(token_ids: Sequence[int]) -> str:
    """The characters of words."""
    return "".join(chr(ord("!") + token_id - WORDS.start) for token_id in token_ids)


def with_wishes(
    families: Sequence[Family], said: dict[str, list[int]], methods: Sequence[str], seed: int = 0
) -> list[Family]:
    """The same requests, some with wishes for speculation and with predictions that are nearly `said`."""
    draw = random.Random(seed)

    def wish(ask: Ask) -> Ask:
        guess = list(said[ask.name])
        options = SpeculationOptions(
            enabled=draw.random() > 0.05,
            num_tokens=draw.choice((None, None, None, 1, 3)),
            method=draw.choice((*methods, "auto")) if draw.random() < 0.2 else None,
        )
        if guess and draw.random() < 0.15:
            guess[draw.randrange(len(guess))] = draw.choice(LOUD)
            del guess[draw.randrange(len(guess))]
            method = "prediction" if draw.random() < 0.5 else options.method
            options = replace(options, prediction=tuple(guess), method=method)
        return replace(ask, request=replace(ask.request, speculation=options))

    return [[wish(ask) for ask in family] for family in families]
