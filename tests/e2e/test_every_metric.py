"""Every metric there is, fed by traffic: the scripted scenario, scraped while it plays."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import FinishReason
from tests.e2e.wire import ask
from tests.support.metrics_golden import GOLDEN
from tests.support.scenario import KEYS, MODEL, RECURRENT_MODEL, Scenario, scenario

SCRAPE_EVERY_S = 0.05
Series = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels, without the model's name

# What this play cannot make happen, and why.
EXCEPTIONS = (
    (r"stage=watchdog", "a step that hangs is the end of the engine"),
    (r"embedding", "there is no embedding model here: test_embeddings.py has one"),
    (r"tenant=anonymous", "stands there before the first request; then everybody has a key"),
    (r"reason=displaced", "the queue is never filled by two tenants here: test_tenants.py does it"),
    (r"blamed=batch", "a fault of all requests ends the engine before long"),
    (r"stage=kv", "only a fault of the block accounts counts there"),
    (r"prefix_cache_disk|stage=disk", "there is no disk behind the cache: test_disk_link.py has one"),
    (r"next_turn_tokens", "replies end beside others here: test_next_turn.py has one that does not"),
    (r"stage=grammar", "no fault can be planned in there"),
    (r"(method|drafter)=(medusa|heads)", "heads take long to train"),
    (r"(method|drafter)=mtp", "the model here brings no such module"),
    (r"n1_fallbacks", "drafts can be taken back from either model: test_speculative_decoder.py has another"),
    (r"result=lane", "no other outcomes are drafted for here: test_speculation.py has them"),
    (r"position=([4-9]|[1-3]\d)", "four drafts a round are the most here"),
    (r"batch_lines_(running|waiting)", "the one batch has ended by then: test_batches.py has them"),
    (r"batch_lines_total status=(expired|cancelled)", "the one batch ends well"),
    (r"http_requests_total code=\d+,route=/v1/(chat|responses|messages)", "one chat is held: it goes well"),
)


class Scrapes:
    """The most that each series has shown, on either server."""

    def __init__(self) -> None:
        self.most: dict[Series, float] = {}
        self.labels_of: dict[str, set[tuple[str, str]]] = {}
        self.series_of: dict[str, Series] = {}

    async def scrape(self, url: str) -> None:
        """Ask once, without a key."""
        reply = await ask(url, "GET", "/metrics")
        assert reply.status == 200
        for line in reply.body.decode().splitlines():
            # Most of a page are buckets, which say no more than their sums and counts.
            if line.startswith("slipstream_") and "_bucket{" not in line:
                text, _, value = line.rpartition(" ")
                series = self.series_of.get(text) or self.add(text)
                self.most[series] = max(self.most[series], float(value))

    def add(self, text: str) -> Series:
        """A series that has come, by its name and labels as the page shows them; the parser takes long."""
        ((sample,),) = (family.samples for family in text_string_to_metric_families(f"{text} 0\n"))
        assert sample.labels.pop("model_name") in (MODEL, RECURRENT_MODEL)
        labels = tuple(sorted(sample.labels.items()))
        self.labels_of.setdefault(sample.name, set()).update(labels)
        self.series_of[text] = series = (sample.name, labels)
        self.most.setdefault(series, 0.0)
        return series

    def empty(self) -> list[str]:
        """The series that never showed more than 0, as `name label=value,...`."""
        names = {
            f"{name} {','.join(f'{label}={value}' for label, value in labels)}"
            for (name, labels), value in self.most.items()
            if value == 0
        }
        return sorted(names)


@asynccontextmanager
async def scraping(show: Scenario) -> AsyncIterator[Scrapes]:
    """Scrapes both servers until it is left, and once more then."""
    scrapes = Scrapes()

    async def go_on() -> None:
        while True:
            await asyncio.gather(*map(scrapes.scrape, show.urls))
            await asyncio.sleep(SCRAPE_EVERY_S)

    task = asyncio.create_task(go_on())
    try:
        yield scrapes
    finally:
        task.cancel()
        await asyncio.wait([task])
    await asyncio.gather(*map(scrapes.scrape, show.urls))


async def test_every_metric_is_fed_by_traffic(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with scenario(tmp_path) as show:
        async with scraping(show) as scrapes:
            await show.play()
        check_sums(show)
    empty = [name for name in scrapes.empty() if not any(re.search(each, name) for each, _ in EXCEPTIONS)]
    assert not empty, empty
    check_families(scrapes)
    check_labels(scrapes)


def check_families(scrapes: Scrapes) -> None:
    """All that is promised was there, and showed something."""
    promised = {line.split()[0] for line in GOLDEN.read_text().splitlines() if not line.startswith("#")}
    seen = {re.sub("_(sum|count)$", "", name) for (name, _), value in scrapes.most.items() if value > 0}
    excused = {name for name in promised | seen if any(re.search(each, name) for each, _ in EXCEPTIONS)}
    assert promised - excused == seen - excused


def check_labels(scrapes: Scrapes) -> None:
    """What clients wrote, keys above all, is nowhere."""
    values = {value for labels in scrapes.labels_of.values() for _, value in labels}
    assert not {value for value in values if "nowhere" in value or "unheard_of" in value}
    assert not any(key in value for key in KEYS for value in values)
    tenants = {value for label, value in scrapes.labels_of["slipstream_tenant_share_ratio"]}
    assert len(tenants - {"anonymous"}) == len(KEYS)
    routes = {
        value for label, value in scrapes.labels_of["slipstream_http_requests_total"] if label == "route"
    }
    assert routes == {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/metrics", "unmatched", "/v1/files", "/v1/batches", "/v1/batches/{batch_id}"),
        *("/v1/requests/{request_id:live}", "/v1/requests/{request_id:path}/cancel"),
    }


def check_sums(show: Scenario) -> None:
    """What is counted in several ways is counted equally."""
    for engine in show.engines:
        metrics = engine.metrics
        finished = metrics.requests_finished
        assert metrics.requests_started == finished.total()
        assert metrics.request_aborts.total() == finished[FinishReason.ABORT]
        choices = metrics.e2e_request_latency.count
        assert choices == metrics.request_generation_tokens.count >= finished.total()
        gaps, firsts = metrics.inter_token_latency, metrics.time_to_first_token
        assert metrics.generation_tokens == firsts.count + gaps.count
        assert gaps.sum == pytest.approx(metrics.request_decode_time.sum)
        assert metrics.prefix_cache_hits <= metrics.prefix_cache_queries <= metrics.prompt_tokens
        assert metrics.request_preemptions.sum == metrics.preemptions.total()
        steps = sum(histogram.count for histogram in metrics.step_duration.values())
        assert steps == metrics.step_batched_tokens.count
        stats = metrics.speculation
        assert sum(stats.accepted_per_position) == stats.accepted.total() <= stats.proposed.total()
