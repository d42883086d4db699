"""What a plan is made from and made of: the task, the device, pieces of memory, and what a special kernel's plan says.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from distmlp.network import Network


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU."""

    name: str
    capability: int  # × 10
    multiprocessors: int
    shared_bytes: int  # a block may ask for
    memory_bytes: int  # free

    @property
    def has_tensor_cores(self) -> bool:
        """For TF32 and bfloat16."""
        return self.capability >= 80


@dataclass(frozen=True)
class Task:
    """What is computed, as far as the layout depends on it."""

    network: Network
    rows: int  # largest batch of this rank
    precision: str
    loss: str
    labels: bool
    weights: bool
    slots: tuple[str, ...]  # of the optimizer
    ema: bool
    ranks: int
    raw_type: str = "f4"  # of the training inputs: kind and bytes
    needs_norm: bool = False  # of the whole gradient or of tensors before any update: clipping, LAMB
    lane_rows: int = 0  # of sums over streams, see lane_plan.py; 0: a step is a whole batch

    @property
    def updates_directly(self) -> bool:
        """A parameter may move as soon as its own gradient is known."""
        return self.ranks == 1 and not self.needs_norm


@dataclass(frozen=True)
class Buffer:
    """A named piece of the one allocation. `zeroed`: must hold zeros before the first step."""

    name: str
    size_bytes: int
    zeroed: bool = False


def raw_code(raw_type: str) -> str:
    """What kernels/codes.cuh calls training inputs of `raw_type`: RAW_F32 for "f4"."""
    return f"RAW_{raw_type[0].upper()}{8 * int(raw_type[1:])}"


class SpecialPlan(Protocol):
    """The launch of a training kernel made for some networks; the general one of kernels/wide.cu takes the others.

    Its kernel has the arguments of `train_steps` in wide.cu and behind them the addresses of `buffers`.
    """

    @property
    def name(self) -> str: ...  # of the kernel, for users and tests
    @property
    def path(self) -> str: ...  # "narrow": a block takes rows through all layers alone, else "wide"
    @property
    def source(self) -> str: ...  # file in kernels/
    @property
    def entry(self) -> str: ...  # the kernel's name in it
    @property
    def blocks(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def pays(self) -> bool: ...  # is faster than the general kernel; where it is not, it is taken by name only
    @property
    def cluster(self) -> int: ...  # blocks of a cluster
    @property
    def batch_rows(self) -> int: ...  # that it wants in the batch, output and error buffers of the general kernel

    def macros(self) -> dict[str, str]:
        """Compile-time definitions beside those that all kernels have."""
        ...

    def buffers(self) -> tuple[Buffer, ...]:
        """Its own pieces of device memory."""
        ...


def aligned(size: int, to: int) -> int:
    return -(-size // to) * to
