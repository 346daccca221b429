"""Pages of other sites, in a browser that can reach the server: they read nothing and change nothing."""

from __future__ import annotations

from typing import Any, cast

import pytest

from config import ServerSettings
from server.app import build_app
from tests.e2e.http_server import make_settings, server_url
from tests.e2e.wire import RawReply, Wire, ask
from tests.support.engines import EngineShape, running_engine
from tests.support.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"
EVIL = "https://evil.example"
# What a page may send without asking: CORS calls such requests simple.
SIMPLE_TYPES = (
    "",
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
)


def test_by_default_other_machines_reach_nothing_and_other_sites_are_named_nowhere() -> None:
    settings = ServerSettings()
    assert (settings.host, settings.allowed_host, settings.cors_origin) == ("127.0.0.1", (), ())


# A name that an attacker can make point to 127.0.0.1 once his page is loaded.
REBOUND = (
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:8000"),
    *(
        "localhost@evil.example",
        "evil.example/localhost",
        "localhost:80:80",
        "[::1].evil.example",
        "127.1.nip.io",
    ),
    *("0.0.0.0:8000", "192.168.0.1", "[::]", "[fe80::1]", "mylocalhost", "[localhost]", "2130706433"),
)


@pytest.mark.parametrize("host", REBOUND)
async def test_a_server_on_loopback_answers_no_name_that_could_be_rebound(host: str) -> None:
    async with server_url(FakeEngine()) as url:
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/"),
            ("OPTIONS", COMPLETIONS),
        ):
            refused(await ask(url, method, path, None, {"host": host}), "host_not_allowed")
        same = {"host": host, "origin": f"http://{host}"}
        refused(await ask(url, "POST", COMPLETIONS, {"prompt": "a"}, same), "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "127.0.0.1",
            "127.0.0.1:80",
            "127.1.2.3",
            "[::1]:8000",
        ),
        *("app.localhost", "[0:0:0:0:0:0:0:1]"),
    ],
)
async def test_every_name_of_this_machine_alone_is_answered(host: str) -> None:
    async with server_url(FakeEngine()) as url:
        assert (await ask(url, "GET", "/v1/models", None, {"host": host})).status == 200
        page = {"host": host, "origin": f"http://{host}"}  # the status page's own requests
        assert (await ask(url, "POST", COMPLETIONS, {"prompt": "a"}, page)).status == 200


async def test_no_host_at_all_is_no_browser() -> None:
    async with server_url(FakeEngine()) as url:
        wire = await Wire.connect(url)
        wire.writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await wire.head())[0] == 200
        await wire.close()


async def test_a_host_that_is_allowed_is_answered_beside_loopback() -> None:
    async with server_url(FakeEngine(), allowed_host=("Box.example", "[fd00::1]")) as url:
        for host in ("box.example", "box.example:8443", "localhost", "[fd00::1]:80"):
            assert (await ask(url, "GET", "/v1/models", None, {"host": host})).status == 200
        for host in ("evil.example", "x.box.example", "10.0.0.1"):
            refused(await ask(url, "GET", "/v1/models", None, {"host": host}), "host_not_allowed")
    async with server_url(FakeEngine(), allowed_host=("*",)) as url:
        assert (await ask(url, "GET", "/v1/models", None, {"host": "evil.example"})).status == 200


async def test_a_public_server_answers_any_host_until_some_are_named() -> None:
    async with server_url(FakeEngine(), is_public=True) as url:
        assert (await ask(url, "GET", "/v1/models", None, {"host": "api.example"})).status == 200
    async with server_url(FakeEngine(), is_public=True, allowed_host=("api.example",)) as url:
        # Probes and scrapers name a pod by its address, which is no name that could be rebound.
        for host in ("api.example", "10.1.2.3:8000", "[fd00::7]:8000", "localhost"):
            assert (await ask(url, "GET", "/health", None, {"host": host})).status == 200
        refused(await ask(url, "GET", "/v1/models", None, {"host": "evil.example"}), "host_not_allowed")


FOREIGN = (
    *(
        EVIL,
        "null",
        "",
        "http://localhost:1",
        "https://localhost:1",
        "file://",
        "http://localhost.evil.example",
    ),
    "chrome-extension://abc",
)


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("is_public", [False, True])
async def test_a_page_of_another_origin_changes_nothing(origin: str, is_public: bool) -> None:
    engine = FakeEngine()
    headers = {"origin": origin, "content-type": "application/json"}
    async with server_url(engine, is_public=is_public, api_key=("k",)) as url:
        for method, path in (
            ("POST", COMPLETIONS),
            ("POST", "/reset_prefix_cache"),
            ("POST", "/v1/requests/x/cancel"),
            ("PATCH", "/v1/requests/x"),
            ("DELETE", "/v1/models"),
            ("PUT", "/nope"),
        ):
            wire = await Wire.connect(url)
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            wire.writer.write(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode())
            refused(await wire.reply(), "origin_not_allowed")
            await wire.close()
    assert engine.requests == []


