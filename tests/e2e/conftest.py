"""One server for all tests of a module that change nothing in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.e2e.http_server import server_url
from tests.support.fake_engine import FakeEngine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url() -> AsyncIterator[str]:
    """The URL of a plain server; for tests marked with the module's event loop."""
    async with server_url(FakeEngine(), max_n=8, max_queued_requests=32, max_body_bytes=100_000) as url:
        yield url
