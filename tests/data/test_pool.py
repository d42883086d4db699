"""Reader threads."""

import subprocess
import sys
import threading
import time
import weakref

import pytest

from distmlp.data.pool import Pool, reader_threads


def test_results_and_errors_come_back():
    pool = Pool(3)
    tasks = [pool.submit(divmod, 17, k) for k in (5, 0, 3)]
    assert tasks[0].result() == (3, 2)
    with pytest.raises(ZeroDivisionError):
        tasks[1].result()
    assert tasks[2].result() == (5, 2)
    assert all(task.done() for task in tasks)
    pool.close()


def test_tasks_run_at_the_same_time_on_no_more_threads_than_asked():
    pool, gate = Pool(2), threading.Barrier(2)
    assert {task.result() for task in [pool.submit(lambda: gate.wait(10) < 2) for _ in range(4)]} == {True}
    names = {pool.submit(lambda: threading.current_thread().name).result() for _ in range(20)}
    assert names <= {"reader-1", "reader-2"}
    pool.close()


def test_a_cancelled_task_does_not_run():
    pool, gate, ran = Pool(1), threading.Event(), []
    pool.submit(gate.wait)
    task = pool.submit(ran.append, 1)
    task.cancelled = True
    gate.set()
    task.settle()
    assert ran == []
    pool.close()


def test_what_a_task_was_done_with_is_let_go():
    """Also by a thread that has no other task yet: it may be a buffer that nobody else may have meanwhile."""
    pool = Pool(1)
    kept = {1, 2, 3}
    gone = weakref.ref(kept)
    assert pool.submit(lambda values=kept: len(values)).result() == 3
    assert pool.submit(len, kept).result() == 3
    del kept
    assert gone() is None
    pool.close()


def test_threads_start_late_and_end():
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    pool = Pool(4)
    assert set(threading.enumerate()) <= before
    pool.submit(int).result()
    started = set(threading.enumerate()) - before
    assert started
    pool.close()
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in started)


def test_a_read_that_never_returns_does_not_keep_the_program_alive():
    script = "from distmlp.data.pool import Pool; import time; Pool(1).submit(time.sleep, 1000); print('done')"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (told.stdout, told.returncode) == ("done\n", 0)


def test_number_of_readers():
    assert reader_threads(5, 3) == 5
    assert 1 <= reader_threads(0, 1) <= 16
    assert reader_threads(0, 1000) == 1
