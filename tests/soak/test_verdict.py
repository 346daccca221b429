"""What a soak makes of its figures, and that each kind of loss would be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.soak.errands import CHAT, COMPLETIONS, Mix
from tests.soak.tally import Tally
from tests.soak.verdict import HELD, Findings, Probes, judge, rss_growth_mb, without_outcome
from tests.soak.vitals import Samples, Vitals

REST = Vitals(
    at=0.0,
    rss_mb=400.0,
    num_fds=20,
    num_threads=9,
    blocks_used=0,
    num_running=0,
    num_waiting=0,
    num_children=0,
)


def page_of(
    answered: dict[int, int], finished: dict[str, int], rejected: dict[str, int], errors: int = 0
) -> Samples:
    """Metrics as a server shows them, of one route."""
    lines = [
        f'slipstream_http_requests_total{{route="{COMPLETIONS}",code="{c}"}} {n}' for c, n in answered.items()
    ]
    lines += [f'slipstream_requests_total{{finish_reason="{reason}"}} {n}' for reason, n in finished.items()]
    lines += [
        f'slipstream_requests_rejected_total{{reason="{reason}"}} {n}' for reason, n in rejected.items()
    ]
    lines += [f'slipstream_engine_errors_total{{stage="forward"}} {errors}']
    types = {line.split("{")[0] for line in lines}
    return Samples("\n".join([*(f"# TYPE {name} counter" for name in types), *lines, ""]))


def sound() -> Findings:
    """A hundred requests: 3 bad, 2 without room, 1 that gave up in the queue, 10 that left, 4 early."""
    tally = Tally(num_sent=100, num_canaries=4)
    tally.statuses.update({200: 84, 400: 3, 503: 3})
    tally.first_tokens = [(at / 10, 0.5) for at in range(100)]
    return Findings(
        tally=tally,
        seen=[replace(REST, at=float(at), rss_mb=400 + 0.01 * at) for at in range(100)],
        before=REST,
        after=REST,
        page=page_of(
            {200: 84, 400: 3, 503: 3, 499: 10},
            {"stop": 50, "length": 34, "abort": 6, "error": 1},
            {"queue_full": 2, "queue_timeout": 1},
        ),
        probes=Probes([5.0] * 100, []),
        errors_logged=[],
        exit_code=0,
        saturated_s=None,
    )


def missed(found: Findings) -> list[str]:
    return [verdict.bar.name for verdict in judge(found) if not verdict.bar.met]


def with_tally(change: Callable[[Tally], None]) -> Findings:
    found = sound()
    change(found.tally)
    return found


def lose_a_request(tally: Tally) -> None:
    tally.num_sent += 1


def read_what_was_not_given(tally: Tally) -> None:
    tally.statuses[504] += 1


def test_a_sound_soak_misses_no_bar() -> None:
    assert missed(sound()) == []


@pytest.mark.parametrize(
    ("found", "bar"),
    [
        (replace(sound(), after=replace(REST, blocks_used=1)), HELD),
        (replace(sound(), after=replace(REST, num_waiting=1)), "requests open at rest"),
        (replace(sound(), after=replace(REST, num_fds=21)), "files open at rest, more than before"),
        (
            replace(sound(), after=replace(REST, num_threads=10)),
            "threads at rest, more than in the first half",
        ),
        (replace(sound(), after=replace(REST, num_children=1)), "child processes, more than before"),
        (
            replace(sound(), seen=[replace(REST, rss_mb=400 + 0.2 * at) for at in range(100)]),
            "memory, growth over the second half",
        ),
        (replace(sound(), seen=[REST] * 5), "memory, growth over the second half"),
        (replace(sound(), exit_code=-9), "exit code after SIGTERM, off 0"),
        (replace(sound(), errors_logged=["one"]), "errors in the log"),
        (replace(sound(), probes=Probes([5.0], [(1.0, 503)])), "/health, answers other than 200"),
        (replace(sound(), probes=Probes([5.0] * 90 + [200.0] * 10, [])), "/health p99"),
        (with_tally(lose_a_request), "requests that clients and server count apart"),
        (with_tally(read_what_was_not_given), "requests that clients and server count apart"),
        (with_tally(lambda tally: tally.surprise("what")), "surprises to clients"),
        (
            with_tally(lambda tally: tally.first_tokens.extend((10 + at / 10, 0.7) for at in range(100))),
            "first token p99, second half over first",
        ),
    ],
)
def test_each_loss_is_seen(found: Findings, bar: str) -> None:
    assert bar in missed(found)


@pytest.mark.parametrize("num_finished", [84, 97])
def test_requests_end_once(num_finished: int) -> None:
    """Of a hundred with three refused and ten that left, some 87 to 97 have ended."""
    page = page_of({200: 87, 400: 3, 499: 10}, {"stop": num_finished}, {"queue_full": 0})
    assert without_outcome(100, page) == max(0, 87 - num_finished)
    twice = page_of({200: 87, 400: 3, 499: 10}, {"stop": 99}, {"queue_full": 0})
    assert without_outcome(100, twice) == 2


def test_a_queue_is_wanted_while_more_arrives_than_can_be_served() -> None:
    found = replace(sound(), saturated_s=50.0)
    assert "share of looks that saw a queue" in missed(found)
    busy = [replace(each, num_waiting=int(2 < each.at < 50)) for each in found.seen]
    assert missed(replace(found, seen=busy)) == []


def test_growth_is_that_of_the_second_half() -> None:
    early = [replace(REST, rss_mb=min(400.0 + at, 440.0)) for at in range(100)]
    assert rss_growth_mb(early) == 0
    late = [replace(REST, rss_mb=max(400.0, 350.0 + at)) for at in range(100)]
    assert rss_growth_mb(late) == pytest.approx(44.5, abs=2.5)


def test_a_mix_has_everything_in_its_share() -> None:
    mix = Mix(seed=1)
    errands = [mix.errand() for _ in range(4000)]

    def share(wanted: Callable[..., bool]) -> float:
        return sum(map(wanted, errands)) / len(errands)

    assert 0.16 < share(lambda e: e.leave_s is not None or e.cancel_s is not None) < 0.24
    assert 0.03 < share(lambda e: e.is_bad) < 0.07
    assert 0.03 < share(lambda e: e.read_gap_s > 0) < 0.07
    assert 0.4 < share(lambda e: e.path == CHAT) < 0.6
    for word in (b'"n"', b"tools", b"structured_outputs", b"response_format", b"logprobs", b"deadline_ms"):
        assert share(lambda e, word=word: word in e.body) > 0.01, word
    again = Mix(seed=1)
    assert [again.errand() for _ in range(50)] == errands[:50]
