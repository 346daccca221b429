"""/v1/embeddings, /v1/rerank and /v1/score beside a generator, over real sockets and tiny models."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from config import load_settings
from engine import EmbeddingService, Engine
from server.observability.request_log import Tracer
from server.observability.tracing import RequestTracer
from tests.e2e.http_server import served
from tests.e2e.real_engine import real_engine
from tests.e2e.wire import RawReply, Wire, ask
from tests.support.captured_log import captured_log
from tests.support.embedding_reference import pair_scores, vectors
from tests.support.tiny_embedders import MAX_TOKENS, save_cross_encoder, save_embedder
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["the river is long", "a", "stones of the nile", "the nile is a river of stones " * 3]
LONG = "river " * 200
SPANS = InMemorySpanExporter()
CHAT, EMBEDDER = "chat-model", "embedder"


@asynccontextmanager
async def server(model: Path, *flags: str, tracer: Tracer | None = None) -> AsyncIterator[tuple[str, Engine]]:
    """A server started with these flags, as the command line would have it."""
    settings = load_settings([str(model), *flags], environ={})
    async with real_engine(model, *flags) as engine, served(settings, engine, tracer) as url:
        yield url, engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    return {
        CHAT: save_tiny_model("llama", folder / CHAT),
        EMBEDDER: save_embedder(folder / EMBEDDER, prompts=prompts),
        "reranker": save_cross_encoder(folder / "reranker"),
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def both(models: dict[str, Path]) -> AsyncIterator[tuple[str, Engine]]:
    flags = ("--served-model-name", CHAT, "--embedding-model", str(models[EMBEDDER]), "--ollama-api")
    tracer = RequestTracer(CHAT, SimpleSpanProcessor(SPANS))
    async with server(models[CHAT], *flags, tracer=tracer) as found:
        yield found
    tracer.close()


@pytest.fixture
def url(both: tuple[str, Engine]) -> str:
    return both[0]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def reranker_url(models: dict[str, Path]) -> AsyncIterator[str]:
    async with server(models["reranker"], "--served-model-name", "reranker") as (url, _):
        yield url


def service_of(engine: Engine) -> EmbeddingService:
    assert isinstance(engine.companion, EmbeddingService)
    return engine.companion


async def until(is_so: Callable[[], bool]) -> None:
    """Let the server run until it is so."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)


async def embed(url: str, texts: object, **more: object) -> RawReply:
    return await ask(url, "POST", "/v1/embeddings", {"input": texts, **more})


def rows(reply: RawReply) -> np.ndarray:
    assert reply.status == 200, reply.body
    assert [each["index"] for each in reply.json()["data"]] == list(range(len(reply.json()["data"])))
    return np.array([each["embedding"] for each in reply.json()["data"]])


def assert_alike(found: np.ndarray, expected: np.ndarray) -> None:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / lengths).min() >= 0.9999
    assert np.abs(found - expected).max() < 1e-5


async def test_vectors_are_those_of_the_plain_model(url: str, models: dict[str, Path]) -> None:
    reply = await embed(url, TEXTS)
    expected, num_tokens = vectors(models[EMBEDDER], TEXTS)
    assert_alike(rows(reply), expected)
    found = reply.json()
    assert found["object"] == "list" and found["model"] == str(models[EMBEDDER])
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == num_tokens
    assert_alike(rows(await embed(url, TEXTS[0])), expected[:1])


async def test_a_prompt_of_the_models_own_goes_before_each_text(url: str, models: dict[str, Path]) -> None:
    expected, _ = vectors(models[EMBEDDER], [f"query: {text}" for text in TEXTS])
    assert_alike(rows(await embed(url, TEXTS, prompt_name="query")), expected)
    assert (await embed(url, TEXTS, prompt_name="passage")).status == 400


async def test_token_ids_are_taken_as_they_are(url: str, models: dict[str, Path]) -> None:
    ids = [[2, 10, 5, 3], [2, 6, 7, 8, 3]]
    found = rows(await embed(url, ids))
    assert_alike(found[:1], rows(await embed(url, ids[0])))
    assert_alike(found, vectors(models[EMBEDDER], ids)[0])


