"""Cases for the GPU tests: a network, its data and its run as plain values, and the engines made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
from engine.fakes import FakeFeed, FakeWorld, make_config, make_network
from numpy.typing import NDArray

from distmlp.config import RunConfig
from distmlp.data.shards import Rows
from distmlp.engine import Standardization, State
from distmlp.engine.reference import ReferenceEngine
from distmlp.order import Order

LIMITS = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2}  # norm-wise


@dataclass(frozen=True)
class Case:
    """`batches` batches of `batch` rows and a short one of `extra`."""

    widths: tuple[int, ...] = (17, 33, 20, 5)
    precision: str = "fp32"
    loss: str = "mse"
    optimizer: str = "momentum"
    activation: str | tuple[str, ...] = "tanh"
    output_activation: str = "identity"
    batch: int = 50
    batches: int = 2
    extra: int = 0
    labels: bool = False
    weights: bool = False
    dtype: str = "f4"
    standardize: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of the optimizer
    run: dict[str, Any] = field(default_factory=dict, hash=False)
    residence: str = "device"
    seed: int = 0
    kernel: str = "wide"
    limit: float = 1.0  # times LIMITS

    def __str__(self) -> str:
        widths = "-".join(map(str, self.widths if len(self.widths) < 9 else (*self.widths[:2], len(self.widths))))
        kinds = self.activation if isinstance(self.activation, str) else "mixed"
        return f"{widths}x{self.batch} {self.precision} {kinds} {self.loss} {self.optimizer}"

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def rows(self) -> int:
        return self.batch * self.batches + self.extra

    @property
    def config(self) -> RunConfig:
        return make_config(
            list(self.widths),
            {
                "activation": self.activation, "output_activation": self.output_activation, "loss": self.loss,
                "init": "glorot_uniform",
            },
            data={"train": "unused.h5", "batch": self.batch, "streams": 4, "residence": self.residence},
            optimizer={"name": self.optimizer, "learning_rate": 0.01, **self.options},
            run={"precision": self.precision, "seed": self.seed, **self.run},
        )  # fmt: skip

    @property
    def order(self) -> Order:
        return Order(self.rows, 4, self.batch, self.seed, True)

    def data(self) -> Rows:
        """Random inputs; targets that depend on them, so that gradients of a batch add up."""
        random = np.random.default_rng(self.seed + 7)
        features, outputs = self.widths[0], self.widths[-1]
        inputs = random.standard_normal((self.rows, features))
        map_ = random.standard_normal((features, outputs)) / np.sqrt(features)
        signal = np.sin(inputs @ map_) + 0.1 * random.standard_normal((self.rows, outputs))
        if self.standardize:
            inputs = inputs * np.linspace(1, 30, features) + np.linspace(-50, 1000, features)
        if np.dtype(self.dtype).kind in "ui":
            inputs = np.clip(np.rint(inputs * 20 + 60), 0, 127)
        targets: NDArray = signal.astype(np.float32)
        if self.loss == "softmax_cross_entropy":
            labels = signal.argmax(1)
            targets = labels if self.labels else np.eye(outputs, dtype=np.float32)[labels]
        elif self.loss == "binary_cross_entropy":
            targets = (signal > 0).astype(np.float32)
        weights = random.uniform(0, 2, self.rows).astype(np.float32) if self.weights else None
        return Rows(inputs.astype(self.dtype), targets, weights)

    def standardization(self, rows: Rows) -> Standardization:
        if not self.standardize:
            return Standardization()
        inputs = rows.inputs.astype(np.float64)
        targets = rows.targets.astype(np.float64)
        whole = self.loss in ("mse", "mae", "huber")
        return Standardization(
            (inputs.mean(0), inputs.std(0) + 1e-9), (targets.mean(0), targets.std(0) + 1e-9) if whole else None
        )

    def initial(self) -> State:
        """Initial weights, biases not zero."""
        network = make_network(self.config)
        flat = network.initial(self.seed, "glorot_uniform")
        random = np.random.default_rng(self.seed)
        for _, bias in network.views(flat):
            bias[:] = random.uniform(-0.5, 0.5, bias.shape)
        return State(flat)

    def reference(self, dtype: Any = np.float64, rows: Rows | None = None) -> ReferenceEngine:
        rows = self.data() if rows is None else rows
        engine = ReferenceEngine(
            self.but(precision="fp32").config, make_network(self.config), FakeWorld(), FakeFeed(rows, self.order),
            self.standardization(rows), dtype=dtype,
        )  # fmt: skip
        engine.load(self.initial())
        return engine

    def fused(
        self,
        poison: int | None = 0xFF,
        world: Any = None,
        rows: Rows | None = None,
        transport: str = "staged",
        **options: Any,
    ) -> Any:
        from distmlp.engine.fused import FusedEngine

        rows = self.data() if rows is None else rows
        world = world or FakeWorld()
        feed = MemoryFeed(rows, self.order, world.size, world.rank)
        engine = FusedEngine(
            self.config, make_network(self.config), world, feed, self.standardization(rows), kernel=self.kernel,
            poison=poison, **options,
        )  # fmt: skip
        if world.size > 1:
            engine.connect(transport)
        engine.load(self.initial())
        return engine


class MemoryFeed(FakeFeed):
    """Also hands out all rows, as an engine wants that keeps them."""

    def resident(self) -> Rows:
        owned = self.order.owned_rows(self.streams)
        return Rows(*(part[owned.start : owned.stop] for part in self.rows.parts))

    def resident_bytes(self) -> int:
        return sum(part.nbytes for part in self.resident().parts)


def error(value: NDArray, wanted: NDArray) -> float:
    """Norm-wise: |value - wanted| / |wanted|."""
    value, wanted = value.astype(np.float64), wanted.astype(np.float64)
    return float(np.linalg.norm(value - wanted) / (np.linalg.norm(wanted) or 1.0))


def rates(count: int, rate: float = 0.01) -> NDArray:
    return np.full(count, rate)


def drawn(count: int, case: Callable[..., Case], **strategies: st.SearchStrategy) -> list[Case]:
    """Up to `count` different cases of what hypothesis draws, the same in every process.

    As parameters of a test they are compiled ahead, side by side, and each has a time limit to itself.
    """
    found: list[Case] = []

    @hypothesis.settings(
        max_examples=2 * count, derandomize=True, deadline=None, database=None, phases=[hypothesis.Phase.generate]
    )
    @hypothesis.given(st.builds(case, **strategies))
    def collect(one: Case) -> None:
        if str(one) not in map(str, found):
            found.append(one)

    collect()
    return found[-count:]  # the first are the simplest
