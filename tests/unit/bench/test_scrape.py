"""The scraper of the benchmark: keeps its rate, reads whole pages, and tells when one is none."""

from __future__ import annotations

import asyncio

import pytest

from tests.bench.scrape import Scraper, ScrapeRuns, section_of
from tests.e2e.http_server import server_url
from tests.e2e.scripted_server import reply, scripted_server
from tests.support.fake_engine import FakeEngine


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


async def scraped(url: str, seconds: float) -> Scraper:
    scraper = Scraper(*address_of(url), per_s=100)
    scraper.__enter__()
    await asyncio.sleep(seconds)
    await asyncio.to_thread(scraper.__exit__, None, None, None)
    return scraper


async def test_it_scrapes_a_server_again_and_again() -> None:
    async with server_url(FakeEngine()) as url:
        scraper = await scraped(url, 0.5)
    assert scraper.error is None
    assert 2 <= len(scraper.taken_ms) <= 60
    assert all(0 < taken < 10_000 for taken in scraper.taken_ms)


@pytest.mark.parametrize(("status", "page"), [("200 OK", b"# no end\n"), ("503 Not Now", b"# EOF\n")])
async def test_a_page_that_is_none_ends_it(status: str, page: bytes) -> None:
    async with scripted_server(reply(page, status)) as script:
        scraper = await scraped(script.url, 0.2)
    assert scraper.taken_ms == []
    assert f"/metrics answered {status[:3]}" in str(scraper.error)


def test_the_ratio_is_taken_pair_by_pair() -> None:
    runs = ScrapeRuns()
    runs.plain, runs.scraped = [100.0, 200.0, 50.0], [99.0, 190.0, 49.5]
    runs.scrapes_ms = [[1.0, 2.0, 30.0], [3.0] * 200, [4.0] * 200]
    section = section_of(runs)
    assert [(bar.measured, bar.met) for bar in section.bars] == [(4.0, True), (0.99, True)]
