"""Traces for as long as a server runs, where the environment asks for them; nothing is imported else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from config import TraceExport

if TYPE_CHECKING:
    from server.observability.request_log import Tracer

log = logging.getLogger("slipstream.server")


@contextmanager
def exported_traces(export: TraceExport, model: str) -> Iterator[Tracer | None]:
    """A tracer of requests for `model`, its last spans exported at the end; None where none is wanted.

    What cannot be had is said in one warning: no trace is worth a server.
    """
    if not export.wanted:
        yield None
        return
    problem = export.problem
    if problem is None:
        try:
            from server.observability.tracing import RequestTracer
        except ImportError as error:
            problem = f"{error.name} is not installed: run pip install '.[otel]' in Slipstream's folder"
    if problem is not None:
        log.warning("traces are not exported: %s", problem)
        yield None
        return
    tracer = RequestTracer.exporting(model)
    try:
        yield tracer
    finally:
        tracer.close()
