"""Which transport reduces the gradients: a table of decisions over plain facts. Pure.

`none` one rank; `mpi` MPI on the buffers where they lie (GPU memory for the fused engine, host memory for the
reference engine); `staged` through page-locked host memory; `nccl`; `peer` inside the step's kernel, or, on several
hosts, in peer memory within a host and by MPI between the first ranks of hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distmlp.errors import SystemUnfitError


@dataclass(frozen=True)
class Probe:
    """Whether the MPI library moves device memory, found out in a child process."""

    works: bool
    reason: str  # what was tried and how it ended


AVAILABLE = frozenset({"mpi", "staged", "nccl", "peer"})
MOST_PEERS = 8  # ranks of a host that `peer` joins, as in kernels/peers.cuh


@dataclass(frozen=True)
class Facts:
    """What the decision hangs on; the same on every rank."""

    engine: str  # fused or reference
    size: int
    hosts: int
    mpi_version: str = ""  # the MPI library's version string
    make: str = ""
    device_mpi: Probe = Probe(False, "not tried")
    peer: str = ""  # why the ranks of a host cannot reach each other's GPU memory; "" if they can
    nccl: str = ""  # why NCCL cannot be used; "" if it can
    shared_gpu: bool = False
    fullest: int = 0  # ranks of the host with the most; 0: as many on each
    offered: frozenset[str] = AVAILABLE

    @property
    def neighbours(self) -> int:
        """Most ranks of a host."""
        return self.fullest or -(-self.size // self.hosts)


@dataclass(frozen=True)
class Choice:
    """The transport and why it was taken."""

    transport: str
    reason: str


def choose_transport(wanted: str, facts: Facts) -> Choice:
    """Decide `run.transport`. Raises SystemUnfitError where the one asked for cannot work here."""
    if facts.size == 1:
        return Choice("none", "one rank: nothing to reduce")
    if facts.engine == "reference":
        if wanted in ("nccl", "peer"):
            raise SystemUnfitError(
                f"run.transport = {wanted} needs the fused engine on GPUs, and the reference engine runs here; "
                "use --set run.transport=auto"
            )
        return Choice("mpi", "host buffers through MPI: the reference engine keeps everything in host memory")
    obstacles = {name: obstacle(name, facts) for name in ("peer", "mpi", "nccl", "staged")}
    if wanted != "auto":
        if wanted == "peer":  # ranks that share a GPU take turns of milliseconds, but it works
            obstacles[wanted] = obstacle(wanted, replace(facts, shared_gpu=False))
        if obstacles[wanted]:
            raise SystemUnfitError(f"run.transport = {wanted} cannot work here: {obstacles[wanted]}")
        return Choice(wanted, "asked for")
    if facts.hosts > 1 and not obstacles["peer"]:  # two stages; MPI and NCCL know the way between hosts by themselves
        direct = next((name for name in ("mpi", "nccl") if not obstacles[name]), "")
        if direct:
            obstacles["peer"] = f"the ranks are on {facts.hosts} hosts, and {direct} moves GPU memory between them"
    taken = next(name for name in obstacles if not obstacles[name] or name == "staged")
    passed = [f"{name}: {reason}" for name, reason in obstacles.items() if reason and name != taken]
    better = [text for text in passed if list(obstacles).index(text.split(":")[0]) < list(obstacles).index(taken)]
    merit = _MERITS[taken]
    if taken == "peer" and facts.hosts > 1:
        merit = (
            f"up to {facts.neighbours} ranks of a host add up in GPU memory, and only the first goes on through host "
            f"memory; mpi: {obstacles['mpi']}; nccl: {obstacles['nccl']}"
        )
    return Choice(taken, "; ".join([merit, *better]))


_MERITS = {
    "peer": "all ranks are on one host and reach each other's GPU memory",
    "mpi": "the MPI library moves GPU memory",
    "nccl": "NCCL moves GPU memory",
    "staged": "through page-locked host memory, which works with any MPI",
}


def obstacle(transport: str, facts: Facts) -> str:
    """Why `transport` cannot serve the fused engine here, with what to do; "" if it can."""
    if transport not in facts.offered:
        return "it is not available yet in this version of distmlp"
    if transport == "peer":
        if facts.hosts > 1 and facts.neighbours == 1:
            return f"the ranks are on {facts.hosts} hosts, one on each"
        if facts.shared_gpu:
            return "ranks share a GPU, and kernels that wait for each other take turns there"
        if facts.neighbours > MOST_PEERS:
            return f"{facts.neighbours} ranks on a host, and it joins up to {MOST_PEERS}"
        return facts.peer
    if transport == "nccl":
        return "ranks share a GPU, which NCCL refuses" if facts.shared_gpu else facts.nccl
    if transport == "mpi" and not facts.device_mpi.works:
        return (
            f"the MPI library is not CUDA-aware ({facts.device_mpi.reason}): {facts.mpi_version}; "
            f"{device_hint(facts.make)}"
        )
    return ""


def device_hint(make: str) -> str:
    """How device support is switched on in an MPI of this make."""
    return _DEVICE_HINTS.get(make, _DEVICE_HINTS["MPICH"])


_DEVICE_HINTS = {
    "Open MPI": (
        "Open MPI needs a build with CUDA (`ompi_info --parsable --all | grep mpi_built_with_cuda_support:value`) and "
        "a UCX with cuda_copy and cuda_ipc in UCX_TLS; see launch/env/openmpi-ucx.sh"
    ),
    "MPICH": "MPICH needs a build with --with-cuda and MPIR_CVAR_ENABLE_GPU=1; see launch/env/mpich.sh",
    "Intel MPI": (
        "Intel MPI needs I_MPI_OFFLOAD=1, I_MPI_OFFLOAD_CUDA_LIBRARY=/full/path/of/libcuda.so.1 and I_MPI_ROOT; "
        "see launch/env/intel-mpi.sh"
    ),
    "Cray MPICH": (
        "Cray MPICH needs MPICH_GPU_SUPPORT_ENABLED=1 and its GTL library (craype-accel module, or LD_PRELOAD of "
        "libmpi_gtl_cuda.so); see launch/env/cray.sh"
    ),
    "MVAPICH": "MVAPICH needs a build with --enable-cuda and MV2_USE_CUDA=1",
}
