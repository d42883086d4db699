"""How jobs end: one message, one code, nobody left waiting. Real ranks, small programs."""

from __future__ import annotations

import signal
import sys
import time

import pytest
from launching import finish, run_python, start_mpi

PROGRAM = """
import sys, time
from distmlp.comm.hints import rank_hint
from distmlp.comm.policy import guarded
from distmlp.errors import ConfigError, DataError, StoppedError
how, who = sys.argv[1], [int(word) for word in sys.argv[2].split(",") if word]

def main():
    if how == "bug before MPI" and rank_hint() in who: raise RuntimeError("a bug")
    if how == "fault before MPI" and rank_hint() in who: raise ConfigError("bad key")
    if how == "usage": print("usage: ...", file=sys.stderr); raise SystemExit(2)
    if how == "help": print("help"); return 0
    from distmlp.comm.world import open_world
    world = open_world()
    if how == "agreed" : world.agree(lambda: 1 / 1 if world.rank not in who else fail("bad file"), "opening")
    if how == "fault" and world.rank in who: fail("bad file")
    if how == "bug" and world.rank in who: raise RuntimeError("a bug")
    if how == "stopped": raise StoppedError("saved")
    if how == "code": return 5
    if how == "files" and world.rank in who: raise OSError(24, "Too many open files", "x.py")
    if how == "interrupt" and world.rank in who: raise KeyboardInterrupt
    world.barrier()
    print("all well")

def fail(text):
    raise DataError(text)

guarded(main)
"""
ALL = "0,1,2"


@pytest.mark.parametrize(
    ("how", "who", "code", "message"),
    [
        ("fault", "1", 3, "distmlp: error: bad file [rank 1 on host "),
        pytest.param("fault", "0", 3, "distmlp: error: bad file [rank 0 on host ", marks=pytest.mark.full),
        ("fault", ALL, 3, "distmlp: error: bad file\n"),
        ("agreed", "0,2", 3, "distmlp: error: bad file [ranks 0, 2 on "),
        ("fault before MPI", ALL, 2, "distmlp: error: bad key\n"),
        pytest.param("fault before MPI", "2", 2, "distmlp: error: bad key [rank 2 on host ", marks=pytest.mark.full),
        ("stopped", ALL, 75, "distmlp: saved\n"),
        pytest.param("usage", ALL, 2, "usage: ...\n", marks=pytest.mark.full),
        ("code", ALL, 5, ""),
        ("files", "1", 4, "distmlp: error: too many open files for this process or host"),
        pytest.param(
            "library", ALL, 4, "too many open files for this process or host (libx.so", marks=pytest.mark.full
        ),
        ("interrupt", "1", 130, "distmlp: error: interrupted [rank 1"),
    ],
)
def test_faults_are_told_once_with_their_code(how, who, code, message):
    done = run_python(3, PROGRAM, how, who, timeout=20)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(message) == 1 or not message
    assert done.stderr.count("distmlp: ") == message.startswith("distmlp")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("MemoryError()", "out of memory; use a smaller"),
        ("OSError(12, 'Cannot allocate memory')", "out of memory ([Errno 12] Cannot allocate memory); use"),
        ("ImportError('libx.so: cannot open shared object file: Too many open files')", "too many open files"),
        ('RuntimeError("can\'t start new thread")', "no further thread can be started; raise the limit (ulimit -u)"),
    ],
)
def test_what_the_system_refuses_is_no_bug(error, message):
    program = f"from distmlp.comm.policy import guarded\ndef main(): raise {error}\nguarded(main)"
    done = run_python(0, program, timeout=20)
    assert (done.returncode, done.stderr.splitlines()[1:]) == (4, [])
    assert done.stderr.startswith(f"distmlp: error: {message}")


@pytest.mark.parametrize(
    ("how", "who", "where"),
    [
        ("bug", "2", "rank 2 on host"),
        ("bug", ALL, ""),
        ("bug before MPI", "1", "rank 1 on host"),
        pytest.param("bug before MPI", ALL, "", marks=pytest.mark.full),
    ],
)
def test_bugs_show_one_traceback(how, who, where):
    done = run_python(3, PROGRAM, how, who, timeout=20)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.count("RuntimeError: a bug") == 1
    assert where in done.stderr


def test_output_of_a_command_without_mpi_is_shown_once():
    done = run_python(3, PROGRAM, "help", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "help\n", "")


