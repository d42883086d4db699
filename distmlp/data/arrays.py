"""How much memory this process may still take: the machine's, or its control group's where that is less."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes free for new data on this host, control-group limits included. Never negative."""
    limits = [_machine_bytes(root / "proc/meminfo")]
    limits += _group_bytes(root / CGROUP.relative_to("/"), root / "proc/self/cgroup")
    return max(0, min(limits))


def _machine_bytes(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 30  # unknown: be modest


def _group_bytes(mount: Path, membership: Path) -> list[int]:
    """What every control group above this process leaves (version 2 and 1); page cache counts as free."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version1 = "memory" in controllers.split(",")
        if controllers and not version1:
            continue
        base = mount / "memory" if version1 else mount
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version1 else ("memory.max", "memory.current")
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if base not in (folder, *folder.parents):
                break
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and limit < 1 << 60:
                limits.append(limit - (used or 0) + _cache_bytes(folder / "memory.stat"))
    return limits


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or "max"
        return None


def _cache_bytes(statistics: Path) -> int:
    try:
        pairs = dict(line.split()[:2] for line in statistics.read_text(encoding="ascii").splitlines())
        return int(pairs.get("inactive_file", pairs.get("total_inactive_file", 0)))
    except (OSError, ValueError):
        return 0
