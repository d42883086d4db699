"""Files that are complete or absent, and what is said when they cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmlp.files import check_replaceable, describe, leftovers, open_regular, replace_file, sync_directory


def only(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_pieces_and_header(tmp_path):
    path = tmp_path / "file"
    replace_file(path, [b"....", memoryview(b"body"), b""], lambda: b"head")
    assert path.read_bytes() == b"headbody"
    replace_file(path, [])
    assert path.read_bytes() == b""
    assert only(tmp_path) == ["file"]


def test_long_pieces_are_written_whole(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))  # as little as a kernel likes
    replace_file(tmp_path / "file", [bytes(range(100))])
    assert (tmp_path / "file").read_bytes() == bytes(range(100))


def broken_pieces() -> Iterator[bytes]:
    yield b"half"
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["write", "fsync", "close", "rename", None])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    real = getattr(os, call) if call else None

    def fail(*arguments: object) -> None:
        if call == "close":
            real(*arguments)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        if call:
            patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=r"exceeded|No space"):
            replace_file(path, [b"new"] if call else broken_pieces())
    assert path.read_bytes() == b"old"
    assert only(tmp_path) == ["file"]


def test_file_and_directory_are_on_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, r=real: (calls.append((n, _kind(a[0]))), r(*a))[1])
    replace_file(tmp_path / "file", [b"x"])
    assert calls == [("fsync", "file"), ("rename", ""), ("fsync", "directory")]


def _kind(handle: object) -> str:
    if not isinstance(handle, int):
        return ""
    return "directory" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"


def test_file_systems_that_cannot_sync_a_directory(tmp_path, monkeypatch):
    def refuse(handle: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    sync_directory(tmp_path)


def test_leftovers_are_those_of_the_names_asked_for(tmp_path):
    names = {
        ".step-1.h5.0123456789abcdef01234567.tmp": True,
        ".step-1.h5.0123456789ABCDEF01234567.tmp": False,
        "step-1.h5.0123456789abcdef01234567.tmp": False,
        ".other.0123456789abcdef01234567.tmp": False,
    }
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / ".step-2.h5.0123456789abcdef01234567.tmp").symlink_to("step-1.h5")
    found = {path.name for path in leftovers(tmp_path, r"step-\d+\.h5")}
    assert found == {name for name, ours in names.items() if ours}
    assert leftovers(tmp_path / "absent", ".*") == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ("No space left on device (ENOSPC)", "1,234 bytes needed", "free on its file system")),
        (errno.EDQUOT, ("EDQUOT", "1,234 bytes needed", "a quota may allow less")),
        (errno.EROFS, ("Read-only file system (EROFS)",)),
        (errno.EIO, ("Input/output error (EIO)",)),
    ],
)
def test_what_is_said_of_an_error(tmp_path, number, words):
    text = describe(OSError(number, os.strerror(number)), tmp_path / "gone" / "away", 1234)
    for word in words:
        assert word in text


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_files_are_replaced_or_read(tmp_path, kind):
    """Root may rename a file over a device; whoever opens a pipe waits for its other end."""
    path = tmp_path / "place"
    {"pipe": os.mkfifo, "device": lambda link: os.symlink(os.devnull, link), "folder": os.mkdir}[kind](path)
    with pytest.raises(OSError, match=r"is a directory|no regular file"):
        open_regular(path)
    with pytest.raises(OSError, match=r"Is a directory|no regular file"):
        replace_file(path, [b"data"])
    assert only(tmp_path) == ["place"]
    assert not path.is_file()


def test_a_file_is_not_replaced_by_what_is_made_from_it(tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    source.write_bytes(b"1")
    other.write_bytes(b"2")
    os.link(source, tmp_path / "link")
    check_replaceable(other, [source, tmp_path / "gone"])
    with pytest.raises(OSError, match="which it is made from"):
        check_replaceable(tmp_path / "link", [other, source])