async def test_two_origins_are_foreign() -> None:
    async with server_url(FakeEngine()) as url:
        wire = await Wire.connect(url)
        own, foreign = b"origin: http://localhost\r\n", b"origin: %s\r\n" % EVIL.encode()
        wire.writer.write(
            b"POST /reset_prefix_cache HTTP/1.1\r\nhost: localhost\r\n" + own + foreign + b"\r\n"
        )
        refused(await wire.reply(), "origin_not_allowed")
        await wire.close()


async def test_nothing_is_given_to_a_page_that_only_reads() -> None:
    headers = {"origin": EVIL, "access-control-request-method": "POST"}
    async with server_url(FakeEngine()) as url:
        for method, path in (
            ("OPTIONS", COMPLETIONS),
            ("GET", "/v1/models"),
            ("GET", "/health"),
            ("GET", "/"),
        ):
            reply = await ask(url, method, path, None, headers)
            assert not [name for name in reply.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("content_type", SIMPLE_TYPES)
async def test_no_post_that_a_page_may_send_unasked_is_served(content_type: str) -> None:
    """On every route, those of tomorrow included, even from a browser too old to send its origin."""
    app = build_app(make_settings(), cast(Any, FakeEngine()))
    paths = [path for path, methods in app.openapi()["paths"].items() if "post" in methods]
    assert len(paths) >= 6
    headers = {"content-type": content_type}
    bare = (
        "/reset_prefix_cache",
        "/v1/requests/{request_id}/cancel",
        "/v1/batches/{batch_id}/cancel",
        "/v1/files",
    )
    async with server_url(FakeEngine()) as url:
        for path in paths:
            for body in (b"", b'{"prompt":"a"}'):
                wire = await Wire.connect(url)
                await wire.send(
                    "POST",
                    path.format(request_id="x", batch_id="x"),
                    b"",
                    {**headers, "content-length": str(len(body))},
                )
                wire.writer.write(body)
                reply = await wire.reply()
                expected = (415,) if body or path in bare else (400, 415)  # no JSON at all is a 400
                assert reply.status in expected, path
                await wire.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json"},
        {"authorization": "Bearer any"},
        {"x-requested-with": "curl"},
        {"x-request-id": "mine"},
    ],
)
async def test_a_post_without_a_body_says_in_its_head_that_no_page_sent_it(headers: dict[str, str]) -> None:
    sent = {"content-type": "", **headers}
    async with running_engine(EngineShape()) as harness, server_url(harness.engine) as url:
        assert (await ask(url, "POST", "/reset_prefix_cache", None, sent)).status == 200
        assert (await ask(url, "POST", "/v1/requests/x/cancel", None, sent)).status == 404


FRIEND = "https://app.example"


async def test_an_origin_that_is_allowed_may_ask_and_read() -> None:
    engine = FakeEngine()
    async with server_url(engine, cors_origin=(f"{FRIEND}/", "http://localhost:3000"), api_key=("k",)) as url:
        asked = {
            "origin": FRIEND,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        }
        reply = await ask(url, "OPTIONS", COMPLETIONS, None, asked)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, FRIEND)
        assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in reply.headers
        sent = {"origin": FRIEND, "authorization": "Bearer k"}
        reply = await ask(url, "POST", COMPLETIONS, {"prompt": "a"}, sent)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, FRIEND)
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        # It reads why it was refused, too.
        reply = await ask(url, "POST", COMPLETIONS, {"prompt": "a"}, {"origin": FRIEND})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (401, FRIEND)
        for origin in (EVIL, "http://app.example", "https://app.example:444"):
            refused(
                await ask(url, "POST", COMPLETIONS, {"prompt": "a"}, {**sent, "origin": origin}),
                "origin_not_allowed",
            )
            reply = await ask(url, "OPTIONS", COMPLETIONS, None, {**asked, "origin": origin})
            assert "access-control-allow-origin" not in reply.headers


async def test_any_origin_may_be_allowed() -> None:
    async with server_url(FakeEngine(), cors_origin=("*",)) as url:
        for origin in (EVIL, "null"):
            reply = await ask(url, "POST", COMPLETIONS, {"prompt": "a"}, {"origin": origin})
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")


def refused(reply: RawReply, code: str) -> None:
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["code"]) == (403, "permission_error", code)
    assert "x-request-id" in reply.headers
