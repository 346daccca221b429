"""What is kept of files, batches and their lines. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OPEN_STATUSES: Final = ("validating", "in_progress", "finalizing", "cancelling")
LONGEST_LIFE_S: Final = 30 * 86_400  # of a file, and of a batch after its end
SHORTEST_LIFE_S: Final = 3600  # of a file


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file; `tenant` is the key's that made it, empty without keys. None never expires."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    num_lines: int
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One job. `errors` and `metadata` are JSON; `expires_at` is when its completion window ends.

    What it writes is kept for `output_lifetime_s`.
    """

    id: str
    tenant: str
    input_file_id: str
    endpoint: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: str | None = None
    metadata: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_lifetime_s: int = LONGEST_LIFE_S

    @property
    def ends_by(self) -> int:
        """The first second after the window, which begins within the second of `created_at`."""
        return self.expires_at + 1


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a job: its 1-based line in the input file, and where that lies."""

    number: int
    custom_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for: up to `limit` behind the id `after`."""

    limit: int = 20
    after: str | None = None
    is_descending: bool = True
