"""BLAS threads of a rank: fair shares of cores, control groups, and a user's own choice."""

from __future__ import annotations

import json
import os

import pytest

from distmlp.comm.threads import cpu_quota, fair_threads
from tests.launching import run_python

INF = float("inf")


def cores(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


@pytest.mark.parametrize(
    ("mine", "local", "quota", "threads"),
    [
        pytest.param(cores(*range(8)), [cores(*range(8))], INF, 8, id="alone"),
        pytest.param(cores(*range(8)), [cores(*range(8))] * 2, INF, 4, id="two share all"),
        pytest.param(cores(*range(8)), [cores(*range(8))] * 3, INF, 2, id="rounded down"),
        pytest.param(cores(0, 1), [cores(0, 1), cores(2, 3)], INF, 2, id="bound apart"),
        pytest.param(cores(0, 1, 2), [cores(0, 1, 2), cores(2, 3)], INF, 2, id="one core in common"),
        pytest.param(cores(0), [cores(0)] * 4, INF, 1, id="crowded"),
        pytest.param(cores(*range(64)), [cores(*range(64))] * 2, 8.0, 4, id="control group of 8 cores"),
        pytest.param(cores(*range(64)), [cores(*range(64))], 0.5, 1, id="half a core"),
    ],
)
def test_fair_share(mine, local, quota, threads):
    assert fair_threads(mine, local, quota) == threads


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "200000 100000\n"}, 2.0),
        ({"cpu.max": "max 100000\n"}, INF),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, INF),
        ({}, INF),
        ({"cpu.max": "nonsense"}, INF),
    ],
)
def test_quota_of_the_control_group(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize("chosen", ["2", ""])
def test_users_number_of_threads_is_respected(chosen):
    """Two ranks on this machine; without a choice each gets its share, at least one."""
    script = (
        "import json, os, numpy, threadpoolctl\n"
        "from distmlp.comm.policy import guarded\n"
        "from distmlp.comm.threads import allowed_cores, cpu_quota\n"
        "def main():\n"
        "    from distmlp.comm.world import open_world\n"
        "    world = open_world()\n"
        "    found = [pool['num_threads'] for pool in threadpoolctl.threadpool_info() if pool['user_api'] == 'blas']\n"
        "    share = max(1, int(min(len(allowed_cores()), cpu_quota()) // 2))\n"
        "    gathered = world.all_gather((found, share))\n"
        "    if world.rank == 0: print(json.dumps(gathered))\n"
        "guarded(main)\n"
    )
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
    env = {"OMP_NUM_THREADS": chosen} if chosen else {}
    script = f"import os\nif {not chosen}:\n    [os.environ.pop(name, None) for name in {variables}]\n" + script
    done = run_python(2, script, env=env)
    assert done.returncode == 0, done.stderr
    ((first, share), (second, _)) = json.loads(done.stdout)
    expected = min(2, os.cpu_count() or 1) if chosen else share
    assert set(first) | set(second) == {expected}
