"""JAX: float32 master weights, Adam; one `jit` of a `lax.scan` over the batches of an epoch.

bf16: weights and activations are cast before the products; tf32 and fp32: float32 arrays, and JAX's own names for
the precision of their products.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
from subjects import BLOCKS, RATE, Measurement, Problem, run_subject

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
PRODUCTS = {"bf16": "default", "tf32": "tensorfloat32", "fp32": "float32"}


def loss_of(kind: type, parameters: list, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean squared error of (batch, features) inputs; activations of dtype `kind`."""
    x = inputs.astype(kind)
    for i, (weight, bias) in enumerate(parameters):
        x = x @ weight.astype(kind) + bias.astype(kind)
        if i < len(parameters) - 1:
            x = jnp.maximum(x, 0)
    return jnp.mean((x.astype(jnp.float32) - targets) ** 2)


def make_run(precision: str):  # type: ignore[no-untyped-def]  # a compiled function of JAX
    """Training over (batches, batch, columns): `run(state, batches)` gives the new state and every loss."""
    kind = jnp.bfloat16 if precision == "bf16" else jnp.float32

    def step(state: tuple, batch: tuple) -> tuple:
        parameters, first, second, count = state
        loss, gradients = jax.value_and_grad(loss_of, argnums=1)(kind, parameters, *batch)
        count = count + 1
        first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, gradients)
        second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, second, gradients)
        scale1, scale2 = 1 / (1 - BETA1**count), 1 / jnp.sqrt(1 - BETA2**count)
        parameters = jax.tree.map(
            lambda p, m, v: p - RATE * scale1 * m / (jnp.sqrt(v) * scale2 + EPSILON), parameters, first, second
        )
        return (parameters, first, second, count), loss

    return jax.jit(lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0)


def initial(problem: Problem) -> tuple:
    parameters = [tuple(map(jnp.asarray, layer)) for layer in problem.weights()]
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return parameters, zeros, jax.tree.map(jnp.copy, zeros), jnp.float32(0)


def measure(problem: Problem, warm: bool) -> Iterator[Measurement]:
    with jax.default_matmul_precision(PRODUCTS[problem.precision]):
        yield from _measure(problem, warm)


def _measure(problem: Problem, warm: bool) -> Iterator[Measurement]:
    run, state, split = make_run(problem.precision), initial(problem), None
    if len(jax.devices()) > 1:  # every batch over all GPUs, the state on each of them
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        split, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*s)) for s in ((None, "data"), ()))
        state = jax.device_put(state, whole)
    if warm:
        layers, shape = problem.preset.layers, (problem.batches, problem.preset.batch)
        shapes = [jax.ShapeDtypeStruct((*shape, n), jnp.float32, sharding=split) for n in (layers[0], layers[-1])]
        run.lower(state, tuple(shapes)).compile()
        return
    batches = problem.stacked(problem.rows, len(jax.devices()))
    batches = tuple(map(jnp.asarray, batches)) if split is None else jax.device_put(tuple(batches), split)
    state, losses = run(state, batches)
    losses = np.asarray(losses, np.float64)[: problem.learn_steps].tolist()

    def epochs(state: tuple, count: int) -> tuple[tuple, float]:
        started = perf_counter()
        for _ in range(count):
            state, last = run(state, batches)
        last.block_until_ready()
        return state, (perf_counter() - started) / count

    state, seconds = epochs(state, 2)
    count = max(1, round(problem.block_seconds / seconds))
    times = []
    for _ in range(BLOCKS):
        state, seconds = epochs(state, count)
        times.append(seconds / problem.batches * 1e6)
    yield Measurement("jax-scan", times, losses)


if __name__ == "__main__":
    run_subject(measure)
