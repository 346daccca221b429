"""ScheduleChooser: whether to speculate, and whether to wait for drafts, by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

_WINDOW = 12  # steps of a first trial, with those that do not count
_RETRIAL = 8  # steps of a later trial
_GLANCE = 6  # steps of the arm of which more is known
_CARRY_OVER = 2  # steps after a change of arm that do not count: they carry what the other left
_MOST_WINDOWS = 6  # for each arm in one trial
_RETRY_EVERY = 450  # steps between two trials
_MOST_PATIENCE = 4  # times that many steps, after trials of arms that were far behind
_FAR_BEHIND = 0.7  # of the rate of the arm in use
_CHANGED = 0.8  # of its rate after the last trial, or the inverse: the arm in use has changed
_LOOK_EVERY = 32  # steps, to look for such a change
_MARGIN = 1.03  # by which an arm must be better to replace the one in use
_DOUBT = 2.0  # standard errors that two arms must differ by
_KEEP = 0.5 ** (1 / 128)  # half of a step's weight is gone 128 steps of its arm later
_BUCKET_PATIENCE = 4  # steps that a batch must have another size to count as such


@dataclass(slots=True)
class _Arm:
    """Tokens per second of one arm, with forgetting: a ratio of sums, and its standard error."""

    num_steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    tt: float = 0.0  # sum of tokens by tokens
    ts: float = 0.0  # of tokens by seconds
    ss: float = 0.0  # of seconds by seconds

    def observe(self, tokens: float, seconds: float) -> None:
        self.num_steps += 1
        self.tokens = _KEEP * self.tokens + tokens
        self.seconds = _KEEP * self.seconds + seconds
        self.tt = _KEEP * self.tt + tokens * tokens
        self.ts = _KEEP * self.ts + tokens * seconds
        self.ss = _KEEP * self.ss + seconds * seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def error(self) -> float:
        """The standard error of the rate (the delta method); infinite before two steps."""
        if self.num_steps < 2:
            return float("inf")
        return sqrt(max(0.0, self.tt - 2 * self.rate * self.ts + self.rate**2 * self.ss)) / self.seconds


class _Contest:
    """The arms at one size of batch: the one in use, and now and then another that is compared with it."""

    def __init__(self, num_arms: int) -> None:
        self.arms = [_Arm() for _ in range(num_arms)]
        self.in_use = 0
        self.on_trial: int | None = None
        self.running = 0
        self._queue = list(range(1, num_arms))  # still to be tried for the first time
        self._num_windows = 0
        self._is_side_by_side = False  # what is known of the arm in use was measured beside the trial
        self._next = 0
        self._patience = 1
        self._rate_then = 0.0
        self._left = _WINDOW  # steps of the window, or until the next trial

    @property
    def has_chosen(self) -> bool:
        """True once the arm in use has been compared with another."""
        return self._rate_then > 0

    def step(self) -> None:
        """Count the step that comes next, and change the running arm if a window is over."""
        self._left -= 1
        if self.on_trial is None and self._left % _LOOK_EVERY == 0 and self._has_changed():
            self._queue = [arm for arm in range(len(self.arms)) if arm != self.in_use]
            self.arms[self.in_use] = _Arm()  # what it knows is no longer so
            self._left = 0
        if self._left > 0:
            return
        if self.on_trial is None:
            self._start_trial()
        else:
            self._judge(self.on_trial)

    def _has_changed(self) -> bool:
        """True if the rate of the arm in use has changed much since it was chosen: others may have, too."""
        rate = self.arms[self.in_use].rate
        return self._rate_then > 0 and not _CHANGED <= rate / self._rate_then <= 1 / _CHANGED

    def _start_trial(self) -> None:
        if self._queue:
            challenger = self._queue.pop(0)
            self._left = _WINDOW
        else:
            self._next = (self._next + 1) % len(self.arms)
            if self._next == self.in_use:
                self._next = (self._next + 1) % len(self.arms)
            challenger = self._next
            self._left = _RETRIAL
        self._is_side_by_side = self.arms[self.in_use].num_steps <= _WINDOW
        self._begin(challenger)

    def _begin(self, challenger: int) -> None:
        self.arms[challenger] = _Arm()
        self.on_trial = self.running = challenger
        self._num_windows = 1

    def _judge(self, challenger: int) -> None:
        """A window of a trial is over: decide, or start another.

        A challenger that beats what was measured long before may owe it to the machine, whose speed drifts:
        it wins only against the arm in use as measured beside it.
        """
        used, other = self.arms[self.in_use], self.arms[challenger]
        doubt = _DOUBT * sqrt(used.error**2 + other.error**2)
        difference = other.rate - used.rate
        is_last = self._num_windows >= 2 * _MOST_WINDOWS
        is_clear = abs(difference) > doubt
        is_better = (is_clear or (is_last and difference > doubt / 2)) and other.rate > _MARGIN * used.rate
        if is_better and not self._is_side_by_side:
            self._is_side_by_side = True
            self.arms[self.in_use] = _Arm()
            self._begin(challenger)
            self.running, self._left = self.in_use, _WINDOW
        elif is_better:
            self.in_use = challenger
            self._patience = 1
            self._end_trial()
        elif is_last or (is_clear and difference < 0):
            is_far = other.rate < _FAR_BEHIND * used.rate
            self._patience = min(_MOST_PATIENCE, 2 * self._patience) if is_far else 1
            self._end_trial()
        else:
            self._num_windows += 1
            # By turns: who had the later windows would owe what a drifting machine gave it.
            self.running = challenger if self.running == self.in_use else self.in_use
            is_surer = self.arms[self.running].error < max(used.error, other.error)
            self._left = _GLANCE if is_surer else _WINDOW

    def _end_trial(self) -> None:
        self.on_trial = None
        self._rate_then = self.arms[self.in_use].rate
        self.running = self.in_use
        self._left = 1 if self._queue else _RETRY_EVERY * self._patience


class ScheduleChooser:
    """Names the arm for each step: the best by committed tokens per second, at each size of batch.

    It tries `arms` in short windows first; then it uses the best one and retries the others now and then,
    briefly unless one has become better. Batch sizes are separate by doublings. It has no clock, so the same
    observations give the same arms. Loop thread only.
    """

    def __init__(self, arms: Sequence[str]) -> None:
        self._arms = tuple(arms)
        self._contests: dict[int, _Contest] = {}
        self._size = 0  # the batch's, as a bit length
        self._num_elsewhere = 0
        self._running = -1
        self._num_unchanged = 0
        self._is_measured = True  # the last step, or there was none

    def arm(self, num_seqs: int) -> str:
        """The arm for the step that comes next; call it once for each."""
        size = max(0, num_seqs - 1).bit_length()
        self._num_elsewhere = self._num_elsewhere + 1 if size != self._size else 0
        if self._num_elsewhere >= _BUCKET_PATIENCE or not self._contests:
            self._size, self._num_elsewhere = size, 0
        contest = self._contests.get(self._size)
        if contest is None:
            contest = self._contests[self._size] = _Contest(len(self._arms))
        if self._is_measured:
            contest.step()
        self._is_measured = False
        self._num_unchanged = self._num_unchanged + 1 if contest.running == self._running else 0
        self._running = contest.running
        return self._arms[contest.running]

    @property
    def chosen(self) -> str | None:
        """The best arm at the present size of batch; None before the first comparison there."""
        contest = self._contests.get(self._size)
        return self._arms[contest.in_use] if contest is not None and contest.has_chosen else None

    def observe(self, num_seqs: int, num_committed: int, seconds: float) -> None:
        """The result of the step that `arm` was last called for; do not call it for steps with prefill.

        Windows, and the time between trials, are counted in steps that have a result: a window of prefill
        alone would compare nothing.
        """
        self._is_measured = True
        if self._num_unchanged < _CARRY_OVER or self._num_elsewhere or num_seqs < 1 or seconds <= 0:
            return
        contest = self._contests[self._size]
        contest.arms[self._running].observe(num_committed / num_seqs, seconds)
