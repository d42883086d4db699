import math
import re

import numpy as np
import pytest
from data.samples import alone, open_shards, write_shard

from distmlp.engine import Evaluation
from distmlp.errors import DataError
from distmlp.evaluation import evaluate, metrics, own_blocks, refuse, row_blocks


class Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("rows", [1, 21, 255, 256, 257, 100_000])
def test_blocks_cover_every_row_once_whatever_the_ranks(rows):
    everything = [row for block in row_blocks(rows) for row in (block.start, block.stop)]
    assert everything[0] == 0
    assert everything[-1] == rows
    assert everything[1:-1:2] == everything[2::2]
    for size in (1, 2, 3, 7):
        split = [block for rank in range(size) for block in own_blocks(rows, Rank(rank, size))]
        assert split == row_blocks(rows)


def test_evaluation_round_trip_through_an_array():
    total = Evaluation(3.0, 2.5, 1.0, 2.0, 4.0, np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0]))
    again = Evaluation.from_array(total.as_array())
    np.testing.assert_array_equal(again.as_array(), total.as_array())
    assert again.squared.shape == (2,)


def test_regression_metrics_are_those_of_their_definitions():
    generator = np.random.default_rng(0)
    target = generator.normal(5.0, 2.0, (50, 3))
    guess = target + generator.normal(0.0, 0.5, (50, 3))
    weight = generator.uniform(0.5, 2.0, 50)
    error = guess - target
    w = weight[:, None]
    total = Evaluation(
        50, weight.sum(), 7.0, 0.0, (w * abs(error)).sum(), (w * error**2).sum(0), (w * target).sum(0),
        (w * target**2).sum(0),
    )  # fmt: skip
    result = metrics(total, "mse")
    mean = np.average(target, axis=0, weights=weight)
    r2 = 1 - (w * error**2).sum(0) / (w * (target - mean) ** 2).sum(0)
    assert result["r2"] == pytest.approx(r2.mean())
    assert result["rmse"] == pytest.approx(math.sqrt((w * error**2).sum() / weight.sum() / 3))
    assert result["mae"] == pytest.approx((w * abs(error)).sum() / weight.sum() / 3)
    assert result["loss"] == pytest.approx(7.0 / weight.sum())


def test_constant_target_has_no_r2():
    total = Evaluation(2, 2.0, 0.0, 0.0, 0.0, np.array([1.0]), np.array([2.0]), np.array([2.0]))
    assert math.isnan(metrics(total, "mse")["r2"])


def test_accuracy_of_classification():
    assert metrics(Evaluation(4, 4.0, 2.0, 3.0), "softmax_cross_entropy") == {"loss": 0.5, "accuracy": 0.75}


class _Squares:
    """An engine whose loss is the sum of the targets' squares."""

    def evaluate(self, inputs, targets, weights):
        total = Evaluation(squared=np.zeros(1), target=np.zeros(1), target_squared=np.zeros(1))
        total.loss, total.rows = float((inputs.sum() + targets.astype("f8") ** 2).sum()), len(inputs)
        return total


class _Sums(_Squares):
    """And here the sum of the targets."""

    def evaluate(self, inputs, targets, weights):
        total = super().evaluate(inputs, targets, weights)
        total.loss = float(targets.sum())
        return total


@pytest.mark.parametrize(("role", "value"), [("inputs", np.nan), ("targets", np.inf)])
def test_rows_that_are_not_numbers_are_named(tmp_path, role, value):
    arrays = {"inputs": np.ones((600, 2)), "targets": np.ones((600, 1))}
    arrays[role][[7, 400], 0] = value
    write_shard(tmp_path / "a.h5", arrays["inputs"][:300], arrays["targets"][:300])
    write_shard(tmp_path / "b.h5", arrays["inputs"][300:], arrays["targets"][300:])
    shards = open_shards(tmp_path)
    assert not np.isfinite(evaluate(_Squares(), shards, alone()).loss)
    with pytest.raises(DataError, match=rf"a\.h5 row 7; .*: {role} hold NaN or infinite values; mend or leave out"):
        evaluate(_Squares(), shards, alone(), refuse)
    told = []
    assert evaluate(_Squares(), shards, alone(), told.append).rows == 598
    assert len(told) == 1
    assert re.search(rf"a\.h5 row 7; .*b\.h5 row 100: {role} hold NaN or infinite values$", told[0])


def test_infinities_of_either_sign_have_no_sum(tmp_path):
    targets = np.ones((600, 1))
    targets[[7, 400], 0] = np.inf, -np.inf
    write_shard(tmp_path / "a.h5", np.ones((600, 2)), targets)
    assert not np.isfinite(evaluate(_Sums(), open_shards(tmp_path), alone()).loss)


def test_a_column_of_nothing_is_counted_but_not_listed(tmp_path):
    write_shard(tmp_path / "a.h5", np.full((5000, 2), np.nan), np.ones((5000, 1)))
    told = []
    total = evaluate(_Squares(), open_shards(tmp_path), alone(), told.append)
    assert told[0].endswith(
        "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more (5,000 rows in all): inputs hold NaN or infinite values"
    )
    assert math.isnan(metrics(total, "mse")["loss"])
