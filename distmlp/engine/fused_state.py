"""The device side of the fused engine: buffers, constants and kernels, without the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cupy
import numpy as np
from numpy.typing import NDArray

from distmlp.config import RunConfig
from distmlp.engine import Standardization, State, layout
from distmlp.engine import compile as compiler
from distmlp.engine.device_memory import Arena, Ledger
from distmlp.engine.lane_plan import LanePlan
from distmlp.engine.module import Kernel, Module
from distmlp.engine.optimizers import slot_names
from distmlp.engine.plan import SLOT_BUFFERS, THREADS, Plan
from distmlp.engine.plan_peers import peer_form
from distmlp.engine.plan_task import SpecialPlan, raw_code
from distmlp.engine.tally import TALLY
from distmlp.errors import SystemUnfitError


class DeviceState:
    """Allocates what `plan` asks for and loads the kernels made for it."""

    def __init__(
        self, config: RunConfig, plan: Plan, standardization: Standardization, ledger: Ledger, poison: int | None = None
    ) -> None:
        self.config, self.plan, self.ledger = config, plan, ledger
        self.network = plan.task.network
        codes = [compiler.cubin(*part, plan.device.capability) for part in specialisations(config, plan)]
        self.arena = Arena(plan.buffers, ledger.stream, poison)
        self._modules = [Module(code, ledger) for code in codes]
        self._module = self._modules[0]
        self._check_sizes()
        blocks, shared = plan.blocks, plan.shared_bytes
        self._special_arguments: tuple[np.uint64, ...] = ()
        if plan.special is None:
            self._train = self._module.kernel("train_steps", blocks, THREADS, shared, grid_wide=True)
        else:
            self._train = self._special_kernel(plan.special)
        self._forward_rows = self._module.kernel("forward_rows", blocks, THREADS, shared, grid_wide=True)
        self._pack_weights = self._module.kernel("pack_weights", 2 * blocks, THREADS)
        self._constants = self._engine_structure(standardization)
        self._slots = {name: SLOT_BUFFERS[name] for name in slot_names(config.optimizer.name)}
        for module in self._modules:
            module.write_constant("ENGINE", self._constants)
        self.reduced = "gradient", self.network.size + TALLY  # the buffer that ranks sum, and its elements
        self._packed_from = ""  # the flat buffer whose weights the copies hold
        self._joined = False  # with ranks that sum inside the kernel

    def _special_kernel(self, special: SpecialPlan) -> Kernel:
        self._special_arguments = tuple(np.uint64(self.arena.address(buffer.name)) for buffer in special.buffers())
        return self._modules[1].kernel(
            special.entry, special.blocks, special.threads, special.shared_bytes, grid_wide=True
        )

    def train_steps(self, rows: Sequence[np.uint64], begin: int, end: int, apply_first: bool) -> None:
        """Queue steps [begin, end) of the step table on the raw rows at `rows` (see `Raw` in params.cuh).

        `apply_first`: the gradient buffer holds the reduced gradient of step begin - 1, whose update comes first.
        """
        self._train(*rows, np.int32(begin), np.int32(end), np.int32(apply_first), *self._special_arguments)
        if self.plan.special is not None:
            self._packed_from = ""  # it need not keep the general kernel's copies

    def join_peers(self, peers: NDArray) -> Kernel:
        """Sum gradients inside the kernel from now on, with the ranks of `peers` (see `Peers` in peers.cuh).

        Returns the kernel that does nothing but such a sum.
        """
        self._constants["deferred"], self._constants["needs_norm"] = 0, layout.PEERS_SUM
        if not self._joined:
            self._joined = True
            if part := peer_specialisation(self.config, self.plan):
                self.plan = replace(self.plan, special=self.plan.joined or self.plan.special, joined=None)
                assert self.plan.special is not None
                code = compiler.cubin(*part, self.plan.device.capability)
                self._modules[1:] = [Module(code, self.ledger)]
                self._train = self._special_kernel(self.plan.special)
        for module in self._modules:
            module.write_constant("ENGINE", self._constants)
            module.write_constant("PEERS", peers)
        return self._module.kernel("sum_gradients", self.plan.blocks, THREADS, grid_wide=True)

    def share_peers(self, peers: NDArray) -> tuple[Kernel, Kernel]:
        """Kernels that sum the gradient over the ranks of `peers`, and that spread what the first of them has: to be
        launched between two steps."""
        self._module.write_constant("PEERS", peers)
        blocks = self.plan.blocks
        return (
            self._module.kernel("sum_gradients", blocks, THREADS, grid_wide=True),
            self._module.kernel("spread_gradients", blocks, THREADS),
        )

    def use_lanes(self, lanes: LanePlan) -> None:
        """From now on a step of the table is one stream's rows, and the message of the streams is what ranks reduce."""
        self._constants["lanes"], self._constants["lane_sums"] = map(self.arena.address, ("lanes", "lane_sums"))
        self._constants["lane_stride"], self._constants["lane_nodes"] = lanes.count, lanes.nodes
        self.ledger.upload(self.arena.address("lanes"), lanes.table)
        self._module.write_constant("ENGINE", self._constants)
        self.reduced = "lane_sums", lanes.nodes * (self.network.size + TALLY) + TALLY

    def _check_sizes(self) -> None:
        sizes = tuple(int(s) for s in self._module.read_constant("SIZES", 4))
        if sizes[:3] != layout.SIZES or sizes[3] > self.plan.shared_bytes:
            raise AssertionError(f"layout.py and params.cuh disagree: {layout.SIZES} {self.plan.shared_bytes} {sizes}")

    def _engine_structure(self, standardization: Standardization) -> NDArray:
        config, plan, address = self.config, self.plan, self.arena.address
        structure = np.zeros((), layout.ENGINE)
        for name in (
            "parameters", "first_slot", "second_slot", "ema", "gradient", "partial_tiles", "tile_arrivals", "logits",
            "loss_partials", "norm_partials", "control", "steps", "results",
        ):  # fmt: skip
            structure[name] = address(name)
        structure["size"] = self.network.size
        if standardization.inputs is not None:
            self._put_columns(structure, "input", *standardization.inputs, address("columns"))
        for parity in range(2):
            batch = structure["batches"][parity]
            batch["inputs"] = address(f"inputs{parity}")
            batch["labels"] = address(f"labels{parity}")
            batch["weights"] = address(f"weights{parity}")
        optimizer = config.optimizer
        structure["raw_type"] = layout.RAW_TYPES.index(plan.task.raw_type)
        structure["layers"] = len(plan.layers)
        structure["gradient_tasks"], structure["gradient_tiles"] = plan.gradient_tasks, plan.gradient_tiles
        structure["stop_on_nonfinite"] = config.run.on_nonfinite == "stop"
        structure["needs_norm"] = optimizer.clip_norm > 0
        structure["deferred"] = plan.task.ranks > 1
        structure["huber_delta"], structure["ema_decay"] = config.model.huber_delta, config.run.ema_decay
        for name in ("clip_norm", "weight_decay", "momentum", "rho", "epsilon", "beta1", "beta2"):
            structure[name] = getattr(optimizer, name)
        for layer, sizes, entry in zip(self.network.layers, plan.layers, structure["layer"], strict=False):
            for name in ("weight", "output", "error", "column_sums"):
                entry[name] = address(f"{name}{layer.index}")
            for name in ("weight_offset", "bias_offset", "fan_in", "fan_out"):
                entry[name] = getattr(layer, name)
            for name in ("ld_in", "ld_out", "tiles_n", "splits", "first_task", "first_tile"):
                entry[name] = getattr(sizes, name)
            entry["activation"] = layout.ACTIVATIONS.index(layer.activation)
        return structure

    def _put_columns(self, structure: NDArray, side: str, mean: NDArray, deviation: NDArray, at: int) -> None:
        """Mean in two floats and reciprocal deviation to the device, from `at` on."""
        high = mean.astype(np.float32)
        low = (mean - high.astype(np.float64)).astype(np.float32)
        for name, values in (("mean_high", high), ("mean_low", low), ("factor", (1.0 / deviation).astype(np.float32))):
            structure[f"{side}_{name}"] = at
            self.ledger.upload(at, np.ascontiguousarray(values))
            at += values.nbytes

    def load(self, state: State) -> None:
        """Take over parameters, slots, average and step counter."""
        self._put_flat("parameters", state.parameters)
        for name, buffer in self._slots.items():
            if name in state.slots:
                self._put_flat(buffer, state.slots[name])
            else:
                self.arena.zero(buffer, self.ledger.stream)
        if self.arena.has("ema"):
            self._put_flat("ema", state.parameters if state.ema is None else state.ema)
        own = () if self.plan.special is None else self.plan.special.buffers()
        for name in ("control", "tile_arrivals", *(buffer.name for buffer in own if buffer.zeroed)):
            self.arena.zero(name, self.ledger.stream)
        step = np.array([state.step], np.uint64)
        self.ledger.upload(self.arena.address("control") + layout.offset(layout.CONTROL, "step"), step)
        self._packed_from = ""
        self.pack("parameters")

    def _put_flat(self, name: str, values: NDArray) -> None:
        self.ledger.upload(self.arena.address(name), np.ascontiguousarray(values, np.float32))

    def state(self, spare: State | None = None) -> State:
        """A copy of everything a step changes, in the arrays of `spare` where they fit."""
        old = spare or State(np.empty(0))
        return State(
            self._flat("parameters", old.parameters),
            {name: self._flat(buffer, old.slots.get(name)) for name, buffer in self._slots.items()},
            self._flat("ema", old.ema) if self.arena.has("ema") else None,
            int(self.control()["step"]),
        )

    def _flat(self, name: str, spare: NDArray | None) -> NDArray:
        if spare is None or spare.size != self.network.size or spare.dtype != np.float32:
            spare = np.empty(self.network.size, np.float32)
        self.ledger.download(self.arena.address(name), spare)
        return spare

    def control(self) -> NDArray:
        """The counters that outlive a launch."""
        control = np.zeros((), layout.CONTROL)
        self.ledger.download(self.arena.address("control"), control)
        return control

    def thaw(self) -> None:
        """Let steps happen again after a step that was not finite."""
        offset = layout.offset(layout.CONTROL, "frozen")
        self.ledger.upload(self.arena.address("control") + offset, np.zeros(1, np.uint32))

    def prepare_training(self) -> None:
        """Make the weight copies those of the parameters, where the training kernel reads them."""
        if self.plan.special is None:
            self.pack("parameters")

    def pack(self, source: str) -> None:
        """Make the weight copies those of flat buffer `source`, "parameters" or "ema"."""
        if self._packed_from != source:
            self._pack_weights(np.uint64(self.arena.address(source)))
            self._packed_from = source

    def forward(self, inputs: NDArray, source: str) -> NDArray:
        """Outputs (rows, outputs), float32, standardized, for up to `plan.rows` raw rows (rows, features) float32."""
        rows = len(inputs)
        self.pack(source)
        self.ledger.upload(self.arena.address("raw_rows"), inputs)
        flat, out = self.arena.address(source), self.arena.address("predictions")
        self._forward_rows(np.uint64(self.arena.address("raw_rows")), np.uint64(flat), np.uint64(out), np.int32(rows))
        outputs = np.empty((rows, self.network.outputs), np.float32)
        self.ledger.download(out, outputs)
        return outputs


