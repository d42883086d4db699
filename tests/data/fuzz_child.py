"""Open and read many damaged shards in one process, and say after each what came out. Started by test_fuzz.

Arguments: a folder with the originals, the first number, how many. One JSON line a file: its number and kind,
the outcome ("right", "refused", "wrong"), the message, seconds, and how much memory it took beyond the start.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import h5py
import numpy as np
from data.mutations import mutate

from distmlp.data.inspection import Inspected, inspect_files
from distmlp.data.shards import Rows, Shards, check_shapes
from distmlp.data.values import judge, scan
from distmlp.errors import DataError

GROUP = 20
DATASETS = {"inputs": "inputs", "targets": "targets"}


def main(folder: Path, first: int, count: int) -> None:
    good = sorted(folder.glob("*.h5"))
    originals = [path.read_bytes() for path in good]
    expected = [fingerprint(use(item)) for item in inspect_files([str(path) for path in good], DATASETS)]
    for begin in range(first, first + count, GROUP):
        numbers = range(begin, min(begin + GROUP, first + count))
        paths = []
        for number in numbers:
            path = folder / f"damaged-{number}.bin"
            path.write_bytes(mutate(originals[number // 7 % len(originals)], number))
            paths.append(path)
        start = time.perf_counter()
        inspected = inspect_files([str(path) for path in paths], DATASETS)
        seconds = (time.perf_counter() - start) / len(numbers)
        for number, path, item in zip(numbers, paths, inspected, strict=True):
            report(number, path, item, seconds, expected[number // 7 % len(originals)])
            path.unlink()


def report(number: int, path: Path, item: Inspected, seconds: float, expected: int) -> None:
    reset_peak()
    before, start = resident("VmRSS"), time.perf_counter()
    try:
        outcome, message = "right", ""
        rows = use(item)
        if (fault := differs(path, rows, expected)) is not None:
            outcome, message = "wrong", fault
    except DataError as error:
        outcome, message = "refused", str(error)
    grown = resident("VmHWM") - before
    print(
        json.dumps({
            "number": number, "outcome": outcome, "message": message, "grown": grown, "file": path.stat().st_size,
            "seconds": seconds + time.perf_counter() - start,
            "child": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        }),
        flush=True,
    )  # fmt: skip


def use(item: Inspected) -> Rows:
    """What `Shards.open` and a reader do with one file."""
    if item.problem:
        raise DataError(item.problem)
    files = [item.layouts]
    problems = check_shapes(files, "softmax_cross_entropy", ())
    if problems:
        raise DataError(str(problems))
    shards = Shards(files, labels=True, classes=0, loss="softmax_cross_entropy")
    problems, _ = judge(shards, [scan(shards, 0, 1)], ())
    if problems:
        raise DataError(str(problems))
    return shards.read(0, shards.rows)


def fingerprint(rows: Rows) -> int:
    return hash((rows.inputs.tobytes(), rows.targets.tobytes()))


def differs(path: Path, rows: Rows, expected: int) -> str | None:
    """Compare with the original, else with what HDF5 reads from the damaged file, in a process of its own."""
    if fingerprint(rows) == expected:
        return None
    theirs = os.fork()
    if theirs == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
        code = 0
        try:
            with h5py.File(path, "r", locking=False) as file:
                same = all(
                    np.array_equal(
                        array.reshape(-1).view(np.uint8), file[name][...].astype(array.dtype).reshape(-1).view(np.uint8)
                    )
                    for name, array in (("inputs", rows.inputs), ("targets", rows.targets))
                )
            code = 0 if same else 1
        except Exception as error:
            print(error, file=sys.stderr)
            code = 2
        os._exit(code)
    _, status = os.waitpid(theirs, 0)
    code = os.waitstatus_to_exitcode(status)
    return "other values than HDF5 reads" if code == 1 else None


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
