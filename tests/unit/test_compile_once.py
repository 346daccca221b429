"""The compiler of the tests: what it has compiled it gives again, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compile_once import MOST_KEPT, compile_once, put_first

COMPILER = """#!/bin/sh
echo asked >>"$0.log"
cat "$1" >"$3"
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """One that gives the source back, and writes down how often."""
    path = tmp_path / "cc"
    path.write_text(COMPILER)
    path.chmod(0o755)
    return path


def asked(compiler: Path) -> int:
    return len(Path(f"{compiler}.log").read_text().splitlines())


def test_another_source_other_flags_and_another_compiler_are_compiled_anew(
    compiler: Path, tmp_path: Path
) -> None:
    source, header, made, kept = (tmp_path / name for name in ("a.cpp", "a.h", "made", "kept"))
    kept.mkdir()
    source.write_text("one")

    def compile(*flags: str) -> str:
        made.unlink(missing_ok=True)
        assert compile_once(kept, str(compiler), [str(source), "-o", str(made), *flags]) == 0
        return made.read_text()

    assert [compile(), compile()] == ["one", "one"] and asked(compiler) == 1
    compile("-O0")
    assert asked(compiler) == 2
    source.write_text("two")
    assert compile() == "two" and asked(compiler) == 3
    header.write_text("changed")
    compile()
    assert asked(compiler) == 4
    compiler.write_text(COMPILER + "# newer\n")
    compile()
    assert asked(compiler) == 5
    assert not list(kept.glob("*.part"))


def test_a_failure_is_told_and_not_kept(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("one")
    compiler.write_text('#!/bin/sh\necho asked >>"$0.log"\nexit 3\n')
    for _ in range(2):
        assert compile_once(tmp_path, str(compiler), [str(source), "-o", str(tmp_path / "made")]) == 3
    assert asked(compiler) == 2


def test_what_nobody_has_asked_for_lately_is_forgotten(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.rename(compiler.with_name("c++"))
    monkeypatch.setenv("PATH", str(tmp_path))
    kept = tmp_path / "kept"
    kept.mkdir()
    for number in range(MOST_KEPT + 2):
        (kept / f"{number}").touch()
    folder = put_first(kept)
    assert folder is not None and (folder / "c++").exists()
    (folder / "c++").unlink()
    folder.rmdir()
    assert len(list(kept.iterdir())) == MOST_KEPT
