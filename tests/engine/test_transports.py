"""From `run.transport` to an engine that is joined: facts, choice, second choice, refusal; the GPU is a stub."""

from __future__ import annotations

from typing import Any

import pytest

from distmlp.comm.binding import Binding, Gpu, Seat
from distmlp.comm.transport import Probe
from distmlp.config import RunConfig
from distmlp.engine import Standardization, select, transports
from distmlp.errors import AgreedError, SystemUnfitError
from distmlp.network import Network
from tests.engine.fakes import FakeWorld, run_ranks

NETWORK = Network.build([3, 2], "relu", "identity")
AWARE, UNAWARE = Probe(True, "right in a trial"), Probe(False, "the trial's all-reduce crashed with signal 11")
LIBRARY = "Open MPI v5.0.11"


class Child:
    """The trial of device memory, as its parent sees it."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.asked = probe, 0

    def result(self) -> Probe:
        self.asked += 1
        return self.probe


class Engine:
    """Joins by anything but `broken`."""

    reason, devices = "a stub", ()

    def __init__(self, world: FakeWorld, broken: tuple[str, ...]) -> None:
        self.world, self.broken, self.tried = world, broken, []
        self.transport = "none"

    def connect(self, transport: str) -> str:
        self.tried.append(transport)

        def join() -> None:
            if transport in self.broken:
                raise SystemUnfitError(f"{transport} gives wrong sums")

        self.world.agree(join)
        self.transport = transport
        return "55 µs"


def opened(
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    probe: Probe | None = AWARE,
    nccl: str = "",
    shared: bool = False,
    broken: tuple[str, ...] = ("peer",),
    feed: Any = "rows",
) -> list[tuple[Engine, str, Child]]:
    """Engine, what is said at the start, and the child, of two ranks; rank 0 alone has a child."""
    config = RunConfig(model={"layers": (3, 2)}, data={"train": "x"}, run={"transport": wanted})
    seats = tuple(Seat(rank, "host", None, rank, Gpu("H200", f"GPU-{rank}")) for rank in range(2))
    monkeypatch.setattr(select, "_obstacle_here", lambda config: "")
    monkeypatch.setattr(select, "bind", lambda world, share: Binding(world.rank, seats, "2 ranks" if shared else ""))
    monkeypatch.setattr(select, "_fused", lambda arguments, ordinal: Engine(arguments[2], broken))
    monkeypatch.setattr(transports, "_nccl_obstacle", lambda: nccl)

    def body(world: FakeWorld) -> tuple[Engine, str, Child]:
        world.mpi_version = LIBRARY
        child = Child(probe or AWARE)
        world.device_probe = child if world.rank == 0 and probe else None
        return *select.open_engine(config, NETWORK, world, feed, Standardization()), child

    return run_ranks(2, body)


@pytest.mark.parametrize(
    ("wanted", "options", "taken", "said"),
    [
        ("auto", {"broken": ()}, "peer", "reach each other's GPU memory"),
        ("auto", {}, "mpi", "peer gives wrong sums"),
        ("auto", {"probe": UNAWARE}, "nccl", "signal 11"),
        ("auto", {"probe": UNAWARE, "nccl": "NCCL is not installed"}, "staged", "NCCL is not installed"),
        ("auto", {"probe": None}, "nccl", "MPI was running before distmlp could try it"),
        ("auto", {"probe": UNAWARE, "shared": True}, "staged", "ranks share a GPU"),
        ("auto", {"broken": ("peer", "mpi")}, "nccl", "mpi gives wrong sums"),
        ("auto", {"broken": ("peer", "mpi", "nccl")}, "staged", "nccl gives wrong sums"),
        ("mpi", {}, "mpi", "asked for"),
        ("nccl", {"probe": UNAWARE}, "nccl", "asked for"),
        ("staged", {"probe": UNAWARE}, "staged", "asked for"),
        ("peer", {"broken": (), "shared": True}, "peer", "asked for"),
    ],
)
def test_taken_on_all_ranks_and_said(monkeypatch, wanted, options, taken, said):
    for engine, reason, _ in opened(monkeypatch, wanted, **options):
        assert engine.transport == taken
        line = reason.splitlines()[-1]
        assert line.startswith(f"transport {taken} (")
        assert line.endswith("55 µs)")
        assert said in line
        assert "GPU-1" in reason


@pytest.mark.parametrize(
    ("wanted", "options", "words"),
    [
        ("mpi", {"probe": UNAWARE}, ("not CUDA-aware", LIBRARY, "signal 11", "ompi_info")),
        ("mpi", {"probe": None}, ("not CUDA-aware", "before mpi4py.MPI is imported")),
        ("mpi", {"broken": ("mpi",)}, ("mpi gives wrong sums",)),
        ("nccl", {"nccl": "NCCL is not installed"}, ("run.transport = nccl", "not installed")),
        ("nccl", {"shared": True}, ("ranks share a GPU, which NCCL refuses",)),
        ("peer", {}, ("peer gives wrong sums",)),
    ],
)
def test_refused_on_all_ranks(monkeypatch, wanted, options, words):
    with pytest.raises(AgreedError) as refused:
        opened(monkeypatch, wanted, **options)
    assert refused.value.exit_code == SystemUnfitError.exit_code
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(("wanted", "asked"), [("auto", 1), ("mpi", 1), ("nccl", 0), ("staged", 0)])
def test_trial_is_waited_for_only_where_it_decides(monkeypatch, wanted, asked):
    child = opened(monkeypatch, wanted)[0][2]
    assert child.asked == asked


def test_library_that_fails_is_never_handed_device_memory(monkeypatch):
    for engine, _, _ in opened(monkeypatch, "auto", probe=UNAWARE, broken=("peer", "nccl")):
        assert engine.tried == ["peer", "nccl", "staged"]


def test_nothing_is_joined_without_training(monkeypatch):
    for engine, _, child in opened(monkeypatch, "mpi", probe=UNAWARE, feed=None):
        assert (engine.tried, child.asked) == ([], 0)


def test_what_failed_on_one_host_is_used_on_none():
    assert transports.agreed_probe([None, AWARE, None, UNAWARE]) == UNAWARE
    assert transports.agreed_probe([None, AWARE]) == AWARE
    assert not transports.agreed_probe([None, None]).works
