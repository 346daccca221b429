"""The body of POST /v1/batches."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PlainValidator
from typing_extensions import TypedDict

from server.api.batches.records import LONGEST_LIFE_S, SHORTEST_LIFE_S
from server.api.openai.protocol_values import BodyPart, refuse

MAX_METADATA = 16
MAX_WINDOW_S = 7 * 86_400
_MAX_KEY, _MAX_VALUE = 64, 512
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class ExpiresAfter(TypedDict):
    """When a file is deleted: so many seconds after it was made."""

    anchor: Annotated[Literal["created_at"], Field(description="From when the seconds count.")]
    seconds: Annotated[int, Field(description="An hour to 30 days.", ge=SHORTEST_LIFE_S, le=LONGEST_LIFE_S)]


def check_window(value: object) -> str:
    """A completion window such as 24h."""
    if not isinstance(value, str) or _WINDOW.fullmatch(value) is None or window_s(value) > MAX_WINDOW_S:
        refuse("must be a time such as 24h, 30m or 7d, the longest")
    return value


def window_s(window: str) -> int:
    """The seconds of a window that was checked."""
    found = _WINDOW.fullmatch(window)
    assert found is not None
    return int(found[1]) * _UNIT_S[found[2]]


def check_metadata(value: object) -> dict[str, str]:
    """Up to 16 short texts by short names."""
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        refuse(f"must be an object of at most {MAX_METADATA} strings")
    for key, text in value.items():
        if not isinstance(text, str) or len(key) > _MAX_KEY or len(text) > _MAX_VALUE:
            refuse(f"must hold strings of at most {_MAX_VALUE} characters under names of at most {_MAX_KEY}")
    return value


def check_id(value: object) -> str:
    """The id of a file."""
    if not isinstance(value, str) or len(value) > _MAX_KEY:
        refuse("must be the id of a file")
    return value


def check_expiry(value: object) -> int:
    """The seconds of OpenAI's `{"anchor": "created_at", "seconds": N}`."""
    if not isinstance(value, dict) or set(value) != {"anchor", "seconds"} or value["anchor"] != "created_at":
        refuse("must be an object with the anchor 'created_at' and seconds")
    seconds = value["seconds"]
    if type(seconds) is not int or not SHORTEST_LIFE_S <= seconds <= LONGEST_LIFE_S:
        refuse(f"must have seconds from {SHORTEST_LIFE_S} to {LONGEST_LIFE_S}")
    return seconds


class BatchRequest(BodyPart):
    """A job: the requests in a file, all for one endpoint. Unknown fields land in `model_extra`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    input_file_id: Annotated[str, PlainValidator(check_id, str)]
    """A file of purpose `batch`."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    """Where each line's body would have been sent; its `url` must be the same."""
    completion_window: Annotated[str, PlainValidator(check_window, str)]
    """Until when the answers are needed, such as `24h`; the job that ends first goes first. One that cannot
    be met by the measured rate is refused."""
    metadata: Annotated[dict[str, str], PlainValidator(check_metadata, dict[str, str])] | None = None
    """Up to 16 strings to find the batch by."""
    output_expires_after: Annotated[int, PlainValidator(check_expiry, ExpiresAfter)] = LONGEST_LIFE_S
    """How long the files that the batch writes are kept, counted from their making; 30 days by default."""
