"""The compose file: wired to files that exist, confined, and reachable from this machine only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from config import load_settings
from server.http.listener import GRACE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
KEYS = {
    *("build", "image", "command", "environment", "ports", "volumes", "depends_on", "healthcheck"),
    *("read_only", "tmpfs", "cap_drop", "security_opt", "restart", "stop_grace_period"),
}


def mounts(service: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Source, target and mode of every volume."""
    parts = [volume.split(":") for volume in service["volumes"]]
    return [(source, target, mode[0] if mode else "rw") for source, target, *mode in parts]


def seconds(text: str) -> float:
    """30s as a number."""
    number = re.fullmatch(r"(\d+)s", text)
    assert number is not None
    return float(number[1])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_only_what_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert set(service) <= KEYS
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["healthcheck"]["start_period"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    image, _, tag = service["image"].partition(":")
    assert "build" in service or re.fullmatch(r"v?\d+\.\d+\.\d+", tag), f"{image} has no exact version"


@pytest.mark.parametrize("name", SERVICES)
def test_every_mount_has_a_source(name: str) -> None:
    for source, target, mode in mounts(SERVICES[name]):
        assert target.startswith("/")
        if source.startswith("."):
            assert mode == "ro"
            assert any((DEPLOY / source).iterdir())
        else:
            assert source in COMPOSE["volumes"]


def test_the_image_is_built_from_the_projects_folder() -> None:
    build = SERVICES["slipstream"]["build"]
    assert (DEPLOY / build["context"] / "Dockerfile").is_file()
    assert build["target"] == "cpu"


def test_a_stopped_server_may_finish_its_drain() -> None:
    drain_s = load_settings([], {}).server.drain_timeout
    # After the drain: the step in flight, the last events to their readers, the listener.
    assert seconds(SERVICES["slipstream"]["stop_grace_period"]) > drain_s + 4 * GRACE_S


def test_prometheus_scrapes_the_service() -> None:
    targets = yaml.safe_load((DEPLOY / "prometheus/targets/slipstream.yml").read_text())
    assert targets == [{"targets": [f"slipstream:{SERVICES['slipstream']['ports'][0].split(':')[-1]}"]}]
    config = next(word for word in SERVICES["prometheus"]["command"] if word.startswith("--config.file="))
    assert ("./prometheus", config.removeprefix("--config.file=").rpartition("/")[0], "ro") in mounts(
        SERVICES["prometheus"]
    )


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    grafana, provisioning = SERVICES["grafana"], DEPLOY / "grafana/provisioning"
    source = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"][0]
    host, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
    assert host in grafana["depends_on"]
    assert SERVICES[host]["ports"][0].endswith(f":{port}")
    [provider] = yaml.safe_load((provisioning / "dashboards/slipstream.yml").read_text())["providers"]
    folders = {target: DEPLOY / source for source, target, _ in mounts(grafana)}
    assert list(folders[provider["options"]["path"]].glob("*.json"))
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (folders[str(home.parent)] / home.name).is_file()


def test_whoever_looks_at_grafana_can_change_nothing() -> None:
    environ = SERVICES["grafana"]["environment"]
    assert environ["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environ["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
