import os
import subprocess
import sys

import pytest

from engine.startup.host_tuning import SPIN_ROUNDS, prepare_process


def test_the_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    prepare_process()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    prepare_process()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPIN_ROUNDS)


def test_the_server_can_prepare_before_anything_loads_torch() -> None:
    code = "import sys, server.commands.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_settling_turns_the_collector_on() -> None:
    code = (
        "import gc; from engine.startup.host_tuning import freeze_heap; gc.disable(); freeze_heap(); "
        "assert gc.isenabled() and gc.get_freeze_count() > 0"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_settling_gives_back_what_loading_has_freed() -> None:
    code = """
from pathlib import Path
from engine.startup.host_tuning import prepare_process, freeze_heap

def resident_mib():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) >> 10

prepare_process()
blocks = [b"x" * 1_000_000 for _ in range(100)]
kept = [bytes(1000)]  # above them, or the heap would end where they began
del blocks
before = resident_mib()
freeze_heap()
print(before - resident_mib())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) > 50


def test_threads_hand_the_interpreter_on_soon() -> None:
    code = (
        "import sys; from engine.startup.host_tuning import SWITCH_S, prepare_process; prepare_process(); "
        "assert sys.getswitchinterval() == SWITCH_S <= 0.001"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
