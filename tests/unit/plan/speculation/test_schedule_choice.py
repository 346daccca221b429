from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import exp
from random import Random

import pytest

from engine.plan.speculation.schedule_choice import ScheduleChooser

ARMS = ("off", "sync", "async")
# By arm: tokens that a sequence gets in a step, and seconds of a step.
Machine = dict[str, tuple[float, float]]


def run_chooser(
    machine_at: Callable[[int], Machine],
    num_steps: int,
    num_seqs: int = 1,
    seed: int = 0,
    prefills: Callable[[int], bool] = lambda step: False,
) -> tuple[float, float, Counter[str]]:
    """Expected tokens, seconds, and steps by arm. It is told of tokens drawn by chance, and noisy times.

    It is not told of steps that prefill.
    """
    chooser, random = ScheduleChooser(ARMS), Random(seed)
    tokens = seconds = 0.0
    used: Counter[str] = Counter()
    for step in range(num_steps):
        arm = chooser.arm(num_seqs)
        used[arm] += 1
        mean, step_s = machine_at(step)[arm]
        tokens += mean
        seconds += step_s
        drawn = sum(_draw(mean, random) for _ in range(num_seqs))
        stall = 8 if random.random() < 0.01 else 1
        if not prefills(step):
            chooser.observe(num_seqs, drawn, stall * step_s * random.gauss(1, 0.08))
    return tokens, seconds, used


def _draw(mean: float, random: Random) -> int:
    """One token and, with a chance that makes for the mean, more."""
    tokens = 1
    while random.random() < 1 - 1 / mean:
        tokens += 1
    return tokens


MACHINES: dict[str, Machine] = {
    "async": {"off": (1, 0.02), "sync": (2.5, 0.036), "async": (2.4, 0.026)},
    "sync": {"off": (1, 0.02), "sync": (3, 0.03), "async": (2.6, 0.035)},
    "off": {"off": (1, 0.02), "sync": (1.5, 0.06), "async": (1.5, 0.05)},
    "off, by little": {"off": (1, 0.02), "sync": (2, 0.043), "async": (2, 0.042)},
}


