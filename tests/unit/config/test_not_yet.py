import pytest

from config import SettingsError, load_settings
from config.not_yet import NOT_YET

REFUSED = [
    ("--compile=on", "model.compile", "on", "use auto or off"),
]


@pytest.mark.parametrize(("argv", "key", "value", "instead"), REFUSED)
def test_asking_for_what_is_missing_is_refused(argv: str, key: str, value: str, instead: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings([argv], {})
    flag = argv.partition("=")[0]
    assert str(caught.value) == f"flag {flag}: {key} = '{value}' is not available yet; {instead}"


def test_each_line_of_the_table_is_tested() -> None:
    assert {missing.key for missing in NOT_YET} == {key for _, key, _, _ in REFUSED}


@pytest.mark.parametrize(
    "argv",
    [
        "--compile=off",
        "--compile=auto",
        "--swap-space=0",
        "--swap-space=2GiB",
        "--prefix-caching",
        "--no-prefix-caching",
        *(f"--scheduling-policy={name}" for name in ("fcfs", "sjf", "priority", "deadline", "orca", "fair")),
        *(f"--preemption={name}" for name in ("auto", "recompute", "swap")),
        *(f"--speculative-method={name}" for name in ("none", "ngram", "suffix", "auto")),
        *(f"--speculation-schedule={name}" for name in ("async", "sync", "auto")),
        *(f"--draft-verification={name}" for name in ("match", "rejection", "block")),
        *(f"--draft-length-policy={name}" for name in ("fixed", "threshold", "goodput")),
        *(f"--num-speculative-tokens={count}" for count in ("auto", 1, 32)),
        *(f"--min-acceptance-rate={rate}" for rate in (0, 0.5, 1)),
        "--draft-model=x",
        "--medusa-heads=x",
        "--speculative-config={}",
        "--queue-timeout=0",
        "--queue-timeout=2.5",
        "--request-timeout=60",
        "--stall-timeout=5",
        "--read-timeout=5",
        "--max-connections=9",
        "--max-header-bytes=65536",
        "--no-protect-metrics",
    ],
)
def test_asking_for_what_is_there_is_fine(argv: str) -> None:
    load_settings([argv], {})


def test_environment_is_refused_alike() -> None:
    with pytest.raises(SettingsError, match=r"^env SLIPSTREAM_MODEL__COMPILE: .* = 'on' is not available"):
        load_settings([], {"SLIPSTREAM_MODEL__COMPILE": "on"})
