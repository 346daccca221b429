"""TextQueue: texts that wait to be embedded, and which of them are next. Computes nothing."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from engine.compute.embedding.records import EncodedText

Tenant = str | None


@dataclass(slots=True, eq=False)
class TextJob:
    """The texts of one request. `rows` has what was computed of each; the job is done when none is left.

    `num_tokens` are those of the texts that no batch has yet: every request that comes asks for them.
    """

    tenant: Tenant
    texts: list[EncodedText]
    rows: list[Any] = field(init=False)
    num_begun: int = 0
    num_left: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.texts)
        self.num_left = len(self.texts)
        self.num_tokens = sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class Chosen:
    """One text of a batch."""

    job: TextJob
    index: int

    @property
    def text(self) -> EncodedText:
        """Its tokens."""
        return self.job.texts[self.index]


class TextQueue:
    """Turns by tokens: the tenant that got fewest goes next, of its requests each in turn.

    A tenant that comes back begins where the others are, so that waiting saves up nothing.
    """

    def __init__(self) -> None:
        self._jobs: OrderedDict[Tenant, deque[TextJob]] = OrderedDict()
        self._served: dict[Tenant, int] = {}
        self.num_tokens = 0  # that wait

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[TextJob]:
        return chain.from_iterable(self._jobs.values())

    def add(self, job: TextJob) -> None:
        """Queue all of its texts."""
        if job.tenant not in self._jobs:
            self._served[job.tenant] = min(self._served.values(), default=0)
            self._jobs[job.tenant] = deque()
        self._jobs[job.tenant].append(job)
        self.num_tokens += job.num_tokens

    def drop(self, job: TextJob) -> None:
        """Take out what is left of it; nothing happens if nothing is."""
        jobs = self._jobs.get(job.tenant, ())
        if job in jobs:
            self.num_tokens -= job.num_tokens
            self._remove(job)

    def take(self, max_tokens: int) -> list[Chosen]:
        """The texts of the next batch: one at least if any waits, several of at most `max_tokens` in all."""
        chosen: list[Chosen] = []
        num_tokens = 0
        while self._jobs:
            tenant = min(self._jobs, key=self._served.__getitem__)
            job = self._jobs[tenant][0]
            size = len(job.texts[job.num_begun])
            if chosen and num_tokens + size > max_tokens:
                break
            chosen.append(Chosen(job, job.num_begun))
            num_tokens += size
            job.num_begun += 1
            job.num_tokens -= size
            self._served[tenant] += size
            if job.num_begun == len(job.texts):
                self._remove(job)
            else:
                self._jobs[tenant].rotate(-1)
        self.num_tokens -= num_tokens
        return chosen

    def _remove(self, job: TextJob) -> None:
        jobs = self._jobs[job.tenant]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.tenant]
            del self._served[job.tenant]
