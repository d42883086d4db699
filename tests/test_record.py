"""The record of the GPU tests, as far as it is put together without a GPU."""

from __future__ import annotations

import pytest
from gpu.conftest import _repeated

GPU = {"kernel_sha256": "a", "device": "b", "driver": "c", "cuda": "d"}


def test_a_repeat_adds_up_and_names_what_passed_then() -> None:
    before = {**GPU, "date": "1", "passed": 7, "failed": 3, "skipped": 1}
    now = {**GPU, "date": "2", "passed": 2, "failed": 1, "skipped": 0}
    record = _repeated(before, now, ["y", "x"])
    assert record == {**GPU, "date": "2", "passed": 9, "failed": 1, "skipped": 1, "passed_when_repeated": ["x", "y"]}


@pytest.mark.parametrize("name", GPU)
def test_a_repeat_is_of_the_same_kernels_and_gpu(name: str) -> None:
    counts = {"passed": 1, "failed": 0, "skipped": 0}
    with pytest.raises(AssertionError, match="--last-failed"):
        _repeated({**GPU, **counts, name: "another"}, {**GPU, **counts}, [])
