"""A headless Chromium for tests, driven over its debugging pipe; needs nothing installed but the browser.

The protocol is JSON messages that end with a zero byte, on the browser's file descriptors 3 and 4.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *(
        "--headless=new",
        "--remote-debugging-pipe",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
    ),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *(
        "--disable-extensions",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ),
)
PATIENCE_S = 60
_FIRST_FREE = 10  # descriptors the browser does not expect at a fixed number
# Puts the two descriptors where the browser looks for them, then becomes the browser.
_LAUNCH = (
    "import os, sys; [os.dup2(int(sys.argv[i]), i + 2) for i in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"
)

# In the page: resolves with the expression's value once it is truthy.
_UNTIL = """new Promise((resolve, reject) => {
  const end = Date.now() + %d;
  const look = () => {
    const value = (%s);
    if (value) resolve(value);
    else if (Date.now() > end) reject(new Error("not in time: " + %s));
    else setTimeout(look, 20);
  };
  look();
})"""


def find_chromium() -> str | None:
    """The path of an installed browser, None when there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(Exception):
    """The browser refused a command, or the page threw."""


@dataclass(slots=True)
class Connection:
    """The pipe: commands with their answers, and events by session."""

    writer: asyncio.StreamWriter
    answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ids: Any = field(default_factory=lambda: count(1))

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command's result. Raises BrowserError."""
        number = next(self.ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self.writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(PATIENCE_S):
            return await answer

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Sort what comes until the pipe closes."""
        while data := await reader.readuntil(b"\0"):
            message = json.loads(data[:-1])
            answer = self.answers.pop(message.get("id", 0), None)
            if answer is None:
                self.events.setdefault(message.get("sessionId", ""), []).append(message)
            elif answer.done():
                continue
            elif "error" in message:
                answer.set_exception(BrowserError(message["error"]["message"]))
            else:
                answer.set_result(message["result"])


@dataclass(slots=True)
class Tab:
    """One page with its own storage. Mouse and keyboard events are the browser's own, not made by script."""

    connection: Connection
    session: str

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self.connection.call(method, self.session, **params)

    async def open(self, url: str) -> None:
        """Go there; returns when the document has loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def front(self) -> None:
        """Be the tab that is seen; input reaches no other."""
        await self.call("Page.bringToFront")

    async def evaluate(self, expression: str) -> Any:
        """The value of `expression`, awaited if it is a promise. Raises BrowserError when it throws."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise BrowserError(result["exceptionDetails"]["exception"].get("description", expression))
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 20) -> Any:
        """The value of `expression` as soon as it is truthy; `seconds` at most PATIENCE_S."""
        return await self.evaluate(_UNTIL % (seconds * 1000, expression, json.dumps(expression)))

    async def text(self, selector: str) -> str:
        """What the element reads as on the screen."""
        found = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return str(found)

    async def click(self, selector: str) -> None:
        """Scroll to the element and press the mouse in its middle."""
        element = f"document.querySelector({json.dumps(selector)})"
        await self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        box = await self.evaluate(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1
            )

    async def fill(self, selector: str, text: str) -> None:
        """Put `text` in the field's place of whatever it holds, as a paste does."""
        await self.evaluate(
            f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))"
        )
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key that writes a new line or nothing, where the focus is."""
        fields: dict[str, Any] = {"key": key, "code": key, "modifiers": 8 if shift else 0}
        if key == "Enter":
            fields |= {"windowsVirtualKeyCode": 13, "text": "\r"}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """The size of the window in CSS pixels, as a phone has it when `mobile`."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )

    async def prefer(self, scheme: str) -> None:
        """What the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self) -> bytes:
        """A PNG of the window."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    @property
    def complaints(self) -> list[str]:
        """What the console would show in red, in order: exceptions, errors, policy violations."""
        found = []
        for event in self.connection.events.get(self.session, []):
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['source']}: {params['entry']['text']}")
        return found


@dataclass(slots=True)
class Browser:
    """A running browser."""

    connection: Connection

    async def tab(self) -> Tab:
        """A fresh page in a profile of its own, 1280 x 800, in a system that prefers light."""
        context = (await self.connection.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.connection.call(
            "Target.createTarget", url="about:blank", browserContextId=context
        )
        attached = await self.connection.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        tab = Tab(self.connection, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        await tab.resize(1280, 800)
        await tab.prefer("light")
        return tab


@asynccontextmanager
async def open_browser(profile: Path) -> AsyncIterator[Browser]:
    """A browser with its files in `profile`, gone on leaving. Raises BrowserError when none is installed."""
    path = find_chromium()
    if path is None:
        raise BrowserError("no Chromium is installed")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE) for fd in (theirs_in, theirs_out)]
    os.close(theirs_in)
    os.close(theirs_out)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LAUNCH, *map(str, theirs)),
        *(path, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        pass_fds=theirs,
        stderr=asyncio.subprocess.DEVNULL,
    )
    for fd in theirs:
        os.close(fd)
    connection, reader_task, closers = await _connect(ours_in, ours_out)
    try:
        yield Browser(connection)
    finally:
        await _close(connection, process)
        reader_task.cancel()
        await asyncio.gather(reader_task, return_exceptions=True)
        for transport in closers:
            transport.close()


async def _connect(
    read_fd: int, write_fd: int
) -> tuple[Connection, asyncio.Task[None], tuple[asyncio.BaseTransport, ...]]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 27)  # a screenshot is one message
    reading, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0)
    )
    writing, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(write_fd, "wb", 0)
    )
    connection = Connection(asyncio.StreamWriter(writing, protocol, None, loop))
    return connection, asyncio.create_task(connection.read(reader)), (reading, writing)


async def _close(connection: Connection, process: asyncio.subprocess.Process) -> None:
    """Ask first, so that no child of the browser is left behind."""
    try:
        connection.writer.write(b'{"id": 0, "method": "Browser.close"}\0')
        async with asyncio.timeout(10):
            await process.wait()
    except (TimeoutError, ConnectionError):
        process.kill()
        await process.wait()
