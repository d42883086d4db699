"""What holds for every kernel, each as one function of a case; the test files say for which cases.

Steps are right against the float64 reference, bits repeat, a loss curve follows the general kernel's, batches that are
not finite change nothing, and evaluation sees the weights that training left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.cases import LIMITS, Case, error, rates
from numpy.typing import NDArray

from distmlp.engine.device import find_obstacle


def _is_hopper() -> bool:
    from distmlp.engine.fused_state import describe_device

    return not find_obstacle() and describe_device()[1] == 90


hopper_only = pytest.mark.skipif(not _is_hopper(), reason="this kernel is for compute capability 9.0")


def bits(engine: Any) -> list[bytes]:
    state = engine.state()
    return [state.parameters.tobytes(), *(slot.tobytes() for slot in state.slots.values())]


def epochs(engine: Any, case: Case, steps: int, at_once: int = 1000) -> NDArray:
    """Losses of `steps` steps from the first epoch on."""
    losses, batches = [], case.order.batches_per_epoch
    done = 0
    while done < steps:
        epoch, first = divmod(done, batches)
        count = min(at_once, batches - first, steps - done)
        losses.append(engine.train(epoch, first, rates(count, 1e-3)).losses)
        done += count
    return np.concatenate(losses)


def check(case: Case, steps: int = 3) -> None:
    """Slots and losses after the first step and weights after `steps` agree norm-wise, tensor by tensor within 5×."""
    limit = LIMITS[case.precision] * case.limit
    reference, engine = case.reference(), case.fused()
    steps = min(steps, -(-case.rows // case.batch))
    try:
        complaints = []
        for step in range(steps):
            wanted, got = reference.train(0, step, rates(1)), engine.train(0, step, rates(1))
            complaints += _compare(f"loss {step}", got.losses, wanted.losses, 3 * limit)  # a square of differences
            complaints += _compare(f"weight {step}", got.weights, wanted.weights, 1e-6)
            true, found = reference.state(), engine.state()
            assert found.step == true.step
            # Later slots and Adam's signs follow weights that differ already.
            slots = true.slots if step == 0 else {}
            buffers = {**slots, "weights": true.parameters, **({} if true.ema is None else {"ema": true.ema})}
            for name, buffer in buffers.items():
                other = found.slots.get(name, found.ema if name == "ema" else found.parameters)
                complaints += _compare(f"{name} {step}", other, buffer, limit)
                if name in slots and name != "second_moment":
                    for layer in engine._network.layers:
                        for kind in ("weight", "bias"):
                            part = getattr(layer, kind)
                            complaints += _compare(f"{name} {kind} {layer.index}", other[part], buffer[part], 5 * limit)
        assert not complaints, "; ".join(complaints[:12])
    finally:
        engine.close()


def _compare(what: str, value: NDArray, wanted: NDArray, limit: float) -> list[str]:
    off = error(value, wanted)
    return [] if off <= limit else [f"{what}: {off:.2e} > {limit:.0e}"]


def check_planned(case: Case, regime: str) -> None:
    """The kernel that the case names takes it, and its steps are right."""
    engine = case.fused()
    assert (engine.plan.kernel, engine.plan.regime) == (case.kernel, regime)
    engine.close()
    check(case)


def check_bits_repeat(case: Case, steps: int, at_once: int = 1) -> None:
    """Steps twice, in launches of different length, over memory that held different things."""
    first, second = case.fused(poison=0xFF), case.fused(poison=0x3C)
    one, two = epochs(first, case, steps), epochs(second, case, steps, at_once)
    assert one.tobytes() == two.tobytes()
    assert bits(first) == bits(second)


def check_follows_wide(case: Case, steps: int, falling: int) -> None:
    """Losses are the general kernel's to 3 %; the last `falling` of them are clearly below the first."""
    ours, wide = (epochs(each.fused(), case, steps) for each in (case, case.but(kernel="wide")))
    assert not falling or ours[-falling:].mean() < 0.8 * ours[:falling].mean()
    assert np.abs(ours / wide - 1).max() < 3e-2


def check_flat_gradient(case: Case, steps: int = 2) -> None:
    """The path through the gradient buffer, which clipping takes, gives the same update as the direct one."""
    direct, flat = case.fused(), case.but(options={"clip_norm": 1e30}).fused()
    for engine in (direct, flat):
        engine.train(0, 0, rates(steps))
    assert error(flat.state().parameters, direct.state().parameters) < 1e-6


def check_stops(case: Case, value: float, where: str = "inputs", batch: int = 2) -> None:
    """A row of `batch` that is not finite ends training before that batch's update."""
    rows = case.data()
    getattr(rows, where)[int(case.order.batch_rows(0, batch, range(4))[5]), 1] = value
    engine, clean = case.fused(rows=rows), case.fused()
    report = engine.train(0, 0, rates(case.batches))
    assert (report.nonfinite, report.steps) == (batch, batch)
    clean.train(0, 0, rates(batch))
    assert bits(engine) == bits(clean)


def check_large(case: Case, part: str, factor: float, rate: float, steps: int = 1) -> None:
    """`part` of the rows times `factor`, with which nothing overflows: losses and update are right.

    `rate` so small that the weights hardly move: the second step's gradients depend on their third power.
    """
    rows = case.data()
    getattr(rows, part)[:] *= factor
    reference, engine = case.reference(rows=rows), case.fused(rows=rows)
    start, limit = case.initial().parameters, LIMITS[case.precision] * case.limit
    wanted, got = (each.train(0, 0, rates(steps, rate)) for each in (reference, engine))
    assert (engine.plan.kernel, engine.state().step) == (case.kernel, steps)
    assert np.abs(got.losses / wanted.losses - 1).max() < 3 * limit
    assert error(engine.state().parameters - start, reference.state().parameters - start) < limit


def check_skips(case: Case, batches: tuple[int, ...] = (1,), value: float = np.nan, row: int | None = None) -> None:
    """Under the policy `skip`, `batches` that are not finite change nothing, and the steps behind them go on.

    `row`: instead of a row of each of the batches this one is bad, which may lie in any.
    """
    case = case.but(run={"on_nonfinite": "skip"})
    rows, steps = case.data(), range(case.batches)
    members = [case.order.batch_rows(0, step, range(4)) for step in steps]
    if row is not None:
        batches = tuple(step for step in steps if row in members[step])
    bad = [int(members[batch][0]) for batch in batches] if row is None else [row]
    rows.targets[bad, 0] = value
    engine, clean = case.fused(rows=rows), case.fused()
    assert engine.plan.kernel == case.kernel
    report = engine.train(0, 0, rates(len(steps)))
    assert [step for step in steps if not np.isfinite(report.losses[step])] == list(batches)
    assert (report.skipped, engine.state().step) == (len(batches), len(steps) - len(batches))
    for step in steps:
        if step not in batches:
            clean.train(0, step, rates(1))
    assert bits(engine) == bits(clean)


def check_evaluation(case: Case) -> None:
    """The loss over all rows is about that of the last epoch of 60 steps."""
    engine, rows = case.fused(), case.data()
    losses = epochs(engine, case, 60)
    loss = engine.evaluate(rows.inputs, rows.targets, None).loss / case.rows
    assert loss == pytest.approx(losses[-case.order.batches_per_epoch :].mean(), rel=0.15)
