"""Two engines of a tiny model on a local Ray cluster, asked over HTTP through Ray's proxy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from config import PlannedFault
from deploy.ray.options import RayOptions, read_options
from tests.e2e.wire import RawReply, Wire, ask, events_of

ray = pytest.importorskip("ray", reason="needs the extra 'ray': make test-ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
STEP_S = 0.05
SEATS, QUEUE = 4, 2
DRAIN_S = 2.0
APP = "slipstream"
PATIENCE_S = 30  # for what Ray does by itself


@dataclass(frozen=True)
class Cluster:
    """The address of the proxy, and what was deployed behind it."""

    url: str
    options: RayOptions

    async def redeploy(self, **changes: Any) -> None:
        """Put other engines and fronts in the place of those there are, and wait until they run."""
        await asyncio.to_thread(deploy, RayOptions(**{**vars_of(self.options), **changes}))


def vars_of(options: RayOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in RayOptions.__dataclass_fields__}


def deploy(options: RayOptions) -> None:
    from deploy.ray.app import assemble

    ray.serve.run(assemble(options), name=APP)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two engines whose every step takes `STEP_S` longer than it should."""
    from ray import serve

    from server.http.listener import bind
    from tests.support.tiny_models import save_tiny_model

    model = save_tiny_model("llama", tmp_path_factory.mktemp("ray") / "model")
    args = {
        **{"model": model, "served-model-name": "tiny", "replicas": 2, "cpus": 0.5},
        **{"max-num-seqs": SEATS, "max-queued-requests": QUEUE, "num-kv-blocks": 256, "compile": "off"},
        **{"speculative-method": "none", "drain-timeout": DRAIN_S, "log-format": "text"},
    }
    given = read_options(args, {})
    slow = PlannedFault("forward_sleep", count=-1, seconds=STEP_S)
    options = RayOptions(**{**vars_of(given), "faults": (slow,)})
    with pytest.MonkeyPatch.context() as patch, bind("127.0.0.1", 0) as free:
        patch.setenv("PYTHONPATH", str(ROOT))  # for Ray's workers
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        port = free.getsockname()[1]
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
        free.close()
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            deploy(options)
            yield Cluster(f"http://127.0.0.1:{port}", options)
        finally:
            serve.shutdown()
            ray.shutdown()


@dataclass
class Streamed:
    """A stream as its client sees it; `arrivals` has the time of each event."""

    replica: str
    wire: Wire
    events: list[Any] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    ended_well: bool = False

    async def read(self) -> Streamed:
        """To its end, which need not be a good one."""
        try:
            while chunk := await self.wire.chunk():
                self.arrivals.append(time.monotonic())
                for event in filter(None, chunk.split(b"\n\n")):
                    if event == b"data: [DONE]":
                        self.ended_well = True
                    elif not event.startswith(b":"):
                        self.events.append(json.loads(event.removeprefix(b"data: ")))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended_well = False
        await self.wire.close()
        return self

    @property
    def error(self) -> Any:
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def num_tokens(self) -> int:
        return sum(len(event["choices"][0]["token_ids"]) for event in self.events if "choices" in event)


async def open_stream(
    url: str, num_tokens: int, prompt: str = "Once upon a time", **headers: str
) -> Streamed:
    """A stream that has begun; a header's name has _ for -."""
    body = {
        **{"prompt": prompt, "max_tokens": num_tokens, "stream": True},
        **{"ignore_eos": True, "return_token_ids": True},
    }
    wire = await Wire.connect(url)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await wire.send("POST", "/v1/completions", json.dumps(body).encode(), named)
    status, head = await wire.head()
    assert status == 200, await wire.reader.read(500)
    return Streamed(head["x-slipstream-replica"], wire)


@asynccontextmanager
async def one_on_each(url: str, num_tokens: int) -> AsyncIterator[list[asyncio.Task[Streamed]]]:
    """A stream being read from each of the two engines."""
    found: dict[str, Streamed] = {}
    for number in range(8):
        stream = await open_stream(url, num_tokens, x_session_id=f"s{number}")
        if stream.replica in found:
            await stream.wire.close()
        else:
            found[stream.replica] = stream
        if len(found) == 2:
            break
    assert len(found) == 2
    tasks = [asyncio.create_task(stream.read()) for stream in found.values()]
    yield tasks
    await asyncio.gather(*tasks)


async def complete(url: str, prompt: str, **headers: str) -> RawReply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await ask(url, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1}, named)


