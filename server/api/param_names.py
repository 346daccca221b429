"""renamed_params: errors of a chat turn in the words of the API whose request it was made from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from engine import InvalidRequest
from server.http.errors import ApiError, error_reply


@contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals that leave here name a field as the client does; `names` are looked up in their order."""
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        reply = error_reply(error)
        message, param = reply.message, reply.param
        for chat, own in names.items():
            message = re.sub(rf"'{re.escape(chat)}(?=['.\[])", f"'{own}", message)
            if param is not None and (param == chat or param.startswith((f"{chat}.", f"{chat}["))):
                param = own
        raise ApiError(replace(reply, message=message, param=param)) from error
