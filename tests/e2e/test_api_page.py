"""The page at /docs: all of it comes from this server, and without a key it shows nothing else."""

from __future__ import annotations

import re
from importlib.metadata import version

from engine import FillInMiddle
from server.pages.api_page import SCRIPT_PATH, STYLE_PATH, load_api_page
from tests.e2e.http_server import server_url
from tests.e2e.wire import ask
from tests.support.fake_engine import FakeEngine


async def test_the_page_and_what_it_loads_need_no_key_and_the_description_does() -> None:
    async with server_url(FakeEngine(), api_key=("k",)) as url:
        page = await ask(url, "GET", "/docs")
        script = await ask(url, "GET", SCRIPT_PATH)
        style = await ask(url, "GET", STYLE_PATH)
        described = await ask(url, "GET", "/openapi.json")
        others = [(await ask(url, "GET", path)).status for path in ("/redoc", "/docs/", "/docs/redoc.js")]
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (script.status, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert (style.status, style.headers["content-type"]) == (200, "text/css; charset=utf-8")
    assert b"SwaggerUIBundle" in script.body
    assert b".swagger-ui" in style.body
    for reply in (page, script, style):
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert described.status == 401
    assert others == [401, 401, 401]


async def test_no_page_takes_scripts_from_another_server() -> None:
    async with server_url(FakeEngine()) as url:
        page = await ask(url, "GET", "/docs")
        assert (await ask(url, "GET", "/redoc")).status == 404
    html = page.body.decode()
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert not re.search(r"https?://|@import|srcset|<iframe|<object", html)
    sources = set(re.findall(r"<(?:script|link)[^>]* (?:src|href)=\"([^\"]*)\"", html))
    swagger = f"?{version('fastapi-offline')}"
    assert sources == {"data:,", f".{SCRIPT_PATH}{swagger}".replace("./", ""), f"{STYLE_PATH[1:]}{swagger}"}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag, count in (("script", 2), ("style", 1)):
        allowed = rules[f"{tag}-src"].split()
        assert len(allowed) == count + 1
        assert {each for each in allowed if not each.startswith("'sha256-")} == {"'self'"}
    assert load_api_page().html == html


async def test_the_description_says_that_a_key_is_asked_for_only_where_one_is() -> None:
    bearer = {"authorization": "Bearer k"}
    async with server_url(FakeEngine(), api_key=("k",)) as url:
        keyed = (await ask(url, "GET", "/openapi.json", headers=bearer)).json()
    async with server_url(FakeEngine()) as url:
        keyless = (await ask(url, "GET", "/openapi.json")).json()
    assert keyed["security"] == [{"key": []}]
    scheme = keyed["components"]["securitySchemes"]["key"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert "security" not in keyless
    assert "securitySchemes" not in keyless["components"]


async def test_every_body_has_an_example_that_the_server_takes() -> None:
    marks = FillInMiddle(1, 2, 3, frozenset())
    async with server_url(FakeEngine(fill_in_middle=marks)) as url:
        paths = (await ask(url, "GET", "/openapi.json")).json()["paths"]
        posts = {
            path: kinds["post"]
            for path, kinds in paths.items()
            if "requestBody" in kinds.get("post", {})
            and kinds["post"]["tags"] != ["embeddings"]
            and path not in ("/infill", "/v1/files", "/v1/batches")
        }  # these need models of another kind, or files, which the tests of their own have
        assert len(posts) >= 4
        for path, operation in posts.items():
            example = operation["requestBody"]["content"]["application/json"]["example"]
            assert (await ask(url, "POST", path, example)).status == 200, path
