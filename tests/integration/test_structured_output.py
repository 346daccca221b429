"""Replies of a tiny real model that must have a form: always valid, and the same with drafts as without."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from config.schema import ModelSettings
from engine import (
    Engine,
    FinishReason,
    GenerationRequest,
    RequestFailed,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)
from engine.compute.drafters.draft_tree import default_tree
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.compute.loading.loader import load_model
from engine.text.tokenizer import Tokenizer
from tests.support.engines import Collected, collect
from tests.support.speculated import engine_of, single_threaded
from tests.support.structures import SCHEMAS
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE, save_tiny_model

MAX_TOKENS = 190
ROOMY = ("--max-model-len", "256", "--kv-cache-memory", "16MiB")
FIXED = ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0")
SPECULATION = {
    "ngram": ("--speculative-method", "ngram", *FIXED),
    "predicted": FIXED,
    "predicted, rejection": (*FIXED, "--draft-verification", "rejection"),
    "suffix, rejection": ("--speculative-method", "suffix", "--draft-verification", "rejection", *FIXED),
    "auto": ("--num-speculative-tokens", "6"),
    "the target itself": ("--speculative-method", "draft-model", "--speculation-schedule", "sync", *FIXED),
    "trees": ("--speculative-method", "medusa", *FIXED),
    "crowded": ("--num-kv-blocks", "72", "--max-num-batched-tokens", "24"),
    "crowded, swapped": ("--num-kv-blocks", "72", "--preemption", "swap", "--swap-space", "4MiB"),
}
OTHER_FORMS = {
    "any object": StructuredOutput("json_object"),
    "regex": StructuredOutput("regex", r"[A-Z][a-z]{2,8}, [0-9]{1,3}\.|none"),
    "choice": StructuredOutput("choice", '["yes", "no", "yes, but not now"]'),
    "lark": StructuredOutput(
        "grammar", 'start: sum "=" NUMBER\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/'
    ),
    "ebnf": StructuredOutput("grammar", 'root ::= "(" item ("," item)? ")"\nitem ::= [a-f] | "-" [0-9]\n'),
}
TEXTS = {
    "regex": r"[A-Z][a-z]{2,8}, [0-9]{1,3}\.|none",
    "choice": "yes|no|yes, but not now",
    "lark": r"[0-9]{1,3}(\+[0-9]{1,3}){1,3}=[0-9]{1,3}",
    "ebnf": r"\((?:[a-f]|-[0-9])(?:,(?:[a-f]|-[0-9]))?\)",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def heads(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that know nothing: their trees hold all kinds of tokens, few of them allowed anywhere."""
    found: Path = tmp_path_factory.mktemp("heads") / "medusa"
    target = load_model(directory, ModelSettings(dtype="float32"))
    MedusaHeads(target, 2, torch.arange(VOCAB_SIZE), default_tree(2, 12)).save(found)
    return found


@dataclass(frozen=True)
class Ask:
    """One request for a form."""

    name: str
    structure: StructuredOutput
    sampling: SamplingParams
    fork_of: str | None = None


def asks() -> list[Ask]:
    """Every schema and every other form, greedy and sampled, some with two choices."""
    forms = {name: StructuredOutput("json_schema", json.dumps(schema)) for name, schema in SCHEMAS.items()}
    forms |= OTHER_FORMS
    found = []
    for index, (name, structure) in enumerate(forms.items()):
        greedy = SamplingParams(MAX_TOKENS, temperature=0.0, repetition_penalty=1.1, logprobs=1)
        sampled = SamplingParams(MAX_TOKENS, temperature=1.0, top_p=0.98, seed=1000 + index)
        other = SamplingParams(MAX_TOKENS, temperature=1.0, seed=2000 + index)
        found += [
            Ask(f"{name}, greedy", structure, greedy),
            Ask(f"{name}, sampled", structure, sampled),
            Ask(f"{name}, forked", structure, other, f"{name}, sampled"),
        ]
    return found


