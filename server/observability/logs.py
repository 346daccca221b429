"""Logging: every line, ours and the libraries', through one formatter to stderr.

One event is one line whatever its values hold, tracebacks excepted, whose lines are marked. Prompts and
completions are never logged: callers pass ids, counts and times.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from config import LogSettings
from server.observability.log_writer import LogWriter

OWN_LOGGERS = ("slipstream", "server", "engine", "config", "uvicorn")
LIBRARY_LOGGERS = ("uvicorn", "uvicorn.error", "transformers", "huggingface_hub")
_APART = frozenset({"event", "logger", "stack", "exception"})


def configure_logging(log: LogSettings, stream: TextIO | None = None, *, never_waits: bool = False) -> None:
    """Send structlog's and the standard library's records to `stream`; None is stderr.

    A later call replaces an earlier one. `auto` is rows to read on a terminal and JSON otherwise; a record
    whose extra `rows` makes some, called without arguments, is those there. Libraries are heard from warning
    upwards. With `never_waits` a stream that is a file is written by a LogWriter, which
    `logging.shutdown` ends.
    """
    stream = sys.stderr if stream is None else stream
    render = {"text": render_text, "json": render_json}.get(log.log_format)
    if render is None:
        render = render_rows if stream.isatty() else render_json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = _handler(stream, never_waits)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.StackInfoRenderer(),
                structlog.processors.format_exc_info,
                drop_decoration,
                render,
            ],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if type(old) in (logging.StreamHandler, LogWriter)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    _set_levels(logging.getLevelNamesMapping()[log.log_level.upper()])
    adopt_library_loggers()


def _handler(stream: TextIO, never_waits: bool) -> logging.Handler:
    try:
        fd = stream.fileno()
    except OSError:  # not a file
        never_waits = False
    return LogWriter(fd) if never_waits else logging.StreamHandler(stream)


def adopt_library_loggers() -> None:
    """Take the libraries' own handlers away so that their records reach ours; again after importing one."""
    for name in LIBRARY_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # The server counts and logs requests itself; a second line for each would only cost time.
    logging.getLogger("uvicorn.access").disabled = True
    logging.captureWarnings(True)


def drop_decoration(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove copies of the message: uvicorn attaches a coloured one, other handlers leave theirs behind."""
    for name in ("color_message", "message", "asctime"):
        event.pop(name, None)
    return event


def render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """One JSON object in printable ASCII."""
    event.pop("rows", None)
    return json.dumps(event, default=repr).replace("\x7f", "\\u007f")


def render_text(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """`time level event key=value ...` on one line, then a traceback with each of its lines marked."""
    event.pop("rows", None)
    head = f"{event.pop('timestamp', '')} {event.pop('level', ''):<7} "
    return "\n".join([head + _words(event), *_marked(event)])


def render_rows(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """For a person at a terminal: the local time, `warning:` or `error:` where it is one, and the words."""
    make_rows = event.pop("rows", None)
    level = str(event.pop("level", ""))
    severity = "" if level in ("info", "debug") else f"{level}: "
    event.pop("timestamp", None)
    marked = _marked(event)
    first, *others = [_words(event)] if make_rows is None else [escape(row) for row in make_rows()]
    now = time.strftime("%H:%M:%S")
    return "\n".join([f"{now}  {severity}{first}", *(f"{'':10}{row}" for row in others), *marked])


def _words(event: EventDict) -> str:
    """`event key=value ...`, without the name of the logger; tracebacks come apart."""
    happened = escape(str(event.get("event", "")).strip())
    values = ((key, value) for key, value in event.items() if key not in _APART)
    return " ".join([happened, *(f"{quote(key)}={quote(value)}" for key, value in values)])


def _marked(event: EventDict) -> list[str]:
    """The lines of a stack and of a traceback, each marked so that none passes for a record."""
    blocks = [str(event[key]) for key in ("stack", "exception") if event.get(key)]
    return [f"  | {escape(line)}" for block in blocks for line in block.splitlines()]


def quote(value: object) -> str:
    """`value` so that it is one word: bare when it can be, else in double quotes with escapes."""
    text = str(value)
    if text and text.isprintable() and not any(char in ' "\\=' for char in text):
        return text
    return '"' + escape(text).replace('"', '\\"') + '"'


def escape(text: str) -> str:
    """`text` without what ends a line or steers a terminal; such characters are spelled \\n or \\x1b."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


def _set_levels(level: int) -> None:
    logging.getLogger().setLevel(max(level, logging.WARNING))
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level)
    # Its own start and stop lines would say again what ours say.
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING))
