"""Which GPU a rank drives: chosen from what every rank of the host sees, shown in a table, never shared by accident.

Listing the GPUs goes through the driver and creates no context: a context on GPU 0 by every rank would cost
hundreds of megabytes there (horovod#2625, pytorch#135279).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distmlp.errors import AgreedError, SystemUnfitError

if TYPE_CHECKING:
    from distmlp.comm.world import World


@dataclass(frozen=True)
class Gpu:
    """A device as a process sees it: its name and UUID; the ordinal is its place in the process's list."""

    name: str
    uuid: str


@dataclass(frozen=True)
class Seat:
    """A rank and its GPU."""

    rank: int
    host: str
    visible: str | None  # CUDA_VISIBLE_DEVICES, None where it is not set
    ordinal: int
    gpu: Gpu


@dataclass(frozen=True)
class Binding:
    """The result of `bind`: this rank's ordinal, all seats, and what to warn of."""

    ordinal: int
    seats: tuple[Seat, ...]
    warning: str  # "" unless GPUs are shared on purpose

    @property
    def shared(self) -> bool:
        """Whether several ranks share a GPU."""
        return bool(self.warning)


def bind(world: World, share_gpu: bool) -> Binding:
    """Choose this rank's GPU. Collective; sets no device itself, so that the engine's first call can.

    Raises AgreedError (exit code 4) where a rank sees no GPU, or ranks would share one without `run.share_gpu`.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    everyone = world.all_gather((world.place, visible, list_gpus()))
    seats = seat_ranks(
        [(place, world.rank_hosts[rank], seen, gpus) for rank, (place, seen, gpus) in enumerate(everyone)]
    )
    warning = shared_gpus(seats)
    if warning and not share_gpu:
        raise AgreedError(
            f"{warning}: start one rank per GPU, or let them share with --set run.share_gpu=true",
            SystemUnfitError.exit_code,
        )
    return Binding(seats[world.rank].ordinal, seats, warning)


def seat_ranks(ranks: Sequence[tuple[object, str, str | None, Sequence[Gpu]]]) -> tuple[Seat, ...]:
    """GPUs for all ranks, given as (place, host, CUDA_VISIBLE_DEVICES, GPUs seen); pure.

    Ranks of the same place are of one host. Raises AgreedError where some see no GPU.
    """
    blind = [f"rank {rank} on host {host} (CUDA_VISIBLE_DEVICES {_shown(seen)})"
             for rank, (_, host, seen, gpus) in enumerate(ranks) if not gpus]  # fmt: skip
    if blind:
        raise AgreedError(
            f"no CUDA device is visible to {', '.join(blind[:4])}{' …' if len(blind) > 4 else ''}; ask the scheduler "
            "for a GPU per rank, unset CUDA_VISIBLE_DEVICES, or use --set run.engine=reference",
            SystemUnfitError.exit_code,
        )
    ordinals: dict[int, int] = {}
    for place in dict.fromkeys(place for place, *_ in ranks):
        local = [rank for rank, (other, *_) in enumerate(ranks) if other == place]
        chosen = choose_gpus([[gpu.uuid for gpu in ranks[rank][3]] for rank in local])
        ordinals |= dict(zip(local, chosen, strict=True))
    return tuple(
        Seat(rank, host, seen, ordinals[rank], gpus[ordinals[rank]]) for rank, (_, host, seen, gpus) in enumerate(ranks)
    )


def choose_gpus(visible: Sequence[Sequence[str]]) -> list[int]:
    """Ordinals for the ranks of one host, from the UUIDs each of them sees, in the order of the local rank. Pure.

    The wanted ordinal is the local rank where several are visible and 0 where one is (the scheduler has then chosen).
    Where that GPU is taken, another that is visible and free is used, and only then is one shared.
    """
    taken: dict[int, str] = {}
    # Ranks with the fewest choices go first, so that nobody takes the only GPU of another.
    for local_rank in sorted(range(len(visible)), key=lambda rank: len(visible[rank])):
        uuids = visible[local_rank]
        wanted = uuids[local_rank % len(uuids)]
        free = [uuid for uuid in uuids if uuid not in taken.values()]
        taken[local_rank] = wanted if wanted in free or not free else free[0]
    return [list(uuids).index(taken[local_rank]) for local_rank, uuids in enumerate(visible)]


def shared_gpus(seats: Sequence[Seat]) -> str:
    """ "2 ranks on host a, 1 GPU (UUID)" for every host where ranks share GPUs, "" where none do. Pure."""
    hosts: dict[str, list[Seat]] = {}
    for seat in seats:
        hosts.setdefault(seat.host, []).append(seat)
    crowded = []
    for host, local in hosts.items():
        uuids = list(dict.fromkeys(seat.gpu.uuid for seat in local))
        if len(uuids) < len(local):
            plural = "s" if len(uuids) > 1 else ""
            crowded.append(f"{len(local)} ranks on host {host}, {len(uuids)} GPU{plural} ({', '.join(uuids)})")
    return "; ".join(crowded)


def table(seats: Sequence[Seat]) -> str:
    """The start-up table: rank, host, visible list, chosen ordinal, name and UUID."""
    rows = [("rank", "host", "CUDA_VISIBLE_DEVICES", "ordinal", "GPU", "UUID")]
    rows += [
        (str(seat.rank), seat.host, _shown(seat.visible), str(seat.ordinal), seat.gpu.name, seat.gpu.uuid)
        for seat in seats
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def list_gpus() -> list[Gpu]:
    """The GPUs this process sees, in the order of their ordinals; empty without a driver. Creates no context."""
    with suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return [_describe(cuda, ordinal) for ordinal in range(count.value)]
    return []


def _describe(cuda: ctypes.CDLL, ordinal: int) -> Gpu:
    device, name, uuid = ctypes.c_int(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, 256, device)
    # the second version tells the instances of a partitioned (MIG) GPU apart
    get_uuid = cuda.cuDeviceGetUuid_v2 if hasattr(cuda, "cuDeviceGetUuid_v2") else cuda.cuDeviceGetUuid
    get_uuid(ctypes.byref(uuid), device)
    text = bytes(uuid).hex()
    return Gpu(
        name.value.decode(errors="replace"),
        "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])),
    )


def _shown(visible: str | None) -> str:
    return "not set" if visible is None else repr(visible)
