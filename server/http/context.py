"""ServerContext: what every route of one application shares; Exchange: one HTTP request and its reply."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request
from starlette.types import Scope

from config import Settings
from engine import EmbeddingService, Engine, EngineInfo, InvalidRequest, Overloaded
from server.api.generation import Accepted
from server.api.live_replies import LiveReplies
from server.api.next_turns import NextTurns
from server.api.responses.store import StoredResponses
from server.http.open_tenants import OpenTenants
from server.http.peer import Peer
from server.http.turns import Turns
from server.observability.figure_history import FigureHistory
from server.observability.http_metrics import HttpMetrics

EXCHANGE_KEY = "slipstream.exchange"


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Built once by `build_app`. `created` is the start in Unix seconds, as model listings show it.

    `large_bodies` are read, and pieces of `large_replies` written, in a thread each.
    """

    settings: Settings
    engine: Engine
    http: HttpMetrics
    created: int
    history: FigureHistory
    live: LiveReplies = field(default_factory=LiveReplies)
    responses: StoredResponses = field(default_factory=StoredResponses)
    tenants: OpenTenants = field(default_factory=OpenTenants)
    large_bodies: Turns = field(default_factory=Turns)
    large_replies: Turns = field(default_factory=Turns)
    next_turns: NextTurns | None = None

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the API; the first is the one replies and metrics carry."""
        return self.settings.model.served_names

    @property
    def embeddings(self) -> EmbeddingService | None:
        """What embeds and scores; None where it is not even looked for a model that does."""
        companion = self.engine.companion
        return companion if isinstance(companion, EmbeddingService) else None

    @property
    def generator_names(self) -> tuple[str, ...]:
        """The names of the model that generates; none where an embedding model is served alone."""
        return self.served_names if self.engine.generates else ()

    @property
    def embedding_names(self) -> tuple[str, ...]:
        """The names of the embedding model or reranker, if one is served."""
        name = self.settings.model.embedding_name
        if name is not None:
            return (name,)
        is_alone = not self.engine.generates and self.embeddings is not None
        return self.served_names if is_alone else ()

    @property
    def info(self) -> EngineInfo | None:
        """What was loaded, None before that; for replies that do not wait for the model."""
        try:
            return self.engine.info
        except (InvalidRequest, Overloaded):
            return None


@dataclass(frozen=True, slots=True)
class ReadTexts:
    """The texts of a request for vectors or scores, read `prepared_s` after its arrival."""

    model: str
    num_texts: int
    num_tokens: int
    prepared_s: float


@dataclass(slots=True)
class Exchange:
    """One HTTP request being answered. `headers` are added to the reply, whatever it turns out to be.

    `caller_id` is the label the caller put on it, None when there is none that could be sent back. `tenant`
    names the key used, never the key; where that key serves many, `tenant_of_user` names the users it speaks
    for. `arrival_time` is in seconds of `clock`, which is the engine's so that
    both count from the same instant. `peer` is what its connection knows of the client. `accepted` is None
    until a completion or chat request has its places in the queue, `texts` until the texts of a request for
    vectors or scores are read. `is_background` says that it is a line of a batch, which came over no
    connection; `holds_server_key` that it may change what holds for all requests.
    """

    caller_id: str | None
    own_id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    clock: Callable[[], float] = time.monotonic
    arrival_time: float = field(init=False)
    tenant: str | None = None
    tenant_of_user: Callable[[str], str] | None = None
    peer: Peer = field(default_factory=Peer)
    accepted: Accepted | None = None
    texts: ReadTexts | None = None
    is_background: bool = False
    holds_server_key: bool = False
    status: int | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    id_headers: tuple[bytes, ...] = (b"x-request-id",)  # that its id is sent in

    def __post_init__(self) -> None:
        self.arrival_time = self.clock()

    @property
    def request_id(self) -> str:
        """The reply's label: the caller's, else ours."""
        return self.caller_id or self.own_id

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return self.clock() - self.arrival_time

    def reply_headers(self) -> list[tuple[bytes, bytes]]:
        """What every reply carries; called when its first byte is sent."""
        elapsed_ms = round(self.age_s * 1000)
        return [
            *((name, self.request_id.encode("ascii")) for name in self.id_headers),
            (b"openai-processing-ms", str(elapsed_ms).encode("ascii")),
            *self.headers,
        ]


def cache_owner(context: ServerContext, exchange: Exchange) -> str | None:
    """Who alone finds the prefixes that this request caches; None where all find each other's."""
    return None if context.settings.cache.share_prefix_cache else exchange.tenant


def context_of(request: Request) -> ServerContext:
    """The context of the application that serves `request`."""
    return cast(ServerContext, request.app.state.slipstream)


def exchange_of(scope: Scope) -> Exchange:
    """The exchange the outermost middleware opened for this request."""
    return cast(Exchange, scope[EXCHANGE_KEY])
