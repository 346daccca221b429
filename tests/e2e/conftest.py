"""One server for all tests of a module that change nothing in it, and no certificates for clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.e2e.http_server import server_url
from tests.support.fake_engine import FakeEngine


@pytest.fixture(autouse=True, scope="session")
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All speak plain HTTP, and each client of hundreds would read those of the whole world first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url() -> AsyncIterator[str]:
    """The URL of a plain server; for tests marked with the module's event loop."""
    async with server_url(FakeEngine(), max_n=8, max_queued_requests=32, max_body_bytes=100_000) as url:
        yield url
