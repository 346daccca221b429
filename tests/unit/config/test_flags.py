from pathlib import Path

import pytest

from config import SettingsError
from config.flags import read_flags
from config.setting import Given


def values(*argv: str) -> dict[str, object]:
    return {key: given.value for key, given in read_flags(argv).given.items()}


def test_flags_are_flat_kebab_case_in_both_spellings() -> None:
    assert values("--max-num-seqs", "8", "--port=9") == {"scheduler.max_num_seqs": "8", "server.port": "9"}


def test_each_value_knows_its_flag() -> None:
    flags = read_flags(["m", "--port", "9", "--no-prefix-caching"])
    assert flags.given == {
        "model.model": Given("m", "argument MODEL"),
        "server.port": Given("9", "flag --port"),
        "cache.prefix_caching": Given(False, "flag --no-prefix-caching"),
    }


@pytest.mark.parametrize(
    "argv",
    [["m", "--port", "9"], ["--port", "9", "m"], ["--model", "m", "--port=9"], ["--port=9", "--model=m"]],
)
def test_the_model_may_stand_anywhere(argv: list[str]) -> None:
    assert values(*argv) == {"model.model": "m", "server.port": "9"}


def test_repeatable_flags_collect_in_order_and_others_keep_the_last() -> None:
    assert values("--api-key", "a", "--port", "1", "--api-key=b", "--port", "2") == {
        "server.api_key": ("a", "b"),
        "server.port": "2",
    }


def test_switches_come_in_pairs() -> None:
    assert values("--strict-params", "--no-per-request-metrics") == {
        "server.strict_params": True,
        "server.per_request_metrics": False,
    }
    assert values("--strict-params", "--no-strict-params") == {"server.strict_params": False}


def test_a_value_may_be_empty_hold_equals_signs_or_start_with_a_dash() -> None:
    assert values("--host=", "--api-key=a=b", "--priority-aging-seconds", "-5") == {
        "server.host": "",
        "server.api_key": ("a=b",),
        "scheduler.priority_aging_seconds": "-5",
    }


def test_the_file_is_named_by_config() -> None:
    assert read_flags(["--config", "a.toml"]).config_file == Path("a.toml")
    assert read_flags([]).config_file is None


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--prot", "9"], "flag --prot: unknown flag; did you mean --port? (see slipstream serve --help)"),
        (["--max_num_seqs=1"], "flag --max_num_seqs: unknown flag; did you mean --max-num-seqs? (see"),
        (["--scheduler.max-num-seqs", "1"], "flag --scheduler.max-num-seqs: unknown flag"),
        (["--por", "9"], "flag --por: unknown flag"),
        (["--zzzzzz"], "flag --zzzzzz: unknown flag (see slipstream serve --help)"),
        (["-p", "9"], "flag -p: unknown flag"),
        (["--"], "flag --: unknown flag"),
        (["--home", "x"], "flag --home: unknown flag"),
        (["--port"], "flag --port: needs a value; expected a whole number from 0 to 65535"),
        (["--port", "--host", "a"], "flag --port: needs a value"),
        (["--config"], "flag --config: needs a value; expected the path of a TOML file"),
        (["--strict-params=yes"], "flag --strict-params: takes no value, got 'yes'"),
        (["a", "b"], "argument MODEL: 'b' is one model too many; argument MODEL already names 'a'"),
        (["a", "--model", "b"], "flag --model: 'b' is one model too many; argument MODEL already names 'a'"),
        (["--model=a", "b"], "argument MODEL: 'b' is one model too many; flag --model already names 'a'"),
        (["--bad\nflag\x1b[2J"], r"flag --bad\nflag\x1b[2J: unknown flag"),
    ],
)
def test_mistakes_are_one_clear_line(argv: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_flags(argv)
    assert str(caught.value).startswith(line)
    assert str(caught.value).isprintable()


def test_an_endless_flag_is_cut() -> None:
    with pytest.raises(SettingsError) as caught:
        read_flags(["--" + "x" * 10_000])
    assert len(str(caught.value)) < 200
