"""One answer: shown while it comes, counted when it is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from server.commands.remote.chunks import DONE, Chunk, Drafts, read_chunk, read_drafts, whole_number
from server.commands.remote.event_splitter import EventSplitter
from server.commands.remote.failures import BrokenReply, Refused
from server.commands.remote.http_client import HttpClient
from server.plain_words import counted


@dataclass(slots=True)
class ReplyStats:
    """What an answer took. `num_tokens` is the server's count if `is_counted_by_server`, else of chunks."""

    ttft_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    is_counted_by_server: bool = False
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    drafts: Drafts | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None when there was only one."""
        if self.ttft_s is None or self.num_tokens < 2 or self.last_s <= self.ttft_s:
            return None
        return (self.num_tokens - 1) / (self.last_s - self.ttft_s)


class Reply:
    """A reply sink that hands text on at once. `text` and `stats` are good at any time, also of a part."""

    def __init__(self, show: Callable[[str], None], show_aside: Callable[[str], None]) -> None:
        self.text = ""
        self.stats = ReplyStats()
        self._show = show
        self._show_aside = show_aside
        self._splitter = EventSplitter()
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._body = bytearray()
        self._asked = 0.0
        self._is_done = False

    async def ask(self, client: HttpClient, path: str, body: bytes) -> None:
        """Send the request and show the answer to its end. Raises RemoteError, and what showing raises."""
        self._asked = perf_counter()
        await client.exchange("POST", path, body, self)
        if self._status != 200:
            raise Refused(self._status, self._headers, bytes(self._body))
        if not self._is_done and self.stats.finish_reason is None:
            raise BrokenReply("stream cut short", "the answer broke off")

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Keep them."""
        self._status, self._headers = status, headers

    def on_data(self, data: bytes, at: float) -> None:
        """Show what has come."""
        if self._status != 200:
            self._body += data
            return
        for payload in self._splitter.feed(data):
            if payload == DONE:
                self._is_done = True
            else:
                self._take(read_chunk(payload), at)

    def _take(self, chunk: Chunk, at: float) -> None:
        stats = self.stats
        if chunk.text or chunk.aside:
            stats.ttft_s = at - self._asked if stats.ttft_s is None else stats.ttft_s
            stats.last_s = at - self._asked
            if not stats.is_counted_by_server:
                stats.num_tokens += 1
        stats.finish_reason = chunk.finish_reason or stats.finish_reason
        stats.drafts = read_drafts(chunk.metrics) or stats.drafts
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        if chunk.aside:
            self._show_aside(chunk.aside)
        if chunk.text:
            self.text += chunk.text
            self._show(chunk.text)

    def _take_usage(self, usage: Mapping[str, object]) -> None:
        num_tokens = whole_number(usage.get("completion_tokens"))
        if num_tokens is not None:
            self.stats.num_tokens, self.stats.is_counted_by_server = num_tokens, True
        self.stats.num_prompt_tokens = whole_number(usage.get("prompt_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.stats.num_cached_tokens = whole_number(details.get("cached_tokens"))


def describe(stats: ReplyStats) -> str:
    """An answer's speed in one short line."""
    parts = [counted(stats.num_tokens, "token")]
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
    if stats.ttft_s is not None:
        parts.append(f"first after {stats.ttft_s:.2f} s")
    if stats.drafts is not None and stats.drafts.num_proposed:
        parts.append(f"{stats.drafts.acceptance_rate:.0%} of drafts accepted")
    if stats.finish_reason == "length":
        parts.append("cut at the token limit")
    return ", ".join(parts)
