"""One job at a time in an output directory, without file locks: many cluster file systems have none.

The lock is a file that appears complete, by a hard link, and names its owner. A dead owner is known at once
on the same host by its process. Elsewhere, and in another container, it is watched for a while: a living owner
touches the file every few seconds.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from distmlp.errors import ConfigError

NAME = ".lock"
BEAT_SECONDS = 5.0
WATCH_SECONDS = 40.0  # without a beat: long enough for a file server that stalls
DEAD_SECONDS = 90.0  # since the last beat: no need to watch
_JOBS = {"SLURM_JOB_ID": "Slurm job", "PBS_JOBID": "PBS job", "LSB_JOBID": "LSF job", "JOB_ID": "job"}


class OutputLock:
    """Held from construction until `release`, or until this process dies. Raises ConfigError naming the owner."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._me = _myself()
        while not _appear(self.path, self._me):
            self._remove_dead_owner()
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="output lock", daemon=True).start()

    def release(self) -> None:
        """Give the directory back; further calls do nothing."""
        if not self._released.is_set():
            self._released.set()
            if self.mine():
                with suppress(OSError):
                    self.path.unlink()

    def mine(self) -> bool:
        """Whether the lock is still ours: no other job has taken this one for dead."""
        return _read(self.path).get("token") == self._me["token"]

    def _remove_dead_owner(self) -> None:
        owner = _read(self.path)
        if _alive(owner, self.path):
            raise ConfigError(
                f"output {self.path.parent}: in use by another job: {_describe(owner)}; choose another run.output "
                f"or wait for its end; if that job is certainly dead, remove {self.path}"
            )
        # One at a time: whoever judged the old owner dead a moment ago must not remove the lock of its successor.
        turn = self.path.with_name(f"{NAME}.turn")
        if not _appear(turn, self._me):
            if not _fresh(turn):
                turn.unlink(missing_ok=True)  # of a job that died in these few lines
            time.sleep(0.02)
            return
        try:
            if _read(self.path) == owner:
                self.path.unlink(missing_ok=True)
        finally:
            turn.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self.path)


def _myself() -> dict[str, Any]:
    job = next((f"{name} {os.environ[key]}" for key, name in _JOBS.items() if os.environ.get(key)), "")
    return {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "job": job,
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": _machine(),
        "started": _started(os.getpid()),
        "token": secrets.token_hex(8),
    }


def _machine() -> str:
    """What a process number is unique in: this boot of this kernel, this PID namespace. Empty where unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str:
    """Start of a process in clock ticks, which tells it from a later one of the same number; empty if it is gone."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def _alive(owner: dict[str, Any], path: Path) -> bool:
    here = _myself()
    if owner.get("machine") and owner["machine"] == here["machine"] and isinstance(owner.get("pid"), int):
        return _started(owner["pid"]) == owner.get("started") != ""
    if owner.get("job") and owner["job"] == here["job"] and owner.get("restart") != here["restart"]:
        return False  # an earlier start of this very job, requeued since
    return _fresh(path) and _beats(path)


def _fresh(path: Path) -> bool:
    """Whether a file was touched lately, by the file server's clock and not ours."""
    probe = path.with_name(f"{NAME}.{secrets.token_hex(8)}")
    _write_new(probe, b"")
    try:
        return probe.stat().st_mtime - path.stat().st_mtime < DEAD_SECONDS
    except FileNotFoundError:
        return False
    finally:
        probe.unlink()


def _beats(path: Path) -> bool:
    """Whether somebody touches a file while we watch."""
    seen, until = _touched(path), time.monotonic() + WATCH_SECONDS
    while seen is not None and time.monotonic() < until:
        time.sleep(BEAT_SECONDS / 20)
        now = _touched(path)
        if now is not None and now != seen:
            return True
        seen = now
    return False


def _touched(path: Path) -> int | None:
    try:
        with open(path, "rb") as file:  # opening makes a network file system ask its server
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "its lock file does not say which"
    job = f", {owner['job']}" if owner.get("job") else ""
    return f"host {owner.get('host')}, pid {owner.get('pid')}{job}, since {owner.get('since')}"


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
        content = json.loads(file.read(4096))
        return content if isinstance(content, dict) else {}
    return {}


def _appear(path: Path, content: dict[str, Any]) -> bool:
    """Create `path` with its content at once; False where it exists. Raises OSError."""
    data = (json.dumps(content) + "\n").encode()
    temporary = path.with_name(f"{NAME}.{secrets.token_hex(8)}")
    _write_new(temporary, data)
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
    finally:
        temporary.unlink()
    try:  # no hard links here: exclusive creation, with a moment in which the file is still empty
        _write_new(path, data)
        return True
    except FileExistsError:
        return False


def _write_new(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.write(handle, content)
    finally:
        os.close(handle)
