"""GPU tests: skipped without a GPU; kernels are compiled ahead, side by side; the outcome goes to record.json."""

from __future__ import annotations

import datetime
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest

from distmlp.comm.threads import host_cores

pytest.register_assert_rewrite("gpu.checks")
RECORD = Path(__file__).parent / "record.json"
FOLDER = str(Path(__file__).parent)
# With `pytest -n N --dist loadgroup` few processes start ranks, each those of some transports: the ranks of a fixture
# start once, and not dozens of them, which spin while they wait, share cores and GPUs.
STARTS_RANKS = ("test_transports", "test_ranks_in_the_field", "test_commands_leave_the_same_weights")
GROUPS = {"staged": "staged", "mpi": "mpi", "peer": "peer", "nccl": "nccl, auto", "auto": "nccl, auto"}
LONG = ("test_twenty_kills", "test_resume", "test_sanitizer")  # begin early: the end should not wait for them
if find_spec("cupy") is None:  # the modules here import the GPU engine
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """With pytest-xdist: before the workers start, have their NumPy share the cores. Each would use them all."""
    if workers := getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(host_cores() / workers))))


def _obstacle() -> str:
    from distmlp.engine.device import find_obstacle

    return find_obstacle()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if str(item.path).startswith(FOLDER)]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if item.path.stem in STARTS_RANKS or item.name in STARTS_RANKS:
            way = item.name.partition("[")[2].partition("-")[0].rstrip("]")
            item.add_marker(pytest.mark.xdist_group(f"ranks {GROUPS.get(way, 'others')}"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [name not in LONG for name in (item.name, item.path.stem)])
    if ours and (obstacle := _obstacle()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=obstacle))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile what the cases need on all CPUs before the first test."""
    from gpu.cases import Case

    items = [item for item in session.items if str(item.path).startswith(FOLDER)]
    if not items or _obstacle():
        return
    if session.config.option.collectonly or hasattr(session.config, "workerinput"):
        return  # with pytest-xdist: run once with --setup-plan before, or every test compiles its own
    cases = [value for item in items for value in getattr(item, "callspec", _NONE).params.values()]
    modules = {item.module.__name__: item.module for item in items}.values()
    for module in modules:
        cases += getattr(module, "CASES", [])
    joined = [pair for module in modules for pair in getattr(module, "CASES_OF_RANKS", [])]
    started = time.perf_counter()
    jobs = kernels([*((case, 1) for case in cases if isinstance(case, Case)), *joined])
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        seconds = list(pool.map(_compile, jobs))
    print(
        f"\n{len(jobs)} kernels compiled in {time.perf_counter() - started:.0f} s; one took up to "
        f"{max(seconds, default=0):.1f} s"
    )


class _NONE:
    params: dict = {}  # noqa: RUF012


def kernels(cases: list) -> list[tuple]:
    """What to compile for `(case, ranks)`."""
    from engine.fakes import make_network

    from distmlp.engine.device_rows import OwnRows
    from distmlp.engine.fused_state import describe_device, peer_specialisation, specialisations
    from distmlp.engine.lane_plan import LanePlan
    from distmlp.engine.optimizers import needs_norm, slot_names
    from distmlp.engine.plan import make_plan
    from distmlp.engine.plan_task import Device, Task
    from distmlp.order import owned_streams

    device, jobs = Device(*describe_device()), {}
    for case, ranks in dict.fromkeys(cases):
        config, lanes = case.config, None
        largest = OwnRows(case.order, owned_streams(4, ranks, 0)).largest_batch
        if config.run.reproducible == "ranks":
            lanes = LanePlan(4, ranks, 0)
            largest = -(-min(case.batch, case.rows) // 4)
        task = Task(
            make_network(config), largest, case.precision, case.loss, case.labels, case.weights,
            slot_names(case.optimizer), config.run.ema_decay > 0, 2 if lanes else ranks, case.dtype,
            needs_norm(config.optimizer), lanes.rows if lanes else 0,
        )  # fmt: skip
        plan = make_plan(task, device, case.kernel)
        joined = peer_specialisation(config, plan)
        for source, macros in (*specialisations(config, plan), *([joined] if joined else [])):
            jobs[source, *sorted(macros.items())] = (source, macros, device.capability)
    return list(jobs.values())


def _compile(job: tuple) -> float:
    from distmlp.engine.compile import cubin

    started = time.perf_counter()
    cubin(*job)
    return time.perf_counter() - started


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what happened on this GPU, with the hash of the sources it happened to; nothing of a run that was cut."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    worker = hasattr(session.config, "workerinput")  # of xdist: it knows its own tests only
    if worker or reporter is None or exitstatus == pytest.ExitCode.INTERRUPTED or _obstacle():
        return
    counts = {
        kind: len([r for r in reporter.stats.get(kind, []) if str(r.nodeid).startswith("tests/gpu")])
        for kind in ("passed", "failed", "error", "skipped")
    }
    if not sum(counts.values()):
        return
    import cupy

    from distmlp.engine.compile import kernel_sha256

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    version = cupy.cuda.runtime.runtimeGetVersion()
    record = {
        "kernel_sha256": kernel_sha256(),
        "device": properties["name"].decode(),
        "driver": _driver_version(),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "passed": counts["passed"],
        "failed": counts["failed"] + counts["error"],
        "skipped": counts["skipped"],
    }
    if getattr(session.config.option, "lf", False):
        record = _repeated(json.loads(RECORD.read_text()), record, [r.nodeid for r in reporter.stats.get("passed", [])])
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def _repeated(before: dict, now: dict, passed: list[str]) -> dict:
    """The record of a run and of its failed tests run once more (`--last-failed`); it names those that passed then."""
    same = all(before.get(name) == now[name] for name in ("kernel_sha256", "device", "driver", "cuda"))
    assert same, "--last-failed repeats tests of this GPU and of these kernels"
    return {
        **now,
        "passed": before["passed"] + now["passed"],
        "skipped": before["skipped"] + now["skipped"],
        "passed_when_repeated": sorted(passed),
    }


def _driver_version() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next(word for word in words if word[0].isdigit() and word.count(".") >= 1)
    except (OSError, StopIteration):
        import cupy

        return str(cupy.cuda.runtime.driverGetVersion())
