"""Thinking, then a form or a call: the form holds from the token behind the reasoning on, drafts or not.

Schema x thinking x calls x drafts x batch over a tiny random model: always valid, and the same to the byte.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import torch

from config.schema import ModelSettings
from engine import (
    Engine,
    FinishReason,
    GenerationRequest,
    ReplyFormat,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
    ToolChoice,
    ToolRules,
    ToolSpec,
)
from engine.compute.drafters.draft_tree import default_tree
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.compute.loading.loader import load_model
from engine.text.reply.pieces import CollectedCall, CollectedReply
from engine.text.reply.reply_reader import ReplyReader
from tests.support.engines import Collected, collect
from tests.support.speculated import engine_of, single_threaded
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

THINK_ID, END_ID = 510, 511
MAX_TOKENS = 200
ROOMY = ("--max-model-len", "256", "--kv-cache-memory", "16MiB")
FIXED = ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0")
DRAFTS = {
    "none": ("--speculative-method", "none"),
    "ngram": ("--speculative-method", "ngram", *FIXED),
    "suffix": ("--speculative-method", "suffix", *FIXED),
    "predicted": FIXED,
    "model": ("--speculative-method", "draft-model", "--speculation-schedule", "sync", *FIXED),
    "medusa": ("--speculative-method", "medusa", *FIXED),
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
LARK = 'start: "add " N (" \\"}" N)*\nN: /[0-9]{1,3}/\n'
FORMS: dict[str, StructuredOutput | ToolRules | None] = {
    "schema": StructuredOutput("json_schema", json.dumps(SCHEMA)),
    "choice": StructuredOutput("choice", '["yes", "no"]'),
    "call": ToolRules([ToolSpec("go", parameters=SCHEMA), ToolSpec("halt")], ToolChoice("required"), False),
    "call or schema": ToolRules([ToolSpec("go", parameters=SCHEMA), ToolSpec("halt")], is_parallel=False),
    "named call": ToolRules([ToolSpec("go", parameters=SCHEMA)], ToolChoice("required", "go")),
    "grammar call": ToolRules(
        [ToolSpec("halt"), ToolSpec("sum", is_custom=True, form=StructuredOutput("grammar", LARK))],
        ToolChoice("required"),
        False,
    ),
    "free": None,
}
PROMPTS = {"open": "Say.<think>\n", "model": "Say.", "closed": "Say.<think>\n\n</think>\n\n"}
BUDGETS = (None, 0, 7)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="module", params=["marks are tokens", "marks are text"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template thinks; its marks are two tokens of its own, or are spelled like any text."""
    found = save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    (found / "chat_template.jinja").write_text("{{ messages[0].content }}{# <think> </think> #}")
    if request.param == "marks are tokens":
        path = found / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        by_id = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
        for token_id, text in ((THINK_ID, "<think>"), (END_ID, "</think>")):
            gone = by_id[token_id]
            tokenizer["model"]["merges"] = [
                pair for pair in tokenizer["model"]["merges"] if "".join(pair) != gone
            ]
            del tokenizer["model"]["vocab"][gone]
            tokenizer["added_tokens"].append(
                {
                    "id": token_id,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": False,
                }
            )
        path.write_text(json.dumps(tokenizer))
    return found


@dataclass(frozen=True)
class Ask:
    """One request: what its prompt has of thinking, what must follow, and how much may be thought."""

    name: str
    prompt: str
    form: str
    budget: int | None
    sampling: SamplingParams


def asks(*, are_tokens: bool) -> list[Ask]:
    """Every prompt with every form; the end of the reasoning is likely now and then, or the budget's."""
    found: list[Ask] = []
    for prompt in PROMPTS:
        for form in FORMS:
            for budget in BUDGETS:
                if budget is None and not (are_tokens and form in ("schema", "call")):
                    continue  # a random model never spells a mark
                if budget == 0 and form not in ("schema", "free"):
                    continue
                name = f"{prompt}, {form}, {budget}"
                bias = ((END_ID, 4.0), (THINK_ID, 9.0)) if are_tokens else ()
                most = 40 if form == "free" else MAX_TOKENS
                params = SamplingParams(most, temperature=1.0, seed=len(found), logit_bias=bias)
                found.append(Ask(name, prompt, form, budget, params))
    return found


def structure_of(form: ReplyFormat, asked: StructuredOutput | ToolRules | None) -> StructuredOutput | None:
    """What the reply has to be: of a form, a call, or where a call is free, either."""
    if not isinstance(asked, ToolRules):
        return asked
    if asked.choice.is_forced:
        return form.forced(asked)
    return form.either(asked, StructuredOutput("json_schema", json.dumps(SCHEMA)))


