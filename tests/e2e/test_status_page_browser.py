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
from tests.e2e.real_engine import real_engine
from tests.e2e.wire import ask
from tests.support.fake_engine import FakeEngine
from tests.support.repetitive_world import WORDS, save_repetitive_model, text_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (Debian: chromium)"),
]

READY = "document.getElementById('state').dataset.state === 'ready'"
IDLE = "document.getElementById('stop').hidden"
LAST = "#log .turn:not(.question):last-child"
TEXT = f"document.querySelector('{LAST} .content')?.textContent"
DONE = IDLE + " && !document.querySelector('.running') && document.querySelector('.summary:not([hidden])')"
SCRAPES = "performance.getEntriesByType('resource').filter(e => e.name.includes('/status/figures')).length"
TWO_FRAMES = "new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)))"
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
    return FakeEngine(max_model_len=4096, **fields)


async def open_page(tab: Tab, url: str) -> None:
    await tab.open(url)
    await tab.until(READY)


async def send(tab: Tab, prompt: str, **fields: str) -> None:
    for selector, text in {"prompt": prompt, **fields}.items():
        await tab.fill(f"#{selector.replace('_', '-')}", text)
    await tab.click("#send")


async def texts_of(tab: Tab, selector: str) -> list[str]:
    script = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    return list(await tab.evaluate(script))


async def figures_of(tab: Tab) -> dict[str, str]:
    """Those under the last reply."""
    names = [await texts_of(tab, f"{LAST} .summary {tag}") for tag in ("dt", "dd")]
    return dict(zip(*names, strict=True))


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


async def test_the_speed_card_says_why_nothing_is_drafted(tab: Tab) -> None:
    engine = roomy(no_drafts_because="No drafter is loaded: --speculative-method is none.")
    async with server_url(engine) as url:
        await open_page(tab, url)
        await tab.until("document.getElementById('speedup-note').textContent.startsWith('No drafter')")
        engine.no_drafts_because = None
        await tab.until("document.getElementById('speedup-note').textContent.startsWith('no step')")
        assert tab.complaints == []


async def test_a_reply_streams_with_each_token_in_its_shade(tab: Tab) -> None:
    engine = roomy(merge=3, speculation=speculated(8, 6))
    async with server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, "abcdefgh", max_tokens="12")
        await tab.until(DONE)
        assert await tab.text(f"{LAST} .content") == "<user>abcdef"
        assert await texts_of(tab, f"{LAST} .drafted") == ["<", "u", "e", "r", "a", "b"]
        assert await texts_of(tab, f"{LAST} .own") == ["s", ">", "c", "d", "e", "f"]
        drafted, own = await tint_of(tab, f"{LAST} .drafted"), await tint_of(tab, f"{LAST} .own")
        assert [drafted, own] == [await tint_of(tab, f".legend .{name}") for name in ("drafted", "own")]
        assert drafted != own
        assert await figures_of(tab) == {
            **{"tokens": "12", "tokens/s": "110", "first token": "10 ms"},
            **{"drafted": "8", "accepted": "6", "rejected": "2"},
        }
        assert await tab.text(f"{LAST} .note") == "Cut at max tokens."
        request = engine.requests[-1]
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0, 12)
        assert tab.complaints == []


async def test_the_shades_are_those_of_a_real_model_s_tokens(tab: Tab, tmp_path: Path) -> None:
    directory = save_repetitive_model(tmp_path / "model")
    flags = ("--speculation-schedule", "sync", "--draft-length-policy", "fixed", "--min-acceptance-rate", "0")
    async with real_engine(directory, *flags) as engine, server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, text_of([*WORDS[:8], *WORDS[2:8], *WORDS[2:8]]), max_tokens="60")
        await tab.until(DONE)
        figures = await figures_of(tab)
        shaded = [len(await texts_of(tab, f"{LAST} .{name}")) for name in ("drafted", "own")]
        assert (figures["tokens"], figures["accepted"]) == (str(sum(shaded)), str(shaded[0]))
        assert int(figures["drafted"]) == shaded[0] + int(figures["rejected"])
        assert shaded[0] > 3
        assert await texts_of(tab, f"{LAST} .content span:not(.drafted, .own)") == []
        assert tab.complaints == []


async def test_without_drafts_there_are_no_shades(tab: Tab) -> None:
    engine = roomy(merge=3)
    async with server_url(engine) as url:
        await open_page(tab, url)
        await tab.click("#speculate")
        await send(tab, "abcdefgh", max_tokens="9")
        await tab.until(DONE)
        assert engine.requests[-1].speculation.enabled is False
        assert await texts_of(tab, f"{LAST} .drafted") == []
        assert await tint_of(tab, f"{LAST} .own") == "rgba(0, 0, 0, 0)"
        figures = await figures_of(tab)
        assert [figures[name] for name in ("drafted", "accepted", "rejected")] == ["0", "0", "0"]


