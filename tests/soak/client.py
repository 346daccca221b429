"""SoakClient: runs errands one after another on a connection that it keeps, as clients do."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from itertools import count

from tests.e2e.wire import Wire, ask
from tests.soak.errands import Errand
from tests.soak.tally import Tally

PATIENCE_S = 60.0
_DONE = b"data: [DONE]\n\n"
_FINISH = re.compile(rb'"finish_reason":\s*"(\w+)"')
_CODE = re.compile(rb'"code":\s*"?(\w+)')
_REFUSALS = (400, 404, 413, 415)
_names = count()


class SoakClient:
    """One client; everything it sees goes to the tally that it shares with the others.

    `was_refused` says whether the last errand found no room: to be tried again later, not at once.
    """

    def __init__(self, url: str, tally: Tally, patience_s: float = PATIENCE_S) -> None:
        self.was_refused = False
        self._url = url
        self._patience_s = patience_s
        self._tally = tally
        self._wire: Wire | None = None

    async def run(self, errand: Errand) -> None:
        """Send the request and do with it what the errand says; never raises for what the server does."""
        name = f"soak-{next(_names)}"
        self.was_refused = False
        aside = asyncio.create_task(self._aside(errand, name))
        try:
            async with asyncio.timeout(self._patience_s if errand.leave_s is None else errand.leave_s):
                await self._exchange(errand, name)
        except TimeoutError:
            await self.close()
            if errand.leave_s is None:
                self._tally.surprise(f"no end within {self._patience_s:.0f} s of {errand}")
            else:
                self._tally.endings["left"] += 1
        except (OSError, EOFError, ValueError) as error:
            await self.close()
            self._tally.surprise(f"{type(error).__name__} {error}: {errand}")
        finally:
            aside.cancel()
            with suppress(asyncio.CancelledError):
                await aside

    async def close(self) -> None:
        """Leave."""
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    async def _exchange(self, errand: Errand, name: str) -> None:
        tally = self._tally
        if self._wire is None or self._wire.reader.at_eof():
            await self.close()
            self._wire = await Wire.connect(self._url)
        wire, began = self._wire, time.monotonic()
        tally.num_sent += 1
        headers = {"x-request-id": name, "content-type": errand.content_type}
        await wire.send("POST", errand.path, errand.body, headers)
        status, fields = await wire.head()
        if fields["content-type"].startswith("text/event-stream"):
            await self._read_events(wire, errand, began)
        elif fields.get("transfer-encoding") == "chunked":  # a large reply, which is written in pieces
            self._judge(errand, status, b"".join(await wire.chunks()))
        else:
            self._judge(errand, status, await wire.reader.readexactly(int(fields["content-length"])))
        tally.statuses[status] += 1
        if fields.get("connection") == "close":
            await self.close()

    async def _read_events(self, wire: Wire, errand: Errand, began: float) -> None:
        tally = self._tally
        event, num_finished = b"", 0
        while chunk := await wire.chunk():
            if not event:
                tally.note_first_token(time.monotonic() - began)
            event = chunk
            for reason in _FINISH.findall(chunk):
                num_finished += 1
                tally.endings[reason.decode()] += 1
            if chunk.startswith(b'data: {"error"'):
                num_finished += 1
                self._note_error(errand, chunk)
            if errand.read_gap_s:
                await asyncio.sleep(errand.read_gap_s)
        if event != _DONE or not num_finished:
            tally.surprise(f"a stream ended with {event[:200]!r} after {num_finished} finish reasons")

    def _judge(self, errand: Errand, status: int, body: bytes) -> None:
        tally = self._tally
        reply = json.loads(body)
        if status == 503 and reply["error"]["code"] == "queue_full":
            tally.endings["queue_full"] += 1
            self.was_refused = True
        elif errand.is_bad and status in _REFUSALS:
            tally.endings["refused"] += 1
        elif status == 200 and not errand.is_bad:
            tally.endings.update(choice["finish_reason"] for choice in reply["choices"])
        elif status == 504 and errand.may_be_late:
            tally.endings["deadline_exceeded"] += 1
        else:
            tally.surprise(f"{status} {body[:300]!r} for {errand}")

    def _note_error(self, errand: Errand, chunk: bytes) -> None:
        found = _CODE.search(chunk)
        if errand.may_be_late and found is not None and found[1] == b"deadline_exceeded":
            self._tally.endings["deadline_exceeded"] += 1
        else:
            self._tally.surprise(f"{chunk[:300]!r} for {errand}")

    async def _aside(self, errand: Errand, name: str) -> None:
        """What happens beside the reading: a look, a change, a cancel."""
        if errand.meddles:
            await self._ask("GET", f"/v1/requests/{name}")
            await self._ask("PATCH", f"/v1/requests/{name}", {"priority": 5, "deadline_ms": 60_000})
        if errand.cancel_s is not None:
            await asyncio.sleep(errand.cancel_s)
            await self._ask("POST", f"/v1/requests/{name}/cancel", {})

    async def _ask(self, method: str, path: str, body: object = None) -> None:
        try:
            reply = await ask(self._url, method, path, body)
        except (OSError, EOFError) as error:
            self._tally.surprise(f"{type(error).__name__} {error}: {method} {path}")
            return
        if reply.status not in (200, 404):  # which is not there yet, or no more
            self._tally.surprise(f"{reply.status} {reply.body[:200]!r} for {method} {path}")
