"""One request as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass

from server.commands.remote.chunks import Drafts


@dataclass(slots=True)
class Failure:
    """Why a request did not succeed: `kind` to count it by, `message` to read.

    `retry_after_s` is what the last refusal asked for, None when it asked for nothing.
    """

    kind: str
    message: str
    retry_after_s: float | None = None


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds by `perf_counter`. `due` is when it ought to have been sent: what times count from.

    `chunk_times` has one entry for each event that brought output. `num_output_tokens` is the server's own
    count if `is_counted_by_server`, else the number of those events. None is what the server does not tell.
    A request with neither an `ended` nor a `failure` was cut off.
    """

    index: int
    due: float
    sent: float = 0.0
    ended: float | None = None
    failure: Failure | None = None
    num_retries: int = 0
    chunk_times: tuple[float, ...] = ()
    num_output_tokens: int = 0
    is_counted_by_server: bool = False
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    queue_ms: float | None = None
    finish_reason: str | None = None
    drafts: Drafts | None = None

    @property
    def succeeded(self) -> bool:
        """True when the whole reply came."""
        return self.ended is not None and self.failure is None

    @property
    def ttft_s(self) -> float | None:
        """To the first event with output; None when nothing was generated."""
        return self.chunk_times[0] - self.due if self.chunk_times else None

    @property
    def end_to_end_s(self) -> float:
        """To the end of the reply; only of one that succeeded."""
        assert self.ended is not None
        return self.ended - self.due

    @property
    def gaps_s(self) -> list[float]:
        """Between one event with output and the next, as they came."""
        return [
            later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)
        ]

    @property
    def tpot_s(self) -> float | None:
        """Time for each output token after the first; None when there was none.

        Several tokens may come in one event, so this can be less than any gap.
        """
        if self.num_output_tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.num_output_tokens - 1)