async def reply_to(engine: Engine, ask: Ask, prediction: Sequence[int] = ()) -> Collected:
    """One request to its end."""
    prompt = await engine.text.encode(f"Please write: {ask.name.partition(',')[0]}\n")
    grammar = await engine.text.compile_grammar(ask.structure)
    speculation = SpeculationOptions(prediction=tuple(prediction))
    request = GenerationRequest(
        ask.name, prompt, ask.sampling, fork_of=ask.fork_of, grammar=grammar, speculation=speculation
    )
    return await collect(engine.submit(request))


async def replies(
    directory: Path, *flags: str, predictions: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Collected]:
    """All of them at once."""
    known = predictions or {}
    async with engine_of(directory, *ROOMY, *flags) as engine:
        found = await asyncio.gather(*(reply_to(engine, ask, known.get(ask.name, ())) for ask in asks()))
        return dict(zip((ask.name for ask in asks()), found, strict=True))


@pytest.fixture(scope="module")
def plain(directory: Path) -> dict[str, Collected]:
    """What is said without drafts."""
    return asyncio.run(replies(directory, "--speculative-method", "none"))


def predicted(token_ids: Sequence[int], index: int) -> list[int]:
    """A reply foretold: to its end, with more after it, or with a wrong token in the middle."""
    middle = len(token_ids) // 2
    return [
        list(token_ids),
        [*token_ids, EOS_ID, *token_ids],
        [*token_ids[:middle], 77, *token_ids[middle + 1 :]],
    ][index % 3]


def assert_valid(found: dict[str, Collected]) -> None:
    """Every reply that has ended by itself has its form; nearly all have."""
    reasons = {name: reply.finish.reason for name, reply in found.items()}
    assert set(reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}
    ended = [name for name, reason in reasons.items() if reason is FinishReason.STOP]
    assert {name.partition(",")[0] for name in ended} >= {*SCHEMAS, *TEXTS}, sorted(set(found) - set(ended))
    for name in ended:
        form, text = name.partition(",")[0], found[name].text
        if form in TEXTS:
            assert re.fullmatch(TEXTS[form], text), (name, text)
        else:
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(
                json.loads(text), SCHEMAS.get(form, {"type": "object"}), format_checker=checker
            )


def test_every_reply_has_its_form(plain: dict[str, Collected]) -> None:
    assert_valid(plain)


@pytest.mark.by_default("predicted", "suffix, rejection", "trees", "crowded, swapped")
@pytest.mark.parametrize("name", SPECULATION)
async def test_drafts_chunks_and_pressure_change_nothing(
    name: str, directory: Path, heads: Path, plain: dict[str, Collected]
) -> None:
    flags = SPECULATION[name]
    if name == "trees":
        flags = (*flags, "--medusa-heads", str(heads))
    if "draft-model" in flags:
        flags = (*flags, "--draft-model", str(directory))
    predictions = {
        ask.name: predicted(plain[ask.name].token_ids, index)
        for index, ask in enumerate(asks())
        if "predicted" in name
    }
    found = await replies(directory, *flags, predictions=predictions)
    assert_valid(found)
    for ask in asks():
        if "rejection" not in name or ask.sampling.temperature == 0:
            assert found[ask.name].text == plain[ask.name].text, ask.name
            assert found[ask.name].token_ids == plain[ask.name].token_ids, ask.name
    rounds = [reply.finish.speculation for reply in found.values() if reply.finish.speculation is not None]
    assert sum(stats.num_accepted for stats in rounds) > (400 if "predicted" in name else 3)
    if name != "the target itself":  # what its drafts get wrong, the grammar has taken off before
        assert sum(stats.num_proposed - stats.num_accepted for stats in rounds) > 3
    if "crowded" in name:
        assert sum(len(reply.finish.timing.preemptions) for reply in found.values()) > 3


async def one(
    engine: Engine, structure: StructuredOutput, max_tokens: int = 60, name: str = "ask", **sampling: Any
) -> Collected:
    """A single reply."""
    params = SamplingParams(max_tokens, **{"temperature": 1.0, "seed": 5, **sampling})
    return await reply_to(engine, Ask(name, structure, params))


def regex(source: str) -> StructuredOutput:
    return StructuredOutput("regex", source)


