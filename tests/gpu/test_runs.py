"""Stretches of steps: bits that repeat, curves that follow, faults, streams, ranks, evaluation, the ledger."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engine.fakes import FakeJob, FakeWorld
from gpu.cases import LIMITS, Case, error, rates
from gpu.checks import bits, check_bits_repeat, check_skips, check_stops, epochs

from distmlp.engine import layout
from distmlp.engine.module import Module
from distmlp.errors import SystemUnfitError
from distmlp.order import Order

ADAM = Case(optimizer="adam", widths=(20, 60, 50, 4), batch=100, batches=10, extra=7, activation="tanh")
SPLIT = ADAM.but(widths=(32, 64, 16), batch=2000, batches=2, extra=0, precision="bf16")
SOFTMAX = ADAM.but(loss="softmax_cross_entropy", labels=True, precision="tf32")
RELU = ADAM.but(activation="relu")  # lets large values through
CASES = [ADAM, RELU, SPLIT, SOFTMAX, ADAM.but(optimizer="sgd"), ADAM.but(precision="tf32"), ADAM.but(precision="bf16")]


@pytest.mark.parametrize("case", [ADAM, SPLIT, SOFTMAX], ids=str)
def test_bits_repeat(case: Case) -> None:
    check_bits_repeat(case, 1000, at_once=3)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_follows_the_reference_for_500_steps(precision: str) -> None:
    case = ADAM.but(precision=precision)
    wanted, got = epochs(case.reference(), case, 500), epochs(case.fused(), case, 500)
    assert wanted[-50:].mean() < 0.6 * wanted[:50].mean()
    assert np.abs(got / wanted - 1).max() < {"fp32": 1e-3, "tf32": 2e-2, "bf16": 5e-2}[precision]


def test_streamed_rows_give_the_same_bits() -> None:
    case = ADAM.but(weights=True)
    resident, streamed = case.fused(), case.but(residence="stream").fused()
    assert epochs(resident, case, 60).tobytes() == epochs(streamed, case, 60).tobytes()
    assert bits(resident) == bits(streamed)


@pytest.mark.parametrize(("rows", "streams", "batch", "shuffle"), [
    (1, 1, 1, True), (10_000, 16, 333, True), (70_001, 3, 1024, True), (5000, 7, 64, False), (300_000, 5, 4096, True),
])  # fmt: skip
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 3)])
def test_index_table_is_the_sample_order(rows, streams, batch, shuffle, rank, ranks) -> None:
    if streams < ranks:
        pytest.skip("fewer streams than ranks")
    import cupy

    from distmlp.engine.compile import cubin
    from distmlp.engine.device_memory import Ledger
    from distmlp.engine.device_rows import OwnRows
    from distmlp.order import owned_streams

    order = Order(rows, streams, batch, 0x123456789ABCDEF, shuffle)
    own = OwnRows(order, owned_streams(streams, ranks, rank))
    ledger = Ledger(cupy.cuda.Stream(non_blocking=True))
    table = cupy.empty(own.count, np.uint32)
    module = Module(cubin("order.cu", {}, int(cupy.cuda.Device().compute_capability)), ledger)
    for epoch in (0, 5):
        module.kernel("fill_index", 64, 256)(
            np.int64(rows), np.uint64(order.seed), np.int32(streams), np.int32(shuffle), np.int32(own.streams.start),
            np.int32(len(own.streams)), np.uint32(epoch), np.int64(own.count), np.uint64(table.data.ptr),
        )  # fmt: skip
        ledger.stream.synchronize()
        first = order.owned_rows(own.streams).start
        wanted = [order.batch_rows(epoch, b, own.streams) - first for b in range(order.batches_per_epoch)]
        assert [len(w) for w in wanted] == np.diff(own.bounds(0, order.batches_per_epoch)).tolist()
        assert (table.get() == np.concatenate(wanted)).all()


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["direct", "norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_stops_before_a_bad_update(value: float, options: dict) -> None:
    check_stops(RELU.but(options=options), value, batch=3)


def test_skips_a_bad_batch() -> None:
    check_skips(ADAM, (2,))


@pytest.mark.parametrize(("inputs", "bad"), [(10.0, None), (1e15, 0)], ids=["in bounds", "square overflows"])
def test_large_gradients_are_judged_as_by_the_reference(inputs: float, bad: int | None) -> None:
    """Magnitudes that leave open whether a gradient is too large are looked at exactly."""
    case = Case(activation="identity", widths=(4, 3, 2), optimizer="sgd")
    rows = case.data()
    rows.inputs *= inputs
    rows.targets *= 1e18
    reference, engine = case.reference(np.float32), case.fused(rows=rows)
    reference._feed.rows = rows
    one, two = reference.train(0, 0, rates(1, 1e-30)), engine.train(0, 0, rates(1, 1e-30))
    assert (one.nonfinite, two.nonfinite) == (bad, bad)
    if bad is None:
        assert error(two.losses, one.losses) < 1e-5


def test_label_outside_the_classes_is_not_finite() -> None:
    case = SOFTMAX
    rows = case.data()
    rows.targets[case.order.batch_rows(0, 1, range(4))[0]] = 4
    engine = case.fused(rows=rows)
    assert engine.train(0, 0, rates(3)).nonfinite == 1
    rows.targets[:] = -1
    assert case.fused(rows=rows).train(0, 0, rates(3)).nonfinite == 0


def test_weights_that_are_all_zero_change_nothing() -> None:
    case = ADAM.but(weights=True)
    rows = case.data()
    rows.weights[:] = 0
    engine = case.fused(rows=rows)
    report = engine.train(0, 0, rates(2))
    assert (report.steps, report.skipped, engine.state().step) == (2, 0, 0)
    assert engine.state().parameters.tobytes() == case.initial().parameters.tobytes()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}], ids=["plain", "norm"])
def test_ranks_train_like_one(ranks: int, options: dict) -> None:
    """Threads as ranks on one GPU, through the staged reduction; a short last batch and a rank without rows in it."""
    case = ADAM.but(options=options, batch=30, batches=3, extra=1, weights=True)
    alone = case.fused()
    losses = epochs(alone, case, 12)
    results = _on_ranks(case, ranks, lambda engine: (epochs(engine, case, 12), engine.state()))
    for rank_losses, state in results:
        assert error(rank_losses, losses) < 1e-5
        assert state.parameters.tobytes() == results[0][1].parameters.tobytes()
        assert error(state.parameters, alone.state().parameters) < 1e-5
        assert state.step == 12


def test_ranks_stop_together_at_a_bad_row() -> None:
    case = ADAM.but(batch=40)
    rows = case.data()
    rows.inputs[case.order.batch_rows(0, 2, range(2, 4))[0], 0] = np.nan
    reports = _on_ranks(case, 2, lambda engine: engine.train(0, 0, rates(5)), rows)
    assert [(r.nonfinite, r.steps) for r in reports] == [(2, 2)] * 2


def _on_ranks(case: Case, ranks: int, body, rows=None) -> list:
    job, results, faults = FakeJob(ranks), [None] * ranks, []

    def run(rank: int) -> None:
        try:
            results[rank] = body(case.fused(world=FakeWorld(job, rank), rows=rows))
        except BaseException as fault:
            faults.append(fault)
            job.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return results


@pytest.mark.parametrize("case", [ADAM.but(standardize=True), SOFTMAX, ADAM.but(run={"ema_decay": 0.9})], ids=str)
def test_predicts_and_evaluates_like_the_reference(case: Case) -> None:
    rows = case.data()
    reference, engine = case.reference(), case.fused()
    for each in (reference, engine):
        epochs(each, case, 5)
    limit = 20 * LIMITS[case.precision]
    assert error(engine.predict(rows.inputs), reference.predict(rows.inputs)) < limit
    mine = engine.evaluate(rows.inputs, rows.targets, None)
    theirs = reference.evaluate(rows.inputs, rows.targets, None)
    assert mine.rows == theirs.rows == case.rows
    assert error(mine.as_array(), theirs.as_array()) < limit
    # and training goes on as if nothing had been asked
    other = case.fused()
    assert epochs(engine, case, 5).tobytes() == (epochs(other, case, 5), epochs(other, case, 5))[1].tobytes()


def test_continues_on_the_other_engine() -> None:
    case = ADAM
    first, second = case.fused(), case.reference(np.float32)
    epochs(first, case, 4)
    second.load(first.state())
    back = case.fused()
    back.load(second.state())
    assert bits(back) == bits(first)
    assert error(second.train(0, 4, rates(3)).losses, first.train(0, 4, rates(3)).losses) < 1e-5


def test_ledger_agrees_with_the_profiler() -> None:
    profiler = pytest.importorskip("torch.profiler")
    import torch

    case = ADAM
    engine = case.fused()
    engine.train(0, 0, rates(2))
    torch.cuda.synchronize()
    before = engine.transfers()
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as seen:
        report = engine.train(0, 2, rates(8))
        torch.cuda.synchronize()
    after = engine.transfers()
    counts = {name: after[name] - before[name] for name in before}
    assert report.steps == counts["steps"] == 8
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in events if not e.name.lower().startswith("mem")]
    copies = [e for e in events if e.name.lower().startswith("memcpy")]
    assert len(kernels) == counts["kernel_launches"] == 1
    assert len(copies) == 2, [e.name for e in copies]  # the step table in, losses out
    assert counts["host_to_device_bytes"] == 8 * layout.STEP_INFO.itemsize
    assert counts["device_to_host_bytes"] == 8 * layout.STEP_RESULT.itemsize


def test_network_too_large_is_refused_with_figures() -> None:
    case = Case(widths=(200_000, 200_000, 1), batch=4, optimizer="adam")
    from engine.fakes import make_network

    from distmlp.engine import Standardization
    from distmlp.engine.fused import FusedEngine

    with pytest.raises(SystemUnfitError, match=r"needs [\d,]+ bytes.*[\d,]+ are free"):
        FusedEngine(case.config, make_network(case.config), FakeWorld(), None, Standardization())


def test_streams_do_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small streamed launches: every batch is the right one, or the losses would differ."""
    case = ADAM.but(batch=8, batches=200, extra=0, optimizer="sgd")
    from distmlp.engine import device_rows

    monkeypatch.setattr(device_rows, "PIECE_BYTES", 1)
    resident, streamed = case.fused(), case.but(residence="stream").fused()
    assert streamed._rows.steps_per_launch == 1
    assert epochs(resident, case, 1000).tobytes() == epochs(streamed, case, 1000).tobytes()
