"""slurm/scaling.sbatch on a real Slurm: a sweep inside one allocation."""

from __future__ import annotations

import json

import pytest
from launching import PROJECT
from slurm.site import Site

SCALING = PROJECT / "slurm" / "scaling.sbatch"


@pytest.mark.parametrize("launcher", ["pmi2", "mpirun"])
def test_sweep_over_the_tasks_of_a_job(site: Site, launcher: str) -> None:
    words = ("run.toml", "--mode", "strong", "--steps", "40", "--out", "report")
    job = site.submit(*words, script=SCALING, launcher=launcher)
    assert site.cluster.wait(job, 120).state == "COMPLETED", site.log()
    report = json.loads((site.folder / "report" / "report.json").read_text())
    assert [point["ranks"] for point in report["points"]] == [1, 2]
    assert (site.folder / "report" / "report.html").exists()
