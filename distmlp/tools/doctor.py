"""`distmlp doctor`: what this machine offers, what `auto` would take, and what to do about the rest."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from distmlp.comm.hints import rank_hint
from distmlp.comm.transport import Facts, Probe, choose_transport
from distmlp.errors import SystemUnfitError
from distmlp.tools.doctor_facts import gather
from distmlp.tools.doctor_findings import FAULT, Finding, findings

MARKS = {"ok": "ok   ", "note": "     ", "warning": "warn ", "fault": "FAULT"}


def run_doctor(as_json: bool) -> int:
    """Look and print; returns 0 when `auto` has a working choice, else 4. Under a launcher rank 0 alone speaks."""
    if rank_hint() > 0:
        return 0
    report = diagnose(gather())
    print(json.dumps(report, indent=1) if as_json else text(report))
    return 0 if report["works"] else SystemUnfitError.exit_code


def diagnose(facts: dict[str, Any]) -> dict[str, Any]:
    """`works`, `auto` (engine, transport, reason), `findings`, `facts`."""
    found = findings(facts)
    return {
        "works": all(finding.state != FAULT for finding in found),
        "auto": auto_choice(facts),
        "findings": [asdict(finding) for finding in found],
        "facts": facts,
    }


def auto_choice(facts: dict[str, Any]) -> dict[str, str]:
    """Engine and transports that `auto` takes here, and why: `transport` between the ranks of this host,
    `transport_between_hosts` where there are several."""
    gpu, mpi = facts["gpu"], facts["mpi"]
    obstacle = gpu.get("obstacle", gpu.get("error"))
    if obstacle:
        engine, reason = "reference", f"no GPU engine: {obstacle}"
    else:
        names = sorted({device["name"] for device in gpu["devices"]})
        engine, reason = "fused", f"GPU {', '.join(names)}" if names else "a GPU can be used"
    choice = {"engine": engine, "engine_reason": reason}
    for key, hosts in (("transport", 1), ("transport_between_hosts", 2)):
        if mpi.get("ranks", {}).get("size") == 2:
            taken = choose_transport("auto", transport_facts(facts, engine, hosts))
        else:
            taken = choose_transport("auto", Facts(engine, 1, 1))
        choice |= {key: taken.transport, f"{key}_reason": taken.reason}
    return choice


def transport_facts(facts: dict[str, Any], engine: str, hosts: int) -> Facts:
    """What the choice of a transport hangs on, for a job of one rank a GPU on `hosts` hosts like this one."""
    gpu, mpi = facts["gpu"], facts["mpi"]
    reached = all(all(row) for row in gpu.get("peers", []))
    return Facts(
        engine=engine,
        size=hosts * max(2, len(gpu.get("devices", []))),
        hosts=hosts,
        mpi_version=mpi["library"].get("library", ""),
        make=mpi["library"].get("make", ""),
        device_mpi=Probe(**mpi["device"]),
        peer="" if reached else "some GPUs here do not reach each other's memory",
        nccl="" if gpu.get("nccl") else "NCCL is not installed (pip install nvidia-nccl-cu13)",
    )


def text(report: dict[str, Any]) -> str:
    """The report for people: a line a finding, the advice below it."""
    lines = []
    for item in report["findings"]:
        finding = Finding(**item)
        lines.append(f"{MARKS[finding.state]} {finding.subject:6} {finding.text}")
        if finding.advice:
            lines.append(f"             → {finding.advice}")
    auto = report["auto"]
    lines += [
        "",
        f"auto takes engine {auto['engine']} ({auto['engine_reason']})",
        f"     transport {auto['transport']} between ranks of this host ({auto['transport_reason']})",
        f"     transport {auto['transport_between_hosts']} between hosts ({auto['transport_between_hosts_reason']})",
    ]
    if not report["works"]:
        lines.append("auto has no working choice here: mend what is marked FAULT")
    return "\n".join(lines)
