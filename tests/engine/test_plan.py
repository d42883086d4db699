"""Plans for many networks and devices: what they ask for is there, and tiles cover every result."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from distmlp.engine.layout import SIZES
from distmlp.engine.optimizers import slot_names
from distmlp.engine.plan import Plan, make_plan
from distmlp.engine.plan_task import Device, Task
from distmlp.engine.plan_tiles import STATIC_BYTES
from distmlp.errors import SystemUnfitError
from distmlp.network import Network

GIB = 1 << 30
DEVICES = {
    "T4": Device("T4", 75, 40, 64 << 10, 15 * GIB),
    "A100": Device("A100", 80, 108, 163 << 10, 40 * GIB),
    "RTX 3090": Device("RTX 3090", 86, 82, 99 << 10, 24 * GIB),
    "L4": Device("L4", 89, 58, 99 << 10, 22 * GIB),
    "H200": Device("H200", 90, 132, 227 << 10, 139 * GIB),
    "B200": Device("B200", 100, 148, 227 << 10, 180 * GIB),
}
PRESETS = {
    "seed-32": ((100, 1000, 1000, 1000, 2), 32),
    "seed-1024": ((100, 1000, 1000, 1000, 2), 1024),
    "mnist-128": ((784, 512, 512, 10), 128),
    "mnist-1024": ((784, 512, 512, 10), 1024),
    "narrow64-1k": ((32, 64, 64, 64, 64, 16), 1024),
    "narrow64-64k": ((32, 64, 64, 64, 64, 16), 65536),
    "narrow128-64k": ((32, 128, 128, 128, 128, 16), 65536),
    "mid256-4k": ((256,) * 6, 4096),
    "mid512-16k": ((512,) * 6, 16384),
    "mid1024-8k": ((1024,) * 6, 8192),
    "wide4096-8k": ((4096,) * 5, 8192),
}


def task(widths: tuple[int, ...], rows: int, precision: str = "bf16", **changes: object) -> Task:
    values = {
        "network": Network.build(widths, "relu", "identity"), "rows": rows, "precision": precision, "loss": "mse",
        "labels": False, "weights": False, "slots": slot_names("adam"), "ema": False, "ranks": 1, **changes,
    }  # fmt: skip
    return Task(**values)  # type: ignore[arg-type]


def check(plan: Plan) -> None:
    device, network = plan.device, plan.task.network
    per_block = plan.shared_bytes + STATIC_BYTES
    blocks_each = plan.blocks // device.multiprocessors
    assert plan.blocks == blocks_each * device.multiprocessors
    assert per_block * blocks_each <= device.shared_bytes or blocks_each == 1
    assert per_block <= device.shared_bytes
    for shape in (plan.tile, plan.output_tile, plan.gradient_tile):
        assert shape.shared_bytes(plan.product) <= plan.shared_bytes
        assert shape.stages >= 2
        assert not shape.warpgroups or device.capability == 90
    if plan.special:
        assert plan.special.shared_bytes <= device.shared_bytes
        assert plan.special.blocks <= device.multiprocessors
    tiles = 0
    for layer, sizes in zip(network.layers, plan.layers, strict=True):
        assert sizes.first_tile == tiles
        assert sizes.ld_in >= layer.fan_in
        assert sizes.ld_out >= layer.fan_out
        assert sizes.ld_out * plan.element_bytes % 16 == 0
        down = sizes.tiles // sizes.tiles_n
        assert down * plan.gradient_tile.m >= layer.fan_in
        assert sizes.tiles_n * plan.gradient_tile.n >= layer.fan_out
        tiles += sizes.tiles
    assert plan.gradient_tiles == tiles
    assert len({buffer.name for buffer in plan.buffers}) == len(plan.buffers)
    assert sum(buffer.size_bytes for buffer in plan.buffers) <= plan.memory_bytes <= device.memory_bytes
    assert plan.kernel in str(plan)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str, precision: str, device: Device) -> None:
    widths, rows = PRESETS[preset]
    plan = make_plan(task(widths, rows, precision), device)
    check(plan)
    wanted = "FMA" if device.capability < 80 else "TF32X3" if precision == "fp32" else precision.upper()
    assert plan.product == wanted


def test_narrow_presets_are_narrow_on_a_hopper_gpu() -> None:
    for preset, (widths, rows) in PRESETS.items():
        plan = make_plan(task(widths, rows), DEVICES["H200"])
        assert plan.regime == ("narrow" if preset.startswith("narrow64") else plan.regime)
        assert make_plan(task(widths, rows), DEVICES["H200"], kernel="wide").regime == "wide"
        if max(widths) > 128:
            assert plan.regime == "wide"


@hypothesis.given(
    widths=st.lists(st.integers(1, 8192), min_size=2, max_size=8),
    rows=st.integers(1, 100_000),
    precision=st.sampled_from(["fp32", "tf32", "bf16"]),
    loss=st.sampled_from(["mse", "softmax_cross_entropy"]),
    device=st.sampled_from(list(DEVICES.values())),
    flag=st.booleans(),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_network(widths: list[int], rows: int, precision: str, loss: str, device: Device, flag: bool) -> None:
    try:
        plan = make_plan(task(tuple(widths), rows, precision, loss=loss, labels=flag, weights=flag, ema=flag), device)
    except SystemUnfitError:
        hypothesis.reject()
    check(plan)


def test_deepest_and_widest() -> None:
    check(make_plan(task((3, *(31,) * 63, 2), 1), DEVICES["T4"]))
    check(make_plan(task((8192, 8192, 8192), 64), DEVICES["H200"]))


def test_too_large_names_needed_and_free_bytes() -> None:
    with pytest.raises(SystemUnfitError, match=r"needs [\d,]+ bytes on GPU T4, 16,106,127,360 are free .*gradient"):
        make_plan(task((60_000, 60_000, 60_000), 64), DEVICES["T4"])


def test_splits_have_a_place_each() -> None:
    plan = make_plan(task(*PRESETS["mid256-4k"]), DEVICES["H200"])
    assert plan.layers[0].splits > 1
    partial = next(buffer for buffer in plan.buffers if buffer.name == "partial_tiles")
    assert partial.size_bytes == plan.gradient_tasks * plan.gradient_tile.m * plan.gradient_tile.n * 4


def test_structures_have_the_alignment_of_c() -> None:
    assert all(size % 8 == 0 for size in SIZES)


def test_a_kernel_that_joins_ranks_only_inside_waits_for_them() -> None:
    """Until then, and with other transports, another one trains; the memory of both is there."""
    plan = make_plan(task(*PRESETS["seed-32"], ranks=2), DEVICES["H200"])
    assert plan.kernel == "wide"
    assert plan.joined is not None
    assert plan.joined.name == "resident"
    assert {buffer.name for buffer in plan.joined.buffers()} <= {buffer.name for buffer in plan.buffers}
    assert make_plan(task(*PRESETS["seed-32"]), DEVICES["H200"]).joined is None
    chain = make_plan(task(*PRESETS["mid256-4k"], ranks=2), DEVICES["H200"])
    assert (chain.kernel, chain.joined) == ("chain", None)
