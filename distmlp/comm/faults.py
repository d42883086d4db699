"""Faults of several ranks: exchanged with a deadline, and merged into one message for the job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from distmlp.errors import AgreedError

Fault = tuple[int, str]  # exit code, message

_GRAVEST_FIRST = (1, 4, 3, 2, 5, 75)
_FAULT_TAG, _ANSWER_TAG = 4096, 4097
_ANSWER_FACTOR = 2.5  # the other ranks wait so much longer than rank 0, which decides


def merge_faults(faults: Sequence[Fault | None], hosts: Sequence[str], what: str = "") -> AgreedError:
    """One error out of the faults of all ranks (None for those without), identical messages told once.

    `hosts` names each rank's host; `what` heads the message where there are several different ones.
    """
    ranks: dict[str, list[int]] = {}
    for rank, fault in enumerate(faults):
        if fault is not None:
            ranks.setdefault(fault[1], []).append(rank)
    codes = {fault[0] for fault in faults if fault is not None}
    code = min(codes, key=lambda c: _GRAVEST_FIRST.index(c) if c in _GRAVEST_FIRST else -1)
    lines = [
        text if len(where) == len(faults) else f"{text} [{name_ranks(where, hosts)}]" for text, where in ranks.items()
    ]
    if len(lines) == 1:
        return AgreedError(lines[0], code)
    return AgreedError("\n".join([f"{what or 'several ranks failed'}:", *(f"  {line}" for line in lines)]), code)


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """ "rank 3 on host a", or "ranks 0, 2 on a, b" cut short after eight."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} on host {hosts[ranks[0]]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks[:8]))}"


def exchange_faults(communicator: Any, fault: Fault, seconds: float) -> list[Fault | None] | None:
    """All ranks' faults, on every rank, if every rank calls this within about `seconds`; else None.

    Point to point, because ranks that did not fail may be in the middle of a collective and never come here.
    """
    from mpi4py import MPI

    deadline = time.monotonic() + seconds * (1 if communicator.rank == 0 else _ANSWER_FACTOR)
    if communicator.rank > 0:
        communicator.isend(fault, 0, _FAULT_TAG)
        while time.monotonic() < deadline:
            if communicator.iprobe(0, _ANSWER_TAG):
                return communicator.recv(source=0, tag=_ANSWER_TAG)
            time.sleep(0.01)
        return None
    faults: list[Fault | None] = [fault] + [None] * (communicator.size - 1)
    while None in faults and time.monotonic() < deadline:
        status = MPI.Status()
        if communicator.iprobe(MPI.ANY_SOURCE, _FAULT_TAG, status):
            faults[status.Get_source()] = communicator.recv(source=status.Get_source(), tag=_FAULT_TAG)
        else:
            time.sleep(0.01)
    if None in faults:
        return None
    for request in [communicator.isend(faults, other, _ANSWER_TAG) for other in range(1, communicator.size)]:
        request.wait()
    return faults