@pytest.mark.parametrize("flags", [("--speculative-method", "none"), FIXED], ids=["plain", "drafts"])
async def test_a_form_and_everything_else_that_a_request_may_say(
    flags: tuple[str, ...], directory: Path
) -> None:
    tokenizer = Tokenizer(directory)
    a, b, x = (tokenizer.encode(char)[0] for char in "abx")
    async with engine_of(directory, *ROOMY, *flags) as engine:
        # It ends by itself where nothing can follow, without EOS, whoever ignores it.
        for ignore_eos in (False, True):
            done = await one(engine, regex("[ab]{5}"), ignore_eos=ignore_eos, max_tokens=9)
            assert re.fullmatch("[ab]{5}", done.text)
            assert (done.finish.reason, done.finish.stop_reason) == (FinishReason.STOP, None)
            assert EOS_ID not in done.token_ids
        # Where it may end it ends by EOS, unless that is ignored or too early.
        likely_eos: dict[str, Any] = {"logit_bias": ((EOS_ID, 100.0),), "temperature": 0.0}
        assert len((await one(engine, regex("[ab]+"), **likely_eos)).text) == 1
        longest = await one(engine, regex("[ab]+"), ignore_eos=True, max_tokens=12, **likely_eos)
        assert len(longest.token_ids) == 12 and longest.finish.reason is FinishReason.LENGTH
        later = await one(engine, regex("[ab]+"), min_tokens=6, **likely_eos)
        assert len(later.token_ids) == 7 and later.token_ids[-1] == EOS_ID
        # A form that ends before min_tokens wins over it.
        short = await one(engine, regex("[ab]{2}"), min_tokens=30)
        assert len(short.text) == 2 and short.finish.reason is FinishReason.STOP
        # Tokens and strings that end any reply end this one too.
        by_id = await one(engine, regex("a+b"), stop_token_ids=frozenset({b}), logit_bias=((b, 100.0),))
        assert (by_id.finish.stop_reason, by_id.text.strip("a")) == (b, "")
        by_id = await one(engine, regex("a{3}b*"), stop_token_ids=frozenset({x}), ignore_eos=True)
        assert re.fullmatch("a{3}b*", by_id.text)
        by_string = await one(engine, regex("[ab]{2}x[ab]{40}"), stop=("x",))
        assert (by_string.finish.stop_reason, len(by_string.text)) == ("x", 2)
        # Bans, biases and penalties choose among what the form allows.
        banned = await one(engine, regex("[ab]{7}"), bad_words=((a,),), allowed_token_ids=(a, b, x))
        assert banned.text == "b" * 7
        biased = await one(engine, regex("[ab]{7}"), logit_bias=((x, 100.0), (a, 50.0)))
        assert set(biased.text) == {"a"}
        # Cut by max_tokens it is not whole.
        cut = await one(engine, regex("a[ab]{40}"), max_tokens=5)
        assert cut.finish.reason is FinishReason.LENGTH


async def test_what_a_form_and_the_allowed_tokens_leave_nothing_of_ends_alone(directory: Path) -> None:
    async with engine_of(directory, *ROOMY) as engine:
        nothing = one(engine, regex("[ab]{7}"), allowed_token_ids=(5, 6))
        failed, fine = await asyncio.gather(nothing, one(engine, regex("[ab]{7}"), name="other", seed=8))
        assert isinstance(failed.finish.error, RequestFailed)
        assert "grammar" in str(failed.finish.error)
        assert re.fullmatch("[ab]{7}", fine.text)
        engine.metrics.engine_errors.clear()


async def test_log_probabilities_stay_the_models_own(directory: Path) -> None:
    async with engine_of(directory, *ROOMY) as engine:
        grammar = await engine.text.compile_grammar(regex("[ab]{9}"))
        params = SamplingParams(9, temperature=0.0, logprobs=3)
        stream = engine.submit(GenerationRequest("ask", [5, 6, 7], params, grammar=grammar))
        records = [record async for delta in stream for record in delta.logprobs]
        assert len(records) == 9
        assert max(record.rank for record in records) > 10
        assert all(record.logprob < record.top[0][1] for record in records if record.rank > 1)