@pytest.mark.parametrize("merge", [1, 5])
async def test_reasoning_is_folded_and_kept_for_the_next_turn(tab: Tab, merge: int) -> None:
    thought, answer = "<b>Let</b> me see.", "It rains."
    engine = roomy(
        reasoning="qwen3",
        reply=f"<think>\n{thought}\n</think>\n\n{answer}",
        merge=merge,
        speculation=speculated(80, 30),
    )
    async with server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, "abc")
        await tab.until(DONE)
        details = f"document.querySelector('{LAST} .reasoning')"
        assert not await tab.evaluate(f"{details}.open || {details}.hidden")
        summary = await tab.text(f"{LAST} .reasoning summary")
        num_thought = len(f"{thought}</think>") + 1  # line ends and all of the mark but its end are thoughts
        assert summary.startswith(f"Thought: {num_thought} tokens, ")
        await tab.click(f"{LAST} .reasoning summary")
        assert await tab.text(f"{LAST} .reasoning .text") == thought
        assert await tab.evaluate(TEXT) == answer
        if merge > 1:
            assert len(await texts_of(tab, f"{LAST} .reasoning .drafted")) > 10
        await tab.click(".more summary")
        await tab.fill("#system", "Be brief.")
        await send(tab, "again")
        await tab.until("document.querySelectorAll('.turn:not(.question, .running)').length === 2")
        told = [(each["role"], each["content"], each.get("reasoning_content")) for each in engine.messages]
        assert told == [
            ("system", "Be brief.", None),
            ("user", "abc", None),
            ("assistant", answer, thought),
            ("user", "again", None),
        ]
        assert tab.complaints == []


async def test_a_call_is_shown_and_its_result_sent_back(tab: Tab) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "<i>Oslo</i>"}}\n</tool_call>'
    engine = roomy(reply=call, merge=2, speculation=speculated(80, 30))
    async with server_url(engine) as url:
        await open_page(tab, url)
        await tab.click(".more summary")
        await send(tab, "abc", tools="no JSON")
        assert "The tools are not JSON" in await tab.text("#failure")
        assert engine.requests == []
        await send(tab, "abc", tools='{"name": "weather", "parameters": {"type": "object"}}')
        await tab.until(DONE)
        assert await tab.evaluate("document.getElementById('failure').hidden")
        assert await texts_of(tab, ".call h3") == ["weather"]
        assert json.loads(await tab.evaluate("document.querySelector('.call pre').textContent")) == {
            "city": "<i>Oslo</i>"
        }
        assert len(await texts_of(tab, ".call pre .drafted")) > 3
        engine.reply = "Rain."
        await tab.fill(".call input", "rain, 17 °C")
        await tab.press("Enter")
        await tab.until(f"{TEXT} === 'Rain.' && {IDLE}")
        question, calling, result = engine.messages
        assert (question["role"], question["content"]) == ("user", "abc")
        calls: Any = calling["tool_calls"]
        assert (calling["role"], calls[0]["function"]["name"]) == ("assistant", "weather")
        assert (result["role"], result["content"], result["tool_call_id"]) == (
            "tool",
            "rain, 17 °C",
            calls[0]["id"],
        )
        assert await tab.evaluate("document.querySelector('.call input').readOnly")
        await tab.click("#restart")
        await send(tab, "new")
        await tab.until(DONE)
        assert [each["content"] for each in engine.messages] == ["new"]
        assert tab.complaints == []


async def test_live_requests_are_listed_and_cancelled(tab: Tab) -> None:
    go = asyncio.Event()

    async def gate(i: int) -> None:
        if i > 8:
            await go.wait()

    engine = roomy(gate=gate, merge=3, speculation=speculated(8, 6))
    rows = "document.getElementById('live-rows').children"
    async with server_url(engine) as url:
        await open_page(tab, url)
        await tab.until("document.getElementById('live-note').textContent === 'None'")
        body = {"prompt": "abc", "n": 2, "max_tokens": 50}
        other = asyncio.create_task(ask(url, "POST", "/v1/completions", body, {"x-request-id": "<b>a/b</b>"}))
        await tab.until(f"{rows}.length === 1")
        await send(tab, "abc", max_tokens="40")
        await tab.until(
            f"{rows}.length === 2 && {rows}[1].querySelector('.drafts').textContent === '6 of 12'"
        )
        assert await texts_of(tab, "#live-rows .name") == [
            "<b>a/b</b>",
            await tab.evaluate(f"{rows}[1].querySelector('.name').title"),
        ]
        assert await texts_of(tab, "#live-rows .status") == ["running, 2 choices", "running"]
        assert await texts_of(tab, "#live-rows .written") == ["18", "9"]
        await tab.until(f"document.querySelector('{LAST} .rejected').textContent === '6'")
        await tab.click("#live-rows tr button")
        await tab.until(f"{rows}[0].querySelector('button').disabled")
        assert [how for _, how in engine.cancelled] == ["cancel", "cancel"]
        go.set()
        await tab.until(f"{rows}.length === 0 && {IDLE}")
        assert (await other).status == 200
        assert tab.complaints == []


