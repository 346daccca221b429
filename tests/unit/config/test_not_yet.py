import pytest

from config import SettingsError, load_settings
from config.not_yet import NOT_YET

REFUSED = [
    ("--compile=on", "model.compile", "on", "use auto or off"),
    ("--speculative-method=ngram", "speculation.speculative_method", "ngram", "use none or auto"),
    ("--speculative-method=medusa", "speculation.speculative_method", "medusa", "use none or auto"),
    ("--draft-model=x", "speculation.draft_model", "x", "leave it out"),
    ("--medusa-heads=x", "speculation.medusa_heads", "x", "leave it out"),
    ("--num-speculative-tokens=4", "speculation.num_speculative_tokens", "4", "only auto works so far"),
    ("--speculation-schedule=sync", "speculation.speculation_schedule", "sync", "only auto works so far"),
    ("--draft-verification=block", "speculation.draft_verification", "block", "only match works so far"),
    ("--draft-length-policy=fixed", "speculation.draft_length_policy", "fixed", "only goodput works so far"),
    ("--min-acceptance-rate=0", "speculation.min_acceptance_rate", "0", "only 0.3 works so far"),
    ("--speculative-config={}", "speculation.speculative_config", "{}", "leave it out"),
    ("--stall-timeout=5", "server.stall_timeout", "5", "only 60 works so far"),
    ("--read-timeout=5", "server.read_timeout", "5", "only 30 works so far"),
    ("--max-connections=9", "server.max_connections", "9", "only 2048 works so far"),
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
        "--speculative-method=none",
        "--speculative-method=auto",
        "--speculation-schedule=auto",
        "--num-speculative-tokens=auto",
        "--queue-timeout=0",
        "--queue-timeout=2.5",
        "--request-timeout=60",
        "--stall-timeout=60.0",
        "--max-header-bytes=65536",
        "--no-protect-metrics",
    ],
)
def test_asking_for_what_is_there_is_fine(argv: str) -> None:
    load_settings([argv], {})


def test_environment_is_refused_alike() -> None:
    with pytest.raises(SettingsError, match=r"^env SLIPSTREAM_MODEL__COMPILE: .* = 'on' is not available"):
        load_settings([], {"SLIPSTREAM_MODEL__COMPILE": "on"})