async def reply_to(engine: Engine, ask: Ask, prediction: Sequence[int] = ()) -> tuple[Collected, ReplyReader]:
    """One request to its end, and what reads it."""
    form, rules = engine.reply_format, FORMS[ask.form]
    prompt = await engine.text.encode(PROMPTS[ask.prompt])
    structure = structure_of(form, rules)
    grammar = None if structure is None else await engine.text.compile_grammar(structure)
    gate = form.gate(prompt, engine.info.vocab_size, grammar, ask.budget)
    speculation = SpeculationOptions(prediction=tuple(prediction))
    request = GenerationRequest(ask.name, prompt, ask.sampling, grammar=gate, speculation=speculation)
    reply = await collect(engine.submit(request))
    has_form = structure is not None and structure.calls is None
    return reply, form.reader(prompt, rules if isinstance(rules, ToolRules) else None, has_form=has_form)


Replies = dict[str, tuple[Collected, ReplyReader]]


async def replies(
    directory: Path, *flags: str, batch: int = 16, predictions: Mapping[str, Sequence[int]] | None = None
) -> Replies:
    """All of them, `batch` at a time."""
    known, places = predictions or {}, asyncio.Semaphore(batch)
    async with engine_of(directory, *ROOMY, *flags) as engine:
        are_tokens = len(await engine.text.encode("</think>")) == 1

        async def one(ask: Ask) -> tuple[Collected, ReplyReader]:
            async with places:
                return await reply_to(engine, ask, known.get(ask.name, ()))

        wanted = asks(are_tokens=are_tokens)
        found = await asyncio.gather(*map(one, wanted))
        return dict(zip((ask.name for ask in wanted), found, strict=True))


@pytest.fixture(scope="module")
def plain(directory: Path) -> Replies:
    """What is said without drafts, in a crowd: what is said alone is compared with it."""
    return asyncio.run(replies(directory, *DRAFTS["none"]))


def read(found: tuple[Collected, ReplyReader]) -> CollectedReply:
    reply, reader = found
    reader.count(reply.token_ids)
    return reader.whole(reply.text, cut=reply.finish.reason is not FinishReason.STOP)


def check_arguments(call: CollectedCall) -> bool:
    """True for a custom tool's input."""
    if call.name == "go":
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    if call.name == "sum":
        assert re.fullmatch(r'add \d{1,3}( "\}\d{1,3})*', call.arguments)
    return call.name == "sum"


def test_what_follows_the_reasoning_has_its_form(plain: Replies) -> None:
    num_thought = num_answers = num_summed = 0
    for name, found in plain.items():
        prompt, form, budget = name.split(", ")
        whole, (reply, reader) = read(found), found
        if budget != "None":
            assert reader.num_reasoning_tokens <= int(budget) + len("</think>"), name
        num_thought += reader.num_reasoning_tokens
        if prompt == "closed":
            assert reader.num_reasoning_tokens == 0 and not whole.reasoning
        if form == "free":
            continue
        if reply.finish.reason is not FinishReason.STOP:
            assert budget == "None", (name, reply.text)
            continue
        assert "think>" not in whole.content
        if form == "schema":
            jsonschema.validate(json.loads(whole.content), SCHEMA)
        elif form == "choice":
            assert whole.content in ("yes", "no"), (name, reply.text)
        elif form == "call or schema" and not whole.calls:
            jsonschema.validate(json.loads(whole.content), SCHEMA)
            num_answers += 1
        else:
            (call,) = whole.calls
            assert call.is_whole and not whole.content
            num_summed += check_arguments(call)
    assert num_thought > 50
    assert num_answers and num_summed


@pytest.fixture(scope="module")
def drafting(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[str]]:
    """The flags of each way to draft. The draft model thinks alike; the heads know nothing."""
    heads = tmp_path_factory.mktemp("heads") / "medusa"
    target = load_model(directory, ModelSettings(dtype="float32"))
    MedusaHeads(target, 2, torch.arange(VOCAB_SIZE), default_tree(2, 12)).save(heads)
    more = {"model": ("--draft-model", str(directory)), "medusa": ("--medusa-heads", str(heads))}
    return {name: (*flags, *more.get(name, ())) for name, flags in DRAFTS.items()}


QUICK = [("predicted", 1), ("predicted", 16), ("ngram", 16), ("suffix", 16)]
SLOW = [(name, batch) for name in DRAFTS for batch in (1, 16) if (name, batch) not in QUICK]


@pytest.mark.by_default
@pytest.mark.parametrize(
    ("name", "batch"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
async def test_drafts_and_crowds_change_nothing(
    name: str, batch: int, directory: Path, drafting: Mapping[str, Sequence[str]], plain: Replies
) -> None:
    predictions = {ask: reply.token_ids for ask, (reply, _) in plain.items() if name == "predicted"}
    found = await replies(directory, *drafting[name], batch=batch, predictions=predictions)
    for ask, (reply, _) in found.items():
        assert reply.text == plain[ask][0].text, ask
        assert reply.token_ids == plain[ask][0].token_ids, ask
    if name == "predicted":  # so that many a draft holds the token at which the form begins
        stats = [reply.finish.speculation for reply, _ in found.values()]
        assert sum(each.num_accepted for each in stats if each is not None) > 200
    if name in ("model", "medusa"):
        stats = [reply.finish.speculation for reply, _ in found.values()]
        assert sum(each.num_proposed for each in stats if each is not None) > 200
