"""Whether traces are exported, by the environment variables that OpenTelemetry has for that.

Where to and how often is the exporter's own business, which reads them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ONLY_PROTOCOL = "http/protobuf"


@dataclass(frozen=True, slots=True)
class TraceExport:
    """`wanted`: an endpoint is named, and nothing switches traces off. `problem` says why it cannot be."""

    wanted: bool
    problem: str | None = None


def read_trace_export(environ: Mapping[str, str]) -> TraceExport:
    """What `environ` asks for. Never raises: no trace is worth a server."""
    given = {name: value.strip() for name, value in environ.items()}
    exporter = given.get("OTEL_TRACES_EXPORTER", "").lower() or "otlp"
    off = given.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    if off or not any(given.get(name) for name in _ENDPOINTS):
        return TraceExport(wanted=False)
    if exporter != "otlp":
        return TraceExport(True, "OTEL_TRACES_EXPORTER names another exporter than otlp or none")
    for name in _PROTOCOLS:
        if given.get(name):
            fits = given[name] == _ONLY_PROTOCOL
            return TraceExport(True, None if fits else f"{name} is not {_ONLY_PROTOCOL}")
    return TraceExport(wanted=True)
