"""StepPipeline: has steps carried out on the target thread, two of them at once where the device can."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from engine.loop.engine_parts import AheadRunner, LaunchedStep, StepRunner
from engine.loop.reader_turns import ReaderTurns
from engine.plan.grammar import Grammar
from engine.plan.step_records import NO_TOKEN, SampledRows, SamplingInputs, StepInputs, StepResult


class StepPipeline:
    """The runner, for the event loop: `launch` a step, `draw` it where that is later, `read` the oldest.

    A runner that is no AheadRunner has its step read before the next is launched. One that is does everything
    on the target thread, which launches nothing while it waits for a result: launch before reading. While it
    launches or draws, readers' turns are held. Grammars are shown there what was drawn by them.
    `can_launch_ahead` is True if a step may be launched before the last one is read.
    """

    def __init__(self, runner: StepRunner, executor: Executor, turns: ReaderTurns) -> None:
        self._executor = executor
        self._turns = turns
        self._runner = runner
        self._ahead_runner = runner if isinstance(runner, AheadRunner) else None
        self.can_launch_ahead = self._ahead_runner is not None
        self._flying: deque[asyncio.Future[StepResult]] = deque()  # of a runner that is no AheadRunner
        self._launched: deque[tuple[StepInputs, LaunchedStep]] = deque()  # the target thread's

    def launch(self, inputs: StepInputs) -> None:
        """Start a step; what it raises, `read` does. Loop thread."""
        if self._ahead_runner is not None:
            self._queue(partial(self._launch, self._ahead_runner, inputs))
        else:
            loop = asyncio.get_running_loop()
            self._flying.append(loop.run_in_executor(self._executor, self._run, inputs))

    def draw(self, sampling: SamplingInputs) -> None:
        """Have the newest step drawn, which was launched without its draw; what it raises, `read` does."""
        self._queue(partial(self._draw, sampling))

    def _queue(self, work: Callable[[], None]) -> None:
        """Have the target thread do what does not wait for the device; readers wait for the thread."""
        loop = asyncio.get_running_loop()

        def work_and_release() -> None:
            work()
            loop.call_soon_threadsafe(self._turns.release)

        # Not by way of the loop, which would be woken when the work is done, and nobody waits for that.
        self._executor.submit(work_and_release if self._turns.hold() else work)

    async def read(self) -> StepResult:
        """The result of the oldest step launched and not read yet. Raises what the runner raised."""
        if not self.can_launch_ahead:
            return await self._flying.popleft()
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._wait)

    # On the target thread.

    def _run(self, inputs: StepInputs) -> StepResult:
        result = self._runner.run(inputs)
        _foresee(inputs, result.rows)
        return result

    def _launch(self, runner: AheadRunner, inputs: StepInputs) -> None:
        """Launch one more; never raises. Behind one that could not be, what needs its tokens cannot be."""
        last = self._launched[-1][1] if self._launched else None
        if inputs.previous_rows is not None and isinstance(last, _Failed):
            self._launched.append((inputs, _Failed(last.error)))
            return
        try:
            self._launched.append((inputs, runner.launch(inputs)))
        except Exception as error:
            self._launched.append((inputs, _Failed(error)))

    def _draw(self, sampling: SamplingInputs) -> None:
        """Draw the newest; never raises."""
        inputs, step = self._launched.pop()
        try:
            step.draw(sampling)
        except Exception as error:
            step = _Failed(error, step)
        self._launched.append((replace(inputs, sampling=sampling), step))

    def _wait(self) -> StepResult:
        inputs, step = self._launched.popleft()
        result = step.wait()
        _foresee(inputs, result.rows)
        return result


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that could not be launched, or whose pass, `begun`, could not be drawn from."""

    error: Exception
    begun: LaunchedStep | None = None

    def draw(self, sampling: SamplingInputs) -> None:
        """Fail as before."""
        raise self.error

    def wait(self) -> StepResult:
        if self.begun is not None:
            with suppress(Exception):
                self.begun.wait()  # what it writes may be another's next
        raise self.error


def _foresee(inputs: StepInputs, rows: SampledRows) -> None:
    """Show the grammars what was drawn by them: to commit it costs the loop nothing then."""
    failed = rows.row_errors or {}
    drawn: dict[int, tuple[Grammar, list[int]]] = {}
    for adjustment in inputs.sampling.adjustments:
        if adjustment.allowed_mask is None:
            continue
        grammar, row = adjustment.allowed_mask.grammar, adjustment.row
        token_id = NO_TOKEN if row in failed else rows.token_ids[row]
        drawn.setdefault(id(grammar), (grammar, []))[1].append(token_id)
    for grammar, token_ids in drawn.values():
        grammar.foresee(list(takewhile(lambda token_id: token_id != NO_TOKEN, token_ids)))
