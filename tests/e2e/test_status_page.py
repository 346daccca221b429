"""The page at /: its headers, that it needs nothing from outside, and that it reads what the server has."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from server.observability.health import server_version
from server.pages.status_page import load_status_page
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import Wire, ask
from tests.support.fake_engine import FakeEngine

VOID = {"meta", "link", "input", "path", "br"}
PURE = ("words.js", "history.js", "figures.js", "event_stream.js", "tokens.js")


class Outline(HTMLParser):
    """Tags that must balance, attributes, and the text of each style and script."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.inline: dict[str, list[str]] = {"style": [], "script": []}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag in self.inline:
            self.inline[tag].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inline:
            self.inline[self.open[-1]][-1] += data


@pytest.fixture(scope="module")
def outline() -> Outline:
    parser = Outline()
    parser.feed(load_status_page().html)
    parser.close()
    assert parser.open == []
    return parser


def script_of(outline: Outline) -> str:
    return "".join(outline.inline["script"])


async def test_the_page_is_served_to_anyone_and_nothing_else_is() -> None:
    async with server_url(FakeEngine(), api_key=("k",), protect_metrics=True) as url:
        reply = await ask(url, "GET", "/")
        for path in ("/metrics", "/status/figures", "/static/status.html", "/status.html", "//"):
            assert (await ask(url, "GET", path)).status == 401, path
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.body.decode() == load_status_page().html


async def test_head_is_get_without_a_body_and_nothing_else_is_taken() -> None:
    async with server_url(FakeEngine()) as url:
        whole = await ask(url, "GET", "/")
        wire = await Wire.connect(url)
        await wire.send("HEAD", "/")
        status, headers = await wire.head()
        await wire.send("POST", "/", b"{}")  # a body after HEAD's reply would be read as this one's
        refused = await wire.reply()
        document = (await ask(url, "GET", "/openapi.json")).json()
        await wire.close()
    assert (status, headers["content-length"]) == (200, str(len(whole.body)))
    assert headers["content-security-policy"] == whole.headers["content-security-policy"]
    assert refused.status == 405
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert "/" not in document["paths"]


def test_the_policy_allows_exactly_what_the_page_holds(outline: Outline) -> None:
    rules = dict(rule.split(" ", 1) for rule in load_status_page().policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["frame-ancestors"] == rules["trusted-types"] == "'none'"
    assert (rules["connect-src"], rules["img-src"]) == ("'self'", "data:")
    for tag in ("style", "script"):
        texts = outline.inline[tag]
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[f"{tag}-src"].split() == [f"'sha256-{each}'" for each in hashes]
    assert len(outline.inline["style"]) == 1
    assert len(outline.inline["script"]) == sum(
        each.name.endswith(".js") and not each.name.startswith("api.") for each in _parts()
    )


def test_nothing_comes_from_outside(outline: Outline) -> None:
    html = load_status_page().html
    assert not re.search(r"https?://|@import|url\(|srcset|<iframe|<object", html)
    assert "<!-- script" not in html
    links = {(tag, name, value) for tag, name, value in outline.attributes if name in ("src", "href")}
    targets = {("link", "data:,"), ("a", "/metrics"), ("a", "/docs"), ("a", "#ask")}
    assert links == {(tag, "href", value) for tag, value in targets}
    assert not [each for each in outline.attributes if each[1].startswith("on") or each[1] == "style"]


def test_what_a_server_says_never_becomes_markup(outline: Outline) -> None:
    sinks = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|javascript:"
    )
    assert not re.search(sinks, script_of(outline))


def test_every_element_the_scripts_look_for_is_there_once(outline: Outline) -> None:
    script = script_of(outline)
    ids = Counter(value for _, name, value in outline.attributes if name == "id")
    assert max(ids.values()) == 1
    asked = set(re.findall(r"(?:getElementById|setText|number)\(\s*\"([\w-]+)\"", script))
    assert len(asked) > 30
    assert asked <= ids.keys()
    labels = {value for tag, name, value in outline.attributes if (tag, name) == ("label", "for")}
    assert labels <= ids.keys()
    charts = {value for _, name, value in outline.attributes if name == "data-chart"}
    assert charts == set(re.findall(r"^  \"?([\w-]+)\"?: \{ name:", script, re.MULTILINE))


