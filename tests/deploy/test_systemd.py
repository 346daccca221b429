"""The unit for systemd, read by systemd itself and held to the server's settings."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from config import Settings, load_settings
from config.environment import read_environment
from server.commands import serve

FOLDER = Path(__file__).resolve().parents[2] / "deploy/systemd"
UNIT = FOLDER / "slipstream.service"
MOST_EXPOSED = 16  # tenths, of 100

needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="no systemd-analyze is installed (Debian: systemd)"
)


def section(name: str) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser[name]


def analyze(verb: str, *flags: str, unit: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", verb, *flags, str(unit)], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is here in place of the one that it installs."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/slipstream/bin/slipstream", sys.executable))
    return path


@needs_systemd
def test_systemd_finds_nothing_to_say(unit: Path) -> None:
    found = analyze("verify", "--man=no", unit=unit)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("PrivateTmp=yes", "PrivateTemp=yes"))
    assert "'PrivateTemp'" in analyze("verify", "--man=no", unit=unit).stderr


@needs_systemd
def test_little_is_exposed(unit: Path) -> None:
    bound = ("--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager")
    found = analyze("security", *bound, unit=unit)
    assert found.returncode == 0, found.stdout
    rated = re.search(r"Overall exposure level for \S+: ([\d.]+)", found.stdout)
    assert rated is not None and rated[1] in (FOLDER / "README.md").read_text()
    unit.write_text(unit.read_text().replace("ProtectSystem=strict\n", "").replace("PrivateUsers=yes\n", ""))
    assert analyze("security", *bound, unit=unit).returncode != 0


def test_a_stop_waits_for_the_drain_and_refused_settings_are_not_tried_again() -> None:
    service = section("Service")
    assert int(service["TimeoutStopSec"]) >= Settings().server.drain_timeout + 5
    assert int(service["RestartPreventExitStatus"]) == serve.REFUSED
    assert service["ExecStart"].endswith("/bin/slipstream serve")


def test_what_the_readme_sets_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    text = UNIT.read_text() + (FOLDER / "README.md").read_text()
    named = set(re.findall(r"SLIPSTREAM_[A-Z_]+", text))
    assert "SLIPSTREAM_SERVER__API_KEY_FILE" in named
    given = read_environment(dict.fromkeys(named, "1"))
    assert len(given) == len(named)
    assert load_settings([]).home
