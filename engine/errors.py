"""The exception tree of the engine: one root, each name says what happened.

EngineError
├── StartRefused          the model or the settings cannot be served: the process stops with one line
│   └── UnsupportedModel  an architecture that would not be served exactly
├── RequestRejected       refused before any work was done
│   ├── InvalidRequest    a value no retry will make right
│   │   └── ContextLengthExceeded
│   └── Overloaded        try again later: queue full, queue wait too long, loading, draining
├── DeadlineExceeded      the time given is up, or too short: refused for it, or ended by it
├── OutOfDeviceMemory     a forward pass did not fit; fewer requests may
├── DeviceLost            the device takes no more work of this process
├── RequestFailed         an accepted request ended by a fault of ours; its neighbours go on
├── RewindError           state could not be cut back to an earlier position
└── EngineDead            the step loop has stopped; nothing can be served any more
"""

from __future__ import annotations

import traceback
from enum import Enum


class EngineError(Exception):
    """Root of every error the engine raises on purpose."""


class StartRefused(EngineError):
    """The server must not start; the message is one line that says what to change."""


class UnsupportedModel(StartRefused):
    """The architecture, named in the message, cannot be served exactly."""


class RequestRejected(EngineError):
    """Refused before it cost anything; never raised for an accepted request."""


class InvalidRequest(RequestRejected):
    """A value is wrong and stays wrong; `param` names the request field, None when not a single one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TemplateStopped(InvalidRequest):
    """The chat template was stopped at these messages for what they took; others like them take as much."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt with the tokens asked for, does not fit the model's context of `limit`."""

    def __init__(self, *, limit: int, prompt_tokens: int, max_tokens: int, param: str) -> None:
        total = prompt_tokens + max_tokens
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested {total} tokens "
            f"({prompt_tokens} in the prompt, {max_tokens} in the completion). Please reduce the length of "
            "the prompt or of the completion.",
            param=param,
        )
        self.limit = limit
        self.prompt_tokens = prompt_tokens


class Overloaded(RequestRejected):
    """Try again in `retry_after_s` seconds; `code` is one of queue_full, queue_timeout, loading, draining."""

    def __init__(self, message: str, code: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = max(1, retry_after_s)


class DeadlineExceeded(EngineError):
    """The time a request was given is up, or too short to finish it: trying again as it is is no use.

    `completion_s` says when it would have been done, in seconds from its arrival, where that is estimated;
    after `retry_after_s` it could have been in time.
    """

    completion_s: float | None = None
    retry_after_s: int = 1


class OutOfDeviceMemory(EngineError):
    """The forward pass ran out of memory: worth one more try with fewer requests."""


class DeviceLost(EngineError):
    """A fault after which the device takes no more work of this process: only a new one can compute again."""


class RequestFailed(EngineError):
    """An accepted request could not be finished; `stage` names where (forward, sampler, detokenizer, ...)."""

    def __init__(self, message: str, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


class RewindFault(Enum):
    """Why a rewind was refused."""

    NOT_SUPPORTED = "not_supported"
    POSITION_BEYOND_END = "position_beyond_end"


class RewindError(EngineError):
    """Model state cannot be cut back as asked; `fault` says why, and nothing has changed."""

    def __init__(self, fault: RewindFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class EngineDead(EngineError):
    """The step loop has ended for good; every open request ends with this.

    `code` says how: engine_dead after a fault, engine_hung when a step did not come back.
    """

    def __init__(self, message: str, code: str = "engine_dead") -> None:
        super().__init__(message)
        self.code = code


def frames_of(error: BaseException) -> dict[str, str]:
    """For a log record's `extra`: where `error` came from and what it is, without its words.

    For code that works on text: what a library has to say of an error may be a client's text.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    return {"stack": f"{frames}{type(error).__name__}"}


def release_frames(error: BaseException) -> None:
    """Clear the local variables of every finished frame in the traceback of `error` and of its causes.

    A future keeps its error, and the error its frames, until cycles are collected, which is rare. Without
    this, the tensors of a failed pass stay in memory until then.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        todo += (found.__cause__, found.__context__)
