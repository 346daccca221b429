"""What the doctor found, as one record; and where the parts of it come from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from config import Settings
from engine import Diagnosis, StartRefused, memory_bytes, usable_cores
from server.commands.machine import cpu_model, versions
from server.http.auth import read_keys
from server.http.listener import bind, is_public, url_of

_PACKAGES = ("slipstream", "torch", "transformers", "tokenizers", "fastapi", "uvicorn")


@dataclass(slots=True)
class MachineFacts:
    """The computer. The two sizes of memory are None where the system does not tell."""

    cpu: str
    num_cpus: int
    system: str
    memory_bytes: int | None
    available_bytes: int | None
    versions: Mapping[str, str]


@dataclass(slots=True)
class ServerFacts:
    """Where it would listen, `url` None where it cannot; and how many keys let a client in."""

    host: str
    port: int
    url: str | None
    num_keys: int


@dataclass(slots=True)
class LoadFacts:
    """What loading the model for real showed. Speed is of one greedy request, None when it made no token.

    `num_kv_blocks` is 0 for an embedding model, which makes none.
    """

    load_s: float
    num_kv_blocks: int
    tokens_per_s: float | None


@dataclass(slots=True)
class Report:
    """Everything. `loaded` is None unless the model was loaded."""

    machine: MachineFacts
    server: ServerFacts
    engine: Diagnosis
    loaded: LoadFacts | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def all_problems(self) -> list[str]:
        """What would stop a start."""
        return [*self.problems, *self.engine.problems]

    @property
    def all_warnings(self) -> list[str]:
        """What would not stop it, but is worth knowing."""
        return [*self.warnings, *self.engine.warnings]

    def as_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes, times in seconds."""
        engine = asdict(self.engine)
        del engine["problems"], engine["warnings"]
        return {
            "ok": not self.all_problems,
            "problems": self.all_problems,
            "warnings": self.all_warnings,
            "machine": asdict(self.machine),
            **engine,
            "server": asdict(self.server),
            "loaded": None if self.loaded is None else asdict(self.loaded),
        }


def make_report(settings: Settings, found: Diagnosis) -> Report:
    """The machine's and the server's side of it added to what the engine found."""
    memory = memory_bytes()
    machine = MachineFacts(
        cpu=cpu_model(),
        num_cpus=usable_cores(),
        system=f"{platform.system()} {platform.release()}",
        memory_bytes=None if memory is None else memory[0],
        available_bytes=None if memory is None else memory[1],
        versions=versions(*_PACKAGES),
    )
    server = ServerFacts(settings.server.host, settings.server.port, None, 0)
    report = Report(machine, server, found)
    try:
        server.num_keys = len(read_keys(settings.server))
    except StartRefused as refusal:
        report.problems.append(str(refusal))
    _try_port(report)
    return report


def _try_port(report: Report) -> None:
    """Listen for a moment where the server would."""
    server = report.server
    try:
        listener = bind(server.host, server.port)
    except StartRefused as refusal:
        report.problems.append(str(refusal))
        return
    with listener:
        server.url = url_of(listener) if server.port else None
        if is_public(listener) and not server.num_keys:
            report.warnings.append(
                f"--host {server.host} lets other machines in, and no --api-key keeps them out."
            )
