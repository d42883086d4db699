"""Reader threads. Daemons: a read that never returns (a hung file system) does not keep the program alive."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any


class Task:
    """Work handed to a `Pool`."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._work: Callable[[], Any] | None = partial(function, *arguments)
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self.cancelled = False

    def run(self) -> None:
        """Do it, once. What it was done with is let go: threads hold a task until they get another."""
        work, self._work = self._work, None
        try:
            if work is not None and not self.cancelled:
                self._result = work()
        except BaseException as error:  # kept for whoever asks for the result
            self._error = error
        del work
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def succeeded(self) -> bool:
        return self._done.is_set() and self._error is None

    def settle(self) -> None:
        """Wait until it has ended, whatever came out."""
        self._done.wait()

    def result(self) -> Any:
        """Wait for the end and return the result, or raise what the function raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Pool:
    """A few threads that take tasks in order. Started with the first task."""

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._started = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Task:
        """Queue `function(*arguments)`."""
        task = Task(function, arguments)
        self._tasks.put(task)
        if self._started < self.threads:
            self._started += 1
            threading.Thread(target=self._work, name=f"reader-{self._started}", daemon=True).start()
        return task

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()

    def close(self) -> None:
        """Let the threads end after what is queued. Does not wait."""
        for _ in range(self._started):
            self._tasks.put(None)
        self._started = 0


def reader_threads(readers: int, local_size: int) -> int:
    """`readers` where given, else this rank's share of the CPUs it may use, 1 to 16."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return readers or max(1, min(16, cpus // max(1, local_size)))
