"""PyTorch's DistributedDataParallel over NCCL, a process a GPU, eager steps with fused Adam; see ranks.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from time import perf_counter

import numpy as np
import torch
import torch.distributed as distributed
from subjects import BLOCKS, RATE, Measurement, Problem, arguments, run_subject
from torch.multiprocessing import start_processes

STEPS = 20  # of a block at least


def make_model(problem: Problem) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for weight, bias in problem.weights():
        linear = torch.nn.Linear(*weight.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight.T.copy()))
            linear.bias.copy_(torch.from_numpy(bias.copy()))
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def measure(problem: Problem, warm: bool) -> Iterator[Measurement]:
    if warm:
        return
    rank, size = distributed.get_rank(), distributed.get_world_size()
    batches = problem.stacked(problem.rows, size)
    inputs, targets = (torch.from_numpy(np.split(a, size, 1)[rank].copy()).cuda() for a in batches)
    model = torch.nn.parallel.DistributedDataParallel(make_model(problem).cuda(), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)

    def step(i: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=problem.precision == "bf16"):
            loss = torch.nn.functional.mse_loss(model(inputs[i % len(inputs)]).float(), targets[i % len(inputs)])
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for i in range(problem.learn_steps):
        loss = step(i)
        distributed.all_reduce(loss)
        losses.append(float(loss) / size)

    def block(count: int) -> float:
        torch.cuda.synchronize()
        started = perf_counter()
        for i in range(count):
            step(i)
        torch.cuda.synchronize()
        seconds = torch.tensor((perf_counter() - started) / count).cuda()
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
        return float(seconds)

    block(STEPS)
    count = max(STEPS, round(problem.block_seconds / block(STEPS)))
    times = [block(count) * 1e6 for _ in range(BLOCKS)]
    if rank == 0:
        yield Measurement("torch-ddp", times, losses)


def work(rank: int, size: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=size)
    run_subject(measure, quiet=rank > 0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    size = arguments().ranks
    start_processes(work, (size, port), size, start_method="spawn")
