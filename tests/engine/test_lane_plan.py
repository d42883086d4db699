"""The GPU's tree of streams: a stack that does what the tree says, and the rows of every stream in a batch."""

from __future__ import annotations

import numpy as np
import pytest

from distmlp.engine.lane_plan import LanePlan
from distmlp.engine.lanes import LaneSums
from distmlp.engine.tally import TALLY, Sums
from distmlp.network import Network
from distmlp.order import Order, owned_streams

NETWORK = Network.build([3, 2], "relu", "identity")


def message_of(plan: LanePlan, values: np.ndarray) -> np.ndarray:
    """As kernels/lanes.cuh does it: `keep_lane` for every own stream."""
    memory = np.zeros((plan.rows, values.shape[1]), np.float32)

    def row(place: int, level: int) -> int:
        return place if level == 0 else plan.nodes + level - 1

    for lane, stream in enumerate(plan.owned):
        how, value = plan.table[lane], values[stream].copy()
        for k in range(1, how["merges"] + 1):
            value = memory[row(how["place"], how["level"] - k)] + value
        memory[row(how["place"], how["level"] - how["merges"])] = value
    return memory[: plan.nodes]


def total_of(plan: LanePlan, message: np.ndarray) -> np.ndarray:
    """`finish_lanes`."""
    memory = message.copy()
    for node, how in enumerate(plan.table[plan.count :]):
        value = memory[node].copy()
        assert how["level"] <= node
        for k in range(1, how["merges"] + 1):
            value = memory[how["level"] - k] + value
        memory[how["level"] - how["merges"]] = value
    return memory[0] + np.float32(0)


@pytest.mark.parametrize("streams", [1, 2, 3, 8, 13, 16])
def test_stack_adds_what_the_tree_of_the_reference_engine_adds(streams):
    rng = np.random.default_rng()
    shape = (streams, NETWORK.size + TALLY)
    values = (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    values[:, :4] = -0.0
    reference = LaneSums(NETWORK, streams, 1, 0, np.float32)
    reference.fill(lambda stream, out: np.copyto(out.buffer, values[stream]))
    wanted = Sums(NETWORK, np.empty(NETWORK.size + TALLY, np.float32))
    reference.total(wanted)
    for ranks in range(1, streams + 1):
        plans = [LanePlan(streams, ranks, rank) for rank in range(ranks)]
        assert {plan.most for plan in plans} == {max(plan.count for plan in plans)}
        message = sum(message_of(plan, values) for plan in plans)
        for plan in plans:
            assert total_of(plan, message).tobytes() == wanted.buffer.tobytes()


@pytest.mark.parametrize(("rows", "streams", "batch"), [(61, 6, 16), (61, 7, 5), (8, 8, 3), (100, 3, 100), (5, 4, 64)])
def test_split_gives_every_stream_its_rows_of_a_batch(rows, streams, batch):
    order = Order(rows, streams, batch, 0, True)
    for ranks in range(1, streams + 1):
        for rank in range(ranks):
            owned, plan = owned_streams(streams, ranks, rank), LanePlan(streams, ranks, rank)
            batches = [order.batch_positions(number, owned) for number in range(order.batches_per_epoch)]
            own, bounds = np.concatenate(batches), np.cumsum([0, *map(len, batches)])
            for origin in (0, 7):  # a batch need not begin where it does in the epoch
                firsts, counts = plan.split(bounds, bounds[:-1] + origin)
                assert counts.sum() == len(own)
                for entry, (first, count) in enumerate(zip(firsts, counts, strict=True)):
                    batch_number, stream = entry // plan.count, owned[entry % plan.count]
                    wanted = order.batch_positions(batch_number, range(stream, stream + 1))
                    picked = (
                        own[first - origin : first - origin + count * plan.count : plan.count] if count else own[:0]
                    )
                    assert picked.tolist() == wanted.tolist()
                    assert count <= -(-batch // streams)
