from pathlib import Path

import pytest

from config import SettingsError, load_with_origins
from config.setting import Given
from config.toml_file import format_toml, read_toml

TOO_LARGE = "a number is too long, or tables or arrays are nested too deep"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_tables_are_sections_and_keys_come_in_both_cases(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'home = "/data"\n[model]\nserved-model-name = ["a", "b"]\n[scheduler]\nmax_num_seqs = 8\n'
        'max-decode-seqs = 4\n[server]\napi-key = "k"\nstrict-params = true\n',
    )
    assert {key: value for key, (value, _) in read_toml(path).items()} == {
        "home": "/data",
        "model.served_model_name": ("a", "b"),
        "scheduler.max_num_seqs": 8,
        "scheduler.max_decode_seqs": 4,
        "server.api_key": ("k",),
        "server.strict_params": True,
    }


def test_each_value_knows_its_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 9\n")
    assert read_toml(path) == {"server.port": Given(9, f"file {path}")}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[servr]\nport = 1\n", "unknown table [servr]; did you mean [server]?"),
        ("[[server]]\nport = 1\n", "unknown key server"),
        ("[server]\nprot = 1\n", "unknown key server.prot; did you mean server.port?"),
        (
            "[server]\nmax-num-seqs = 1\n",
            "unknown key server.max-num-seqs; did you mean scheduler.max_num_seqs?",
        ),
        ("port = 1\n", "unknown key port; did you mean server.port?"),
        ("server = 1\n", "unknown key server"),
        ("[server.http]\nport = 1\n", "unknown key server.http"),
        ("[server]\nmax-n = 1\nmax_n = 1\n", "server.max_n is given twice"),
        (
            "[server\n",
            "not valid TOML (Expected ']' at the end of a table declaration (at line 1, column 8))",
        ),
        ('[server]\n"a\\nb" = 1\n', r"unknown key server.a\nb"),
        (f"[server]\nport = {'1' * 5000}\n", TOO_LARGE),
        (f"[server]\nport = {'[' * 3000}{']' * 3000}\n", TOO_LARGE),
    ],
)
def test_mistakes_name_the_file_and_the_key(tmp_path: Path, text: str, line: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        read_toml(path)
    assert str(caught.value).startswith(f"file {path}: {line}")
    assert str(caught.value).isprintable()


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.toml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SettingsError) as caught:
            read_toml(path)
        assert str(caught.value) == f"file {path}: cannot be read ({reason})"
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_toml(binary)


def test_what_is_written_reads_back_as_the_same(tmp_path: Path) -> None:
    template = write(tmp_path, "x")
    argv = [
        'mine/Ünï"q\\\x7f',
        "--max-body-bytes=3MiB",
        "--priority-aging-seconds",
        "0.1234567",
        "--port",
        "8000",
    ]
    argv += ["--no-prefix-caching", "--served-model-name=a", "--served-model-name=b c", "--swap-space=0"]
    argv += ["--max-model-len", "77", "--chat-template", str(template), "--num-kv-blocks=auto"]
    first = load_with_origins(argv, {"SLIPSTREAM_HOME": str(tmp_path)})
    path = tmp_path / "shown.toml"
    path.write_text(format_toml(*first), encoding="utf-8")
    again = load_with_origins(["--config", str(path)], {})
    assert again.settings == first.settings
    given = {key for key, origin in first.origins.items() if origin != "default"}
    assert {key for key, origin in again.origins.items() if origin != "default"} == given


def test_defaults_stand_in_comments_and_origins_behind(tmp_path: Path) -> None:
    loaded = load_with_origins(["--port", "9"], {"SLIPSTREAM_LOG__LOG_LEVEL": "debug"})
    plain = format_toml(*loaded)
    assert "\nport = 9\n" in plain
    assert '\n# host = "127.0.0.1"\n' in plain
    assert "default" not in plain.replace("is not set", "")
    lines = [" ".join(line.split()) for line in format_toml(*loaded, with_origins=True).splitlines()]
    assert "port = 9 # flag --port" in lines
    assert 'log-level = "debug" # env SLIPSTREAM_LOG__LOG_LEVEL' in lines
    assert '# host = "127.0.0.1" # default' in lines
    assert "# revision is not set # default" in lines


def test_keys_are_counted_not_shown() -> None:
    loaded = load_with_origins(["--api-key", "s3cret"], {})
    text = format_toml(*loaded, with_origins=True)
    assert "s3cret" not in text
    assert "# api-key: 1 set, not shown" in text
