"""AheadFakeRunner: the fake model on a device that takes a step before the last one's tokens are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.plan.step_records import SampledRows, StepInputs, StepResult
from tests.support.fakes import POISON, FakeRunner


@dataclass
class AheadFakeRunner(FakeRunner):
    """An AheadRunner whose device computes at once, or, if `is_late`, only when the result is waited for.

    A token that was not drawn well is POISON, and so is what is drawn after it; behind a step that failed
    nothing can be computed. Errors come from `launch`, or, if `is_late`, from `wait`. `events` has
    ("launch", number) and ("read", number), in their order.
    """

    is_late: bool = False
    events: list[tuple[str, int]] = field(default_factory=list)
    num_ahead: int = 0  # steps launched while another was not read
    _drawn: SampledRows | None = None  # by the last launch, None if it failed
    _doomed: set[int] = field(default_factory=set)  # rows of the step that is computed: they follow bad ones
    _flying: deque[_Launched] = field(default_factory=deque)

    def launch(self, inputs: StepInputs) -> _Launched:
        """See AheadRunner."""
        number = sum(kind == "launch" for kind, _ in self.events)
        self.events.append(("launch", number))
        self.num_ahead += bool(self._flying)
        step = _Launched(lambda: self._carry_out(inputs), lambda: self._read_step(number))
        if len(self._flying) > 1:
            self.violations.append("three steps at once")
        if not self.is_late:
            step.compute()
        self._flying.append(step)
        return step

    def _read_step(self, number: int) -> None:
        self._flying.popleft()
        self.events.append(("read", number))

    def _carry_out(self, inputs: StepInputs) -> StepResult:
        drawn, self._drawn = self._drawn, None
        rows = inputs.previous_rows
        self._doomed = set()
        if rows is not None:
            if drawn is None:
                raise RuntimeError("the step before has failed")
            errors = drawn.row_errors or {}
            token_ids = inputs.token_ids.copy()
            for place, row in enumerate(rows.tolist()):
                token_ids[place] = POISON if row in errors else drawn.token_ids[row]
                if row in errors:
                    self._doomed.add(place)
            inputs = replace(inputs, token_ids=token_ids)
        result = self.run(inputs)
        self._drawn = result.rows
        return result

    def _prefix(self, inputs: StepInputs, sequence: int, index: int) -> list[int]:
        if sequence in self._doomed:
            return [0] * int(inputs.kv_lens[sequence])
        return super()._prefix(inputs, sequence, index)

    def _sample(self, inputs: StepInputs) -> SampledRows:
        rows = super()._sample(inputs)
        doomed = dict.fromkeys(self._doomed, "follows a bad row")
        return replace(rows, row_errors={**(rows.row_errors or {}), **doomed} or None)


@dataclass
class _Launched:
    """A step that is carried out once."""

    carry_out: Callable[[], StepResult]
    note_read: Callable[[], None]
    result: StepResult | None = None

    def compute(self) -> StepResult:
        """Its result, computed if it was not yet."""
        if self.result is None:
            self.result = self.carry_out()
        return self.result

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        self.note_read()
        return self.compute()
