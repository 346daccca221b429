"""Batches: the files and batches of one server, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from starlette.requests import Request
from starlette.types import ASGIApp

from server.api.batches.line_call import LineCaller
from server.api.batches.runner import BatchRunner
from server.api.batches.seats import Seats
from server.api.batches.state import BatchState
from server.http.context import ServerContext


@dataclass(frozen=True, slots=True)
class Batches:
    """What is kept, and what runs of it. Nothing is touched on disk before it is used. Loop thread only."""

    state: BatchState
    runner: BatchRunner

    @classmethod
    def of(cls, context: ServerContext, app: ASGIApp) -> Batches:
        """The parts that the settings ask for; lines are requests to `app`."""
        settings, engine = context.settings, context.engine
        state = BatchState(settings.server.state_dir or settings.home / "state")
        seats = Seats(context)
        caller = LineCaller(app, engine.now)
        runner = BatchRunner(state, seats, caller, context.http.batch_lines, settings.server.max_body_bytes)
        context.live.on_change = runner.wake
        context.http.batch_load = lambda: (runner.num_running, runner.num_waiting)
        return cls(state, runner)

    def start(self) -> None:
        """Go on with the batches that an earlier server has left open."""
        if self.state.was_used:
            self.runner.start()

    async def stop(self) -> None:
        """Let running lines go and close the database. Safe to call twice."""
        await self.runner.stop()
        await self.state.close()


def batches_of(request: Request) -> Batches:
    """Those of the application that serves `request`."""
    return cast(Batches, request.app.state.batches)
