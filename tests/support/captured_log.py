"""The daemon's log, as it would stand on stderr, in memory."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from config import LogSettings
from server.observability.logs import LIBRARY_LOGGERS, OWN_LOGGERS, configure_logging


@dataclass
class CapturedLog:
    """What has been logged so far."""

    stream: io.StringIO = field(default_factory=io.StringIO)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[str]:
        """Split at LF alone, as a collector does."""
        return self.text.split("\n")[:-1]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def events(self, event: str = "request") -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]

    async def requests(self, number: int = 1) -> list[dict[str, Any]]:
        """The lines of that many requests, which come a moment after their replies."""
        async with asyncio.timeout(10):
            while len(self.events()) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self.events()


@contextmanager
def logging_put_back() -> Iterator[None]:
    """Leave the process's loggers as they were."""
    loggers = [logging.getLogger(name) for name in (*OWN_LOGGERS, *LIBRARY_LOGGERS, "uvicorn.access")]
    loggers.append(logging.getLogger())
    before = [
        (logger, logger.handlers[:], logger.level, logger.propagate, logger.disabled) for logger in loggers
    ]
    try:
        yield
    finally:
        for logger, handlers, level, propagate, disabled in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate, logger.disabled = propagate, disabled
        logging.captureWarnings(False)
        structlog.reset_defaults()


@contextmanager
def captured_log(
    log_format: Literal["text", "json"] = "json", level: Literal["debug", "info"] = "info"
) -> Iterator[CapturedLog]:
    """Log into memory meanwhile, as the daemon does."""
    with logging_put_back():
        log = CapturedLog()
        configure_logging(LogSettings(log_format=log_format, log_level=level), log.stream)
        yield log