async def sample(url: str, name: str, *labels: str) -> float:
    """The sum of a metric's samples that have all of `labels`."""
    text = (await ask(url, "GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith(f"slipstream_{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


async def until(what: Any, patience_s: float = PATIENCE_S) -> Any:
    """The first true answer of `what`, asked ten times a second: nobody tells when Ray has acted."""
    deadline = time.monotonic() + patience_s
    while not (found := await what()):
        assert time.monotonic() < deadline, "Ray took too long"
        await asyncio.sleep(0.1)
    return found


def test_the_example_is_valid() -> None:
    from ray.serve.schema import ServeDeploySchema

    yaml = pytest.importorskip("yaml")
    example = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(example).applications
    options = read_options(application.args, {})
    assert options.scales
    assert options.settings.scheduler.max_num_seqs == 64


async def test_events_pass_as_they_are_made(cluster: Cluster) -> None:
    stream = await (await open_stream(cluster.url, 30)).read()
    assert stream.ended_well
    assert stream.num_tokens == 30
    gaps = [later - earlier for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)]
    print(f"gaps: median {sorted(gaps)[len(gaps) // 2] * 1e3:.0f} ms, longest {max(gaps) * 1e3:.0f} ms")
    assert len(stream.arrivals) >= 25
    assert stream.arrivals[-1] - stream.arrivals[0] > 25 * STEP_S


async def test_replies_are_the_servers_own(cluster: Cluster) -> None:
    models = (await ask(cluster.url, "GET", "/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    reply = await ask(cluster.url, "POST", "/v1/chat/completions", chat, {"x-request-id": "mine"})
    assert reply.status == 200
    assert reply.json()["usage"]["completion_tokens"] == 3
    assert reply.headers["x-request-id"] == "mine"
    streamed = await ask(cluster.url, "POST", "/v1/chat/completions", chat | {"stream": True})
    assert events_of(streamed.body)[-1]["choices"][0]["finish_reason"] == "length"


async def test_errors_are_the_servers_own(cluster: Cluster) -> None:
    bad = await ask(cluster.url, "POST", "/v1/completions", {"prompt": 3, "stream": True})
    assert (bad.status, bad.json()["error"]["param"]) == (400, "prompt")
    broken = await ask(cluster.url, "POST", "/v1/completions", b"{")
    assert (broken.status, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    unknown = await ask(cluster.url, "POST", "/v1/completions", {"model": "other", "prompt": "x"})
    assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")
    large = await ask(cluster.url, "POST", "/v1/completions", b'"' + b"x" * (9 << 20) + b'"')
    assert (large.status, large.json()["error"]["code"]) == (413, "body_too_large")
    nowhere = await ask(cluster.url, "GET", "/nowhere")
    assert (nowhere.status, nowhere.json()["error"]["type"]) == (404, "not_found_error")


async def test_full_engines_refuse_by_themselves(cluster: Cluster) -> None:
    num_places = 2 * (SEATS + QUEUE)
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
    asked = [ask(cluster.url, "POST", "/v1/completions", body) for _ in range(num_places + 8)]
    replies = await asyncio.gather(*asked)
    refused = [reply for reply in replies if reply.status == 503]
    assert len(refused) + sum(reply.status == 200 for reply in replies) == len(replies)
    assert refused
    for reply in refused:
        assert reply.json()["error"]["code"] == "queue_full"
        assert (
            reply.json()["error"]["message"] != "Too many requests wait for a replica."
        )  # the engine's word
        assert int(reply.headers["retry-after"]) >= 1


async def test_a_prompt_goes_where_its_prefix_is(cluster: Cluster) -> None:
    for beginning in ("The river runs to the sea. ", "A server answers requests. ", "Numbers: 0 1 2 3. "):
        prefix = beginning * 12
        first = await complete(cluster.url, prefix + "one")
        others = [await complete(cluster.url, f"{prefix}two {number}") for number in range(3)]
        replicas = {reply.headers["x-slipstream-replica"] for reply in [first, *others]}
        assert len(replicas) == 1
        cached = [reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in others]
        assert min(cached) > 0
        label = f'replica="{replicas.pop()}"'
        assert await sample(cluster.url, "prefix_cache_hits_total", label) >= sum(cached)


async def test_sessions_stay_and_spread(cluster: Cluster) -> None:
    found: dict[str, set[str]] = {}
    for number in range(24):
        name = f"session {number % 8}"
        reply = await complete(cluster.url, "Hi", x_session_id=name)
        found.setdefault(name, set()).add(reply.headers["x-slipstream-replica"])
    assert all(len(replicas) == 1 for replicas in found.values())
    assert len(set.union(*found.values())) == 2


async def test_a_client_that_leaves_frees_its_seat(cluster: Cluster) -> None:
    before = await sample(cluster.url, "request_aborts_total", 'reason="disconnect"')
    stream = await open_stream(cluster.url, 200)
    await stream.wire.close()

    async def noticed() -> bool:
        return await sample(cluster.url, "request_aborts_total", 'reason="disconnect"') > before

    await until(noticed, 5)
    assert await sample(cluster.url, "num_requests_running") == 0


async def test_a_request_is_found_wherever_it_runs(cluster: Cluster) -> None:
    async with one_on_each(cluster.url, 100) as streams:
        stream = await open_stream(cluster.url, 200, x_request_id="to-be-cancelled")
        reply = await ask(cluster.url, "POST", "/v1/requests/to-be-cancelled/cancel")
        assert reply.status == 200
        await stream.read()
        assert stream.ended_well
        assert stream.events[-1]["choices"][0]["finish_reason"] == "abort"
        missing = await ask(cluster.url, "POST", "/v1/requests/to-be-cancelled/cancel")
        assert missing.status == 404
    assert all(task.result().num_tokens == 100 for task in streams)


async def test_metrics_are_everyones(cluster: Cluster) -> None:
    text = (await ask(cluster.url, "GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("slipstream_num_requests_running{")]
    assert len(lines) == 2
    assert text.count("# TYPE slipstream_num_requests_running ") == 1


async def test_a_killed_engine_costs_its_own_streams_only(cluster: Cluster) -> None:
    async with one_on_each(cluster.url, 120) as streams:
        names = {replica for replica in await replicas_of(cluster.url)}
        assert len(names) == 2
        victim = engine_processes()[0]
        killed_at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        answers = []
        while not all(task.done() for task in streams):
            answers.append((await complete(cluster.url, "Still there?")).status)
    lost, unharmed = sorted((task.result() for task in streams), key=lambda stream: stream.num_tokens)
    print(f"{len(answers)} requests beside the kill: {answers.count(200)} answered, the rest 503")
    assert unharmed.ended_well
    assert unharmed.num_tokens == 120
    assert lost.ended_well
    assert lost.error["code"] == "replica_lost"
    assert set(answers) <= {200, 503}

    async def is_back() -> bool:
        return len(await replicas_of(cluster.url) - {lost.replica}) == 2

    await until(is_back)
    print(f"both engines back {time.monotonic() - killed_at:.1f} s after the kill")
    assert time.monotonic() - killed_at < 30
    async with one_on_each(cluster.url, 10):
        pass


async def replicas_of(url: str) -> set[str]:
    """The engines that answer a scrape."""
    text = (await ask(url, "GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("slipstream_num_requests_running{")]
    return {line.split('replica="')[1].split('"')[0] for line in lines}


def engine_processes() -> list[psutil.Process]:
    """The engines' processes, which Ray names."""
    processes = psutil.Process().children(recursive=True)
    return [each for each in processes if f"ServeReplica:{APP}:engine" in " ".join(each.cmdline())]


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error(cluster: Cluster) -> None:
    async with one_on_each(cluster.url, 230) as streams:
        await cluster.redeploy()
    cut = [task.result() for task in streams]
    assert all(DRAIN_S / STEP_S / 2 < stream.num_tokens < 230 for stream in cut)
    # Engines go one after the other; the front, which goes with the first, cannot tell of the second.
    told = [stream for stream in cut if stream.ended_well]
    assert len(told) == 1
    assert told[0].error["code"] == "replica_lost"


async def test_a_redeployment_loses_no_stream_that_ends_in_time(cluster: Cluster) -> None:
    before = await replicas_of(cluster.url)
    async with one_on_each(cluster.url, int(DRAIN_S / STEP_S / 2)) as streams:
        await cluster.redeploy(replicas=1)
        for task in streams:
            stream = await task
            assert stream.ended_well
            assert stream.error is None

    async def is_alone() -> bool:
        after = await replicas_of(cluster.url)
        return len(after) == 1 and not after & before

    await until(is_alone)


async def test_a_dead_engine_is_replaced(cluster: Cluster) -> None:
    await cluster.redeploy(replicas=1, faults=(PlannedFault("forward_raise", at=20, count=-1),))
    (first,) = await replicas_of(cluster.url)
    failed_at = None

    async def is_replaced() -> bool:
        nonlocal failed_at
        reply = await complete(cluster.url, "Still there?")
        if reply.status != 200 and failed_at is None:
            failed_at = time.monotonic()
        assert reply.status in (200, 500, 503)
        return reply.status == 200 and reply.headers["x-slipstream-replica"] != first

    await until(is_replaced)
    assert failed_at is not None
    print(f"a dead engine replaced {time.monotonic() - failed_at:.1f} s after its first failure")
