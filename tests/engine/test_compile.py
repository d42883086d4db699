"""Every kernel compiles for the GPUs we name, without a GPU, with registers and spills in bounds; the cache is safe.

Needs CuPy (or nothing but its NVRTC binding) and NVRTC; both come from PyPI and need no driver.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from engine.fakes import make_config, make_network

from distmlp.engine import compile as compiler
from distmlp.engine.optimizers import needs_norm, slot_names
from distmlp.engine.plan import make_plan
from distmlp.engine.plan_task import Device, Task
from distmlp.errors import SystemUnfitError

try:
    compiler.version()
except SystemUnfitError as error:
    pytest.skip(str(error), allow_module_level=True)

DEVICES = {
    75: Device("T4", 75, 40, 64 << 10, 1 << 34),
    80: Device("A100", 80, 108, 163 << 10, 1 << 35),
    90: Device("H200", 90, 132, 227 << 10, 1 << 37),
    100: Device("B200", 100, 148, 227 << 10, 1 << 37),
}
ALL_ACTIVATIONS = ("relu", "leaky_relu", "elu", "gelu", "silu", "tanh", "sigmoid", "softplus", "sine", "identity")

# Families: product × loss kind × update kind × tile sizes. Others differ in a constant.
FAMILIES = {
    "fp32 direct, large tiles": ((512,) * 4, 8192, "fp32", {}, "adam"),
    "fp32 warpgroups": ((512,) * 4, 1024, "fp32", {"activation": "gelu"}, "adam"),
    "tf32 norm first, mixed": ((8, *(24,) * 10, 2), 64, "tf32", {"activation": ALL_ACTIVATIONS}, "lamb"),
    "bf16 direct, large tiles": ((512,) * 4, 4096, "bf16", {"activation": "gelu"}, "adamw"),
    "bf16 softmax, small tiles": ((100, 500, 10), 32, "bf16", {"loss": "softmax_cross_entropy"}, "nesterov"),
    "bf16 resident": ((100, 1000, 1000, 1000, 2), 32, "bf16", {}, "adam"),
    "tf32 resident": ((784, 512, 512, 10), 128, "tf32", {}, "adam"),
    "fp32 resident": ((100, 1000, 1000, 1000, 2), 32, "fp32", {}, "adam"),
    "bf16 narrow": ((32, 64, 64, 16), 4096, "bf16", {}, "adam"),
    "bf16 chain": ((256,) * 6, 4096, "bf16", {}, "adam"),
    "bf16 bulk": ((512,) * 6, 16384, "bf16", {}, "adam"),
    "tf32 strips": ((32, 128, 128, 128, 128, 16), 65536, "tf32", {}, "adam"),
    "fp32 strips": ((32, 64, 64, 16), 1024, "fp32", {"activation": "silu"}, "adam"),
    "tf32 strips, norm first": ((32, 64, 16), 9000, "tf32", {}, "lamb"),
    "tf32 bulk": ((512,) * 6, 16384, "tf32", {}, "adam"),
    "bf16 bulk, several ranks": ((512,) * 6, 16384, "bf16", {}, "adam"),
    "bf16 passes": ((32, 128, 128, 128, 128, 16), 65536, "bf16", {}, "adam"),
    "bf16 sweep": ((64, *(128,) * 7, 16), 65536, "bf16", {}, "adam"),
    "bf16 narrow, several ranks": ((32, 64, 64, 16), 4096, "bf16", {}, "adam"),
    "bf16 chain, several ranks": ((256,) * 6, 4096, "bf16", {}, "adam"),
    "bf16 resident, several ranks": ((100, 1000, 1000, 1000, 2), 32, "bf16", {}, "adam"),
    "bf16 passes, several ranks": ((32, 128, 128, 128, 128, 16), 65536, "bf16", {}, "adam"),
    "bf16 four ranks": ((100, 1000, 1000, 1000, 2), 1024, "bf16", {}, "adam"),
    "bf16 bulk, four ranks": ((512,) * 6, 16384, "bf16", {}, "adam"),
    "tf32 several ranks": ((100, 500, 10), 32, "tf32", {}, "momentum"),
    "fp32 ranks, reproducible": ((100, 500, 10), 32, "fp32", {}, "sgd"),
}

# One of every kernel has half-precision inputs, which are a type of our own in the kernels (strips declines them).
HALF = {
    "fp32 warpgroups", "fp32 resident", "bf16 sweep", "bf16 narrow, several ranks", "bf16 chain, several ranks",
    "bf16 bulk, several ranks", "bf16 passes, several ranks",
}  # fmt: skip

BYTES_SPILLED = {"bulk.cu": 2048}  # outside the loops of products, and where a fault is dealt with


def specialisations(family: str, capability: int) -> list[tuple[str, dict[str, str]]]:
    from distmlp.engine.fused_state import peer_specialisation
    from distmlp.engine.fused_state import specialisations as of_plan

    widths, rows, precision, model, optimizer = FAMILIES[family]
    config = make_config(list(widths), model, optimizer={"name": optimizer}, run={"precision": precision})
    labels = config.model.loss == "softmax_cross_entropy"
    task = Task(
        make_network(config), rows, precision, config.model.loss, labels, False, slot_names(optimizer), False,
        4 if "four ranks" in family else 2 if "ranks" in family else 1, "f2" if family in HALF else "f4",
        needs_norm=needs_norm(config.optimizer), lane_rows=9 if "reproducible" in family else 0,
    )  # fmt: skip
    plan = make_plan(task, DEVICES[capability])
    joined = peer_specialisation(config, plan)
    return of_plan(config, plan) + ([joined] if joined else [])


def compile_family(arguments: tuple[str, int]) -> list[tuple[str, compiler.Compiled]]:
    """What becomes of every module of a family."""
    family, capability = arguments
    return [
        (source, compiler.compiled(source, macros, capability))
        for source, macros in specialisations(family, capability)
    ]


@pytest.fixture(scope="module", params=[80, 90, 100])
def compiled(request: pytest.FixtureRequest) -> dict[str, list[tuple[str, compiler.Compiled]]]:
    """By family, for one compute capability."""
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        return dict(
            zip(FAMILIES, pool.map(compile_family, [(family, request.param) for family in FAMILIES]), strict=True)
        )


def test_registers_and_spills(compiled: dict) -> None:
    for family, parts in compiled.items():
        for source, made in parts:
            registers = [int(n) for n in re.findall(r"Used (\d+) registers", made.remarks)]
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", made.remarks)]
            target = re.search(r"for '(sm_\w+)'", made.remarks)
            print(f"{target and target[1]} {family}: {source} {len(made.code):,} bytes of machine code, "
                  f"registers {registers}, bytes spilled {spills}")  # fmt: skip
            assert registers, made.remarks
            assert max(registers) <= 255
            assert max(spills) <= BYTES_SPILLED.get(source, 1024)
            serialised = [line for line in made.remarks.splitlines() if "C75" in line]
            print(*serialised, sep="\n", end="\n" if serialised else "")
            # In the narrow kernel it is a matter of speed that differs between versions of the compiler.
            assert not serialised or source == "narrow.cu", "warpgroup products are run one by one"


def test_no_float_is_added_by_an_atomic_operation(compiled: dict) -> None:
    """The order of such additions, and with it the last bits of a sum, would be another in every run."""
    for family, parts in compiled.items():
        for source, made in parts:
            found = set(re.findall(r"\b(?:atom|red|multimem|cp\.reduce)\.[\w.:]*\.b?f\d+\w*", made.ptx))
            assert not found, f"{family}: {source}"
            assert re.search(r"\b(?:atom|red)\.", made.ptx) or source == "order.cu", "it has others: is this PTX?"


@pytest.mark.parametrize(
    "family",
    [
        "bf16 resident", "tf32 resident", "fp32 resident", "bf16 narrow", "bf16 chain", "bf16 bulk", "tf32 bulk",
        "bf16 sweep", "bf16 passes", "tf32 strips", "fp32 strips",
    ],
)  # fmt: skip
def test_families_are_those_of_their_kernels(family: str) -> None:
    assert specialisations(family, 90)[-1][0] == f"{family.split()[1]}.cu"


def compile_probe(monkeypatch: pytest.MonkeyPatch, header: str, claims: list[str], macros: dict[str, str]) -> None:
    """Compile nothing but `header` and what is claimed of it."""
    sources = compiler._sources()
    probe = "\n".join([f'#include "{header}"', *(f'static_assert({claim}, "{claim}");' for claim in claims)])
    monkeypatch.setattr(compiler, "_sources", lambda: {**sources, "probe.cu": probe})
    compiler.cubin("probe.cu", macros, 90)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize(
    ("widths", "rows", "optimizer", "ema"),
    [
        ([784, 512, 512, 10], 128, "adam", False), ([1, 3, 1], 1, "sgd", True), ([100, 1000, 2], 32, "momentum", True),
        ([17, *[16] * 7, 2], 64, "rmsprop", False), ([500, 33, 700, 5], 17, "adamw", True),
        ([8, 16, 9], 100, "sgd", False),
    ],
    ids=str,
)  # fmt: skip
def test_resident_plan_and_kernel_agree(
    widths: list[int], rows: int, optimizer: str, ema: bool, precision: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from distmlp.engine.fused_state import specialisations as of_plan

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = make_config(widths, {}, optimizer={"name": optimizer}, run={"precision": precision})
    slots = slot_names(optimizer)
    task = Task(make_network(config), rows, precision, config.model.loss, False, False, slots, ema, 1)
    source, macros = of_plan(config, make_plan(task, DEVICES[90], "resident"))[-1]
    assert source == "resident.cu"
    aligned = ("SCRATCH_AT", "SLOPE_AT", "OUTPUT_AT", "LAST_SLOPE_AT", "LOSSES_AT", "COUNTERS_AT", "FLAGS_AT")
    claims = [
        "resident::SHARED_BYTES == RESIDENT_SHARED_BYTES", "resident::EXCHANGE_BYTES == RESIDENT_EXCHANGE_BYTES",
        f"resident::STATES == {1 + len(slots) + ema}", *(f"resident::{name} % 16 == 0" for name in aligned),
    ]  # fmt: skip
    compile_probe(monkeypatch, "resident_shape.cuh", claims, macros)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize(("widths", "rows"), [([512] * 6, 16384), ([300, 65, 130], 5000), ([1, 1], 1)], ids=str)
def test_bulk_plan_and_kernel_agree(
    widths: list[int], rows: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distmlp.engine import plan_bulk as bulk
    from distmlp.engine.fused_state import specialisations as of_plan

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = make_config(widths, {}, optimizer={"name": "adam"}, run={"precision": precision})
    task = Task(make_network(config), rows, precision, config.model.loss, False, False, slot_names("adam"), False, 1)
    plan = make_plan(task, DEVICES[90], "bulk")
    assert isinstance(plan.special, bulk.BulkPlan)
    source, macros = of_plan(config, plan)[-1]
    assert source == "bulk.cu"
    claims = [
        f"SHARED_BYTES == {plan.special.shared_bytes}", f"BULK_THREADS == {plan.special.threads}",
        f"STAGE_BYTES == {bulk.stage_bytes(max(plan.special.n, plan.special.gradient_n))}",
        f"MAX_BULK_LAYERS == {bulk.MAX_LAYERS}", f"TILE_M == {bulk.TILE_M}",
        f"sizeof(near_matrices) + sizeof(Hyper) + 16 <= {bulk.STATIC_BYTES[precision]}",
    ]  # fmt: skip
    compile_probe(monkeypatch, "bulk_store.cuh", claims, macros)


def test_turing_takes_the_plain_path() -> None:
    (source, macros), *_ = specialisations("bf16 softmax, small tiles", 75)
    assert macros["PRODUCT"] == "FMA"
    assert len(compiler.cubin(source, macros, 75)) > 10_000


def test_cache_answers_without_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compiler.cubin("order.cu", {}, 90)
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.cubin("order.cu", {}, 90) == first


def test_another_kernels_sources_compile_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = compiler._sources()
    assert set(compiler._reached("order.cu")) == {"order.cu", "order.cuh"}
    code = compiler.cubin("order.cu", {}, 80)
    for changed, again in (("wide.cu", 0), ("order.cuh", 1)):
        other = {**sources, changed: sources[changed] + "\n// another\n"}
        monkeypatch.setattr(compiler, "_sources", lambda other=other: other)
        assert len(compiler.cubin("order.cu", {}, 80)) == len(code)
        assert len(list(tmp_path.rglob("*.cubin"))) == 1 + again


def test_damaged_cache_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compiler.cubin("order.cu", {}, 90)
    (cached,) = (tmp_path / "distmlp" / "kernels").glob("*.cubin")
    cached.write_bytes(b"stump")
    assert compiler.cubin("order.cu", {}, 90) == first
    cached.write_bytes(first[: len(first) // 2])
    assert compiler.cubin("order.cu", {}, 90) == first


def test_read_only_home_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiler.cubin("order.cu", {}, 90)
    assert list(tmp_path.glob("distmlp-*/*.cubin"))


def test_a_folder_of_others_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "distmlp" / "kernels"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    compiler.cubin("order.cu", {}, 90)
    assert not list(shared.iterdir())


def _compile_order(_: int) -> bytes:
    return compiler.cubin("order.cu", {}, 90)


def test_many_ranks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        codes = list(pool.map(_compile_order, range(4)))
    assert len(set(codes)) == 1


@pytest.mark.parametrize(("capability", "name"), [(52, "5.2"), (999, "99.9")])
def test_unknown_gpu_is_named(capability: int, name: str) -> None:
    with pytest.raises(SystemUnfitError, match=rf"compute capability {name}, and NVRTC \d+\.\d+ compiles for 7\.5 to"):
        compiler.architecture(capability)


def test_nearest_architecture_of_the_generation() -> None:
    assert compiler.architecture(90) == "sm_90a"
    assert compiler.architecture(86) == "sm_86"
    assert compiler.architecture(109) in ("sm_107", "sm_103", "sm_101", "sm_100")


def test_message_of_a_failed_compilation_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemUnfitError) as caught:
        compiler.cubin("wide.cu", {"LOSS": "NO_SUCH_LOSS", "TILE_M": "x"}, 90)
    assert "wide" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= compiler.MESSAGE_LINES + 1


def test_missing_nvrtc_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    compiler._nvrtc.cache_clear()
    real = builtins.__import__

    def refuse(name: str, *arguments: object, **keywords: object) -> object:
        if name.startswith("cupy_backends"):
            raise ImportError("libnvrtc.so.13: cannot open shared object file")
        return real(name, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SystemUnfitError, match=r"libnvrtc.*distmlp\[cuda13\]"):
        compiler._nvrtc()
    monkeypatch.undo()
    compiler._nvrtc.cache_clear()