async def test_base64_holds_the_same_numbers_and_dimensions_cuts_them(url: str) -> None:
    plain = rows(await embed(url, TEXTS))
    coded = (await embed(url, TEXTS, encoding_format="base64")).json()["data"]
    read = [np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4") for each in coded]
    assert np.abs(np.stack(read) - plain).max() < 1e-8
    cut = rows(await embed(url, TEXTS, dimensions=8))
    expected = plain[:, :8] / np.linalg.norm(plain[:, :8], axis=1, keepdims=True)
    assert np.abs(cut - expected).max() < 1e-7
    assert "32 numbers" in (await embed(url, "a", dimensions=33)).json()["error"]["message"]


async def test_openais_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        name = [model.id async for model in client.models.list()][-1]
        found = await client.embeddings.create(model=name, input=TEXTS, dimensions=16)
        assert [len(each.embedding) for each in found.data] == [16] * len(TEXTS)
        assert found.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError):
            await client.embeddings.create(model=name, input=LONG)


async def test_a_text_that_is_too_long_is_refused_unless_it_may_be_cut(url: str) -> None:
    reply = await embed(url, ["a", LONG])
    assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert f"{MAX_TOKENS} tokens" in reply.json()["error"]["message"]
    cut = await embed(url, LONG, truncate_prompt_tokens=-1)
    assert cut.json()["usage"]["prompt_tokens"] == MAX_TOKENS
    few = await embed(url, LONG, truncate_prompt_tokens=5)
    assert_alike(rows(few), rows(await embed(url, "river river river")))
    for asked in (0, MAX_TOKENS + 1):
        assert (await embed(url, "a", truncate_prompt_tokens=asked)).status == 400


async def test_each_model_answers_for_what_it_does(url: str, models: dict[str, Path]) -> None:
    names = [each["id"] for each in (await ask(url, "GET", "/v1/models")).json()["data"]]
    assert names == [CHAT, str(models[EMBEDDER])]
    shown = (await ask(url, "GET", f"/v1/models/{CHAT}")).json()
    assert shown["id"] == CHAT
    told = await embed(url, "a", model=CHAT)
    assert (told.status, told.json()["error"]["param"]) == (400, "model")
    assert (await embed(url, "a", model="other")).json()["error"]["code"] == "model_not_found"
    asked = {"model": names[1], "prompt": "a", "max_tokens": 1}
    told = await ask(url, "POST", "/v1/completions", asked)
    assert told.status == 400 and "generates no text" in told.json()["error"]["message"]
    assert (await ask(url, "POST", "/v1/completions", {**asked, "model": CHAT})).status == 200


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_sorts_by_cosine(url: str, path: str, models: dict[str, Path]) -> None:
    body: dict[str, Any] = {"query": "the long river", "documents": [*TEXTS, {"text": "wet stones"}]}
    documents = [*TEXTS, "wet stones"]
    own, _ = vectors(models[EMBEDDER], ["the long river", *documents])
    cosines = own[1:] @ own[0]
    found = (await ask(url, "POST", path, body)).json()["results"]
    assert [each["index"] for each in found] == np.argsort(-cosines).tolist()
    for each in found:
        assert each["relevance_score"] == pytest.approx(cosines[each["index"]], abs=1e-5)
        assert each["document"] == {"text": documents[each["index"]]}
    best = (await ask(url, "POST", path, {**body, "top_n": 2, "return_documents": False})).json()["results"]
    assert [(each["index"], "document" in each) for each in best] == [
        (each["index"], False) for each in found[:2]
    ]