async def test_the_chat_stays_at_its_end_until_the_viewer_scrolls_up(tab: Tab) -> None:
    left = "(e => e.scrollHeight - e.scrollTop - e.clientHeight)(document.getElementById('log'))"
    async with server_url(roomy(reply="word " * 500)) as url:
        await open_page(tab, url)
        await send(tab, "abc", max_tokens="3000")
        await tab.until(DONE)
        assert await tab.evaluate(left) < 2
        await tab.resize(1280, 700)
        await tab.until(f"{left} < 2")
        await tab.evaluate("document.getElementById('log').scrollTop = 0")
        await tab.evaluate(TWO_FRAMES)
        await tab.resize(1280, 800)
        await tab.evaluate(TWO_FRAMES)
        assert await tab.evaluate(left) > 100


async def test_stop_cancels_on_the_server(tab: Tab) -> None:
    never = asyncio.Event()

    async def gate(i: int) -> None:
        if i == 4:
            await never.wait()

    engine = roomy(gate=gate)
    async with server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, "abc")
        await tab.until(f"{TEXT} === '<use'")
        await tab.click("#stop")
        async with asyncio.timeout(10):
            await engine.streams[0].closed.wait()
        await tab.until(IDLE)
        assert await tab.text(f"{LAST} .note") == "Stopped; the server has cancelled it."
        assert await tab.evaluate(TEXT) == "<use"
        assert await tab.evaluate("document.getElementById('prompt').value") == ""


async def test_a_reply_is_text_whatever_it_spells(tab: Tab) -> None:
    prompt = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp; é 🌊"
    async with server_url(roomy(merge=2)) as url:
        await open_page(tab, url)
        await send(tab, prompt, max_tokens=str(len("<user>" + prompt)))
        await tab.until(DONE)
        assert await tab.evaluate(TEXT) == "<user>" + prompt
        assert await texts_of(tab, ".question") == [prompt]
        assert await tab.evaluate(f"document.querySelectorAll('{LAST} .content *:not(span)').length") == 0
        assert tab.complaints == []


async def test_what_goes_wrong_is_said(tab: Tab) -> None:
    engine = roomy(failure=RequestFailed("a fault", "forward"), fail_at=3)
    async with server_url(engine) as url:
        await open_page(tab, url)
        await send(tab, "abc")
        await tab.until("!document.getElementById('failure').hidden")
        assert "could not be finished" in await tab.text("#failure")
        assert await tab.evaluate(TEXT) == "<us"
        assert await tab.text(f"{LAST} .note") == "The next message leaves this turn out."
        assert await tab.evaluate("document.getElementById('prompt').value") == "abc"
        engine.refusal = Overloaded("The queue is full.", code="queue_full", retry_after_s=7)
        await tab.click("#send")
        await tab.until("document.getElementById('failure').textContent.includes('Try again in 7 s')")
        assert len(await texts_of(tab, "#log .turn")) == 2  # of the first: there is nothing of the second
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
        assert await tab.text("#live-note") == "Not known"
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
        await tab.until("document.getElementById('live-note').textContent === 'None with this key'")
        await tab.click("#send")
        await tab.until(f"{TEXT}?.startsWith('<user>abc')")
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
        await tab.until(f"{TEXT}?.startsWith('<user>ab')")
        assert await tab.evaluate("document.getElementById('prompt').value") == ""
        await tab.press("Enter")  # nothing to send
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
        await tab.until(DONE)
        out = """[...document.querySelectorAll('body *')].filter(e => {
          const box = e.getBoundingClientRect();
          return box.width > 1 && (box.right > innerWidth + 0.5 || box.left < -0.5);
        }).map(e => e.outerHTML.slice(0, 80))"""
        assert json.dumps(await tab.evaluate(out)) == "[]"