@pytest.mark.parametrize("num_seqs", [1, 16])
@pytest.mark.parametrize("name", MACHINES)
def test_auto_is_within_5_percent_of_the_best_arm(name: str, num_seqs: int) -> None:
    machine = MACHINES[name]
    tokens, seconds, used = run_chooser(lambda _: machine, 4000 if num_seqs == 1 else 1500, num_seqs)
    assert tokens / seconds >= 0.95 * max(mean / step_s for mean, step_s in machine.values())
    assert used.most_common(1)[0][0] == name.split(",")[0]


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_among_bursts_of_prompts_the_best_arm_is_found_too(share: float) -> None:
    """What is compared was measured: a trial whose steps have prefill is no shorter for it."""
    machine = {"off": (1.0, 0.02), "sync": (3.0, 0.03), "async": (2.0, 0.03)}
    for seed in range(6):
        draw = Random(seed)
        bursts = [draw.random() < share for _ in range(333)]  # a second or two each
        used = run_chooser(lambda _: machine, 20_000, 8, seed, lambda step: bursts[step // 61])[2]  # noqa: B023
        assert used["sync"] > 0.9 * used.total(), (seed, used)


def test_losers_get_less_than_2_percent_of_steps() -> None:
    machine = {"off": (1.0, 0.02), "sync": (3.0, 0.03), "async": (2.0, 0.03)}
    first = run_chooser(lambda _: machine, 1000, num_seqs=16)[2]
    both = run_chooser(lambda _: machine, 9000, num_seqs=16)[2]
    later = both - first
    assert (later["off"] + later["async"]) / 8000 < 0.02
    assert later["off"] > 0 and later["async"] > 0  # but they do get some


@pytest.mark.parametrize("seed", range(3))
def test_a_drift_is_followed(seed: int) -> None:
    before = {"off": (1.0, 0.02), "sync": (3.0, 0.03), "async": (2.6, 0.03)}
    after = {"off": (1.0, 0.02), "sync": (1.2, 0.03), "async": (1.3, 0.022)}
    tokens, seconds, _ = run_chooser(lambda step: before if step < 3000 else after, 6000, seed=seed)
    assert tokens / seconds >= 0.95 * (3.0 + 1.3) / (0.03 + 0.022)


def test_a_loser_that_becomes_the_best_is_found_though_the_arm_in_use_stays_as_it_was() -> None:
    before = {"off": (1.0, 0.02), "sync": (2.0, 0.03), "async": (1.8, 0.03)}
    after = {"off": (1.0, 0.02), "sync": (2.0, 0.03), "async": (3.0, 0.03)}
    tail: Counter[str] = Counter()
    for num_steps, sign in ((4000, 1), (3000, -1)):
        used = run_chooser(lambda step: before if step < 1000 else after, num_steps, num_seqs=8)[2]
        for arm, count in used.items():
            tail[arm] += sign * count
    assert tail["async"] > 900


def test_a_machine_that_becomes_faster_during_a_trial_does_not_make_the_worse_arm_win() -> None:
    chooser = ScheduleChooser(("off", "sync"))
    speed, used = 1.0, Counter[str]()
    for step in range(3000):
        arm = chooser.arm(1)
        if step == 300 or (step > 300 and arm == "off" and speed == 1.0):
            speed = 1.0 if step == 300 else 0.6  # the clock rises exactly when the other arm is tried
        used[arm] += step > 300
        chooser.observe(1, 2 if arm == "sync" else 1, speed * (0.015 if arm == "sync" else 0.01))
    assert speed < 1
    assert used["off"] < 0.04 * used["sync"]


def test_the_first_steps_by_hand() -> None:
    chooser = ScheduleChooser(ARMS)
    asked = []
    for _ in range(40):
        asked.append(chooser.arm(1))
        chooser.observe(1, 2 if asked[-1] == "sync" else 1, 0.01)
    # A window each, the best from then on: without noise there is no doubt.
    assert asked == ["off"] * 11 + ["sync"] * 13 + ["async"] * 12 + ["sync"] * 4


def test_sizes_of_the_batch_are_kept_apart() -> None:
    chooser = ScheduleChooser(ARMS)
    for step in range(400):
        num_seqs = 1 if step < 200 else 32
        arm = chooser.arm(num_seqs)
        good = "async" if num_seqs == 1 else "off"
        chooser.observe(num_seqs, num_seqs * (2 if arm == good else 1), 0.01)
    assert [chooser.arm(32) for _ in range(5)] == ["off"] * 5
    assert [chooser.arm(1) for _ in range(8)][4:] == ["async"] * 4


def test_a_batch_that_flickers_between_two_sizes_keeps_its_arm() -> None:
    chooser = ScheduleChooser(ARMS)
    for _ in range(100):
        arm = chooser.arm(8)
        chooser.observe(8, 16 if arm == "sync" else 8, 0.01)
    assert {chooser.arm(num_seqs) for num_seqs in (8, 9, 8, 9, 9, 8, 9, 9, 9, 8)} == {"sync"}


def test_steps_that_are_not_told_of_do_no_harm() -> None:
    chooser = ScheduleChooser(ARMS)
    for _ in range(500):
        assert chooser.arm(4) in ARMS
    chooser.observe(0, 1, 0.1)
    chooser.observe(4, 1, 0.0)


def test_one_arm_is_no_choice() -> None:
    chooser = ScheduleChooser(("sync",))
    for _ in range(1000):
        assert chooser.arm(2) == "sync"
        chooser.observe(2, 4, 0.01)


def test_what_is_chosen_is_known_once_it_was_compared_and_no_trial_changes_it() -> None:
    chooser = ScheduleChooser(ARMS)
    assert chooser.chosen is None
    seen = []
    for _ in range(1200):
        arm = chooser.arm(1)
        seen.append((chooser.chosen, arm))
        chooser.observe(1, 3 if arm == "sync" else 1, 0.02)
    first = next(place for place, (chosen, _) in enumerate(seen) if chosen is not None)
    assert 0 < first < 200
    assert {chosen for chosen, _ in seen[first:]} <= {"off", "sync"}
    assert {chosen for chosen, _ in seen[200:]} == {"sync"}
    assert {arm for _, arm in seen[200:]} > {"sync"}, "others were on trial"


def drifting(seed: int, num_steps: int) -> list[float]:
    """How much longer than at other times each step takes: at first, and as the machine wanders."""
    random, wandered, found = Random(seed), 0.0, []
    for step in range(num_steps):
        wandered += random.gauss(0, 0.018) - wandered / 150
        found.append(exp(wandered) * (1 + 0.3 * exp(-step / 100)))
    return found


@pytest.mark.parametrize("num_seqs", [1, 16])
def test_no_arm_is_chosen_for_what_the_machine_did_meanwhile(num_seqs: int) -> None:
    """One whose windows were later by chance, or less sure, is no better for it."""
    machine = {"off": (1.0, 0.0055), "sync": (2.9, 0.0185), "async": (1.8, 0.0145)}
    rates = []
    for seed in range(24):
        pace = drifting(seed, 1500)

        def machine_at(step: int, pace: list[float] = pace) -> Machine:
            return {arm: (mean, step_s * pace[step]) for arm, (mean, step_s) in machine.items()}

        _, _, used = run_chooser(machine_at, 1500, num_seqs, seed)
        tokens, seconds = (sum(used[arm] * machine[arm][i] for arm in ARMS) for i in range(2))
        rates.append(tokens / seconds)
    assert sum(rates) / len(rates) >= 0.945 / 0.0055
