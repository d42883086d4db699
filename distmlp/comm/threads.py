"""BLAS threads of a rank: the cores it may use, shared with the other ranks that may use them too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

USER_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def fair_threads(mine: frozenset[int], local: Sequence[frozenset[int]], quota: float) -> int:
    """Threads for a rank allowed on cores `mine`, on a host whose ranks are allowed on `local`, itself included.

    A core allowed to k ranks counts 1/k; `quota` is the CPU time limit of the host's job in cores (inf: none).
    """
    share = sum(1 / max(1, sum(core in other for other in local)) for core in mine)
    return max(1, int(min(share, quota / max(1, len(local))) + 1e-9))


def limit_blas_threads(local: Sequence[frozenset[int]]) -> None:
    """Give this rank's BLAS its fair share of the cores, where each rank of this host, itself included, may use those
    in `local`. A number set by the user is left alone."""
    if any(variable in os.environ for variable in USER_VARIABLES):
        return
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=fair_threads(allowed_cores(), local, cpu_quota()), user_api="blas")


def allowed_cores() -> frozenset[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def host_cores() -> float:
    """Cores for all ranks of the job on this host. A rank bound to one core says nothing of the others'."""
    cores = len(allowed_cores())
    return min(cores if cores > 1 else os.cpu_count() or 1, cpu_quota())


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores' worth of CPU time that the control group grants (cgroup v2 or v1); inf without a limit."""
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return quota_us / int((root / "cpu/cpu.cfs_period_us").read_text()) if quota_us > 0 else float("inf")
    return float("inf")
