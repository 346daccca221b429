"""Files of blocks: what is read is what was written under that name, or nothing."""

from __future__ import annotations

import errno
import os
import signal
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest

from engine.disk_cache.block_files import BlockFiles, private_directory
from engine.errors import StartRefused

BLOCK_BYTES = 96
FILE_BYTES = BLOCK_BYTES + 16  # with its digest


class FakeBlocks:
    """Blocks in memory, each in two pieces, two in a call."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.batch = 2
        self.block_bytes = BLOCK_BYTES
        self.memory = [bytearray([i + 1]) * BLOCK_BYTES for i in range(num_blocks)]

    def outgoing(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        return [[memoryview(self.memory[i])[:32], memoryview(self.memory[i])[32:]] for i in block_ids]

    incoming = outgoing

    def accept(self, block_ids: Sequence[int]) -> None:
        """In place."""


class LargeBlocks(FakeBlocks):
    """A single block of a megabyte, which takes a moment to write."""

    def __init__(self) -> None:
        self.batch = 1
        self.block_bytes = 1 << 20
        self.memory = [bytearray(self.block_bytes)]

    def fill(self, name: bytes) -> None:
        """As this name says."""
        self.memory[0][:] = (name * (self.block_bytes // len(name) + 1))[: self.block_bytes]

    def holds(self, name: bytes) -> bool:
        """Whether it does."""
        return self.memory[0] == (name * (self.block_bytes // len(name)))


def name_of(number: int, tag: bytes = b"") -> bytes:
    return tag + bytes([number]) * 32


NAMES = [name_of(i) for i in range(5)]


def files_in(directory: Path, blocks: FakeBlocks, kind: str = "k", max_bytes: int = 10_000) -> BlockFiles:
    return BlockFiles(private_directory(directory), kind, blocks, max_bytes)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Five blocks, written."""
    written = files_in(tmp_path / "kv", FakeBlocks()).write(range(5), NAMES, lambda block_id: True)
    assert written == 5
    return tmp_path / "kv"


def paths(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def read_all(directory: Path, names: Sequence[bytes] = NAMES, kind: str = "k") -> tuple[int, FakeBlocks]:
    """How many are good, read by another process into blocks that hold something else."""
    blocks = FakeBlocks()
    for memory in blocks.memory:
        memory[:] = bytes(BLOCK_BYTES)
    return files_in(directory, blocks, kind).read(range(len(names)), names), blocks


def test_another_process_reads_what_was_written(directory: Path) -> None:
    num_good, blocks = read_all(directory)
    assert num_good == 5
    assert blocks.memory[:5] == FakeBlocks().memory[:5]
    assert blocks.memory[5] == bytes(BLOCK_BYTES)
    assert files_in(directory, blocks).count_stored([*NAMES, name_of(9)]) == 5


def test_a_read_that_fails_returns_when_nothing_is_written_into_the_blocks_any_more(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = FakeBlocks()
    files, late = files_in(directory, blocks), Event()
    read_block, ended = files._read_block, []

    def fail_or_be_late(name: bytes, pieces: Sequence[memoryview]) -> bool:
        if name == NAMES[0]:
            raise OSError("the disk is gone")
        late.wait(0.05)
        ended.append(name)
        return read_block(name, pieces)

    monkeypatch.setattr(files, "_read_block", fail_or_be_late)
    with pytest.raises(OSError, match="the disk is gone"):
        files.read(range(5), NAMES)
    assert ended, "the other half was waited for"
    files.close()


def test_what_is_there_is_not_written_again(directory: Path) -> None:
    assert files_in(directory, FakeBlocks()).write(range(5), NAMES, lambda block_id: True) == 0


def test_only_the_user_can_read_any_of_it(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, FILE_BYTES - 1),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:50] + b"\xff" + path.read_bytes()[51:]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
        lambda path: path.write_bytes(bytes(FILE_BYTES)),
    ],
    ids=["emptied", "cut", "longer", "changed", "other digest", "zeros"],
)
def test_a_damaged_file_is_deleted_and_what_follows_it_is_not_read(directory: Path, damage: object) -> None:
    assert callable(damage)
    third = next(path for path in paths(directory) if path.name == NAMES[2].hex())
    damage(third)
    num_good, _ = read_all(directory)
    assert num_good == 2
    assert not third.exists()
    assert len(paths(directory)) == 4


def test_a_file_on_a_bad_sector_is_deleted_and_those_before_it_are_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = next(path for path in paths(directory) if path.name == NAMES[2].hex())
    inode, transfer = third.stat().st_ino, os.preadv

    def read(file: int, pieces: Sequence[memoryview], offset: int) -> int:
        if os.fstat(file).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return transfer(file, pieces, offset)

    monkeypatch.setattr(os, "preadv", read)
    assert read_all(directory)[0] == 2
    assert not third.exists()


def test_contents_under_another_name_are_not_taken_for_its_own(directory: Path) -> None:
    files = {path.name: path for path in paths(directory)}
    files[NAMES[1].hex()].replace(files[NAMES[0].hex()])
    assert read_all(directory)[0] == 0


def test_contents_of_another_kind_are_not_found(directory: Path) -> None:
    assert read_all(directory, kind="other")[0] == 0
    kind = next(directory.iterdir())
    kind.rename(kind.with_name("v1-other"))
    assert read_all(directory, kind="other")[0] == 0, "the digest knows the kind, too"


