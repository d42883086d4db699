"""How the ranks of the fused engine sum their gradients: what can be used here is found out, chosen and opened."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distmlp.comm.startup import library_make
from distmlp.comm.transport import Choice, Facts, Probe, choose_transport
from distmlp.errors import AgreedError

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.engine.fused import FusedEngine

NOT_TRIED = Probe(
    False,
    "not tried: MPI was running before distmlp could try it in a child process; use the `distmlp` command, or call "
    "distmlp.train before mpi4py.MPI is imported",
)


def find_facts(wanted: str, world: World, shared_gpu: bool) -> Facts:
    """What the choice hangs on, the same on every rank. Collective.

    Waits for the trial of device memory in the child process, if `wanted` may need its result.
    """
    tried = None
    several = len(world.hosts) > 1
    if world.device_probe is not None and wanted in ("auto", "mpi", *(["peer"] if several else [])):
        tried = world.device_probe.result()
    found = world.all_gather((tried, _nccl_obstacle()))
    fullest = max(world.all_gather(len(world.neighbours))) if several else 0
    return Facts(
        "fused", world.size, len(world.hosts), world.mpi_version, library_make(world.mpi_version),
        device_mpi=agreed_probe([probe for probe, _ in found]),
        nccl=next((obstacle for _, obstacle in found if obstacle), ""),
        shared_gpu=shared_gpu, fullest=fullest,
    )  # fmt: skip


def agreed_probe(probes: list[Probe | None]) -> Probe:
    """One for all ranks, of which some tried: what failed anywhere is used nowhere. Pure."""
    tried = [probe for probe in probes if probe is not None]
    failed = [probe for probe in tried if not probe.works]
    return (failed or tried or [NOT_TRIED])[0]


def connect(engine: FusedEngine, wanted: str, choice: Choice, facts: Facts) -> str:
    """Open `choice`; where `auto` chose it and it does not work after all, the next best. Collective.

    Returns the line for the start of a run. Raises AgreedError.
    """
    while True:
        try:
            between = ("mpi" if facts.device_mpi.works else "staged",) if facts.hosts > 1 else ()
            note = engine.connect(choice.transport, *between)
            return f"transport {choice.transport} ({choice.reason}{f'; {note}' if note else ''})"
        except AgreedError as error:
            if wanted != "auto" or choice.transport == "staged":
                raise
            if choice.transport == "mpi":
                facts = replace(facts, device_mpi=Probe(False, str(error)))
            elif choice.transport == "nccl":
                facts = replace(facts, nccl=str(error))
            else:
                facts = replace(facts, peer=str(error))
            choice = choose_transport(wanted, facts)


def _nccl_obstacle() -> str:
    from distmlp.engine.gpu import nccl_obstacle

    return nccl_obstacle()
