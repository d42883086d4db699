"""`distmlp doctor`: what this machine offers, what `auto` would take, and what to do about the rest."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from distmlp.comm.hints import rank_hint
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
    """Engine and transport that `auto` takes here, and why."""
    obstacle = facts["gpu"].get("obstacle", facts["gpu"].get("error"))
    if obstacle:
        engine, reason = "reference", f"no GPU engine: {obstacle}"
    else:
        names = sorted({device["name"] for device in facts["gpu"]["devices"]})
        engine, reason = "fused", f"GPU {', '.join(names)}" if names else "a GPU can be used"
    several = facts["mpi"].get("ranks", {}).get("size") == 2
    transport = "mpi" if several else "none"
    why = "host buffers through MPI" if several else "one rank: nothing to reduce"
    return {"engine": engine, "engine_reason": reason, "transport": transport, "transport_reason": why}


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
        f"     and transport {auto['transport']} ({auto['transport_reason']})",
    ]
    if not report["works"]:
        lines.append("auto has no working choice here: mend what is marked FAULT")
    return "\n".join(lines)
