import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
import structlog

from config import LogSettings
from server.observability.logs import configure_logging, escape, quote
from tests.support.captured_log import logging_put_back

HOSTILE = 'a\n2026-01-01T00:00:00Z info forged\r\x1b[2J\u2028\u202e\x00 "q" \\'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _put_logging_back() -> Iterator[None]:
    with logging_put_back():
        yield


def logged_to(
    stream: io.StringIO,
    log_format: Literal["auto", "text", "json"] = "json",
    level: Literal["debug", "info", "warning", "error"] = "info",
) -> Any:
    configure_logging(LogSettings(log_format=log_format, log_level=level), stream)
    return structlog.get_logger("server.test")


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_is_one_object_a_line_with_time_level_and_name() -> None:
    stream = io.StringIO()
    logged_to(stream).info("engine ready", port=8000, model=HOSTILE)
    (record,) = records(stream)
    written = datetime.fromisoformat(record.pop("timestamp"))
    assert abs(datetime.now(UTC) - written) < timedelta(minutes=1)
    assert record == {
        "event": "engine ready",
        "level": "info",
        "logger": "server.test",
        "port": 8000,
        "model": HOSTILE,
    }


def test_json_is_printable_ascii_whatever_the_values_hold() -> None:
    stream = io.StringIO()
    logged_to(stream).warning("bad " + HOSTILE, name=HOSTILE + "\x7f\x9b\udcff", **{"k\ney": object})
    (line,) = stream.getvalue().split("\n")[:-1]
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["name"] == HOSTILE + "\x7f\x9b\udcff"


def test_text_is_one_printable_line_whatever_the_values_hold() -> None:
    stream = io.StringIO()
    logged_to(stream, "text").warning(
        "bad " + HOSTILE, name=HOSTILE, n=3, empty="", path="/a/b", **{"k\ney": 1}
    )
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert " warning bad a\\n2026" in line
    assert line.endswith(' n=3 empty="" path=/a/b "k\\ney"=1')


def test_auto_is_rows_on_a_terminal_and_json_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    log = logged_to(terminal, "auto")
    log.info("hello", size=3)
    log.warning("careful")
    first, second = terminal.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d  hello size=3", first)
    assert second.endswith("  warning: careful")
    logged_to(pipe, "auto").info("hello")
    assert records(pipe)[0]["event"] == "hello"


def test_a_record_with_rows_is_those_on_a_terminal_and_itself_elsewhere() -> None:
    terminal, pipe, text = Terminal(), io.StringIO(), io.StringIO()
    logged_to(terminal, "auto").info("done", n=1, rows=lambda: ["first " + HOSTILE, "second"])
    logged_to(pipe, "auto").info("done", n=1, rows=lambda: ["first"])
    logged_to(text, "text").info("done", n=1, rows=lambda: ["first"])
    first, second = terminal.getvalue().split("\n")[:-1]
    assert "first a\\n2026" in first and first.isprintable()
    assert second == " " * 10 + "second"
    (record,) = records(pipe)
    assert (record["event"], record["n"]) == ("done", 1)
    assert "rows" not in record
    assert text.getvalue().endswith(" done n=1\n")


def test_a_traceback_follows_its_row_and_none_of_it_passes_for_another() -> None:
    terminal = Terminal()
    log = logged_to(terminal, "auto")
    try:
        raise ValueError("bad\n12:00:00  forged")
    except ValueError:
        log.exception("it failed")
    first, *others = terminal.getvalue().splitlines()
    assert first.endswith("  error: it failed")
    assert others
    assert all(line.startswith("  | ") for line in others)


def test_a_second_set_up_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    logged_to(first)
    logged_to(second).info("once")
    assert first.getvalue() == ""
    assert len(records(second)) == 1


def test_the_level_holds_for_ours_and_libraries_are_heard_from_warning() -> None:
    stream = io.StringIO()
    log = logged_to(stream, level="info")
    log.debug("no")
    log.info("yes")
    logging.getLogger("slipstream.engine").info("engine")
    logging.getLogger("httpx").info("no")
    logging.getLogger("httpx").warning("library")
    assert [record["event"] for record in records(stream)] == ["yes", "engine", "library"]
    stream = io.StringIO()
    log = logged_to(stream, level="error")
    log.warning("no")
    logging.getLogger("httpx").warning("no")
    log.error("yes")
    assert [record["event"] for record in records(stream)] == ["yes"]
    stream = io.StringIO()
    logged_to(stream, level="debug").debug("deep")
    logging.getLogger("asyncio").debug("no")
    assert [record["event"] for record in records(stream)] == ["deep"]


def test_standard_records_keep_their_arguments_and_extras() -> None:
    stream = io.StringIO()
    logged_to(stream)
    logging.getLogger("slipstream.engine").info("loaded %s in %.1f s", "m", 1.25, extra={"blocks": 7})
    (record,) = records(stream)
    assert record["event"] == "loaded m in 1.2 s"
    assert record["blocks"] == 7
    assert record["logger"] == "slipstream.engine"


def test_libraries_lose_their_own_handlers() -> None:
    own = io.StringIO()
    logger = logging.getLogger("transformers")
    logger.addHandler(logging.StreamHandler(own))
    logger.propagate = False
    stream = io.StringIO()
    logged_to(stream)
    logging.getLogger("transformers.models").warning("careful")
    assert own.getvalue() == ""
    assert records(stream)[0]["event"] == "careful"


def test_the_access_log_is_silent_and_the_rest_of_uvicorn_is_plain() -> None:
    stream = io.StringIO()
    logged_to(stream)
    logging.getLogger("uvicorn.access").info("GET / 200")
    logging.getLogger("uvicorn.error").info("Started")
    logging.getLogger("uvicorn.error").warning("Careful", extra={"color_message": "\x1b[1mCareful"})
    (record,) = records(stream)
    assert record["event"] == "Careful"
    assert "color_message" not in record


def test_warnings_are_records_too() -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logged_to(stream, "text")
        warnings.warn("careful", stacklevel=1)
        logging.captureWarnings(False)
    assert len(stream.getvalue().splitlines()) == 1
    assert "careful" in stream.getvalue()


def test_a_traceback_cannot_pose_as_a_record() -> None:
    stream = io.StringIO()
    log = logged_to(stream, "text")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed", request="r1")
        logging.getLogger("engine.loop").exception("failed too")
    lines = stream.getvalue().split("\n")[:-1]
    assert [line.split("Z ")[1] for line in lines if not line.startswith("  | ")] == [
        "error   failed request=r1",
        "error   failed too",
    ]
    assert all(line.isprintable() for line in lines)
    assert any("ValueError: a" in line for line in lines)


def test_json_carries_the_traceback_in_its_line() -> None:
    stream = io.StringIO()
    log = logged_to(stream)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    (record,) = records(stream)
    assert record["exception"].endswith("ValueError: why")


def test_bound_context_is_in_every_record() -> None:
    stream = io.StringIO()
    log = logged_to(stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        log.info("a")
        logging.getLogger("engine.loop").info("b")
    assert [record["request_id"] for record in records(stream)] == ["r1", "r1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain/word-1", "plain/word-1"),
        ("ünï", "ünï"),
        (7, "7"),
        (None, "None"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "x"', '"say \\"x\\""'),
        ("a\nb", '"a\\nb"'),
        ("\udcff", '"\\udcff"'),
    ],
)
def test_a_value_is_one_word(value: object, text: str) -> None:
    assert quote(value) == text


def test_escape_leaves_printable_text_alone() -> None:
    assert escape("größe 🙂") == "größe 🙂"
    assert escape("\u202e\x9b") == "\\u202e\\x9b"
