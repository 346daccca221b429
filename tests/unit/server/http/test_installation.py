"""The secret of an installation: one for all its processes and starts, nobody else's."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.http.installation import SECRET_BYTES, installation_secret

FILE = "installation-secret"


def test_it_is_made_once_and_for_us_alone(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    secret = installation_secret(home)
    assert len(secret) == SECRET_BYTES
    assert installation_secret(home) == secret
    assert [path.name for path in home.iterdir()] == [FILE]
    assert stat.S_IMODE((home / FILE).stat().st_mode) == 0o600
    assert installation_secret(tmp_path / "other") != secret


def test_all_who_make_it_at_once_have_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: installation_secret(tmp_path), range(32)))
    assert len(secrets) == 1
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * (SECRET_BYTES + 1)])
def test_one_of_another_length_is_not_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    (tmp_path / FILE).chmod(0o600)
    assert len({installation_secret(tmp_path) for _ in range(2)}) == 2


def test_one_that_others_can_read_or_made_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / FILE
    file.write_bytes(b"x" * SECRET_BYTES)
    file.chmod(0o644)
    assert installation_secret(tmp_path) != b"x" * SECRET_BYTES
    file.chmod(0o600)
    assert installation_secret(tmp_path) == b"x" * SECRET_BYTES
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert installation_secret(tmp_path) != b"x" * SECRET_BYTES


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_bytes(b"x" * SECRET_BYTES)
    known.chmod(0o600)
    (tmp_path / FILE).symlink_to(known)
    assert installation_secret(tmp_path) != known.read_bytes()


def test_without_a_place_to_keep_it_there_is_one_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len({installation_secret(tmp_path / "file" / "home") for _ in range(2)}) == 2


def test_the_state_of_tenants_has_it_too_and_takes_it_along(tmp_path: Path) -> None:
    secret = installation_secret(tmp_path / "home")
    assert installation_secret(tmp_path / "home", tmp_path / "state") == secret
    assert installation_secret(tmp_path / "new", tmp_path / "state") == secret
    assert installation_secret(tmp_path / "new") != secret
    (tmp_path / "file").write_text("")
    assert installation_secret(tmp_path / "file" / "home", tmp_path / "state") == secret
    assert installation_secret(tmp_path / "home", tmp_path / "file" / "state") == secret
