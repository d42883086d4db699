"""Mean and deviation: right, stable, the same bits at any number of ranks."""

import math

import h5py
import numpy as np
import pytest
from data.samples import SOFTMAX, alone, on_ranks, open_shards, write_shard
from data.test_reader import damage_chunk

from distmlp.data import standardize
from distmlp.data.standardize import measure, merge, moments
from distmlp.errors import AgreedError

ROWS = 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("standardize")
    generator = np.random.default_rng(0)
    inputs = generator.normal([5.0, 1e6, -3.0, 7.0], [2.0, 1e-2, 0.0, 1e-30], (ROWS, 4))
    targets = generator.exponential(3.0, (ROWS, 2))
    for number, (low, high) in enumerate([(0, 7000), (7000, 7001), (7001, ROWS)]):
        write_shard(path / f"{number}.h5", inputs[low:high], targets[low:high])
    return path, inputs, targets


def exact(column):
    mean = math.fsum(column) / len(column)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in column) / len(column))


def test_mean_and_deviation_of_every_column(folder):
    path, inputs, targets = folder
    result = measure(open_shards(path), alone(), "both")
    for (mean, deviation), values in ((result.inputs, inputs), (result.targets, targets)):
        for column in range(values.shape[1]):
            true_mean, true_deviation = exact(values[:, column])
            assert mean[column] == pytest.approx(true_mean, rel=1e-14)
            if true_deviation > 1e-12 * abs(true_mean):
                assert deviation[column] == pytest.approx(true_deviation, rel=1e-9)
            else:
                assert deviation[column] == 1.0  # a constant, up to rounding


def test_the_same_bits_at_any_number_of_ranks_and_threads(folder, monkeypatch):
    monkeypatch.setattr(standardize, "SEGMENT_ROWS", 900)
    path = folder[0]
    results = [measure(open_shards(path), alone(), "both", readers) for readers in (1, 3)]
    for ranks in (2, 3, 7):
        results += on_ranks(ranks, lambda world: measure(open_shards(path, world=world), world, "both"))
    bits = {b"".join(part.tobytes() for side in (r.inputs, r.targets) for part in side) for r in results}
    assert len(bits) == 1


def test_values_that_are_not_finite_are_not_counted(tmp_path):
    values = np.array([[1.0, np.nan], [np.inf, np.nan], [3.0, np.nan], [-np.inf, np.nan]], "f4")
    write_shard(tmp_path / "a.h5", values, values)
    mean, deviation = measure(open_shards(tmp_path), alone(), "inputs").inputs
    assert mean.tolist() == [2.0, 0.0]
    assert deviation.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("loss", "which", "sides"),
    [
        ("mse", "none", (False, False)), ("mse", "inputs", (True, False)), ("huber", "both", (True, True)),
        (SOFTMAX, "both", (True, False)), ("binary_cross_entropy", "both", (True, False)),
    ],
)  # fmt: skip
def test_only_numbers_are_standardized(tmp_path, loss, which, sides):
    values = np.array([[0.0], [1.0], [1.0]])
    write_shard(tmp_path / "a.h5", values, values.astype("i4") if loss == SOFTMAX else values)
    result = measure(open_shards(tmp_path, loss), alone(), which)
    assert (result.inputs is not None, result.targets is not None) == sides


def test_integers_and_single_rows(tmp_path):
    write_shard(tmp_path / "a.h5", np.array([[255, 0]], "u1"), np.zeros((1, 1)))
    mean, deviation = measure(open_shards(tmp_path), alone(), "inputs").inputs
    assert (mean.tolist(), deviation.tolist()) == ([255.0, 0.0], [1.0, 1.0])


def test_merging_keeps_the_moments_of_the_whole():
    values = np.random.default_rng(1).normal(1e8, 1.0, (1000, 3))
    total = moments(values[:1])
    for start in range(1, 1000, 37):
        total = merge(total, moments(values[start : start + 37]))
    count, mean, squares = moments(values)
    np.testing.assert_array_equal(total[0], count)
    np.testing.assert_allclose(total[1], mean, rtol=1e-14)
    np.testing.assert_allclose(total[2], squares, rtol=1e-7)
    np.testing.assert_array_equal(merge(total, moments(np.full((5, 3), np.nan)))[2], total[2])


def test_rows_that_cannot_be_read_fail_on_every_rank(tmp_path):
    array = np.random.default_rng(0).normal(size=(9000, 2))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("inputs", data=array, chunks=(100, 2), compression="gzip")
        file["targets"] = array
    damage_chunk(tmp_path / "a.h5", 8050)

    def told(world):
        with pytest.raises(AgreedError) as caught:
            measure(open_shards(tmp_path, world=world), world, "inputs")
        return str(caught.value), caught.value.exit_code

    messages = set(on_ranks(3, told))
    assert len(messages) == 1
    text, code = messages.pop()
    assert code == 3
    assert "rows 8000 to 8099: the chunk is damaged" in text
