"""Who gets a seat, and how many seats the limit on open files allows."""

from __future__ import annotations

import logging

import pytest

from server.http import connection_gate
from server.http.connection_gate import LOBBY, ConnectionGate, Seat, room_for


def test_seats_go_first_to_the_served_then_to_the_lobby_then_to_nobody() -> None:
    gate = ConnectionGate(3)
    assert [gate.seat(n) for n in (0, 2)] == [Seat.SERVED] * 2
    assert [gate.seat(n) for n in (3, 2 + LOBBY)] == [Seat.LOBBY] * 2
    assert gate.seat(3 + LOBBY) is Seat.NONE


def test_a_full_house_is_logged_once_until_it_was_half_empty(caplog: pytest.LogCaptureFixture) -> None:
    gate = ConnectionGate(4)
    for num_open in (4, 5, 3, 4, 2, 4):
        gate.seat(num_open)
    assert [record.getMessage() for record in caplog.records] == [
        "4 connections are open, the limit: more are refused"
    ] * 2


class FakeResource:
    """The limit on open files of a made-up process."""

    RLIMIT_NOFILE, RLIM_INFINITY = 7, -1

    def __init__(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.limits

    def setrlimit(self, _: int, limits: tuple[int, int]) -> None:
        assert limits[0] <= limits[1] or limits[1] == self.RLIM_INFINITY
        self.limits = limits


@pytest.mark.parametrize(
    ("soft", "hard", "room", "soft_after"),
    [
        (4096, 4096, 2048, 4096),
        (1024, 1_048_576, 2048, 2144),
        (1024, -1, 2048, 2144),
        (-1, -1, 2048, -1),
        (256, 1024, 928, 1024),
        (256, 256, 160, 256),
        (128, 128, 32, 128),
        (32, 32, 1, 32),
    ],
)
def test_the_cap_stays_below_the_limit_on_files(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    room: int,
    soft_after: int,
) -> None:
    resource = FakeResource(soft, hard)
    monkeypatch.setattr(connection_gate, "resource", resource)
    with caplog.at_level(logging.WARNING):
        assert room_for(2048) == room
    assert resource.limits == (soft_after, hard)
    assert bool(caplog.records) == (room < 2048)


def test_a_system_without_such_a_limit_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_gate, "resource", None)
    assert room_for(2048) == 2048
