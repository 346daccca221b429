import gc
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from config import Settings
from config.setting import SETTINGS
from config.toml_file import read_toml
from server.commands import cli

SLIPSTREAM = (sys.executable, "-c", "import sys; from server.commands.cli import main; sys.exit(main())")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        for name in setting.env_names:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Replace the server by one that notes its settings and ends with code 7."""
    seen: list[Settings] = []

    def run(settings: Settings) -> int:
        seen.append(settings)
        return 7

    module = ModuleType("server.commands.serve")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server.commands.serve", module)
    monkeypatch.setattr("server.observability.logs.configure_logging", lambda log, never_waits: None)
    monkeypatch.setattr("server.observability.logs.adopt_library_loggers", lambda: None)
    monkeypatch.setattr(cli, "_leave_on_signals", lambda: None)
    return seen


def test_serve_hands_the_settings_over_and_returns_the_servers_code(served: list[Settings]) -> None:
    assert cli.main(["serve", "m", "--port", "9", "--api-key", "k"]) == 7
    (settings,) = served
    assert (settings.model.model, settings.server.port) == ("m", 9)
    assert cli.main(["serve"]) == 7
    assert served[1] == Settings()


def test_an_interrupt_is_no_traceback(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_settings: Settings) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["server.commands.serve"], "run", interrupt)
    assert cli.main(["serve"]) == 130


def test_nothing_collects_garbage_while_the_server_loads(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(sys.modules["server.commands.serve"], "run", lambda _: seen.append(gc.isenabled()))
    cli.main(["serve"])
    assert (seen, gc.isenabled()) == ([False], True)


UNKNOWN_FLAG = "flag --prot: unknown flag; did you mean --port? (see slipstream serve --help)"
BAD_PORT = "flag --port: server.port = 'x' is not allowed; expected a whole number from 0 to 65535"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serve", "--prot", "9"], UNKNOWN_FLAG),
        (["serve", "--port", "x"], BAD_PORT),
        (["serve", "a", "b"], "argument MODEL: 'b' is one model too many; argument MODEL already names 'a'"),
        (["serve", "--config", "/no/file"], "file /no/file: cannot be read (No such file or directory)"),
        (["serv"], "unknown command serv; did you mean serve? (see slipstream --help)"),
        (["--verison"], "unknown command --verison; did you mean --version? (see slipstream --help)"),
        (["smollm2-135m-instruct"], "unknown command smollm2-135m-instruct (see slipstream --help)"),
        (["ser\nve\x1b["], r"unknown command ser\nve\x1b[; did you mean serve? (see slipstream --help)"),
        (["config"], "config: expected slipstream config show [--origins]"),
        (["config", "shwo"], "config: expected slipstream config show [--origins]"),
        (
            ["config", "show", "--orgins"],
            "flag --orgins: unknown flag; did you mean --cors-origin? (see slipstream serve --help)",
        ),
    ],
)
def test_mistakes_are_one_line_on_stderr_and_code_2(
    argv: list[str], line: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr() == ("", f"slipstream: {line}\n")
    assert served == []


def test_no_command_shows_the_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: slipstream COMMAND")


@pytest.mark.parametrize("argv", [["--help"], ["-h"]])
def test_help_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in cli.COMMANDS:
        assert command in out


@pytest.mark.parametrize("argv", [["serve", "--help"], ["serve", "m", "--port", "x", "-h"]])
def test_serve_help_gives_each_setting_one_line_under_its_section(
    argv: list[str], capsys: pytest.CaptureFixture[str], served: list[Settings]
) -> None:
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert served == []
    section, found = "", []
    for line in out.splitlines():
        assert len(line) <= 140
        if line and line[0].isalpha() and ":" in line:
            section = line.partition(":")[0]
        elif line.startswith("  --"):
            flag = line.split()[0].replace("[no-]", "")
            found.append((section, flag))
    described = [(setting.section, setting.flag) for setting in SETTINGS if setting.flag]
    assert found == [("options", "--config"), *described]


@pytest.mark.parametrize(
    "line",
    [
        "  --port N                          port to listen on; 0 = any free one (default: 8000)",
        "  --kv-cache-memory SIZE            memory for K/V on a CPU (default: 1GiB)",
        "  --[no-]prefix-caching             keep and reuse the K/V of shared prefixes (default: on)",
        "  --compile WORD                    kernels compiled for this CPU; auto = where that is possible: "
        "auto|on|off (default: auto)",
        "  --max-connections N               open connections (default: 2048)",
        "  --revision NAME                   branch, tag or commit of the Hugging Face repo",
    ],
)
def test_serve_help_shows_defaults_and_choices(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["serve", "--help"])
    assert line in capsys.readouterr().out.splitlines()


def test_version_is_that_of_the_distribution(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "version", lambda name: f"<{name}>")
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "slipstream <slipstream>\n"


def test_config_show_prints_a_file_that_serve_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], served: list[Settings]
) -> None:
    argv = ["m", "--port", "9", "--max-body-bytes", "1MiB", "--no-per-request-metrics"]
    assert cli.main(["config", "show", *argv]) == 0
    path = tmp_path / "s.toml"
    path.write_text(capsys.readouterr().out)
    assert len(read_toml(path)) == 4
    cli.main(["serve", *argv])
    cli.main(["serve", "--config", str(path)])
    assert served[0] == served[1]


@pytest.mark.parametrize("argv", [["--origins", "--port", "9"], ["--port", "9", "--origins"]])
def test_config_show_origins_says_where_each_value_came_from(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOST", "0.0.0.0")
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "s3cret")
    assert cli.main(["config", "show", *argv]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "port = 9 # flag --port" in lines
    assert 'host = "0.0.0.0" # env SLIPSTREAM_HOST' in lines
    assert "# api-key: 1 set, not shown # env SLIPSTREAM_API_KEY" in lines
    assert "# max-queued-requests = 256 # default" in lines
    assert "s3cret" not in out
    assert sum(" # " in line for line in lines) == len(SETTINGS)


def test_config_show_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["config", "--help"], ["config", "show", "-h"]):
        assert cli.main(argv) == 0
        assert "--origins" in capsys.readouterr().out


LIGHT = """
import sys
from server.commands.cli import main
codes = [main(argv.split()) for argv in sys.argv[1:]]
heavy = {"torch", "transformers", "fastapi", "starlette", "uvicorn", "structlog", "numpy", "engine"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert codes == [0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2], codes
"""


@pytest.mark.parametrize("name", [*cli.COMMANDS])
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("usage: slipstream ")
    assert f"slipstream {name}" in out and (name.startswith("train-") or "\nexamples:\n" in out)
    assert max(map(len, out.splitlines())) <= 140


def test_a_reader_that_has_had_enough_is_no_traceback() -> None:
    program = "import sys; from server.commands.cli import main; sys.exit(main())"
    pipe = f"{sys.executable} -c '{program}' serve --help | head -1"
    ran = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("usage: slipstream serve [MODEL] [options]\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
@pytest.mark.by_default("--help", "config show")
@pytest.mark.parametrize("words", ["--help", "config show", "models"])
def test_a_full_disk_is_one_line(words: str, tmp_path: Path) -> None:
    environ = {**os.environ, "SLIPSTREAM_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [*SLIPSTREAM, *words.split()], stdout=full, stderr=subprocess.PIPE, env=environ, timeout=60
        )
    line = b"slipstream: nothing more can be written: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (1, line)


def test_a_name_that_the_terminal_cannot_show_is_spelled_out() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    words = [*SLIPSTREAM, "config", "show", "\u65e5\u672c"]
    ran = subprocess.run(words, capture_output=True, env=environ, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b'\nmodel = "\\u65e5\\u672c"\n' in ran.stdout


def test_quick_answers_import_nothing_heavy() -> None:
    good = ["--help", "--version", "serve --help", "config show"]
    good += [f"{name} --help" for name in ("bench", "chat", "doctor")]
    bad = ["serve --prot 9", "serve --port x", "bench --rat 3", "chat --sytem x", "doctor --prot 9"]
    commands = [*good, *bad]
    ran = subprocess.run([sys.executable, "-c", LIGHT, *commands], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines() == [
        f"slipstream: {UNKNOWN_FLAG}",
        f"slipstream: {BAD_PORT}",
        "slipstream: bench: flag --rat: unknown flag; did you mean --rate? (see slipstream bench --help)",
        "slipstream: chat: flag --sytem: unknown flag; did you mean --system? (see slipstream chat --help)",
        f"slipstream: {UNKNOWN_FLAG}",
    ]