def test_success_is_silent():
    done = run_python(3, PROGRAM, "none", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "all well\n", "")


@pytest.mark.parametrize(("how", "code"), [("fault", 3), ("bug", 1), ("code", 5), ("none", 0)])
def test_single_process(how, code):
    done = run_python(0, PROGRAM, how, "0")
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code == 1)


def test_stuck_thread_does_not_keep_a_process_that_failed():
    script = (
        "import threading, time\n"
        "from distmlp.comm.policy import guarded\n"
        "from distmlp.errors import DataError\n"
        "def main():\n"
        "    threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "    raise DataError('gone')\n"
        "guarded(main)\n"
    )
    done = run_python(0, script, timeout=15)
    assert (done.returncode, done.stderr) == (3, "distmlp: error: gone\n")


SLOW_END = """
import ctypes, sys
from distmlp.comm import policy
from distmlp.comm.world import open_world
who, seconds, limit, code = sys.argv[1].split(","), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
if limit: policy._FINISHED_SECONDS = policy._FAILED_SECONDS = limit

def main():
    if str(open_world().rank) in who:
        libc = ctypes.CDLL(None)  # an exit handler that waits in C, with Python's lock
        libc.__cxa_atexit(ctypes.cast(libc.sleep, ctypes.c_void_p), ctypes.c_void_p(seconds), None)
    return code

policy.guarded(main)
"""


@pytest.mark.parametrize(
    ("who", "seconds", "limit"),
    [("1", 6, 0), ("0,1", 60, 1), ("0", 60, 1), pytest.param("1", 60, 1, marks=pytest.mark.full)],
    ids=["slow", "all for ever", "first for ever", "second for ever"],
)
@pytest.mark.parametrize("code", [0, 4])
def test_libraries_that_are_slow_to_leave_change_no_exit_code(who, seconds, limit, code):
    done = run_python(2, SLOW_END, who, str(seconds), str(limit), str(code), timeout=20)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == "" or code != 0  # where Open MPI's launcher names the code


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("world.barrier()", 0, ""),
        ("1 / (1 - world.rank)", 1, "ZeroDivisionError"),
        ("world.agree(lambda: fail() if world.rank == 1 else 0)", 3, "distmlp: error: mine [rank 1"),
    ],
)
@pytest.mark.parametrize("before", ["", "from mpi4py import MPI\n"])
def test_users_own_script_ends_the_whole_job(before, end, code, said):
    script = before + (
        "from distmlp.comm.world import open_world\n"
        "from distmlp.errors import DataError\n"
        "def fail(): raise DataError('mine')\n"
        f"world = open_world()\n{end}\nworld.barrier()\n"
    )
    done = run_python(2, script, timeout=20)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert (done.stderr == "") == (code == 0)


def test_interrupt_before_training_ends_all_ranks():
    script = PROGRAM.replace("    world.barrier()", "    print('up', flush=True)\n    time.sleep(60)")
    job = start_mpi(3, [sys.executable, "-c", script, "none", ""])
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    time.sleep(0.5)
    job.send_signal(signal.SIGINT)
    assert finish(job, 10).returncode != 0


@pytest.mark.parametrize("who", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_fault_of_a_rank_whose_others_are_done_is_told(who):
    """A command without MPI: the other ranks have ended and will never come to MPI_Init."""
    script = PROGRAM.replace('if how == "help": print("help"); return 0', 'if how == "done": return 0')
    script = script.replace(
        'if how == "usage"', 'if how == "done" and rank_hint() in who: fail("no space")\n    if how == "usage"'
    )
    done = run_python(2, script, "done", who, timeout=20)
    assert done.returncode == 3
    assert done.stderr.count("distmlp: error: no space") == 1


@pytest.mark.parametrize(("who", "tag"), [(ALL, "early\n"), ("1,2", "early [ranks 1, 2 on ")])
def test_what_ranks_write_before_mpi_is_up_is_merged(who, tag):
    script = PROGRAM.replace(
        "def main():", "def main():\n    if rank_hint() in who: print('early', file=sys.stderr)", 1
    )
    done = run_python(3, script, "none", who)
    assert (done.returncode, done.stdout) == (0, "all well\n")
    assert done.stderr.count("early") == 1
    assert done.stderr.startswith(tag)
