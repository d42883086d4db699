"""compute-sanitizer over a few small steps: no access outside, no race in shared memory, nothing read unwritten."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.cases import Case
from gpu.checks import hopper_only

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
SCRIPT = """
import sys
from distmlp.engine import compile
from gpu.cases import rates
from gpu.test_sanitizer import GROUPS
if sys.argv[2:] == ["waits"]:
    sources = {name: text.replace("bar.arrive", "bar.sync") for name, text in compile._sources().items()}
    compile._sources = lambda: sources
for case in GROUPS[sys.argv[1]]:
    engine = case.fused(poison=None)
    assert engine.plan.kernel == case.kernel
    if case.kernel == "bulk":  # what bulk stores write initcheck does not see: outputs and errors, slopes among them
        engine._state.arena.zero("bulk_rows", engine._state.ledger.stream)
    assert engine.train(0, 0, rates(3)).steps == 3
    engine.predict(case.data().inputs[:100])
    engine.close()
print("done")
"""
SPECIAL = Case(widths=(5, 33, 3), optimizer="adam", precision="bf16", extra=3)
GROUPS = {
    "wide": [
        Case(widths=(5, 33, 3), batch=40, optimizer="adam", extra=3),
        Case(widths=(5, 33, 3), batch=40, optimizer="adam", precision="bf16", options={"clip_norm": 0.1}, extra=3),
        Case(widths=(7, 66, 11), batch=300, loss="softmax_cross_entropy", labels=True, precision="tf32", extra=3),
        Case(widths=(5, 17, 9), batch=40, optimizer="lamb", weights=True, extra=3),
    ],
    "narrow": [SPECIAL.but(kernel="narrow", batch=140)],
    "resident": [SPECIAL.but(kernel="resident", batch=40)],
    "sweep": [SPECIAL.but(kernel="sweep", batch=8500)],
    "passes": [SPECIAL.but(kernel="passes", batch=8500)],
    "strips": [
        SPECIAL.but(kernel="strips", precision="tf32", batch=140),
        SPECIAL.but(kernel="strips", precision="fp32", batch=300, widths=(5, 70, 40, 3), activation="gelu"),
    ],
    "chain": [SPECIAL.but(kernel="chain", widths=(5, 140, 3), batch=1000)],
    "bulk": [
        SPECIAL.but(kernel="bulk", widths=(5, 70, 3), batch=140),
        SPECIAL.but(kernel="bulk", widths=(128, 256, 3), batch=700, activation="relu"),  # tiles that a layer has whole
        SPECIAL.but(kernel="bulk", widths=(128, 256, 3), batch=140, precision="tf32"),
    ],
}
ARRIVE = ("passes", "chain", "bulk")  # at named barriers, without waiting there
CASES = [case for cases in GROUPS.values() for case in cases]
KERNELS = [
    pytest.param(name, marks=hopper_only if name in ("sweep", "passes", "chain", "bulk") else ()) for name in GROUPS
]


# A race as the tool tells it byte by byte: what of (RAW: read after write), and the threads of both accesses.
HAZARD = re.compile(
    r"Potential (\w+) hazard detected.*\n=+ +(?:Write|Read) Thread \((\d+),.*\n=+ +(?:Write|Read) Thread \((\d+),"
)
HELPING = 256  # first thread of the bulk kernel that does not multiply


def only_helpers_read(output: str) -> bool:
    """Whether all races are reads by helping threads: by the one that copies, or of what thread 0 has written for all.

    Of their barriers the tool (of CUDA 13.0) sometimes misses one, the more often the busier the GPU: it has written of
    a race, now and then, between a store and a load with a `BAR.SYNC` of the whole block between them in machine code.
    """
    found = [(kind, int(writer), int(reader)) for kind, writer, reader in HAZARD.findall(output)]
    told = sum(map(int, re.findall(r"\[(\d+) hazards\]", output)))  # summed up by the places in the code
    return len(found) == told > 0 and all(
        kind == "RAW" and (reader == HELPING or (writer == 0 and reader > HELPING)) for kind, writer, reader in found
    )


@pytest.mark.skipif(not os.path.exists(TOOL), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_sanitizer_is_clean(tool: str, kernel: str) -> None:
    # Seen with CUDA 13.0: two accesses with a `bar.sync` of all their threads between them are said to race once a warp
    # has arrived at another barrier by `bar.arrive`, in a kernel of twenty lines that does nothing else, too. So who
    # arrives waits as well; what it does next is then ordered more than it is in use, all else as it is.
    waits = ["waits"] if tool == "racecheck" and kernel in ARRIVE else []
    detail = ["--racecheck-report=all", "--print-limit=100000"] if tool == "racecheck" else []
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(
        [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    done = subprocess.run(
        [TOOL, f"--tool={tool}", *detail, "--error-exitcode=9", sys.executable, "-c", SCRIPT, kernel, *waits],
        capture_output=True, text=True, timeout=240, env=environment, cwd=tests.parent,
    )  # fmt: skip
    assert "done" in done.stdout, (done.stdout + done.stderr)[-3000:]
    if not ((tool, kernel) == ("racecheck", "bulk") and only_helpers_read(done.stdout)):
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
