"""`python -m tests.gpu [--json FILE] [--processes N] [--seconds S] [--tests DIR]`: what needs a CUDA device.

Runs on a machine where nothing can be installed, with the interpreter that is there: what is missing is
named, with the commands that bring it. The tests are dealt out to processes, since each compiles kernels;
what became of each goes into one JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
# What the engine and these tests import, by the names of modules, as one asks pip for it.
NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers>=5.23",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "pydantic_settings": "pydantic-settings",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "dotenv": "python-dotenv",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
}
_INI = """[pytest]
pythonpath = {repository}
markers =
    gpu: needs a CUDA device
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings =
    error
    ignore:builtin type Swig.*:DeprecationWarning
"""
FAILED, REFUSED = 1, 2


class Outcome(NamedTuple):
    """What became of one test: passed, failed or skipped; `message` says why it was not passed."""

    name: str
    outcome: str
    seconds: float
    message: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; 0 if all that ran passed, 1 if not, 2 if something is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, default=REPOSITORY / ".bench" / "test-gpu.json")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=600.0, help="what a process may take")
    parser.add_argument("--tests", type=Path, default=Path(__file__).parent)
    given = parser.parse_args(arguments)
    given.tests = given.tests.resolve()
    if lacking := missing():
        print(how_to_carry(lacking), file=sys.stderr)
        return REFUSED
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "pytest.ini")
        settings.write_text(_INI.format(repository=REPOSITORY))
        tests = _collect(settings, given.tests)
        hands = [tests[first :: given.processes] for first in range(given.processes)]
        hands = [hand for hand in hands if hand]
        with ThreadPoolExecutor(len(hands) or 1) as pool:
            reports = [Path(folder, f"{number}.xml") for number in range(len(hands))]
            commands = [
                [*_command(settings, given.tests), "-vv", "--junitxml", str(report), *hand]
                for hand, report in zip(hands, reports, strict=True)
            ]
            codes = list(pool.map(lambda command: _run(command, given.tests, given.seconds), commands))
        outcomes = [outcome for report in reports for outcome in read_report(report)]
    write_summary(given.json, outcomes)
    # A process that dies, as one does whose device has failed, reports nothing of its tests.
    return FAILED if any(codes) or len(outcomes) < len(tests) or not outcomes else 0


def missing() -> list[str]:
    """The packages that cannot be imported, or are too old."""
    return [wanted for module, wanted in NEEDED.items() if find_spec(module) is None or _is_old(wanted)]


def _is_old(wanted: str) -> bool:
    requirement = Requirement(wanted)
    return bool(requirement.specifier) and version(requirement.name) not in requirement.specifier


def how_to_carry(packages: Sequence[str]) -> str:
    """What to say of packages that are not there."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = shlex.join(packages)
    return (
        f"missing: {', '.join(packages)}\n"
        "Where a network is at hand (pip sees to it that pydantic-core is of the version pydantic names):\n"
        f"  pip download --only-binary :all: --python-version {python} --dest wheels {wanted}\n"
        "Here, beside the interpreter's own packages:\n"
        "  for each in wheels/*.whl; do python -m zipfile -e $each carried; done\n"
        "  PYTHONPATH=carried python -m tests.gpu"
    )


def read_report(report: Path) -> list[Outcome]:
    """The outcomes in a JUnit file; none where it is missing or was cut short."""
    try:
        cases = ET.parse(report).iter("testcase")
        return [_outcome(case) for case in cases]
    except (OSError, ET.ParseError):
        return []


def write_summary(path: Path, outcomes: Sequence[Outcome]) -> None:
    """The JSON file, and on the terminal how many there are of each kind and each failure's first line."""
    counts: dict[str, int] = {}
    for each in outcomes:
        counts[each.outcome] = counts.get(each.outcome, 0) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    tests = [each._asdict() for each in sorted(outcomes)]
    path.write_text(json.dumps({"counts": counts, "tests": tests}, indent=1) + "\n", encoding="utf-8")
    for each in outcomes:
        if each.outcome == "failed":
            print(f"failed: {each.name}: {each.message.splitlines()[0] if each.message else ''}")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no tests ran")
    print(f"written to {path}")


def _outcome(case: ET.Element) -> Outcome:
    name, seconds = f"{case.get('classname')}::{case.get('name')}", float(case.get("time") or 0)
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            return Outcome(
                name, outcome, seconds, f"{found.get('message') or ''}\n{found.text or ''}".strip()
            )
    return Outcome(name, "passed", seconds)


def _command(settings: Path, tests: Path) -> list[str]:
    """Pytest without this project's own settings and plugins, most of which are not there."""
    options = ["-c", str(settings), "--rootdir", str(tests), "--confcutdir", str(tests)]
    return [
        sys.executable,
        "-m",
        "pytest",
        *options,
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-q",
    ]


def _collect(settings: Path, tests: Path) -> list[str]:
    """The tests' names; a module that cannot be imported, or skips itself, stands for its tests."""
    command = [*_command(settings, tests), "--collect-only"]
    listed = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False).stdout
    names = [
        line for line in listed.splitlines() if "::" in line and not line.startswith(("ERROR", "SKIPPED"))
    ]
    whole = {name.split("::")[0] for name in names}
    return names + [file.name for file in sorted(tests.glob("test_*.py")) if file.name not in whole]


def _run(command: Sequence[str], tests: Path, seconds: float) -> int:
    """One process; its exit code, 0 also where it found all skipped. One that takes longer has failed."""
    try:
        code = subprocess.run(command, cwd=tests, check=False, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        print(f"stopped after {seconds:g} s; its last test is the last line above without an outcome")
        return FAILED
    return 0 if code == _NOTHING_RAN else code


_NOTHING_RAN = 5  # pytest's


if __name__ == "__main__":
    sys.exit(main())
