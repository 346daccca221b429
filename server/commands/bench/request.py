"""One streaming request: sent, noted while it runs with as little work as possible, read when it is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.commands.bench.live_counts import LiveCounts
from server.commands.bench.record import RequestRecord
from server.commands.remote.chunks import DONE, Chunk, read_chunk, read_drafts, whole_number
from server.commands.remote.event_splitter import EventSplitter
from server.commands.remote.failures import BrokenReply, Refused


class StreamNotes:
    """A reply sink that keeps every event with its time of arrival and leaves them unread."""

    def __init__(self, counts: LiveCounts) -> None:
        self._counts = counts
        self._splitter = EventSplitter()
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._body = bytearray()
        self._events: list[tuple[float, bytes]] = []

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Keep them."""
        self._status, self._headers = status, headers

    def on_data(self, data: bytes, at: float) -> None:
        """Keep the events that `data` completes."""
        if self._status != 200:
            self._body += data
            return
        payloads = self._splitter.feed(data)
        self._counts.num_events += len(payloads)
        self._events += [(at, payload) for payload in payloads]

    def read_into(self, record: RequestRecord) -> None:
        """Fill in what the complete reply says, or its part before it raises Refused or BrokenReply."""
        if self._status != 200:
            raise Refused(self._status, self._headers, bytes(self._body))
        times: list[float] = []
        is_done = False
        try:
            for at, payload in self._events:
                is_done = payload == DONE
                if not is_done:
                    chunk = read_chunk(payload)
                    if chunk.text or chunk.aside:
                        times.append(at)
                    _note(chunk, record)
        finally:
            record.chunk_times = tuple(times)
            if not record.is_counted_by_server:
                record.num_output_tokens = len(times)
        # Some servers end without [DONE]; one that has said why it ends has said all.
        if not is_done and record.finish_reason is None:
            raise BrokenReply("stream cut short", f"the stream ended after {len(self._events)} events")


def _note(chunk: Chunk, record: RequestRecord) -> None:
    """Take over what an event says beside its text; a later one knows better."""
    record.finish_reason = chunk.finish_reason or record.finish_reason
    if chunk.usage is not None:
        _note_usage(chunk.usage, record)
    if chunk.metrics is not None:
        record.drafts = read_drafts(chunk.metrics) or record.drafts
        queue_ms = chunk.metrics.get("queue_time_ms")
        record.queue_ms = float(queue_ms) if isinstance(queue_ms, int | float) else record.queue_ms


def _note_usage(usage: Mapping[str, Any], record: RequestRecord) -> None:
    output = whole_number(usage.get("completion_tokens"))
    if output is not None:
        record.num_output_tokens, record.is_counted_by_server = output, True
    record.num_prompt_tokens = whole_number(usage.get("prompt_tokens"))
    details = usage.get("prompt_tokens_details")
    record.num_cached_tokens = whole_number(
        (details if isinstance(details, dict) else {}).get("cached_tokens")
    )