async def test_scores_of_pairs(url: str, models: dict[str, Path]) -> None:
    own, _ = vectors(models[EMBEDDER], TEXTS)
    body: dict[str, Any] = {"text_1": TEXTS[0], "text_2": TEXTS}
    found = (await ask(url, "POST", "/v1/score", body)).json()
    assert [each["score"] for each in found["data"]] == pytest.approx((own @ own[0]).tolist(), abs=1e-5)
    body = {"text_1": TEXTS[:3], "text_2": TEXTS[1:]}
    found = (await ask(url, "POST", "/score", body)).json()
    expected = (own[:3] * own[1:]).sum(axis=1).tolist()
    assert [each["score"] for each in found["data"]] == pytest.approx(expected, abs=1e-5)
    assert (await ask(url, "POST", "/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS[:3]})).status == 400


async def test_a_cross_encoder_scores_pairs_alone(reranker_url: str, models: dict[str, Path]) -> None:
    expected = pair_scores(models["reranker"], [("the river", text) for text in TEXTS])
    body: dict[str, Any] = {"query": "the river", "documents": TEXTS}
    found = (await ask(reranker_url, "POST", "/v1/rerank", body)).json()["results"]
    assert {each["index"]: each["relevance_score"] for each in found} == pytest.approx(
        dict(enumerate(expected)), abs=1e-5
    )
    told = await embed(reranker_url, "a")
    assert told.status == 400 and "/v1/rerank" in told.json()["error"]["message"]


async def test_a_server_without_a_generator_says_so(reranker_url: str) -> None:
    assert (await ask(reranker_url, "GET", "/health/ready")).status == 200
    assert (await ask(reranker_url, "GET", "/metrics")).status == 200
    names = [each["id"] for each in (await ask(reranker_url, "GET", "/v1/models")).json()["data"]]
    assert names == ["reranker"]
    messages = [{"role": "user", "content": "hi"}]
    asked: Sequence[tuple[str, dict[str, Any]]] = (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 3}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
    )
    for path, body in asked:
        reply = await ask(reranker_url, "POST", path, body)
        assert reply.status == 400 and "generates no text" in reply.body.decode(), path
    assert (await ask(reranker_url, "GET", "/tokenizer_info")).status == 400


async def test_embeddings_where_none_are_served(models: dict[str, Path]) -> None:
    async with server(models[CHAT]) as (url, _):
        told = await embed(url, "a")
        assert told.status == 400 and "--embedding-model" in told.json()["error"]["message"]


async def test_a_stream_goes_on_while_texts_are_embedded(both: tuple[str, Engine]) -> None:
    url, engine = both
    texts = ["river of stones " * 15] * 600
    wire = await Wire.connect(url)
    body = {"model": CHAT, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    await wire.send("POST", "/v1/completions", json.dumps(body).encode())
    await wire.head()
    embedding = asyncio.create_task(embed(url, texts))
    gaps, seen_at = [], asyncio.get_running_loop().time()
    num_beside = 0
    while await wire.chunk():
        now = asyncio.get_running_loop().time()
        gaps.append(now - seen_at)
        seen_at = now
        num_beside += service_of(engine).num_open > 0
    await wire.close()
    assert len(rows(await embedding)) == len(texts)
    assert num_beside > 10  # it was not that one came after the other
    assert sorted(gaps)[-3] < 0.15  # the machine may stop for a moment once or twice


async def test_what_a_client_that_left_had_asked_for_is_dropped(both: tuple[str, Engine]) -> None:
    url, engine = both
    service, before = service_of(engine), engine.metrics.request_aborts["disconnect"]
    wire = await Wire.connect(url)
    body = json.dumps({"input": ["river of stones " * 15] * 2000}).encode()
    await wire.send("POST", "/v1/embeddings", body)
    await until(lambda: service.num_waiting_tokens > 0)
    num_computed = service.metrics.texts
    await wire.close()
    await until(lambda: engine.metrics.request_aborts["disconnect"] > before)
    assert service.num_open == service.num_waiting_tokens == 0
    assert service.metrics.texts - num_computed < 1000


async def test_a_deadline_that_passes_ends_it(both: tuple[str, Engine]) -> None:
    url, engine = both
    missed = engine.metrics.deadlines_missed
    reply = await embed(url, ["river of stones " * 15] * 2000, deadline_ms=60)
    assert (reply.status, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert engine.metrics.deadlines_missed == missed + 1
    assert service_of(engine).num_open == 0


async def test_the_end_of_a_server_does_not_wait_for_long_texts(models: dict[str, Path]) -> None:
    async with server(models[EMBEDDER], "--served-model-name", EMBEDDER) as (url, engine):
        asked = asyncio.create_task(embed(url, ["river of stones " * 15] * 2000))
        await until(lambda: service_of(engine).num_open > 0)
        began = asyncio.get_running_loop().time()
        await engine.stop()
        assert asyncio.get_running_loop().time() - began < 1
        reply = await asked
        assert (reply.status, reply.json()["error"]["code"]) == (503, "draining")
        assert engine.metrics.request_aborts["drain"] == 1


async def test_requests_are_counted(both: tuple[str, Engine]) -> None:
    url, engine = both
    started, finished = engine.metrics.requests_started, engine.metrics.requests_finished.total()
    await embed(url, TEXTS)
    assert engine.metrics.requests_started - started == 1
    assert engine.metrics.requests_finished.total() - finished == 1
    page = (await ask(url, "GET", "/metrics")).body.decode()
    lines = [line for line in page.splitlines() if "embedding" in line and not line.startswith("#")]
    found = {line.split("{")[0]: float(line.split()[-1]) for line in lines}
    for name in ("texts_total", "tokens_total", "request_latency_seconds_count", "batch_tokens_count"):
        assert found[f"slipstream_embedding_{name}"] > 0
    assert found["slipstream_embedding_batch_duration_seconds_sum"] > 0
    assert found["slipstream_num_embedding_requests_waiting"] == 0


async def test_a_request_is_a_line_and_a_span_as_others_are(url: str, models: dict[str, Path]) -> None:
    name = str(models[EMBEDDER])
    for path, body, operation, num_texts in (
        ("/v1/embeddings", {"input": TEXTS}, "embeddings", 4),
        ("/v1/rerank", {"query": "the", "documents": TEXTS}, "rerank", 5),
        ("/api/embed", {"input": TEXTS}, "embeddings", 4),
        ("/v1/score", {"text_1": 5, "text_2": "a"}, "score", 0),
    ):
        SPANS.clear()
        with captured_log() as log:
            reply = await ask(url, "POST", path, body)
            (line,) = await log.requests()
        (span,) = SPANS.get_finished_spans()
        assert span.context is not None
        attributes: dict[str, Any] = dict(span.attributes or {})
        assert (line["route"], line["code"]) == (path, reply.status)
        assert line["trace_id"] == format(span.context.trace_id, "032x")
        assert attributes["gen_ai.operation.name"] == operation
        if not num_texts:
            assert line["error"] and "texts" not in line and "slipstream.texts" not in attributes
            continue
        assert line["model"] == name and line["texts"] == num_texts
        assert span.name == f"{operation} {name}"
        assert line["prompt_tokens"] == attributes["gen_ai.usage.input_tokens"] > num_texts
        assert 0 < line["prepare_ms"] < line["ms"]


async def test_ollamas_paths_give_the_same_vectors(url: str, models: dict[str, Path]) -> None:
    name = str(models[EMBEDDER])
    expected, _ = vectors(models[EMBEDDER], TEXTS)
    for model in (None, name, f"{name}:latest"):
        told = (await ask(url, "POST", "/api/embed", {"model": model, "input": TEXTS})).json()
        assert told["model"] == (model or name) and told["prompt_eval_count"] > len(TEXTS)
        found = np.array(told["embeddings"])
        unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.allclose(found, unit, atol=1e-5)
    one = await ask(url, "POST", "/api/embeddings", {"model": name, "prompt": TEXTS[0]})
    assert np.allclose(one.json()["embedding"], expected[0], atol=1e-5)
    cut = await ask(url, "POST", "/api/embed", {"input": "a", "dimensions": 4})
    assert np.linalg.norm(cut.json()["embeddings"][0]) == pytest.approx(1, abs=1e-5)
    assert (await ask(url, "POST", "/api/embed", {"input": LONG})).status == 200
    refused = await ask(url, "POST", "/api/embed", {"input": LONG, "truncate": False})
    assert refused.status == 400 and "error" in refused.json()
    wrong = await ask(url, "POST", "/api/embed", {"model": CHAT, "input": "a"})
    assert wrong.status == 400 and name in wrong.json()["error"]
    tags = (await ask(url, "GET", "/api/tags")).json()["models"]
    assert [each["name"] for each in tags] == [f"{CHAT}:latest", f"{name}:latest"]
    cards = [(await ask(url, "POST", "/api/show", {"model": each["name"]})).json() for each in tags]
    assert [each["capabilities"][0] for each in cards] == ["completion", "embedding"]
    family = cards[1]["model_info"]["general.architecture"]
    assert cards[1]["model_info"][f"{family}.context_length"] == MAX_TOKENS
    assert cards[1]["model_info"][f"{family}.embedding_length"] == expected.shape[1]


async def test_a_reranker_alone_is_shown_by_ollamas_path(models: dict[str, Path]) -> None:
    async with server(models["reranker"], "--served-model-name", "reranker", "--ollama-api") as (url, _):
        for body in ({}, {"model": "reranker"}, {"model": "reranker:latest"}):
            card = await ask(url, "POST", "/api/show", body)
            assert (card.status, card.json()["capabilities"]) == (200, []), body
        assert (await ask(url, "POST", "/api/show", {"model": "other"})).status == 404


async def test_many_vectors_by_ollamas_path_are_written_in_pieces(url: str) -> None:
    reply = await ask(url, "POST", "/api/embed", {"input": ["river", "nile"] * 1024})
    assert reply.headers["transfer-encoding"] == "chunked"
    found = reply.json()["embeddings"]
    assert len(found) == 2048 and found[0] == found[2046] != found[1]


async def test_long_documents_come_back_in_pieces(url: str) -> None:
    documents = ["the river " * 50_000, "nilé" * 1000]
    body = {"query": "the river", "documents": documents, "truncate_prompt_tokens": -1}
    reply = await ask(url, "POST", "/v1/rerank", body)
    assert reply.headers["transfer-encoding"] == "chunked"
    results = reply.json()["results"]
    assert [each["document"]["text"] for each in results] == [documents[each["index"]] for each in results]
    short = await ask(url, "POST", "/v1/rerank", {**body, "return_documents": False})
    assert "content-length" in short.headers


async def test_the_examples_of_the_api_page_are_taken(url: str) -> None:
    paths = (await ask(url, "GET", "/openapi.json")).json()["paths"]
    posts = {path: kinds["post"] for path, kinds in paths.items() if "post" in kinds}
    own = {path: each for path, each in posts.items() if each["tags"] == ["embeddings"]}
    assert len(own) == 6
    for path, each in own.items():
        example = each["requestBody"]["content"]["application/json"]["example"]
        reply = await ask(url, "POST", path, {**example, "truncate_prompt_tokens": -1})
        assert reply.status == 200, path


async def test_keys_and_a_full_queue(models: dict[str, Path]) -> None:
    flags = ("--served-model-name", EMBEDDER, "--api-key", "sk-1", "--max-queued-requests", "1")
    async with server(models[EMBEDDER], *flags) as (url, engine):
        assert (await embed(url, "a")).status == 401
        key = {"authorization": "Bearer sk-1"}
        assert (await ask(url, "POST", "/v1/embeddings", {"input": "a"}, headers=key)).status == 200
        with service_of(engine).admit(None):
            reply = await ask(url, "POST", "/v1/embeddings", {"input": "a"}, headers=key)
        assert (reply.status, reply.json()["error"]["code"]) == (503, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1


BAD_INPUTS: Sequence[dict[str, Any]] = (
    {},
    {"input": None},
    {"input": []},
    {"input": 3},
    {"input": [1.5]},
    {"input": [-1]},
    {"input": [10**9]},
    {"input": [True]},
    {"input": ["a", 1]},
    {"input": [[]]},
    {"input": "\ud800"},
    {"input": {"text": "a"}},
    {"input": ["a"] * 2049},
    {"input": "a", "encoding_format": "int8"},
    {"input": "a", "dimensions": 0},
    {"input": "a", "dimensions": "8"},
    {"input": "a", "model": 3},
    {"input": "a", "deadline_ms": 0},
    {"input": "a", "truncate_prompt_tokens": -2},
    {"input": "a", "add_special_tokens": "yes"},
    {"input": "", "add_special_tokens": False},
)
BAD_RERANKS: Sequence[dict[str, Any]] = (
    {"query": "a"},
    {"query": "a", "documents": []},
    {"query": ["a"], "documents": ["a"]},
    {"query": "a", "documents": "a"},
    {"query": "a", "documents": [{"title": "a"}]},
    {"query": "a", "documents": ["a"], "top_n": -1},
    {"query": "a", "documents": [LONG]},
)
BAD_SCORES: Sequence[dict[str, Any]] = (
    {"text_1": "a"},
    {"text_1": [], "text_2": ["a"]},
    {"text_1": "a", "text_2": [1]},
)
BAD = [
    *(("/v1/embeddings", body) for body in BAD_INPUTS),
    *(("/v1/rerank", body) for body in BAD_RERANKS),
    *(("/v1/score", body) for body in BAD_SCORES),
]


@pytest.mark.parametrize(("path", "body"), BAD)
async def test_a_bad_body_is_a_400_that_costs_nothing(
    both: tuple[str, Engine], path: str, body: dict[str, Any]
) -> None:
    url, engine = both
    started = engine.metrics.requests_started
    reply = await ask(url, "POST", path, body)
    assert reply.status == 400, reply.body
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert engine.metrics.requests_started == started
