"""`make serve` and `make test` begin with the right Python, or say so and leave nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands in for an interpreter: tells a version, makes environments of itself, and installs nothing.
PYTHON = """\
#!/bin/sh
case "$*" in
    *version_info*) echo {version} ;;
    "-m venv"*) {venv} ;;
    *"pip"*) echo "pip of {version}" ;;
esac
"""
NAMED_EXTRA = "slipstream" + "["
MAKES = 'mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp /bin/true "$3/bin/slipstream"'


class Project:
    """A copy of what the set-up reads, in a folder with interpreters of our choice."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder / "clone", folder / "path"
        (self.folder / "deploy").mkdir(parents=True)
        self.path.mkdir()
        for name in ("Makefile", "pyproject.toml", "deploy/constraints.txt", "deploy/venv.sh"):
            shutil.copy(ROOT / name, self.folder / name)

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    def has_python(self, name: str, version: str, venv: str = MAKES) -> None:
        """Put an interpreter on the path."""
        (self.path / name).write_text(PYTHON.format(version=version, venv=venv))
        (self.path / name).chmod(0o755)

    def has_venv(self, version: str) -> None:
        """An environment from an earlier time, with something in it."""
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "bin/python").write_text(PYTHON.format(version=version, venv=MAKES))
        (self.venv / "bin/python").chmod(0o755)
        (self.venv / "old").touch()

    def make(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run make; interpreters that the machine really has are behind ours, under other names."""
        path = f"{self.path}:/usr/bin:/bin"
        ours = ("PYTHON", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # of the make that runs the tests
        env = {name: value for name, value in os.environ.items() if name not in ours}
        return subprocess.run(
            ["make", *words], cwd=self.folder, env=env | {"PATH": path}, text=True, capture_output=True
        )


def test_an_extra_is_never_fetched_from_an_index_by_our_name() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    texts = [
        ROOT / name for name in listed.stdout.split("\0") if name.endswith((".md", ".py", ".toml", ".yaml"))
    ]
    naming = [str(path) for path in texts if path.is_file() and NAMED_EXTRA in path.read_text()]
    assert not naming  # there it may be a stranger's: `pip install '.[ray]'`, in the source folder


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("target", ["serve", "test"])
@pytest.mark.parametrize("version", ["3.9", "3.10", "2.7"])
def test_an_old_python_is_one_line_and_leaves_nothing(project: Project, target: str, version: str) -> None:
    project.has_python("python3", version)
    project.has_python("python3.12", "3.12")
    ended = project.make(target)
    first, *rest = ended.stderr.splitlines()
    assert ended.returncode != 0
    assert (
        first == f"Slipstream needs Python 3.11 or newer; found {version} as python3; try PYTHON=python3.12"
    )
    assert all(line.startswith("make") for line in rest) and ended.stdout == ""
    assert not project.venv.exists()


def test_no_python_at_all_is_the_same_line(project: Project) -> None:
    ended = project.make("serve", "PYTHON=python3.99")
    assert ended.stderr.startswith(
        "Slipstream needs Python 3.11 or newer; found none as python3.99; try PYTHON="
    )


def test_an_old_environment_is_replaced_by_the_python_named(project: Project) -> None:
    project.has_python("python3", "3.9")
    project.has_python("python3.12", "3.12")
    project.has_venv("3.9")
    assert project.make("serve").returncode != 0
    assert (project.venv / "old").exists()  # nothing is taken away before there is something better
    ended = project.make("serve", "PYTHON=python3.12")
    assert ended.returncode == 0, ended.stderr
    assert "pip of 3.12" in ended.stdout
    assert not (project.venv / "old").exists()


def test_an_environment_whose_python_is_gone_is_replaced(project: Project) -> None:
    project.has_python("python3", "3.11")
    project.has_venv("3.12")
    (project.venv / "bin/python").unlink()
    (project.venv / "bin/python").symlink_to("/nowhere/python")
    (project.venv / ".installed").touch()
    ended = project.make("serve")
    assert ended.returncode == 0, ended.stderr
    assert "pip of 3.11" in ended.stdout  # installed anew, although the old one was marked as complete


def test_a_good_environment_is_kept_whatever_python3_is(project: Project) -> None:
    project.has_python("python3", "3.9")
    project.has_venv("3.12")
    assert "pip of 3.12" in project.make("test").stdout
    assert (project.venv / "old").exists()
    project.has_python("python3.13", "3.13")
    assert "pip of 3.13" in project.make("test", "PYTHON=python3.13").stdout  # the one that was asked for
    assert not (project.venv / "old").exists()


def test_what_is_installed_is_not_installed_again(project: Project) -> None:
    project.has_python("python3", "3.11")
    assert "[1/2]" in project.make("test").stdout
    assert "[1/2]" not in project.make("test").stdout
    os.utime(project.venv / ".installed", (0, 0))
    assert "[1/2]" in project.make("test").stdout


def test_a_python_that_cannot_make_environments_leaves_nothing(project: Project) -> None:
    project.has_python("python3", "3.11", venv='mkdir "$3"; exit 1')
    ended = project.make("serve")
    assert "python3 cannot make virtual environments" in ended.stderr.splitlines()[0]
    assert not project.venv.exists()
