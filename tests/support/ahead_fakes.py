"""AheadFakeRunner: the fake model on a device that takes a step before the last one's tokens are read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from engine.plan.step_records import SampledRows, SamplingInputs, StepInputs, StepResult
from tests.support.fakes import POISON, FakeRunner


@dataclass
class AheadFakeRunner(FakeRunner):
    """An AheadRunner whose device computes at once, or, if `is_late`, only when the result is waited for.

    A token that was not drawn well is POISON, and so is what is drawn after it; behind a step that failed
    nothing can be computed. Errors come from `launch`, or `draw`, or, if `is_late`, from `wait`. `events` has
    ("launch", number) and ("read", number), in their order, and ("draw", number) of a step drawn later.
    """

    is_late: bool = False
    events: list[tuple[str, int]] = field(default_factory=list)
    num_ahead: int = 0  # steps launched while another was not read
    num_drawn_later: int = 0
    _drawn: SampledRows | None = None  # by the last launch, None if it failed
    _doomed: set[int] = field(default_factory=set)  # rows of the step that is computed: they follow bad ones
    _flying: deque[_Launched] = field(default_factory=deque)
    _num_launched: int = 0

    def launch(self, inputs: StepInputs) -> _Launched:
        """See AheadRunner."""
        step = _Launched(self, self._num_launched, inputs)
        self.note("launch", step.number)
        self._num_launched += 1
        self.num_ahead += bool(self._flying)
        if len(self._flying) > 1:
            self.violations.append("three steps at once")
        if self._flying and self._flying[-1].sampling is None:
            self.violations.append("a step behind one that is not drawn")
        if inputs.is_drawn_later and inputs.sampling.adjustments:
            self.violations.append("adjustments that cannot be known yet")
        if not self.is_late:
            step.compute()
        self._flying.append(step)
        return step

    def note(self, what: str, number: int) -> None:
        """Something has happened to a step."""
        self.events.append((what, number))

    def land(self, step: _Launched) -> None:
        """The oldest step is read."""
        assert self._flying.popleft() is step
        self.note("read", step.number)

    def carry_out_pass(self, inputs: StepInputs) -> StepInputs:
        """Write what the step computes; the step with the tokens that the last one drew."""
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
        self.run_pass(inputs)
        return inputs

    def carry_out_draw(self, inputs: StepInputs) -> StepResult:
        """Draw what the last pass was of."""
        result = self.run_draw(inputs)
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


class _Launched:
    """A step that is carried out once, in two parts; `sampling` is None until it is known."""

    def __init__(self, runner: AheadFakeRunner, number: int, inputs: StepInputs) -> None:
        self.number = number
        self.sampling = None if inputs.is_drawn_later else inputs.sampling
        self._runner = runner
        self._inputs = inputs
        self._has_passed = self._is_drawn = False
        self._result: StepResult | None = None

    def compute(self) -> None:
        """Do what can be done and was not."""
        if not self._has_passed:
            self._has_passed = True
            self._inputs = self._runner.carry_out_pass(self._inputs)
        if not self._is_drawn and self.sampling is not None:
            self._is_drawn = True
            self._result = self._runner.carry_out_draw(replace(self._inputs, sampling=self.sampling))

    def draw(self, sampling: SamplingInputs) -> None:
        """See LaunchedStep."""
        assert self._inputs.is_drawn_later and self.sampling is None, "a step is drawn once"
        self._runner.note("draw", self.number)
        self._runner.num_drawn_later += 1
        self.sampling = sampling
        if not self._runner.is_late:
            self.compute()

    def wait(self) -> StepResult:
        """See LaunchedStep."""
        self._runner.land(self)
        self.compute()
        return self._result or StepResult(SampledRows([]), 0.0, 0.0)
