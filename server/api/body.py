"""From the bytes of a body to a checked request record, or to a 400 that names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from server.api.extra_fields import ExtraFields, OwnFields
from server.api.field_words import describe
from server.api.openai.protocol import GenerationBody
from server.api.openai.protocol_refusals import Refusal, check_refusals
from server.api.openai.protocol_values import MAX_FIELDS
from server.api.time_limit import deadline_header, soonest
from server.api.unknown_fields import UnknownField, unknown_fields
from server.http.body_room import lease_of, parsed_bytes
from server.http.context import context_of, exchange_of
from server.http.errors import invalid, shown
from server.http.json_body import parse_json
from server.http.json_parts import Rest, do_nothing
from server.http.middleware import usable_label
from server.observability.http_metrics import MAX_NAMES

T = TypeVar("T", bound=GenerationBody | OwnFields)
M = TypeVar("M", bound=BaseModel)

IGNORED_HEADER = b"x-slipstream-ignored"
_MAX_IGNORED_SHOWN = 16
_SMALL_BYTES = 16_384  # read within a few milliseconds, whatever it holds


async def read_request(request: Request, kind: type[T], refusals: Mapping[str, Refusal]) -> T:
    """A generating request's body as `kind`, with what its headers add. Raises ApiError."""
    from_header = deadline_header(request.headers)
    body = await read_fields(request, kind, refusals)
    body.deadline_ms = soonest(body.deadline_ms, from_header)
    exchange = exchange_of(request.scope)
    exchange.caller_id = exchange.caller_id or body.request_id
    return body


async def read_fields(request: Request, kind: type[M], refusals: Mapping[str, Refusal]) -> M:
    """The request's body as `kind`. Raises ApiError; counts and reports unknown fields."""

    unknown: list[UnknownField] = []

    def check(data: dict[str, Any], rest: Rest) -> M:
        if len(data) > MAX_FIELDS:
            raise invalid(f"The body has {len(data)} fields; the limit is {MAX_FIELDS}.")
        check_refusals(data, refusals)
        body = kind.model_validate(data, context=rest)
        is_deep = not isinstance(body, ExtraFields)
        unknown.extend(dict.fromkeys(unknown_fields(body, data, refusals, is_deep=is_deep, rest=rest)))
        return body

    body = await read_body(request, check)
    report_unknown(request, unknown)
    return body


async def read_body(request: Request, check: Callable[[dict[str, Any], Rest], M]) -> M:
    """What `check` makes of the request's JSON object; a large one is read off the loop. Raises ApiError.

    `check` is given what it has to call now and then, to let others run.
    """
    content, lease = await _take_body(request), lease_of(request.scope)
    turns = context_of(request).large_bodies

    def read(rest: Rest) -> M:
        try:
            return check(parse_json(content, rest), rest)
        except ValidationError as error:
            raise describe(error) from None

    if len(content) <= _SMALL_BYTES:
        lease.hold(len(content) + parsed_bytes(content))
        return read(do_nothing)
    needed = await turns.run(lambda: parsed_bytes(content), 0)
    lease.hold(len(content) + needed)
    found = await turns.run(lambda: read(turns.rest), len(content))
    lease.upload.close()
    lease.hold(needed)
    return found


async def _take_body(request: Request) -> bytearray:
    """The body in the one piece that ClientMiddleware gives; unlike Starlette's own no copy of it is kept."""
    body: bytearray = (await request.receive())["body"]
    return body


def report_ignored(request: Request, names: Sequence[str]) -> None:
    """Count what of a request is known and ignored, and name it in the reply; see `report_unknown`."""
    report_unknown(request, [UnknownField(name, None) for name in names])


def report_unknown(request: Request, fields: Sequence[UnknownField]) -> None:
    """Count what of a request is ignored, and name it in the reply with what was probably meant.

    Raises ApiError with --strict-params.
    """
    if not fields:
        return
    context = context_of(request)
    if context.settings.server.strict_params:
        name, meant = fields[0]
        hint = "" if meant is None else f"; '{meant}' is"
        raise invalid(f"'{shown(name)}' is not a known field{hint}.", shown(name))
    labels = [_ignored_label(*each) for each in fields[:MAX_NAMES]]
    context.http.count_ignored(len(fields), labels)
    headers = exchange_of(request.scope).headers
    before = [value for name, value in headers if name == IGNORED_HEADER]
    headers[:] = [each for each in headers if each[0] != IGNORED_HEADER]
    value = ",".join(labels[:_MAX_IGNORED_SHOWN]).encode("ascii")
    headers.append((IGNORED_HEADER, b",".join([*before, value])))


def _ignored_label(name: str, meant: str | None) -> str:
    """As the header and the log have it: `colour`, or `temprature;did-you-mean=temperature`."""
    label = shown(usable_label(name) or "?").replace("…", "~").replace(",", "_").replace(";", "_")
    return label if meant is None else f"{label};did-you-mean={meant}"
