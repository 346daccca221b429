"""TextsCall: one request for vectors or scores, from its checked body to what the model gives."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from starlette.requests import Request

from engine import EmbeddingRequest, EmbeddingService, EncodedText, TextReading
from server.api.body import read_fields
from server.api.embeddings.protocol import TextsBody
from server.api.openai.models import check_embedding_model
from server.api.time_limit import allowed_s, deadline_header, prepared_by, soonest
from server.http.body_room import Lease, lease_of
from server.http.context import Exchange, ReadTexts, ServerContext, context_of, exchange_of
from server.http.errors import invalid

B = TypeVar("B", bound=TextsBody)

MANY_NUMBERS = 2_000  # of a reply: more are encoded off the loop


@dataclass(frozen=True, slots=True)
class TextsCall:
    """A request that has its place in the queue. `deadline` is in seconds of the engine's clock."""

    context: ServerContext
    service: EmbeddingService
    exchange: Exchange
    lease: Lease
    model: str
    most: int | None
    deadline: float | None

    def reading(self, param: str) -> TextReading:
        """How the texts of a field are read."""
        return TextReading(param, self.exchange.tenant, self.most)

    async def encode(self, texts: Sequence[str], param: str) -> list[EncodedText]:
        """The tokens of each text of a field. Raises InvalidRequest."""
        return await self.service.encode([(text,) for text in texts], self.reading(param))

    async def compute(self, texts: Sequence[EncodedText]) -> np.ndarray:
        """[num_texts, dimensions], or [num_texts, 1] of a cross-encoder; float32."""
        exchange, peer = self.exchange, self.exchange.peer
        num_tokens = sum(map(len, texts))
        exchange.texts = ReadTexts(self.model, len(texts), num_tokens, exchange.age_s)
        request = EmbeddingRequest(
            texts, exchange.tenant, exchange.arrival_time, self.deadline, lambda: peer.stalled
        )
        rows = await self.service.compute(request)
        self.lease.hold(self.lease.num_bytes + rows.nbytes)
        return rows

    async def vectors(self, texts: Sequence[EncodedText], width: int | None) -> np.ndarray:
        """Vectors cut to `width`, if that is given, and then made of length 1 again."""
        vectors = await self.compute(texts)
        return vectors if width is None else of_length_one(vectors[:, :width])

    def check_vectors(self, width: int | None) -> None:
        """Raise ApiError where the model gives no vectors, or none as wide as is asked for."""
        most = self.service.info.dimensions
        if most is None:
            message = f"The model '{self.model}' scores pairs of texts and gives no vectors: see /v1/rerank."
            raise invalid(message, "model")
        if width is not None and width > most:
            raise invalid(f"'dimensions' is {width}; the model's vectors have {most} numbers.", "dimensions")

    async def score(
        self, pairs: Sequence[tuple[str, str]], params: tuple[str, str]
    ) -> tuple[list[float], int]:
        """How near the texts of each pair are, and how many tokens were read for it.

        A cross-encoder's own score, else the cosine of their vectors, each text of which is computed once.
        """
        service = self.service
        async with prepared_by(self.context.engine, self.deadline, self.exchange.arrival_time):
            if service.info.scores_pairs:
                texts = await service.encode(pairs, self.reading(params[1]))
            else:
                firsts = dict.fromkeys(first for first, _ in pairs)
                seconds = dict.fromkeys(second for _, second in pairs)
                texts = await self.encode(list(firsts), params[0])
                texts += await self.encode(list(seconds), params[1])
        rows = await self.compute(texts)
        num_tokens = sum(map(len, texts))
        if service.info.scores_pairs:
            return rows[:, 0].astype(float).tolist(), num_tokens
        unit = of_length_one(rows)
        first_at = {text: i for i, text in enumerate(firsts)}
        second_at = {text: len(firsts) + i for i, text in enumerate(seconds)}
        left = unit[[first_at[first] for first, _ in pairs]]
        right = unit[[second_at[second] for _, second in pairs]]
        return (left * right).sum(axis=1).astype(float).tolist(), num_tokens

    def envelope(self, prefix: str) -> dict[str, object]:
        """The head of a reply."""
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "model": self.model}


@asynccontextmanager
async def open_call(
    request: Request,
    kind: type[B],
    find_model: Callable[[ServerContext, str | None], str] = check_embedding_model,
) -> AsyncIterator[tuple[TextsCall, B]]:
    """A place in the queue and the body of a request, for as long as it is answered. Raises ApiError."""
    context, exchange = context_of(request), exchange_of(request.scope)
    service = context.embeddings
    if service is None:
        check_embedding_model(context, None)
    assert service is not None
    from_header = deadline_header(request.headers)
    with service.admit(exchange.tenant):
        body = await read_fields(request, kind, {})
        exchange.caller_id = exchange.caller_id or body.request_id
        model = find_model(context, body.model)
        limit_s = allowed_s(soonest(body.deadline_ms, from_header), context.settings.server.request_timeout)
        call = TextsCall(
            context,
            service,
            exchange,
            lease_of(request.scope),
            model,
            most_tokens(body.truncate_prompt_tokens, service.info.max_model_len),
            None if limit_s is None else exchange.arrival_time + limit_s,
        )
        yield call, body


def of_length_one(vectors: np.ndarray) -> np.ndarray:
    """The same directions, each vector of length 1."""
    scaled: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return scaled


def most_tokens(asked: int | None, limit: int) -> int | None:
    """How many tokens of a text to keep, None for all; -1 asks for what the model can read."""
    if asked is None or asked < 0:
        return None if asked is None else limit
    if not 0 < asked <= limit:
        raise invalid(f"'truncate_prompt_tokens' must be from 1 to {limit}, or -1.", "truncate_prompt_tokens")
    return asked


def usage(num_tokens: int) -> dict[str, object]:
    """What was read; nothing is written."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
