"""Work gives way while a second tenant has a request open, and no longer than its share of the time."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack

from server.http.open_tenants import REST, OpenTenants
from server.http.turns import Turns

LONG_S = 60.0


def test_a_tenant_alone_gives_way_to_nobody() -> None:
    tenants = OpenTenants()
    tenants.give_way(LONG_S)
    with tenants.serving("a"), tenants.serving("a"):
        tenants.give_way(LONG_S)


def test_work_waits_until_the_other_tenant_is_served() -> None:
    tenants, ended = OpenTenants(), threading.Event()

    def work() -> None:
        tenants.give_way(LONG_S)
        ended.set()

    with tenants.serving("a"):
        with ExitStack() as others:
            for _ in range(2):
                others.enter_context(tenants.serving("b"))
            worker = threading.Thread(target=work)
            worker.start()
            assert not ended.wait(0.05)
        assert ended.wait(LONG_S)
    worker.join()


def test_work_goes_on_however_long_the_other_is_served() -> None:
    tenants = OpenTenants()
    with tenants.serving("a"), tenants.serving("b"):
        began = time.monotonic()
        tenants.give_way(0.01)
        assert time.monotonic() - began >= 0.01 * REST


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_calls_give_way_for_all_that_they_work_at_each_rest_and_at_their_end() -> None:
    given: list[float] = []
    turns = Turns(given.append)

    def call() -> None:
        turns.rest()
        for _ in range(3):
            compute(0.005)
            turns.rest()
        compute(0.005)

    await asyncio.gather(turns.run(call, 1), turns.run(call, 2))
    assert len(given) == 8
    assert min(given) >= 0.005 and sum(given) < 0.2
