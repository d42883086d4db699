"""distmlp as training runs it: `Engine.train` over resident rows, the host's part of every call included."""

from __future__ import annotations

from collections.abc import Iterator

from subjects import BLOCKS, Measurement, Problem, run_subject

from distmlp.tools.bench import open_preset, rates, time_steps


def measure(problem: Problem, warm: bool) -> Iterator[Measurement]:
    rows = problem.some_rows() if warm else problem.rows
    engine = open_preset(problem.preset, problem.precision, rows, shuffle=False)
    try:
        if warm:
            return
        losses = engine.train(0, 0, rates(problem.learn_steps)).losses.tolist()
        times = time_steps(engine, problem.batches, BLOCKS)
        before = engine.transfers()["kernel_launches"]
        engine.train(0, 0, rates(problem.batches))
        launches = (engine.transfers()["kernel_launches"] - before) / problem.batches
        plan = getattr(engine, "plan", None)
        extra = {
            "launches_per_step": round(launches, 4),
            "transport": "none",
            "path": plan.regime if plan else "reference",
            "kernel": plan.kernel if plan else "reference",
        }
        yield Measurement("distmlp", times, losses, extra)
    finally:
        engine.close()


if __name__ == "__main__":
    run_subject(measure)
