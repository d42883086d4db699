"""What all tests share: which kinds run when, and settings that hold under `mpirun`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from distmlp.comm.hints import read_launch

# A job in the background of a script ignores Ctrl-C and its children inherit that: then no shell could trap it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_launch = read_launch()
RANKS = _launch.size or 1 if _launch is not None and _launch.live else 1

with suppress(ImportError):  # where the suites run on a second MPI, only what they need is installed
    import hypothesis

    # Ranks must draw the same examples, and a slow rank is no failure.
    hypothesis.settings.register_profile("here", derandomize=RANKS > 1 or "CI" in os.environ, deadline=None)
    hypothesis.settings.load_profile("here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long versions unless they are asked for by their marker or by name."""
    if "full" in config.getoption("markexpr") or any("::" in argument for argument in config.args):
        return
    long = [item for item in items if item.get_closest_marker("full")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if RANKS > 1 and not _passed_as_rank(terminalreporter):
        terminalreporter.write_line(f"no test marked `mpi` ran on {RANKS} ranks: pass --with-mpi", red=True)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Under mpirun, pytest-mpi without --with-mpi skips everything and is green: make that a failure."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if RANKS > 1 and reporter is not None and not _passed_as_rank(reporter):
        session.exitstatus = max(1, int(session.exitstatus))


def _passed_as_rank(reporter: pytest.TerminalReporter) -> bool:
    return any("mpi" in report.keywords for report in reporter.stats.get("passed", []))
