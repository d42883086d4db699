"""How commands end under a launcher (I03): the promised code on every rank and from mpirun, one message; and what a
run prints (I01): every line once, warnings of any rank with its tag."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.faults.faults import SECONDS, RunningJob, injection, train_command
from tests.faults.problem import make_problem
from tests.launching import run_mpi

RANKS = 3
# Runs a command and notes its exit code by rank, as the launcher gets to see it.
NOTING = """
note=$1/code-${PMI_RANK:-$OMPI_COMM_WORLD_RANK}
shift
"$@"
code=$?
echo $code > "$note"
exit $code
"""


@pytest.fixture
def problem(tmp_path):
    return make_problem(tmp_path, steps=12, checkpoint_every="6 steps", log_every=3)


def damage(toml: Path, how: str) -> None:
    shard = toml.parent / "train-1.h5"
    if how == "nan":
        with h5py.File(shard, "r+") as file:
            file["inputs"][5, 2] = np.nan
    elif how == "text":
        shard.write_text("not HDF5")
    elif how == "occupied":
        (toml.parent / "run").mkdir()
        (toml.parent / "run" / "notes.txt").write_text("mine")


TIRED = ('data.validation="train-0.h5"', "optimizer.learning_rate=0.0", 'run.validate_every="1 steps"', "run.steps=200")
WILD = ("optimizer.learning_rate=1e30", "optimizer.name=sgd", "schedule.warmup_steps=0")
OUTCOMES: dict[str, tuple[tuple[str, ...], str, int, str]] = {  # --set, harm done, code, words of the message
    "done": ((), "", 0, ""),
    "early stopping": (("run.early_stopping=1", *TIRED), "", 0, ""),
    "no such section": (("dta.batch=64",), "", 2, "dta"),
    "unknown key": (("data.bach=64",), "", 2, "`batch`"),
    "fewer streams than ranks": (("data.streams=2",), "", 2, "data.streams"),
    "output occupied": ((), "occupied", 2, "--overwrite"),
    "no such shards": (('data.train="nothing-*.h5"',), "", 3, "nothing-*.h5"),
    "shard that is no HDF5": ((), "text", 3, "train-1.h5"),
    "no GPU": (("run.engine=fused",), "", 4, "run.engine = fused"),
    "precision without a GPU": (("run.precision=bf16",), "", 4, "bf16"),
    "not a number in the data": ((), "nan", 5, "train-1.h5"),
    "divergence": (WILD, "", 5, "diverged"),
}
LONG = {"no such section", "no such shards", "precision without a GPU", "divergence", "early stopping"}


@pytest.mark.parametrize(
    "outcome", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in OUTCOMES]
)
def test_code_on_every_rank_and_one_message(problem, outcome):
    overrides, harm, code, words = OUTCOMES[outcome]
    damage(problem, harm)
    settings = [f"--set={override}" for override in overrides]
    started = time.monotonic()
    env = {"CUDA_VISIBLE_DEVICES": ""}
    argv = ["sh", "-c", NOTING, "sh", str(problem.parent), *train_command(problem, *settings)]
    done = run_mpi(RANKS, argv, cwd=problem.parent, env=env, timeout=2 * SECONDS)
    assert done.returncode == code, done.stderr
    assert time.monotonic() - started < 2 * SECONDS  # the start included, on a busy machine
    assert "Traceback" not in done.stderr
    assert done.stderr.count("distmlp: error:") == (code != 0)
    assert words in done.stderr
    noted = {path.name: path.read_text().strip() for path in problem.parent.glob("code-*")}
    assert set(noted.values()) == {str(code)}, noted


def test_lines_of_a_run_are_printed_once(problem):
    done = run_mpi(4, train_command(problem))
    assert (done.returncode, done.stderr) == (0, "")
    assert max(Counter(done.stdout.splitlines()).values()) == 1
    steps = [int(line.split()[1].split("/")[0]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert steps == sorted(set(steps))
    assert {3, 6, 9, 12} <= set(steps)


@pytest.mark.parametrize(("ranks", "tag"), [((3,), " [rank 3]"), ((0, 1, 2, 3), " [all ranks]")])
def test_warning_of_any_rank_is_shown_once_with_its_rank(problem, ranks, tag):
    warn = [{"rank": rank, "target": "distmlp.data.feed:Feed.batch", "call": 4, "action": "warn"} for rank in ranks]
    done = RunningJob(4, train_command(problem), injection(*warn)).end(2 * SECONDS)
    assert done.returncode == 0
    shown = [line for line in (done.stdout + done.stderr).splitlines() if "injected warning" in line]
    assert len(shown) == 1
    assert shown[0].endswith(tag)


def test_help_of_a_rank_that_no_launcher_started_is_shown():
    """Variables left over from another job must not make the program mute."""
    done = run_mpi(0, [sys.executable, "-m", "distmlp", "--version"], env={"PMI_RANK": "3", "PMI_SIZE": "4"})
    assert done.returncode == 0
    assert done.stdout.startswith("distmlp ")


@pytest.mark.parametrize(
    ("arguments", "code"), [(["data", "convert", "a.npy", "out.h5"], 0), (["inspect", "none.h5"], 3)]
)
def test_work_of_one_process_is_done_by_rank_0_alone(tmp_path, arguments, code):
    np.save(tmp_path / "a.npy", np.zeros((20, 3), "f4"))
    started = time.monotonic()
    done = run_mpi(RANKS, [sys.executable, "-m", "distmlp", *arguments], cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("distmlp: error:") == (code != 0)
    assert done.stdout.count("rows in 1 file") == (code == 0)
    assert time.monotonic() - started < SECONDS