def specialisations(config: RunConfig, plan: Plan) -> list[tuple[str, dict[str, str]]]:
    """`(source, macros)` of the modules that `plan` needs, the general one first; see kernels/codes.cuh."""
    hidden = {layer.activation for layer in plan.task.network.layers[:-1]}
    macros = {
        "PRODUCT": plan.product,
        "HIDDEN_ACTIVATION": "MIXED" if len(hidden) > 1 else (next(iter(hidden)).upper() if hidden else "IDENTITY"),
        "OUTPUT_ACTIVATION": plan.task.network.layers[-1].activation.upper(),
        "LOSS": config.model.loss.upper(),
        "LABELS": str(int(plan.task.labels)),
        "OPTIMIZER": config.optimizer.name.upper(),
        "SEVERAL_RANKS": str(int(plan.task.ranks > 1)),
        "PEER_FORM": peer_form(plan.task.ranks, 4 * plan.task.network.size),
        **({"LANES": "1"} if plan.task.lane_rows else {}),
    }
    wide = {
        "RAW_TYPE": raw_code(plan.task.raw_type),
        "MIN_BLOCKS": str(plan.blocks // plan.device.multiprocessors),
        **plan.tile.macros("TILE"),
        **plan.output_tile.macros("OUTPUT"),
        **plan.gradient_tile.macros("GRADIENT"),
        "EMA": str(int(plan.task.ema)),
        **(plan.head.macros() if plan.head else {}),
    }
    parts = [("wide.cu", {**macros, **wide})]
    if plan.special is not None:
        parts.append((plan.special.source, {**macros, **plan.special.macros()}))
    return parts


def peer_specialisation(config: RunConfig, plan: Plan) -> tuple[str, dict[str, str]] | None:
    """As `specialisations`: what takes the special module's place once ranks sum inside the kernel; None: nothing."""
    special = plan.joined or plan.special
    macros = getattr(special, "peer_macros", lambda: None)()
    if macros is None or special is None:
        return None
    source, usual = specialisations(config, replace(plan, special=special))[1]
    return source, {**usual, **macros}


def describe_device() -> tuple[str, int, int, int, int]:
    """Name, compute capability (× 10), multiprocessors, shared bytes a block may ask for, free bytes."""
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    return (
        properties["name"].decode(),
        int(device.compute_capability),
        properties["multiProcessorCount"],
        properties["sharedMemPerBlockOptin"],
        cupy.cuda.runtime.memGetInfo()[0],
    )


def check_capability(capability: int, name: str) -> None:
    """Raise SystemUnfitError for a GPU that is too old."""
    from distmlp.engine.device import unfit_capability

    if reason := unfit_capability(capability, name):
        raise SystemUnfitError(reason)
