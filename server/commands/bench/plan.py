"""What a benchmark is to do, as its flags say: plain records, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from server.commands.remote.address import Address


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, or a range of which every request draws one; both ends included."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        """One of them, all equally likely."""
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """What each request asks for. `prompt_file` None makes prompts up; its prompts are taken in turn."""

    endpoint: str
    input_tokens: Lengths
    output_tokens: Lengths
    prompt_file: Path | None
    shared_prefix_tokens: int
    temperature: float
    ignore_eos: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come. Exactly one of the first two is set, and exactly one of the next two.

    `concurrency` is a closed loop: so many at a time, the next when one ends. `rate` is an open loop: so many
    a second on average, at random times, whatever the server does.
    """

    num_requests: int | None
    duration_s: float | None
    concurrency: int | None
    rate: float | None
    num_warmups: int
    max_retries: int
    timeout_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Slos:
    """What a good request keeps to: its wait for the first token, and 99 % of its gaps. None is no limit."""

    ttft_ms: float | None
    itl_ms: float | None

    @property
    def is_set(self) -> bool:
        """False when every finished request is good."""
        return self.ttft_ms is not None or self.itl_ms is not None


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """One run. `json` is where the report goes, "-" for standard output; `model` None asks the server."""

    address: Address
    model: str | None
    workload: Workload
    load: Load
    slos: Slos
    json: str | None
    plot: Path | None
