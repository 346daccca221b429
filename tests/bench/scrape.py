"""Scraping /metrics while streams are served: what a scrape takes, and what it takes from the streams."""

from __future__ import annotations

import http.client
import threading
from contextlib import ExitStack
from time import perf_counter
from types import TracebackType
from typing import Self

from tests.bench.context import BenchContext
from tests.bench.load import HttpSide, checked_figures
from tests.bench.processes import JsonWorker, Server
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed, percentile
from tests.bench.workloads import Workload, prompts_of

SCRAPES_PER_S = 20.0
PAIRS = 4  # of one burst without scrapes and one with, a run
NUM_STREAMS, PROMPT_TOKENS, MAX_TOKENS = 8, 64, 128
BAR_P99_MS = 20.0
BAR_RATIO = 0.98
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
TIMEOUT_S = 10.0


class Scraper:
    """Asks for /metrics at a steady rate in a thread while its context lasts, as Prometheus asks.

    `taken_ms` are from asking to the last byte. A scrape that comes to be late is made at once, so that there
    are as many as there should be.
    """

    def __init__(self, host: str, port: int, per_s: float = SCRAPES_PER_S) -> None:
        self.taken_ms: list[float] = []
        self.error: Exception | None = None
        self._address = host, port
        self._gap_s = 1 / per_s
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._work, name="bench-scraper", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join(2 * TIMEOUT_S)

    def _work(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        due = perf_counter()
        try:
            while not self._left.wait(max(0.0, due - perf_counter())):
                due += self._gap_s
                self.taken_ms.append(1e3 * self._scrape_s(connection))
        except (OSError, http.client.HTTPException, BenchmarkFailed) as error:
            self.error = error
        finally:
            connection.close()

    def _scrape_s(self, connection: http.client.HTTPConnection) -> float:
        begin = perf_counter()
        connection.request("GET", "/metrics", headers={"accept": ACCEPT})
        response = connection.getresponse()
        page = response.read()
        taken_s = perf_counter() - begin
        if response.status != 200 or not page.endswith(b"# EOF\n"):
            raise BenchmarkFailed(f"/metrics answered {response.status} with {len(page)} bytes")
        return taken_s


class ScrapeRuns:
    """One entry a pair of bursts: tokens a second with scrapes and without; and all scrapes of a run."""

    def __init__(self) -> None:
        self.plain: list[float] = []
        self.scraped: list[float] = []
        self.scrapes_ms: list[list[float]] = []


def burst_rate(side: HttpSide, workload: Workload) -> float:
    """Output tokens a second of one burst."""
    return checked_figures(workload, side.burst(workload)).output_tokens_per_s


def measure(context: BenchContext, server: Server, side: HttpSide) -> ScrapeRuns:
    """Bursts in pairs of the same prompts, the one with scrapes first in every other pair."""
    runs = ScrapeRuns()
    for run in range(context.runs):
        taken_ms: list[float] = []
        for pair in range(PAIRS):
            context.say(f"scrape, run {run + 1}/{context.runs}, pair {pair + 1}/{PAIRS}")
            prompts = tuple(prompts_of(context.words, NUM_STREAMS, PROMPT_TOKENS, seed=PAIRS * run + pair))
            workload = Workload("scrape", "", prompts, MAX_TOKENS)
            for scrapes in (False, True) if pair % 2 else (True, False):
                if not scrapes:
                    runs.plain.append(burst_rate(side, workload))
                    continue
                with Scraper(server.host, server.port) as scraper:
                    runs.scraped.append(burst_rate(side, workload))
                if scraper.error is not None:
                    raise BenchmarkFailed(f"a scrape failed: {scraper.error}")
                taken_ms += scraper.taken_ms
        runs.scrapes_ms.append(taken_ms)
    return runs


def section_of(runs: ScrapeRuns) -> Section:
    """The section `scrape` with its bars."""
    section = Section("scrape", f"{NUM_STREAMS} streams, /metrics scraped {SCRAPES_PER_S:.0f} times a second")
    case = f"{NUM_STREAMS} at once, {PROMPT_TOKENS} in / {MAX_TOKENS} out"
    section.add(case, "output, not scraped", "tokens/s", runs.plain)
    section.add(case, "output, scraped", "tokens/s", runs.scraped)
    pairs = zip(runs.scraped, runs.plain, strict=True)
    ratio = section.add(case, "scraped / not", "x", [scraped / plain for scraped, plain in pairs])
    section.add(case, "a scrape, p50", "ms", [percentile(run, 50) for run in runs.scrapes_ms])
    p99 = section.add(case, "a scrape, p99", "ms", [percentile(run, 99) for run in runs.scrapes_ms])
    section.bars.append(Bar("scrape p99 under load", BAR_P99_MS, "ms", p99.median, at_least=False))
    section.bars.append(
        Bar("tokens/s with scrapes over without", BAR_RATIO, "x", ratio.median, at_least=True)
    )
    section.notes.append(
        f"{sum(map(len, runs.scrapes_ms))} scrapes; the client that scrapes is on this machine too."
    )
    section.notes.append(
        "Both bursts of a pair have the same prompts, and nothing is kept of them in between."
    )
    return section


def run_scrape(context: BenchContext) -> list[Section]:
    """The section `scrape`."""
    with ExitStack() as stack:
        server = stack.enter_context(Server(*context.flags, "--no-prefix-caching"))
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        server.wait_ready()
        side = HttpSide(server, client)
        side.burst(Workload("warm-up", "", tuple(prompts_of(context.words, NUM_STREAMS, 32, seed=-1)), 16))
        return [section_of(measure(context, server, side))]
