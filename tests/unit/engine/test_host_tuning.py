import os
import subprocess
import sys

import pytest

from engine.host_tuning import SPIN_ROUNDS, prepare_process


def test_the_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    prepare_process()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    prepare_process()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPIN_ROUNDS)


def test_the_server_can_prepare_before_anything_loads_torch() -> None:
    code = "import sys, server.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_settling_turns_the_collector_on() -> None:
    code = (
        "import gc; from engine.host_tuning import settle_memory; gc.disable(); settle_memory(); "
        "assert gc.isenabled() and gc.get_freeze_count() > 0"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
