"""One reply of many that follows a schema and reports log-probabilities: what the others pay for it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

import uvloop

from engine.compute.loading.loader import LoadedModel
from engine.plan.grammar import CompiledGrammar
from engine.plan.request import GenerationRequest
from engine.text.grammar_compiler import GrammarCompiler
from engine.text.structured_output import StructuredOutput
from engine.text.tokenizer import Tokenizer
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.engines import SETTLE_STEPS, DecodeStep, decode_step, made_engine, settings_for
from tests.bench.gpu.sizes import LlamaShape
from tests.bench.report import Bar, Section

BAR = 0.9  # of the tokens a second without
_RUNS = 3
# Nothing that a random model says ends it: after a few forced tokens it is inside a string.
_SCHEMA = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"type": "string"}}},
    "required": ["lines"],
    "additionalProperties": False,
}


def run_guided(bench: Bench) -> Section:
    """Both models; a step of plain greedy decodes, and one in which one of them asks for more."""
    sizes = bench.sizes
    batch = sizes.guided_batch
    section = Section(
        "guided", f"one of {batch} decodes with top-p, log-probabilities and a schema, whole engine"
    )
    section.notes.append("ratio: tokens a second with that one over those of as many plain decodes.")
    if find_spec("llguidance") is None:
        section.notes.append(
            "llguidance is not here: a penalty stands in for the schema, at less cost to the host."
        )
    max_tokens = sizes.decode_context + 4 * SETTLE_STEPS + 2 * sizes.steps
    for shape in (sizes.small, sizes.large):
        loaded = bench.model(shape, max_tokens)
        bench.say(f"decoding with the {shape.name}")
        uvloop.run(_measure(bench, section, shape, loaded))
        del loaded
    return section


async def _measure(bench: Bench, section: Section, shape: LlamaShape, loaded: LoadedModel) -> None:
    """In turns, so that a machine that becomes slower is slower for both."""
    sizes, name = bench.sizes, shape.name
    batch, context, steps = sizes.guided_batch, sizes.decode_context, sizes.steps
    tokenizer = bench.tokenizer(shape, spells=True)
    schema = compiled(tokenizer)
    settings = settings_for(batch, loaded.max_model_len)
    async with made_engine(settings, loaded, tokenizer, skip_prompts=True) as made:
        plain: list[DecodeStep] = []
        guided: list[DecodeStep] = []
        await decode_step(made, batch, context, steps, first=lambda request: asking(request, schema))
        for _ in range(_RUNS):
            plain.append(await decode_step(made, batch, context, steps))
            guided.append(
                await decode_step(made, batch, context, steps, first=lambda request: asking(request, schema))
            )
    for case, found in (("plain", plain), ("one asks for more", guided)):
        section.add(f"{name}, {case}", "engine", "tokens/s", [batch / step.seconds for step in found])
        section.add(f"{name}, {case}", "on the device", "ms", [1e3 * step.device_s for step in found])
        section.add(f"{name}, {case}", "host", "%", [step.host_percent for step in found])
    ratios = [before.seconds / with_one.seconds for before, with_one in zip(plain, guided, strict=True)]
    ratio = section.add(f"{name}, one of {batch}", "ratio", "×", ratios)
    section.bars.append(Bar(f"one of {batch} asks for more, {name}", BAR, "×", ratio.median, at_least=True))
    bench.keep(section)


def compiled(tokenizer: Tokenizer) -> CompiledGrammar | None:
    """The schema for this vocabulary, which must be able to spell it; None without llguidance."""
    if find_spec("llguidance") is None:
        return None
    compiler = GrammarCompiler(tokenizer.pieces, tokenizer.vocab_size, frozenset())
    return compiler.compile(StructuredOutput("json_schema", json.dumps(_SCHEMA)))


def asking(request: GenerationRequest, schema: CompiledGrammar | None) -> GenerationRequest:
    """The same request, drawn by chance from what the schema allows, and reported on.

    Without a schema it has a penalty: its draw hangs on the token before it all the same.
    """
    penalty = 0.5 if schema is None else 0.0
    sampling = replace(request.sampling, temperature=1.0, top_p=0.95, logprobs=5, presence_penalty=penalty)
    return replace(request, sampling=sampling, grammar=schema)
