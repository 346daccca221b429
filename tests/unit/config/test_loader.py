from itertools import combinations
from pathlib import Path

import pytest

from config import SettingsError, load_settings, load_with_origins
from config.setting import BY_KEY, SETTINGS


def toml(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "s.toml"
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


def test_nothing_given_is_all_defaults() -> None:
    settings, origins = load_with_origins([], {})
    assert settings.server.port == 8000
    assert set(origins) == {setting.key for setting in SETTINGS}
    assert set(origins.values()) == {"default"}


@pytest.mark.parametrize(
    "sources", [pair for size in (1, 2, 3) for pair in combinations(["flag", "env", "file"], size)]
)
@pytest.mark.parametrize(
    ("key", "word", "env"),
    [
        ("server.port", "port", "SLIPSTREAM_PORT"),
        ("server.port", "port", "SLIPSTREAM_SERVER__PORT"),
        ("scheduler.max_num_seqs", "max-num-seqs", "SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS"),
        ("cache.num_kv_blocks", "num-kv-blocks", "SLIPSTREAM_CACHE__NUM_KV_BLOCKS"),
    ],
)
def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, sources: tuple[str, ...], key: str, word: str, env: str
) -> None:
    section, name = key.split(".")
    argv = toml(tmp_path, f"[{section}]\n{word} = 103\n") if "file" in sources else []
    file_origin = f"file {tmp_path / 's.toml'}"
    environ = {env: "102"} if "env" in sources else {}
    argv += [f"--{word}", "101"] if "flag" in sources else []
    expected = {"flag": (101, f"flag --{word}"), "env": (102, f"env {env}"), "file": (103, file_origin)}
    settings, origins = load_with_origins(argv, environ)
    value, origin = expected[sources[0]]
    assert getattr(getattr(settings, section), name) == value
    assert origins[key] == origin


def test_each_setting_takes_its_own_best_source(tmp_path: Path) -> None:
    argv = [*toml(tmp_path, "[server]\nport = 1\nmax-n = 2\n[log]\nlog-level = 'debug'\n"), "--port", "3"]
    settings, origins = load_with_origins(argv, {"SLIPSTREAM_SERVER__MAX_N": "4"})
    assert (settings.server.port, settings.server.max_n, settings.log.log_level) == (3, 4, "debug")
    assert origins["server.port"] == "flag --port"
    assert origins["server.max_n"] == "env SLIPSTREAM_SERVER__MAX_N"
    assert origins["log.log_level"] == f"file {tmp_path / 's.toml'}"
    assert origins["server.host"] == "default"


def test_repeatable_settings_replace_and_never_mix_sources(tmp_path: Path) -> None:
    argv = [*toml(tmp_path, '[server]\napi-key = ["f1", "f2"]\n'), "--api-key", "a", "--api-key", "b"]
    settings = load_settings(argv, {"SLIPSTREAM_API_KEY": "e"})
    assert [key.get_secret_value() for key in settings.server.api_key] == ["a", "b"]


def test_a_switch_off_by_flag_beats_on_by_environment() -> None:
    settings = load_settings(["--no-strict-params"], {"SLIPSTREAM_SERVER__STRICT_PARAMS": "on"})
    assert settings.server.strict_params is False


def test_a_wrong_value_that_is_overridden_does_no_harm() -> None:
    assert load_settings(["--port", "80"], {"SLIPSTREAM_PORT": "x"}).server.port == 80


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_PORT", "1234")
    assert load_settings([]).server.port == 1234
    assert load_settings([], {}).server.port == 8000


