"""PyTorch: float32 master weights, fused Adam; a CUDA graph of several steps, plain and compiled.

bf16: weights and activations are cast before the products; tf32 and fp32: float32 tensors, and PyTorch's own names
for the precision of their products. Eager steps are not timed: every preset is bound by their launches there, and the
graph of the same kernels is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np
import torch
from subjects import BLOCK_SECONDS, BLOCKS, RATE, Measurement, Problem, run_subject

GRAPH_STEPS = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRODUCTS = {"bf16": "high", "tf32": "high", "fp32": "highest"}
Parameters = list[torch.Tensor]


def loss_of(kind: torch.dtype, parameters: Parameters, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean squared error of (batch, features) inputs; activations of dtype `kind`."""
    x, last = inputs.to(kind), len(parameters) - 2
    for i in range(0, len(parameters), 2):
        x = torch.nn.functional.linear(x, parameters[i].to(kind), parameters[i + 1].to(kind))
        if i != last:
            x = torch.relu(x)
    return torch.nn.functional.mse_loss(x.float(), targets)


class Training:
    """Parameters, optimizer and one step on them."""

    def __init__(self, problem: Problem, loss: Callable[..., torch.Tensor]) -> None:
        arrays = [part for weight, bias in problem.weights() for part in (weight.T, bias)]
        self.parameters = [torch.tensor(np.ascontiguousarray(a), device=DEVICE, requires_grad=True) for a in arrays]
        fused = {"fused": True, "capturable": True} if DEVICE == "cuda" else {}
        self.optimizer = torch.optim.Adam(self.parameters, lr=RATE, **fused)
        self.loss = loss

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.loss(self.parameters, inputs, targets)
        gradients = torch.autograd.grad(loss, self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return loss.detach()


def measure(problem: Problem, warm: bool) -> Iterator[Measurement]:
    torch.set_float32_matmul_precision(PRODUCTS[problem.precision])
    kind = torch.bfloat16 if problem.precision == "bf16" else torch.float32

    def loss_in(parameters: Parameters, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(kind, parameters, inputs, targets)

    rows = problem.some_rows() if warm else problem.rows
    inputs, targets = (torch.from_numpy(a).to(DEVICE) for a in problem.stacked(rows))
    for subject, loss in (("torch-graph", loss_in), ("torch-compiled-graph", torch.compile(loss_in))):
        training = Training(problem, loss)
        count = len(inputs) if warm else problem.learn_steps
        losses = [training.step(inputs[i], targets[i]) for i in range(count)]
        if not warm:
            times = time_graph(training, inputs, targets)
            yield Measurement(subject, times, [float(value) for value in losses])
        torch._dynamo.reset()


def time_graph(training: Training, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    steps = min(GRAPH_STEPS, len(inputs))
    if DEVICE == "cpu":  # to try the program; not a measurement
        started = perf_counter()
        training.step(inputs[0], targets[0])
        return [(perf_counter() - started) * 1e6]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            training.step(inputs[i % steps], targets[i % steps])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(steps):
            training.step(inputs[i], targets[i])

    def replay(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (count * steps)

    replay(3)
    count = max(3, round(BLOCK_SECONDS * 1e6 / (replay(3) * steps)))
    return [replay(count) for _ in range(BLOCKS)]


if __name__ == "__main__":
    run_subject(measure)
