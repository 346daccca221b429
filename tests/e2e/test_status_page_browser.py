"""The status page in a real browser: what it shows, streams, stops, refuses and keeps to itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine import EngineDead, Overloaded, RequestFailed, SpecStats
from tests.e2e.browser import Tab, find_chromium, open_browser
from tests.e2e.http_server import MODEL, server_url
from tests.support.fake_engine import FakeEngine

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (Debian: chromium)"),
]

READY = "document.getElementById('state').dataset.state === 'ready'"
IDLE = "document.getElementById('stop').hidden"
SCRAPES = "performance.getEntriesByType('resource').filter(e => e.name.includes('/status/figures')).length"
HIDE = """(hidden => {
  Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
})"""


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with open_browser(tmp_path / "profile") as browser:
        yield await browser.tab()


def roomy(**fields: Any) -> FakeEngine:
    """An engine with room for what the page asks for by itself."""
    return FakeEngine(max_model_len=1024, **fields)


async def open_page(tab: Tab, url: str) -> None:
    await tab.open(url)
    await tab.until(READY)


async def send(tab: Tab, prompt: str, **fields: str) -> None:
    for selector, text in {"prompt": prompt, **fields}.items():
        await tab.fill(f"#{selector.replace('_', '-')}", text)
    await tab.click("#send")


async def drafted_texts(tab: Tab) -> list[str]:
    script = "[...document.querySelectorAll('#reply .drafted')].map(e => e.textContent)"
    return list(await tab.evaluate(script))


async def tint_of(tab: Tab, selector: str) -> str:
    return str(await tab.evaluate(f"getComputedStyle(document.querySelector('{selector}')).backgroundColor"))


def speculated(proposed: int, accepted: int) -> SpecStats:
    stats = SpecStats()
    stats.num_rounds = 4
    stats.proposed["ngram"] = proposed
    stats.accepted["ngram"] = accepted
    return stats


async def test_the_cards_show_what_the_engine_counts(tab: Tab) -> None:
    engine = roomy(draft_gauges=(4.0, 0.5, 1.75))
    async with server_url(engine) as url:
        await open_page(tab, url)
        await tab.until("document.getElementById('tokens-per-second').textContent === '0'")
        assert await tab.text("#ttft-p50") == "–"
        engine.metrics.generation_tokens += 4321
        engine.metrics.time_to_first_token.observe(0.2, times=20)
        engine.metrics.preemptions["swap"] += 3
        engine.metrics.speculation.add(speculated(40, 30))
        await tab.until("document.getElementById('ttft-p50').textContent !== '–'")
        assert await tab.text("#ttft-p50") == "175 ms"  # half way up the bucket from 100 to 250 ms
        assert await tab.text("#tokens-note") == "4,321 since the start"
        assert await tab.text("#acceptance") == "75 %"
        assert await tab.text("#speedup") == "1.75 ×"
        assert await tab.text("#count-preempted") == "3 (+3)"
        assert await tab.text("#model") == MODEL
        assert await tab.text("#kv-note") == "64 of 64 blocks free"
        label = "document.querySelector('[data-chart=ttft] svg').getAttribute('aria-label')"
        assert "now 175 ms, 243 ms" in await tab.evaluate(label)
        assert tab.complaints == []


async def test_a_reply_streams_with_its_drafts_tinted(tab: Tab) -> None:
    engine = roomy(merge=3, speculation=speculated(8, 6))
    async with server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, "abcdefgh", max_tokens="9")
        await tab.until(IDLE + " && document.getElementById('reply-accepted').textContent !== '–'")
        assert await tab.text("#reply") == "<user>abc"
        assert await drafted_texts(tab) == ["<", "u", "e", "r", "a", "b"]
        assert await tab.text("#reply-tokens") == "9"
        assert await tab.text("#reply-ttft") == "10 ms"
        assert await tab.text("#reply-accepted") == "6 of 8"
        assert await tab.text("#reply-note") == "Cut at max tokens."
        assert await tint_of(tab, ".drafted") == await tint_of(tab, ".sample")
        request = engine.requests[-1]
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0, 9)
        assert tab.complaints == []


async def test_tokens_that_only_came_together_are_not_called_drafts(tab: Tab) -> None:
    engine = roomy(merge=3, speculation=speculated(8, 4))
    async with server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, "abcdefgh", max_tokens="9")
        await tab.until("document.getElementById('reply-note').textContent")
        assert "2 tinted tokens came merged" in await tab.text("#reply-note")
        engine.speculation = None
        await tab.click("#send")
        await tab.until("document.getElementById('reply-accepted').textContent === 'none drafted'")
        assert await tint_of(tab, ".drafted") == "rgba(0, 0, 0, 0)"
        await tab.click("#speculate")
        await tab.click("#send")
        await tab.until(IDLE)
        assert engine.requests[-1].speculation.enabled is False


async def test_stop_cancels_on_the_server(tab: Tab) -> None:
    never = asyncio.Event()

    async def gate(i: int) -> None:
        if i == 4:
            await never.wait()

    engine = roomy(gate=gate)
    async with server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, "abc")
        await tab.until("document.getElementById('reply').textContent === '<use'")
        await tab.click("#stop")
        async with asyncio.timeout(10):
            await engine.streams[0].closed.wait()
        await tab.until(IDLE)
        assert await tab.text("#reply-note") == "Stopped; the server has cancelled it."
        assert await tab.text("#reply") == "<use"


async def test_a_reply_is_text_whatever_it_spells(tab: Tab) -> None:
    prompt = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp; é 🌊"
    async with server_url(roomy(merge=2)) as url:
        await open_page(tab, url)
        await send(tab, prompt, max_tokens=str(len("<user>" + prompt)))
        await tab.until(IDLE + " && document.getElementById('reply-tokens').textContent !== '–'")
        assert await tab.evaluate("document.getElementById('reply').textContent") == "<user>" + prompt
        assert await tab.evaluate("document.querySelectorAll('#reply *:not(span)').length") == 0
        assert tab.complaints == []


async def test_what_goes_wrong_is_said(tab: Tab) -> None:
    engine = roomy(failure=RequestFailed("a fault", "forward"), fail_at=3)
    async with server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, "abc")
        await tab.until("!document.getElementById('failure').hidden")
        assert "could not be finished" in await tab.text("#failure")
        assert await tab.text("#reply") == "<us"
        engine.refusal = Overloaded("The queue is full.", code="queue_full", retry_after_s=7)
        await tab.click("#send")
        await tab.until("document.getElementById('failure').textContent.includes('Try again in 7 s')")
        assert await tab.evaluate("document.getElementById('summary').hidden")
        engine.refusal = None
        await tab.fill("#max-tokens", "100000")
        await tab.click("#send")
        await tab.until("document.getElementById('failure').textContent.includes('maximum context length')")
        engine.fault = EngineDead("No progress.", "engine_hung")
        await tab.until("document.getElementById('state').textContent === 'engine hangs'")
    await tab.until("!document.getElementById('banner').hidden")
    assert "cannot be reached" in await tab.text("#banner")
    await tab.click("#send")
    await tab.until("document.getElementById('failure').textContent === 'The server cannot be reached.'")


async def test_a_key_is_asked_for_and_kept_for_the_tab_alone(tab: Tab) -> None:
    async with server_url(roomy(), api_key=("secret",)) as url:
        await tab.open(url)
        await tab.until("document.getElementById('access').open")
        assert "need an API key" in await tab.text("#banner")
        await send(tab, "abc")
        await tab.until("document.getElementById('failure').textContent.includes('API key')")
        await tab.fill("#key", "wrong")
        await tab.click("#key-form button")
        await tab.until("document.getElementById('key-note').textContent.includes('does not accept')")
        await tab.fill("#key", "secret")
        await tab.click("#key-form button")
        await tab.until(f"document.getElementById('model').textContent === '{MODEL}'")
        await tab.until("document.getElementById('banner').hidden")
        assert not await tab.evaluate("document.getElementById('access').open")
        await tab.click("#send")
        await tab.until("document.getElementById('reply').textContent.startsWith('<user>abc')")
        kept = "[...Object.values(localStorage), document.cookie, document.body.innerText].join()"
        assert "secret" not in await tab.evaluate(kept)
        await tab.open(url + "/?again")
        await tab.until(f"document.getElementById('model').textContent === '{MODEL}'")
        await tab.evaluate("document.getElementById('access').open = true")
        await tab.click("#forget")
        await tab.until("!document.getElementById('banner').hidden")
        assert await tab.evaluate("Object.values(sessionStorage).join()") == ""


async def test_enter_sends_and_shift_enter_does_not(tab: Tab) -> None:
    engine = roomy()
    async with server_url(engine) as url:
        await open_page(tab, url)
        await tab.fill("#prompt", "ab")
        await tab.press("Enter", shift=True)
        await tab.call("Input.insertText", text="c")
        assert await tab.evaluate("document.getElementById('prompt').value") == "ab\nc"
        assert engine.requests == []
        await tab.press("Enter")
        await tab.until("document.getElementById('reply').textContent.startsWith('<user>ab')")
        assert await tab.evaluate("document.getElementById('prompt').value") == "ab\nc"
        await tab.until(IDLE)
        assert len(engine.requests) == 1


async def test_a_reload_keeps_the_past(tab: Tab) -> None:
    label = "document.querySelector('[data-chart=tokens-per-second] svg').getAttribute('aria-label')"
    length = "document.querySelector('[data-chart=requests] .first').getTotalLength()"
    engine = roomy()
    async with server_url(engine) as url:
        await open_page(tab, url)
        await tab.until(f"{SCRAPES} >= 4")
        engine.metrics.generation_tokens += 4321
        await tab.until(f"!{label}.endsWith('now 0')")
        await tab.evaluate("new Promise(resolve => setTimeout(resolve, 2100))")
        await tab.open(url + "/?again")
        await tab.until(f"{SCRAPES} >= 1 && document.getElementById('model').textContent")
        assert await tab.evaluate(f"{SCRAPES} < 3")
        assert await tab.evaluate(length) > 10  # seconds of the past, where a page of its own would begin
        assert not (await tab.evaluate(label)).endswith(("now 0", "no data"))


@pytest.mark.parametrize(("width", "height"), [(390, 800), (1280, 800), (1920, 1200)])
async def test_charts_fill_their_cards(tab: Tab, width: int, height: int) -> None:
    gaps = """[...document.querySelectorAll('.card figure')].map(figure => {
      const card = figure.parentElement, box = card.getBoundingClientRect();
      const svg = figure.querySelector('svg').getBoundingClientRect();
      const above = figure.previousElementSibling.getBoundingClientRect();
      return [svg.top - above.bottom, box.bottom - svg.bottom, svg.height];
    })"""
    async with server_url(roomy()) as url:
        await tab.resize(width, height, mobile=width < 500)
        await open_page(tab, url)
        found = await tab.evaluate(gaps)
    assert len(found) == 7
    for above, below, chart in found:
        assert above <= 20  # the axis's end stands between the words and the chart
        assert below <= 32  # the time axis and the edge
        assert chart >= 45


async def test_a_hidden_page_asks_nothing(tab: Tab) -> None:
    async with server_url(roomy()) as url:
        await open_page(tab, url)
        await tab.until(f"{SCRAPES} >= 2")
        await tab.evaluate(f"{HIDE}(true)")
        before = await tab.evaluate(SCRAPES)
        await tab.evaluate("new Promise(resolve => setTimeout(resolve, 2500))")
        assert await tab.evaluate(SCRAPES) == before
        await tab.evaluate(f"{HIDE}(false)")
        await tab.until(f"{SCRAPES} > {before}")
        assert tab.complaints == []


async def test_light_and_dark_follow_the_system_until_the_viewer_chooses(tab: Tab) -> None:
    async with server_url(roomy()) as url:
        await open_page(tab, url)
        light = await tint_of(tab, "html")
        await tab.prefer("dark")
        dark = await tint_of(tab, "html")
        assert light != dark
        await tab.click("#theme")
        assert await tint_of(tab, "html") == light
        await open_page(tab, url + "/?again")
        assert await tint_of(tab, "html") == light
        await tab.click("#theme")  # as the system has it again
        await tab.prefer("light")
        assert await tint_of(tab, "html") == light
        assert await tab.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("width", [320, 390, 768, 1180, 1920])
async def test_nothing_runs_out_of_the_window(tab: Tab, width: int) -> None:
    prompt = "unbroken" * 20
    async with server_url(roomy()) as url:
        await tab.resize(width, 800, mobile=width < 500)
        await open_page(tab, url)
        await send(tab, prompt, max_tokens=str(len(prompt)))
        await tab.until(IDLE + " && document.getElementById('reply-tokens').textContent !== '–'")
        out = """[...document.querySelectorAll('body *')].filter(e => {
          const box = e.getBoundingClientRect();
          return box.width > 1 && (box.right > innerWidth + 0.5 || box.left < -0.5);
        }).map(e => e.outerHTML.slice(0, 80))"""
        assert json.dumps(await tab.evaluate(out)) == "[]"
