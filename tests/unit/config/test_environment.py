import pytest

from config import SettingsError, load_settings
from config.environment import read_environment
from config.setting import SETTINGS, Given


def test_sectioned_and_flat_names_are_read_and_strangers_left_alone() -> None:
    environ = {
        "SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": "8",
        "SLIPSTREAM_PORT": "9",
        "SLIPSTREAM_HOST": "::1",
        "SLIPSTREAM_MODEL": "m",
        "SLIPSTREAM_HOME": "/data",
        "PORT": "1",
        "SLIPSTREAMER": "x",
    }
    assert read_environment(environ) == {
        "scheduler.max_num_seqs": Given("8", "env SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS"),
        "server.port": Given("9", "env SLIPSTREAM_PORT"),
        "server.host": Given("::1", "env SLIPSTREAM_HOST"),
        "model.model": Given("m", "env SLIPSTREAM_MODEL"),
        "home": Given("/data", "env SLIPSTREAM_HOME"),
    }


def test_the_full_name_beats_the_short_one() -> None:
    given = read_environment({"SLIPSTREAM_PORT": "1", "SLIPSTREAM_SERVER__PORT": "2"})
    assert given["server.port"] == Given("2", "env SLIPSTREAM_SERVER__PORT")


def test_every_setting_has_a_name_in_the_environment() -> None:
    for setting in SETTINGS:
        name = setting.env_names[0]
        assert read_environment({name: "x"})[setting.key].origin == f"env {name}"


def test_repeatable_ones_split_at_commas() -> None:
    name = "SLIPSTREAM_MODEL__SERVED_MODEL_NAME"
    assert read_environment({name: "a, b"})["model.served_model_name"].value == ("a", "b")
    assert read_environment({name: "a"})["model.served_model_name"].value == ("a",)


@pytest.mark.parametrize("name", ["SLIPSTREAM_API_KEY", "SLIPSTREAM_SERVER__API_KEY"])
def test_a_comma_makes_no_second_key(name: str) -> None:
    assert read_environment({name: "secret,a\n"})["server.api_key"].value == ("secret,a",)
    with pytest.raises(SettingsError, match="not shown"):
        load_settings([], {name: "secret, a"})


def test_an_empty_key_does_not_open_the_server() -> None:
    with pytest.raises(SettingsError, match=r"^env SLIPSTREAM_API_KEY: server.api_key \(not shown\)"):
        load_settings([], {"SLIPSTREAM_API_KEY": ""})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SLIPSTREAM_PROT", "; did you mean SLIPSTREAM_PORT?"),
        ("SLIPSTREAM_SERVER_PORT", "; did you mean SLIPSTREAM_SERVER__PORT?"),
        ("SLIPSTREAM_SERVER__PROT", "; did you mean SLIPSTREAM_SERVER__PORT?"),
        ("SLIPSTREAM_MAX_NUM_SEQS", "; did you mean SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS?"),
        ("SLIPSTREAM_SERVER", "; did you mean"),
        ("SLIPSTREAM_QQQQQQQQQQQQQQQQQQQQQQQQQ", ""),
    ],
)
def test_unknown_names_under_our_prefix_stop_the_start(name: str, hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_environment({name: "1"})
    assert str(caught.value).startswith(f"env {name}: unknown setting{hint}")


def test_a_hostile_name_stays_one_line() -> None:
    with pytest.raises(SettingsError, match=r"^env SLIPSTREAM_Q\\nQ: unknown setting"):
        read_environment({"SLIPSTREAM_Q\nQ": "1"})


KUBERNETES = {
    "SLIPSTREAM_SERVICE_HOST": "10.0.0.1",
    "SLIPSTREAM_SERVICE_PORT": "8000",
    "SLIPSTREAM_SERVICE_PORT_HTTP": "8000",
    "SLIPSTREAM_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "SLIPSTREAM_PORT_8000_TCP_PROTO": "tcp",
    "SLIPSTREAM_PORT_8000_TCP_PORT": "8000",
    "SLIPSTREAM_PORT_8000_TCP_ADDR": "10.0.0.1",
    "SLIPSTREAM_METRICS_SERVICE_HOST": "10.0.0.2",
    "SLIPSTREAM_METRICS_PORT": "tcp://10.0.0.2:9090",
}


def test_service_links_of_kubernetes_are_no_settings() -> None:
    assert read_environment(KUBERNETES) == {}


def test_the_one_link_that_looks_like_a_setting_gets_a_hint() -> None:
    environ = {**KUBERNETES, "SLIPSTREAM_PORT": "tcp://10.0.0.1:8000"}
    with pytest.raises(SettingsError) as caught:
        load_settings([], environ)
    assert str(caught.value) == (
        "env SLIPSTREAM_PORT: server.port = 'tcp://10.0.0.1:8000' is not allowed; "
        "expected a whole number from 0 to 65535 (Kubernetes sets this for a service called "
        "slipstream: use another name or enableServiceLinks: false, or give --port)"
    )
    assert load_settings(["--port", "9000"], environ).server.port == 9000
    assert load_settings([], {**environ, "SLIPSTREAM_SERVER__PORT": "9001"}).server.port == 9001


def test_a_fault_plan_is_no_setting() -> None:
    assert read_environment({"SLIPSTREAM_ALLOW_FAULTS": "1", "SLIPSTREAM_FAULT_PLAN": "[]"}) == {}