async def test_the_figures_the_page_reads_exist(outline: Outline) -> None:
    script = script_of(outline)
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "GET", "/status/figures")
    assert reply.headers["cache-control"] == "no-store"
    found = reply.json()
    assert (found["model"], found["version"]) == (MODEL, server_version())
    sample = found["samples"][-1]
    asked = set(re.findall(r"(?:\beach|\bnow|latest|sample|snapshot)\.(\w+)", script))
    kept = {"add", "at", "charted", "started", "values", "age", "push", "shift", "length", "find", "counts"}
    assert asked - kept <= sample.keys()
    assert sample.keys() - {"swapped", "counts"} <= asked
    for name, bounds in found["bounds"].items():
        assert len(sample[name]) == len(bounds) + 1
    html = load_status_page().html
    assert {f'id="count-{name}"' for name in sample["counts"]} <= set(re.findall(r'id="count-\w+"', html))
    assert len(sample["counts"]) == html.count('id="count-')


async def test_with_keys_the_figures_need_one() -> None:
    async with server_url(FakeEngine(), api_key=("k",)) as url:
        assert (await ask(url, "GET", "/status/figures")).status == 401
        keyed = await ask(url, "GET", "/status/figures", headers={"authorization": "Bearer k"})
        document = (await ask(url, "GET", "/openapi.json", headers={"authorization": "Bearer k"})).json()
    assert keyed.status == 200
    assert "/status/figures" not in document["paths"]


async def test_a_page_gets_what_it_has_not_yet() -> None:
    async with server_url(FakeEngine()) as url:
        first = (await ask(url, "GET", "/status/figures")).json()["samples"]
        later = (await ask(url, "GET", f"/status/figures?after={first[-1]['at']}")).json()["samples"]
        assert (await ask(url, "GET", "/status/figures?after=nan")).status == 200
        assert (await ask(url, "GET", "/status/figures?after=x")).status == 400
    assert len(first) == 2  # kept as the server began, and now
    assert len(later) == 1
    assert first[0]["at"] < first[1]["at"] < later[0]["at"]


def _parts() -> list[Any]:
    return [each for each in files("server.pages").joinpath("static").iterdir() if each.is_file()]


def test_a_wheel_holds_the_page() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    assert "pages/static/*" in project["tool"]["setuptools"]["package-data"]["server"]
    assert {each.name.rsplit(".", 1)[1] for each in _parts()} == {"html", "css", "js"}


