"""POST /v1/embeddings, /v1/rerank and /v1/score, and the other paths by which clients know the last two."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import EncodedText
from server.api.embeddings.call import MANY_NUMBERS, TextsCall, open_call, usage
from server.api.embeddings.protocol import MAX_TEXTS, EmbeddingsRequest, RerankRequest, ScoreRequest
from server.api.openapi import json_body
from server.api.time_limit import prepared_by
from server.api.turn_reply import LARGE_CHARS
from server.http.errors import invalid
from server.http.json_pieces import LargeJson
from server.http.json_reply import json_response

router = APIRouter(tags=["embeddings"])

_DECIMALS = 9  # float32 has no more to tell of a vector of length 1

_RERANK = {"query": "Which river is the longest?", "documents": ["The Nile has 6,650 km.", "Rivers are wet."]}
_SCORE = {"text_1": "Which river is the longest?", "text_2": ["The Nile has 6,650 km.", "Rivers are wet."]}


@router.post("/v1/embeddings", openapi_extra=json_body(EmbeddingsRequest, {"input": "Three rivers."}))
async def create_embeddings(request: Request) -> Response:
    """A vector of each text."""
    async with open_call(request, EmbeddingsRequest) as (call, body):
        call.check_vectors(body.dimensions)
        if len(body.input) > MAX_TEXTS:
            raise invalid(f"'input' has {len(body.input)} texts; the limit is {MAX_TEXTS}.", "input")
        async with prepared_by(call.context.engine, call.deadline, call.exchange.arrival_time):
            texts = await _read(call, body)
        vectors = await call.vectors(texts, body.dimensions)
        entries = _entries(vectors, as_text=body.encoding_format == "base64")
        reply = {
            **call.envelope("embd"),
            "object": "list",
            "created": int(time.time()),
            "data": entries,
            "usage": usage(sum(map(len, texts))),
        }
        if vectors.size <= MANY_NUMBERS:
            return json_response(reply)
        return LargeJson(reply, call.context.large_replies)


async def _read(call: TextsCall, body: EmbeddingsRequest) -> list[EncodedText]:
    """The inputs as tokens: all of them are texts, or none is."""
    texts = [(item,) for item in body.input if isinstance(item, str)]
    special = body.add_special_tokens is not False
    reading = replace(call.reading("input"), prompt=body.prompt_name, adds_special_tokens=special)
    found = await call.service.encode(texts, reading)
    for item in body.input:
        if not isinstance(item, str):
            token_ids = item if call.most is None else item[: call.most]
            call.service.check_tokens(token_ids, "input")
            found.append(EncodedText(token_ids))
    return found


def _entries(vectors: np.ndarray, *, as_text: bool) -> Iterator[dict[str, object]]:
    """OpenAI's embedding objects, made as they are read, in any thread."""
    for index, vector in enumerate(vectors):
        shown: object = b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        if not as_text:
            shown = np.round(vector.astype(np.float64), _DECIMALS).tolist()
        yield {"object": "embedding", "index": index, "embedding": shown}


@router.post("/v1/rerank", openapi_extra=json_body(RerankRequest, _RERANK))
@router.post("/v2/rerank", openapi_extra=json_body(RerankRequest, _RERANK))
@router.post("/rerank", openapi_extra=json_body(RerankRequest, _RERANK))
async def rerank(request: Request) -> Response:
    """Documents by how well they answer a query, the best first; of equals the first."""
    async with open_call(request, RerankRequest) as (call, body):
        pairs = [(body.query, document) for document in body.documents]
        scores, num_tokens = await call.score(pairs, ("query", "documents"))
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        shows = body.return_documents is not False
        results = [
            {
                "index": index,
                **({"document": {"text": body.documents[index]}} if shows else {}),
                "relevance_score": scores[index],
            }
            for index in best
        ]
        reply = {**call.envelope("rerank"), "results": results, "usage": usage(num_tokens)}
        if not shows or sum(len(body.documents[index]) for index in best) <= LARGE_CHARS:
            return json_response(reply)
        return LargeJson(reply, call.context.large_replies)


@router.post("/v1/score", openapi_extra=json_body(ScoreRequest, _SCORE))
@router.post("/score", openapi_extra=json_body(ScoreRequest, _SCORE))
async def score(request: Request) -> Response:
    """How near the texts of each pair are: one with each of several, or one by one."""
    async with open_call(request, ScoreRequest) as (call, body):
        firsts, seconds = body.text_1, body.text_2
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            raise invalid(
                f"'text_1' has {len(firsts)} texts and 'text_2' has {len(seconds)}: give one, or as many.",
                "text_1",
            )
        scores, num_tokens = await call.score(list(zip(firsts, seconds, strict=True)), ("text_1", "text_2"))
        data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
        reply = {
            **call.envelope("score"),
            "object": "list",
            "created": int(time.time()),
            "data": data,
            "usage": usage(num_tokens),
        }
        return json_response(reply)
