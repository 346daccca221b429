"""The API's description in a real browser that can reach this server alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.browser import Tab, find_chromium, open_browser
from tests.e2e.http_server import server_url
from tests.support.fake_engine import FakeEngine

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (Debian: chromium)"),
]

CHAT = "#operations-generation-create_chat_completion_v1_chat_completions_post"
DRAWN = "document.querySelectorAll('.opblock').length > 10"


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with open_browser(tmp_path / "profile") as browser:
        yield await browser.tab()


async def try_chat(tab: Tab) -> None:
    """Send the example as it stands; returns once its reply is shown."""
    await tab.click(f"{CHAT} .opblock-summary-control")
    await tab.until(f"!!document.querySelector('{CHAT} .try-out__btn')")
    await tab.click(f"{CHAT} .try-out__btn")
    await tab.until(f"!!document.querySelector('{CHAT} .execute')")
    await tab.click(f"{CHAT} .execute")
    await tab.until(f"!!document.querySelector('{CHAT} .live-responses-table tbody tr')")


async def test_the_description_is_drawn_and_can_be_tried(tab: Tab) -> None:
    engine = FakeEngine(max_model_len=1024)
    async with server_url(engine) as url:
        await tab.open(url + "/docs")
        await tab.until(DRAWN)
        assert await tab.evaluate("document.getElementById('key-form').hidden")
        await try_chat(tab)
        assert "200" in await tab.text(f"{CHAT} .live-responses-table tbody .response-col_status")
        assert engine.requests[-1].sampling.temperature == 0.2
        assert tab.complaints == []


async def test_with_keys_nothing_is_shown_before_one_and_it_is_sent_along(tab: Tab) -> None:
    engine = FakeEngine(max_model_len=1024)
    async with server_url(engine, api_key=("secret",)) as url:
        await tab.open(url + "/docs")
        await tab.until("document.getElementById('note').textContent.includes('asks for an API key')")
        await tab.fill("#key", "wrong")
        await tab.click("#key-form button")
        await tab.until("document.getElementById('note').textContent.includes('does not accept')")
        assert await tab.evaluate("document.querySelectorAll('.opblock').length") == 0
        await tab.fill("#key", "secret")
        await tab.click("#key-form button")
        await tab.until(DRAWN)
        await try_chat(tab)
        assert "200" in await tab.text(f"{CHAT} .live-responses-table tbody .response-col_status")
        assert "secret" not in await tab.evaluate("[...Object.values(localStorage), document.cookie].join()")
        await tab.open(url + "/docs?again")
        await tab.until(DRAWN)
        await tab.click("#forget")
        await tab.until("document.getElementById('note').textContent.includes('asks for an API key')")
        assert not [text for text in tab.complaints if "401" not in text]


async def test_dark_follows_the_system_until_the_viewer_chooses(tab: Tab) -> None:
    colour = "getComputedStyle(document.querySelector('.swagger-ui .opblock-tag')).color"
    async with server_url(FakeEngine()) as url:
        await tab.open(url + "/docs")
        await tab.until(DRAWN)
        light = await tab.evaluate(colour)
        await tab.prefer("dark")
        await tab.until(f"{colour} !== {light!r}")
        await tab.click("#theme")
        await tab.until(f"{colour} === {light!r}")
