"""One rank fails, dies or stands still (C01, issue 7): the whole job ends soon, with the original message, once."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.faults.faults import SECONDS, RunningJob, injection, one_traceback, train_command
from tests.faults.problem import make_problem, newest_step, sha256, train

PLACES = {
    "commands": ("distmlp.cli", 1),
    "import": ("distmlp.training", 1),
    "arguments": ("distmlp.config:RunConfig.load", 1),
    "opening data": ("distmlp.data.shards:Shards.open", 1),
    "step 3": ("distmlp.data.feed:Feed.batch", 3),
    "saving": ("distmlp.training:Run._save", 2),
    "report": ("distmlp.output:RunOutput.finish", 1),
}
LIBRARY_CALL = "import sys, distmlp; distmlp.train(distmlp.RunConfig.load(sys.argv[1]))"
FAST = {("import", 1), ("step 3", 1), ("saving", 0)}


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    return make_problem(tmp_path_factory.mktemp("problem"), steps=12, checkpoint_every="4 steps")


def command(how: str, toml) -> list[str]:
    if how == "library call":
        return [sys.executable, "-c", LIBRARY_CALL, str(toml)]
    if how == "console script":
        script = str(Path(sys.executable).with_name("distmlp"))
        return [script, "train", str(toml), "--overwrite"]
    return train_command(toml, "--overwrite")


def cases():
    """Every place, rank and way to launch; all but a selection belong to the long version."""
    for how in ("module", "console script", "library call"):
        for place in PLACES:
            if how == "library call" and place in ("commands", "arguments"):
                continue
            for rank in (0, 1):
                short = (place, rank) in FAST if how == "module" else (place, rank) == ("step 3", 1)
                yield pytest.param(how, place, rank, marks=[] if short else pytest.mark.full)


@pytest.mark.parametrize(("how", "place", "rank"), list(cases()))
def test_exception_on_one_rank_ends_the_job(problem, how, place, rank):
    if how == "library call":
        shutil.rmtree(problem.parent / "run", ignore_errors=True)
    target, call = PLACES[place]
    started = time.monotonic()
    job = RunningJob(
        3, command(how, problem), injection({"rank": rank, "target": target, "call": call, "action": "raise"})
    )
    done = job.end(2 * SECONDS)  # from the start, which takes a while on a busy machine
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - started < 2 * SECONDS
    assert one_traceback(done.stderr), done.stderr
    assert done.stderr.count("RuntimeError: injected fault") == 1
    assert f"rank {rank} on host" in done.stderr


@pytest.mark.parametrize("action", ["kill", pytest.param("exit", marks=pytest.mark.full)])
def test_dead_rank_ends_the_job_and_loses_nothing(tmp_path, action):
    toml = make_problem(tmp_path, steps=30, checkpoint_every="2 steps")
    fault = injection({"rank": 1, "target": "distmlp.data.feed:Feed.batch", "call": 20, "action": action})
    done = RunningJob(3, train_command(toml), fault).end(2 * SECONDS)
    assert done.returncode not in (0, 75)
    assert newest_step(tmp_path / "run") > 0
    train(toml, tmp_path / "run", 3, "--resume")
    train(toml, tmp_path / "whole", 3)
    assert sha256(tmp_path / "run") == sha256(tmp_path / "whole")


@pytest.mark.parametrize(("action", "words"), [("stop", "silent for"), ("sleep", "has not moved for")])
def test_stuck_rank_is_named_by_the_watchdog(tmp_path, action, words):
    toml = make_problem(tmp_path, steps=30, checkpoint_every="2 steps", stall_timeout="3 seconds")
    fault = injection({"rank": 2, "target": "distmlp.data.feed:Feed.batch", "call": 20, "action": action})
    done = RunningJob(3, train_command(toml), fault).end(3 + 2 * SECONDS)
    assert done.returncode == 4
    assert done.stderr.count("distmlp: error: rank 2 on host") == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert newest_step(tmp_path / "run") > 0


def test_reader_thread_that_fails_gives_its_own_message(tmp_path):
    toml = make_problem(tmp_path, steps=12)
    fault = injection({"rank": 1, "target": "distmlp.data.shards:Shards.read_into", "call": 1, "action": "raise"})
    done = RunningJob(3, train_command(toml), fault).end(2 * SECONDS)
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: injected fault") == 1
