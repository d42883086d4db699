"""The deadline for the end of a process holds whatever the process does."""

from __future__ import annotations

import pytest
from launching import run_python

BUSY = {
    "waits in C with Python's lock": "ctypes.PyDLL(None).sleep(60)",
    "waits in Python": "time.sleep(60)",
    "computes": "while True: pass",
    "blocks signals": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(60)",
}


@pytest.mark.parametrize("code", [0, 75])
@pytest.mark.parametrize("busy", BUSY)
def test_ends_with_its_code(busy, code):
    script = f"import ctypes, signal, time\nfrom distmlp.comm.deadline import end_within\nend_within(0.3, {code})\n"
    done = run_python(0, script + BUSY[busy], timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_any_thread_may_set_it():
    script = (
        "import ctypes, threading\nfrom distmlp.comm.deadline import end_within\n"
        "thread = threading.Thread(target=end_within, args=(0.3, 75))\n"
        "thread.start()\nthread.join()\nctypes.PyDLL(None).sleep(60)"
    )
    assert run_python(0, script, timeout=10).returncode == 75


def test_ends_at_least_where_there_is_no_such_timer():
    script = (
        "import signal, time\nfrom distmlp.comm import deadline\n"
        "def refuse(*_): raise OSError(11, 'no timers left')\n"
        "deadline._call_exit = refuse\ndeadline.end_within(0.3, 0)\ntime.sleep(60)"
    )
    assert run_python(0, script, timeout=10).returncode == -14