def test_a_block_that_changes_while_it_is_read_is_not_stored(tmp_path: Path) -> None:
    files = files_in(tmp_path / "kv", FakeBlocks())
    assert files.write(range(3), NAMES[:3], lambda block_id: block_id != 1) == 2
    assert files.count_stored(NAMES[:3]) == 1
    assert len(paths(tmp_path / "kv")) == 2, "nothing unfinished is left"


def test_a_symbolic_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    first = next(path for path in paths(directory) if path.name == NAMES[0].hex())
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        read_all(directory)


def test_what_was_of_no_use_for_longest_goes_first_and_of_a_prompt_its_end(directory: Path) -> None:
    for age, path in enumerate(paths(directory)):
        os.utime(path, (1000 - age, 1000 - age))
    blocks = FakeBlocks()
    files = files_in(directory, blocks, max_bytes=4 * FILE_BYTES)
    assert files.read([0, 1], NAMES[:2]) == 2  # they are of use
    assert files.write([5], [name_of(7)], lambda block_id: True) == 1
    left = {path.name for path in paths(directory)}
    assert left == {name.hex() for name in (NAMES[0], NAMES[1], name_of(7))}, "90 % of the budget"
    times = [os.stat(next(directory.rglob(NAMES[i].hex()))).st_mtime_ns for i in (0, 1)]
    assert times[0] >= times[1]


def test_a_disk_smaller_than_the_budget_keeps_what_was_of_use_last(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = os.pwritev

    def write(file: int, pieces: Sequence[memoryview], offset: int) -> int:
        if sum(path.stat().st_size for path in paths(directory)) >= 5 * FILE_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        return transfer(file, pieces, offset)

    monkeypatch.setattr(os, "pwritev", write)
    for age, name in enumerate(NAMES):
        os.utime(next(directory.rglob(name.hex())), (1000 - age, 1000 - age))
    files = files_in(directory, FakeBlocks(), max_bytes=1 << 30)
    files.touch(NAMES[3:])
    with pytest.raises(OSError, match="No space left"):
        files.write([5], [name_of(7)], lambda block_id: True)
    assert files.write([5], [name_of(7)], lambda block_id: True) == 1
    left = {name_of(7), *NAMES} - {NAMES[2]}
    assert {path.name for path in paths(directory)} == {name.hex() for name in left}


def test_what_other_processes_and_other_kinds_wrote_counts(directory: Path) -> None:
    other = files_in(directory, FakeBlocks(), kind="other", max_bytes=3 * FILE_BYTES)
    assert other.write([6], [name_of(8)], lambda block_id: True) == 1
    assert sum(path.stat().st_size for path in paths(directory)) <= 3 * FILE_BYTES


def test_what_a_killed_process_left_unfinished_goes_with_time(directory: Path) -> None:
    left = next(directory.glob("v*/*")) / ".unfinished-1-0"
    left.write_bytes(b"x" * 50)
    os.utime(left, (1, 1))
    files_in(directory, FakeBlocks(), max_bytes=5 * FILE_BYTES).write(
        [5], [name_of(7)], lambda block_id: True
    )
    assert not left.exists()


def test_processes_of_one_number_in_several_containers_write_beside_each_other(tmp_path: Path) -> None:
    one, other = (files_in(tmp_path / "kv", FakeBlocks()) for _ in range(2))

    def write_the_same(block_id: int) -> bool:
        assert other.write([block_id], NAMES[:1], lambda _: True) == 1
        return True

    assert one.write([0], NAMES[:1], write_the_same) == 1
    assert read_all(tmp_path / "kv", NAMES[:1])[0] == 1
    assert len(paths(tmp_path / "kv")) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_killed_while_it_writes_leaves_whole_blocks_or_none(tmp_path: Path) -> None:
    names = [i.to_bytes(32, "big") for i in range(4000)]
    blocks = LargeBlocks()
    num_found = 0
    for kill in range(8):
        written, says_written = os.pipe()
        if (child := os.fork()) == 0:
            try:
                files = BlockFiles(private_directory(tmp_path / "kv"), "k", blocks, 1 << 40)
                for name in names[500 * kill :]:
                    blocks.fill(name)
                    files.write([0], [name], lambda block_id: True)
                    os.write(says_written, b".")
            finally:
                os._exit(1)
        for _ in range(3 + kill % 3):
            os.read(written, 1)
        time.sleep(0.0003 * kill)  # somewhere within the next ones
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(written)
        os.close(says_written)
        files = BlockFiles(tmp_path / "kv", "k", blocks, 1 << 40)
        for name in names[500 * kill : 500 * (kill + 1)]:
            if files.count_stored([name]):
                blocks.fill(b"something else")
                assert files.read([0], [name]) == 1, "a whole file was damaged"
                assert blocks.holds(name)
                num_found += 1
    assert num_found >= 8 * 3


def test_one_owners_contents_can_be_forgotten(tmp_path: Path) -> None:
    files = files_in(tmp_path / "kv", FakeBlocks())
    names = [name_of(1, b"owner--a"), name_of(2, b"owner--b")]
    files.write([0, 1], names, lambda block_id: True)
    files.forget(b"owner--a")
    assert [files.count_stored([name]) for name in names] == [0, 1]
    files.forget(b"")
    assert not paths(tmp_path / "kv")


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StartRefused, match=r"open to other users \(mode 755\).*chmod 700"):
        private_directory(tmp_path / "open")


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StartRefused, match=r"belongs to user \d+ and this is user 12345"):
        private_directory(tmp_path / "mine")


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartRefused, match="--prefix-cache-dir"):
        private_directory(tmp_path / "file")
