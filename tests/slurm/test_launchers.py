"""Launch lines that do not fit the MPI library: refused, never N independent trainings (FIELD case A02)."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm.site import Site

DISTMLP = (sys.executable, "-m", "distmlp", "train", "run.toml")


def test_srun_without_a_process_manager_is_refused(site: Site) -> None:
    result = site.cluster.call(["srun", "-n", "2", "--mpi=none", f"--chdir={site.folder}", *DISTMLP])
    assert result.returncode == 4, result.stderr
    message = [line for line in result.stderr.splitlines() if "distmlp: error" in line]
    assert len(message) == 1, result.stderr
    for part in ("SLURM_", "says 2 processes", "--mpi=pmix", "mpirun"):
        assert part in result.stderr
    assert not (site.folder / "out").exists()


def test_one_task_under_srun_needs_no_process_manager(site: Site) -> None:
    result = site.cluster.call(["srun", "-n", "1", "--mpi=none", f"--chdir={site.folder}", *DISTMLP])
    assert result.returncode == 0, result.stderr
    assert site.summary()["ranks"] == 1


def test_distmlp_in_the_batch_shell_is_one_rank(site: Site) -> None:
    script = site.folder / "alone.sbatch"
    script.write_text(f"#!/bin/bash\nexec {' '.join(DISTMLP)}\n")
    job = site.cluster.submit(
        "--ntasks=2", f"--chdir={site.folder}", f"--output={site.folder}/job-1.log", str(Path(script))
    )
    assert site.cluster.wait(job).state == "COMPLETED", site.log()
    assert site.summary()["ranks"] == 1