def test_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert load_settings([], {"SLIPSTREAM_HOME": "~/models"}).home == Path("/somewhere/models")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("server.port", "abc", "a whole number from 0 to 65535"),
        ("server.port", "65536", "a whole number from 0 to 65535"),
        ("server.port", "", "a whole number from 0 to 65535"),
        ("server.drain_timeout", "-1", "a number of seconds, 0 or more"),
        ("server.watchdog_timeout", "0", "a number of seconds, more than 0"),
        ("scheduler.max_num_seqs", "0", "a whole number from 1 to 65536, or auto"),
        ("scheduler.max_num_batched_tokens", "many", "a whole number from 1 to 1048576, or auto"),
        ("cache.kv_block_size", "2048", "a whole number from 1 to 1024, or auto"),
        ("cache.num_kv_blocks", "0", "a whole number, 1 or more, or auto"),
        ("cache.kv_cache_memory", "1G", "a size such as 512MiB, 1GiB or a number of bytes"),
        ("cache.gpu_memory_utilization", "2", "a number, more than 0 and at most 1"),
        ("speculation.num_speculative_tokens", "99", "a whole number from 1 to 32, or auto"),
        ("speculation.num_speculative_tokens", "0", "a whole number from 1 to 32, or auto"),
        ("speculation.min_acceptance_rate", "1.1", "a number from 0 to 1"),
        ("speculation.min_acceptance_rate", "nan", "a number from 0 to 1"),
        ("speculation.speculative_method", "draft-model", "--draft-model beside it"),
        ("speculation.speculative_method", "medusa", "--medusa-heads beside it"),
        ("speculation.speculative_config", "[]", "a JSON object"),
        ("model.device", "tpu", "auto, cpu, cuda or cuda:N, N a GPU's number"),
        ("model.device", "cuda:", "auto, cpu, cuda or cuda:N, N a GPU's number"),
        ("model.device", "cuda:-1", "auto, cpu, cuda or cuda:N, N a GPU's number"),
        ("model.device", "cuda:01", "auto, cpu, cuda or cuda:N, N a GPU's number"),
        ("model.device", "cpu:0", "auto, cpu, cuda or cuda:N, N a GPU's number"),
        ("model.chat_template", "/no/file", "the path of a file that exists"),
        ("model.served_model_name", "", "names that are not empty"),
        ("model.model", "", "a name that is not empty"),
    ],
)
def test_bad_values_say_where_what_and_what_is_allowed(key: str, value: str, allowed: str) -> None:
    flag = BY_KEY[key].flag
    with pytest.raises(SettingsError) as caught:
        load_settings([f"{flag}={value}"], {})
    assert str(caught.value) == f"flag {flag}: {key} = '{value}' is not allowed; expected {allowed}"


@pytest.mark.parametrize(
    ("flag", "word", "needed"),
    [
        ("--speculation-schedule", "sync", "--speculation-schedule async"),
        ("--draft-verification", "rejection", "--draft-verification match"),
    ],
)
def test_lanes_that_could_not_be_kept_are_refused(flag: str, word: str, needed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(["--draft-lanes", "2", flag, word], {})
    wrong = "flag --draft-lanes: speculation.draft_lanes = '2' is not allowed"
    assert str(caught.value) == f"{wrong}; expected {needed} beside it"
    for lanes in ("auto", "0"):
        load_settings(["--draft-lanes", lanes, flag, word], {})


def test_integers_need_the_kernels_that_read_them() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(["--quantization", "int8", "--compile", "off"], {})
    wrong = "flag --quantization: model.quantization = 'int8' is not allowed"
    assert str(caught.value) == f"{wrong}; expected --compile auto or on beside it"
    for asked in ("auto", "on"):
        assert load_settings(["--quantization", "int8", "--compile", asked], {}).model.quantization == "int8"


def test_bad_values_name_environment_and_file_alike(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings([], {"SLIPSTREAM_SERVER__STRICT_PARAMS": "perhaps"})
    assert str(caught.value) == (
        "env SLIPSTREAM_SERVER__STRICT_PARAMS: server.strict_params = 'perhaps' is not allowed; "
        "expected true or false"
    )
    with pytest.raises(SettingsError) as caught:
        load_settings(toml(tmp_path, "[server]\nport = true\n"), {})
    assert str(caught.value) == (
        f"file {tmp_path / 's.toml'}: server.port = 'True' is not allowed; "
        "expected a whole number from 0 to 65535"
    )
    with pytest.raises(SettingsError) as caught:
        load_settings([], {"SLIPSTREAM_HOME": ""})
    assert (
        str(caught.value) == "env SLIPSTREAM_HOME: home = '' is not allowed; expected the path of a directory"
    )


def test_the_part_is_blamed_where_it_was_given_when_the_limit_sinks_below_it(tmp_path: Path) -> None:
    argv = [*toml(tmp_path, "[scheduler]\nmax-decode-seqs = 32\n"), "--max-num-seqs", "16"]
    with pytest.raises(SettingsError) as caught:
        load_settings(argv, {})
    assert str(caught.value) == (
        f"file {tmp_path / 's.toml'}: scheduler.max_decode_seqs = '32' is not allowed; "
        "expected at most max-num-seqs (16)"
    )


def test_the_wrong_element_of_a_list_is_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="served_model_name = '7' is not allowed"):
        load_settings(toml(tmp_path, '[model]\nserved-model-name = ["a", 7]\n'), {})


@pytest.mark.parametrize("value", ["x" * 5000, "a\nb", "\x1b[2J", "\u2028", "\udcff"])
def test_lines_stay_one_short_printable_line(value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings([f"--port={value}"], {})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 220


def test_no_home_directory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(SettingsError, match=r"^default: home = '~/.cache/slipstream' is not allowed"):
        load_settings([], {})


@pytest.mark.parametrize("key", ["s3cret key", "s3crét", ""])
def test_a_bad_key_is_never_echoed(key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(["--api-key", key], {})
    assert str(caught.value) == (
        "flag --api-key: server.api_key (not shown) is not allowed; "
        "expected keys of printable ASCII without spaces, not empty"
    )
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
