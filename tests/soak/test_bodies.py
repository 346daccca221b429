"""Hostile bodies, one by one, against a server in its own process: how long nobody is served, what it takes.

Part of `make chaos`. The longest answer to /health tells for how long the event loop was held. Waits
for a core do not count, and a body does only if it takes too long every time.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess, server_process
from tests.soak.hostile_bodies import CONTEXT, HostileBody, hostile_bodies
from tests.support.tiny_models import START_TOKEN, VOCAB_SIZE, save_tiny_model, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]

SEED = 23
HELD_S = 0.1
EXTRA_BYTES = 300 * 10**6
KEPT_BYTES = 100 * 10**6
TRIES = 4
REPLY_S = 300.0
PROBE_S = 0.002
NUM_SLICES = 8
NUM_SHOWN = 10
NUM_WARM_UPS = 8
MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>")


@dataclass(frozen=True, slots=True, order=True)
class Cost:
    """Seconds of the longest silence of /health, bytes beyond those of the idle server, and the reply."""

    held_s: float
    extra_bytes: int
    status: int
    took_s: float


class Watched:
    """A server, and what one request does to it."""

    def __init__(self, server: ServerProcess) -> None:
        self._port = int(server.url.rpartition(":")[2])
        self._proc = Path(f"/proc/{server.process.pid}")
        self._idle_bytes = self._memory("VmRSS")

    def cost(self, body: HostileBody) -> Cost:
        """Send it and read its whole reply. Blocks."""
        data = body.make()
        (self._proc / "clear_refs").write_text("5")  # the peak is counted anew
        began = time.monotonic()
        with self._probed() as waits:
            status = self._send(body, data)
        took_s = time.monotonic() - began
        return Cost(max(waits), self._memory("VmHWM") - self._idle_bytes, status, took_s)

    def kept_bytes(self) -> int:
        """What it has beyond what it had when idle, and did not give back."""
        return self._memory("VmRSS") - self._idle_bytes

    def _memory(self, name: str) -> int:
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    def _send(self, body: HostileBody, data: bytes) -> int:
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REPLY_S)
        try:
            client.request(body.method, body.path, data, {"content-type": "application/json"})
            reply = client.getresponse()
            while reply.read(2**20):
                pass
            return reply.status
        finally:
            client.close()

    def _delayed_s(self) -> float:
        """Seconds for which the server's loop and this thread were ready to run and had no core."""
        threads = (self._proc / "task" / self._proc.name, Path("/proc/thread-self"))
        return sum(int((thread / "schedstat").read_text().split()[1]) for thread in threads) / 1e9

    @contextmanager
    def _probed(self) -> Iterator[list[float]]:
        """How long each of many questions for its health takes, less what other processes add."""
        waits: list[float] = []
        ended = threading.Event()

        def probe() -> None:
            client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REPLY_S)
            while not (ended.is_set() and waits):
                delayed_s, began = self._delayed_s(), time.monotonic()
                client.request("GET", "/health")
                assert client.getresponse().read()
                waits.append(time.monotonic() - began - (self._delayed_s() - delayed_s))
                ended.wait(PROBE_S)
            client.close()

        prober = threading.Thread(target=probe)
        prober.start()
        try:
            yield waits
        finally:
            ended.set()
            prober.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, with a long context, and tokens that ask for the text between two."""
    model = save_tiny_model("llama", tmp_path_factory.mktemp("bodies") / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [START_TOKEN, *MARKS]})
    tokenizer.save_pretrained(model)
    vocab_size = VOCAB_SIZE + len(MARKS)
    tiny_model("llama", max_position_embeddings=CONTEXT, vocab_size=vocab_size).save_pretrained(model)
    return model


@asynccontextmanager
async def started(model: Path) -> AsyncIterator[Watched]:
    """A server with limits as they are by default, after it has used all its cache."""
    async with server_process(model, "--kv-cache-memory", "32MiB") as server:
        await server.until_ready()
        await asyncio.to_thread(warm_up, Watched(server))
        yield Watched(server)


def warm_up(watched: Watched) -> None:
    """Have it touch what it takes once, whoever asks; the idle size has none of it."""
    for number in range(NUM_WARM_UPS):
        ids = [3 + (number + i) % 500 for i in range(CONTEXT - 200)]
        fields = {"prompt": ids, "max_tokens": 4, "logprobs": 5, "ignore_eos": True}
        body = HostileBody("POST", "/v1/completions", "warm-up", json.dumps(fields).encode)
        assert watched.cost(body).status == 200


async def costs_of(model: Path, bodies: Iterable[HostileBody]) -> AsyncGenerator[Cost, None]:
    """Of each in turn; a server that has kept much of those before is replaced."""
    left = deque(bodies)
    while left:
        async with started(model) as watched:
            is_first = True
            while left and (is_first or watched.kept_bytes() <= KEPT_BYTES):
                cost = await asyncio.to_thread(least_cost, watched, left[0])
                if cost.extra_bytes > EXTRA_BYTES and not is_first:
                    break  # to be tried again by itself
                yield cost
                left.popleft()
                is_first = False


def least_cost(watched: Watched, body: HostileBody) -> Cost:
    """What it costs at best. Blocks."""
    cost = watched.cost(body)
    for _ in range(TRIES - 1):
        if cost.held_s <= HELD_S:
            break
        cost = min(cost, watched.cost(body))
    return cost


def is_beyond(cost: Cost) -> bool:
    return cost.held_s > HELD_S or cost.extra_bytes > EXTRA_BYTES


@pytest.mark.parametrize("part", range(NUM_SLICES))
async def test_no_single_body_holds_the_loop_or_takes_much_memory(model: Path, part: int) -> None:
    bodies = list(hostile_bodies(SEED))[part::NUM_SLICES]
    costs: list[tuple[Cost, str]] = []
    async with aclosing(costs_of(model, bodies)) as found:
        async for cost in found:
            costs.append((cost, f"{bodies[len(costs)].path} {bodies[len(costs)].name}"))
            assert cost.status < 500 or cost.status == 503, costs[-1]
    costs.sort(reverse=True)
    for cost, name in costs[:NUM_SHOWN]:
        print(f"{1000 * cost.held_s:6.0f} ms {cost.extra_bytes / 1e6:6.0f} MB {cost.status} {name}")
    beyond = [each for each in costs if is_beyond(each[0])]
    assert not beyond, beyond
