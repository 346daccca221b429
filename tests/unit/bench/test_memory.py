import pytest

from tests.bench.memory import limit_mb, memory_mb

STATUS = """Name:\tpython
VmPeak:\t 9000000 kB
VmHWM:\t 1794000 kB
VmRSS:\t 1750000 kB
RssAnon:\t 1640000 kB
RssFile:\t  110000 kB
Threads:\t5
"""


def test_the_figures_are_in_millions_of_bytes() -> None:
    assert memory_mb(STATUS) == pytest.approx({"most ever": 1837.056, "now": 1792.0, "of files": 112.64})


def test_the_limit_is_weights_and_a_third_the_cache_and_room() -> None:
    assert limit_mb(269_000_000, 2**30) == pytest.approx(349.7 + 1073.741824 + 700)