def run_node(script: str, *flags: str) -> str:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node is installed, which checks the page's scripts")
    done = subprocess.run([node, *flags, "-"], input=script, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scripts_parse_together(outline: Outline) -> None:
    run_node(script_of(outline), "--check")


def compute(expression: str) -> Any:
    """What an expression over the page's pure parts gives."""
    sources = [files("server.pages").joinpath("static", name).read_text(encoding="utf-8") for name in PURE]
    return json.loads(run_node("\n".join((*sources, f"console.log(JSON.stringify({expression}))"))))


def test_a_sample_is_read_with_the_bounds_of_its_histograms() -> None:
    sample = {"at": 3, "ttft": [1, 4, 5], "itl": [0, 2], "kv": [1, 2, 3], "generated": 7}
    facts = {"started": 9, "bounds": {"ttft": [0.5, 1], "itl": [0.1]}}
    given = f"{json.dumps(sample)}, {json.dumps(facts)}"
    found = compute(f"""(s => [s.at, s.started, s.generated, s.kv.free,
        s.ttft.map(([b, n]) => [String(b), n]), s.itl.length])(readSnapshot({given}))""")
    assert found == [3, 9, 7, 3, [["0.5", 1], ["1", 4], ["Infinity", 5]], 2]


def test_percentiles_and_rates_are_of_the_window_alone() -> None:
    found = compute("""(() => {
      const line = new Timeline();
      const at = (time, generated, buckets, started = 1) => {
        line.add({ at: time, generated, buckets, started });
        const pick = (each) => each.buckets;
        const quantiles = line.quantiles(pick, [0, 0.5, 0.95], 60);
        return [line.rate((each) => each.generated, 5), quantiles, line.snapshots.length];
      };
      return [
        at(0, 0, [[1, 100], [2, 100], [Infinity, 100]]),
        at(4, 20, [[1, 110], [2, 120], [Infinity, 120]]),
        at(100, 20, [[1, 110], [2, 120], [Infinity, 120]]),
        at(101, 30, [[1, 110], [2, 120], [Infinity, 124]]),
        at(602, 30, [[1, 110], [2, 120], [Infinity, 124]]),
        at(603, 3, [[1, 1], [2, 1], [Infinity, 1]]),
        at(604, 4, [[1, 2], [2, 2], [Infinity, 2]], 2),
      ];
    })()""")
    nothing = [None, None, None]
    assert found == [
        [None, nothing, 1],
        [5, [0, 1, 1.9], 2],
        [None, nothing, 3],
        [10, [2, 2, 2], 4],
        [None, nothing, 4],
        [None, nothing, 1],
        [None, nothing, 1],
    ]


def test_events_are_whole_wherever_the_bytes_are_cut() -> None:
    stream = ': keep-alive\n\ndata: {"a":"é\\n"}\n\ndata:x\r\n\r\ndata: y\ndata: z\n\ndata: [DONE]\n\n'
    found = compute(f"""(text => [...Array(text.length + 1).keys()].map(cut => {{
        const splitter = new EventSplitter();
        return [...splitter.push(text.slice(0, cut)), ...splitter.push(text.slice(cut))];
    }}))({json.dumps(stream)})""")
    assert found == [['{"a":"é\\n"}', "x", "y\nz", "[DONE]"]] * (len(stream) + 1)


OWN, DRAFT = "target", "draft"


@pytest.mark.parametrize(
    ("chunks", "pieces"),
    [
        pytest.param([("one", "t", "one")], [("one", OWN)], id="alone"),
        pytest.param([("a|b|c", "ddt", "abc")], [("a", DRAFT), ("b", DRAFT), ("c", OWN)], id="drafted"),
        pytest.param(
            [("a|b", "dt", "a"), ("c", "t", "bc")], [("a", DRAFT), ("b", OWN), ("c", OWN)], id="held"
        ),
        pytest.param([("ab|c", "dt", "a", "bc")], [("a", DRAFT), ("b", DRAFT), ("c", OWN)], id="within"),
        pytest.param([(b"\xe2\x82|\xac|!", "dtd", "€!")], [("€", OWN), ("!", DRAFT)], id="bytes"),
        pytest.param([(b"\xe2", "d", ""), (b"\x82\xac|x", "td", "€x")], [("€", OWN), ("x", DRAFT)], id="cut"),
        pytest.param(
            [("<think>|\n|the|</think>|\n\n|the|m", "tdtdtdt", "the", "them")],
            [("the", DRAFT), ("them", None)],
            id="one chunk with the same word on both sides of a mark",
        ),
        pytest.param(
            [("<think>|\n", "dt", ""), ("t", "d", "t"), ("he|</think>|It", "tdt", "he", "It")],
            [("t", DRAFT), ("he", OWN), ("It", OWN)],
            id="marks",
        ),
        pytest.param(
            [("p|q", "dd", "other"), ("r", "t", "r")], [("other", None), ("r", OWN)], id="spelt otherwise"
        ),
        pytest.param([("\ufeff|a", "dt", "\ufeffa")], [("\ufeff", DRAFT), ("a", OWN)], id="byte order mark"),
    ],
)
def test_what_is_shown_is_traced_to_its_tokens(
    chunks: list[tuple[str | bytes, ...]], pieces: list[tuple[str, str | None]]
) -> None:
    """A chunk: its tokens, a letter for where each comes from, and the texts that are shown then."""
    steps = []
    for tokens, origins, *texts in chunks:
        spelt = tokens if isinstance(tokens, bytes) else tokens.encode()
        content = [{"bytes": list(each), "logprob": 0.0} for each in spelt.split(b"|")]
        names = [DRAFT if each == "d" else OWN for each in origins]
        steps.append([{"token_origins": names, "logprobs": {"content": content}}, texts])
    found = compute(f"""(trail => {json.dumps(steps)}.flatMap(([choice, texts]) => {{
        trail.add(choice);
        return texts.flatMap(text => trail.take(text));
    }}))(new TokenTrail())""")
    words = {True: DRAFT, False: OWN, None: None}
    assert [(each["text"], words[each["drafted"]]) for each in found] == pieces


def test_tokens_that_show_nothing_are_not_kept_for_ever() -> None:
    chunk = (
        '{"token_origins": ["draft", "target"], "logprobs": {"content": [{"bytes": [97]}, {"bytes": [98]}]}}'
    )
    found = compute(f"""(trail => {{
      const counts = [...Array(5000)].map(() => trail.add({chunk}));
      return [counts.at(-1), trail.waiting.length, trail.take("ab").map(each => each.text)];
    }})(new TokenTrail())""")
    assert found == [{"count": 2, "drafted": 1}, 4096, ["a", "b"]]


def test_numbers_are_said_shortly() -> None:
    found = compute("""[
      sayNumber(0), sayNumber(9.96), sayNumber(131.4), sayNumber(12345), sayNumber(2.5e6),
      saySeconds(0.0004), saySeconds(0.0123), saySeconds(1.5), saySeconds(640),
      sayShare(0.004), sayShare(0.655), sayDuration(59), sayDuration(3600), sayDuration(3 * 86400),
      say(null, sayNumber), say(NaN, sayNumber),
    ]""")
    assert found == [
        *("0", "10.0", "131", "12,345", "2.50 M", "0.4 ms", "12 ms", "1.50 s", "640 s", "0.4 %", "66 %"),
        *("59 s", "1 h 0 min", "3 d 0 h", "–", "–"),
    ]
