"""Keeps the outcome of the long fault suites in results/, for the repository."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.problem import record
from tests.launching import mpirun_make


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """After `pytest -m full tests/faults/…`: how many cases of each file passed and failed."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or "full" not in session.config.getoption("markexpr"):
        return
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in ("passed", "failed"):
        counts.update((Path(report.nodeid.split("::")[0]).stem, outcome) for report in reporter.stats.get(outcome, []))
    for name in ("failures", "signals", "outcomes"):
        passed, failed = counts[f"test_{name}", "passed"], counts[f"test_{name}", "failed"]
        if passed + failed > 1:
            record(name, mpi=mpirun_make(), passed=passed, failed=failed)
