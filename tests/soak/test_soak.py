"""The soak itself, for half a minute, and a server that leaks, which it must find out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import SoakPlan, soak
from tests.soak.verdict import HELD, judge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SECONDS = 25.0
# Times hang on the machine, and memory still settles in the first minute.
MINUTES_ONLY = ("memory, growth over the second half",)


async def test_nothing_is_lost_in_mixed_load(tmp_path: Path) -> None:
    found = await soak(SoakPlan(SECONDS, num_clients=32), tmp_path, print)
    verdicts = [each for each in judge(found) if not each.is_timed and each.bar.name not in MINUTES_ONLY]
    assert not [each.bar for each in verdicts if not each.bar.met], found.tally.to_json()
    assert found.tally.num_sent > 100
    assert {"stop", "length", "abort", "left", "refused"} <= set(found.tally.endings)


async def test_a_server_that_leaks_is_found_out(tmp_path: Path) -> None:
    found = await soak(SoakPlan(SECONDS, num_clients=32, leaks=True), tmp_path, print)
    assert HELD in [each.bar.name for each in judge(found) if not each.bar.met]
    assert found.after.blocks_used >= found.page.total("request_aborts_total")  # of several choices, each
