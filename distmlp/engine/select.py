"""Which engine runs: `auto` takes the GPU where there is one, and says why it took what it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from distmlp.comm.binding import bind, table
from distmlp.comm.transport import Facts, choose_transport
from distmlp.engine import transports
from distmlp.engine.reference import ReferenceEngine
from distmlp.errors import SystemUnfitError

if TYPE_CHECKING:
    from distmlp.comm.world import World
    from distmlp.config import RunConfig
    from distmlp.data.feed import Feed
    from distmlp.engine import Engine, Standardization
    from distmlp.engine.fused import FusedEngine
    from distmlp.network import Network


def open_engine(
    config: RunConfig,
    network: Network,
    world: World,
    feed: Feed | None,
    standardization: Standardization,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Engine, str]:
    """The engine that `run.engine` asks for, and one line that says why it is this one.

    Call it on every rank: whether all have a GPU is agreed. Without `feed` nothing is trained, and the reference
    engine in fp32 stands in wherever there is no GPU. Raises SystemUnfitError (AgreedError under several
    ranks) where the engine asked for cannot run here, and says what is missing.
    """
    wanted = config.run.engine
    arguments = (config, network, world, feed, standardization, stop)
    if wanted == "reference":
        return _reference(arguments, "asked for"), "run.engine = reference"
    obstacle = _obstacle(config, world)
    if not obstacle:
        return _open_fused(arguments)
    if wanted == "fused" and feed is not None:

        def refuse() -> None:
            if obstacle_here := _obstacle_here(config):
                raise SystemUnfitError(f"run.engine = fused cannot run: {obstacle_here}")
            raise SystemUnfitError(f"run.engine = fused cannot run on every rank: {obstacle}")

        world.agree(refuse, "fused engine")
    return _reference(arguments, obstacle), f"no GPU engine: {obstacle}"


def _open_fused(arguments: tuple) -> tuple[FusedEngine, str]:
    """The fused engine on this rank's GPU, joined with those of the other ranks if it is to train."""
    config, world, feed = arguments[0], arguments[2], arguments[3]
    binding = bind(world, config.run.share_gpu)
    joined = feed is not None and world.size > 1
    wanted = config.run.transport
    if joined:
        facts = transports.find_facts(wanted, world, binding.shared)
        if config.run.reproducible == "ranks":
            facts = replace(facts, peer="run.reproducible = ranks adds up streams between launches")
        choice = world.agree(lambda: choose_transport(wanted, facts), "run.transport")
    engine = world.agree(lambda: _fused(arguments, binding.ordinal), "fused engine")
    engine.devices = [
        {"rank": seat.rank, "host": seat.host, "name": seat.gpu.name, "uuid": seat.gpu.uuid} for seat in binding.seats
    ]
    reason = engine.reason
    if world.size > 1:
        warning = f"; warning: GPUs are shared: {binding.warning}" if binding.shared else ""
        reason += f"{warning}\n{table(binding.seats)}"
    if joined:
        reason += f"\n{transports.connect(engine, wanted, choice, facts)}"
    return engine, reason


def _fused(arguments: tuple, ordinal: int) -> FusedEngine:
    import cupy

    cupy.cuda.Device(ordinal).use()  # before anything makes a context, or every rank would have one on GPU 0
    from distmlp.engine.fused import FusedEngine

    return FusedEngine(*arguments)


def _reference(arguments: tuple, reason: str) -> ReferenceEngine:
    config, world, feed = arguments[0], arguments[2], arguments[3]
    precision = config.run.precision
    if precision != "fp32" and feed is not None:  # what was trained on a GPU can be used anywhere
        raise SystemUnfitError(
            f"run.precision = {precision} needs the fused engine on a GPU, and the reference engine was taken "
            f"({reason}); set run.precision = fp32"
        )
    engine = ReferenceEngine(*arguments)
    facts = Facts("reference", world.size, len(world.hosts))
    engine.transport = choose_transport(config.run.transport, facts).transport
    return engine


def _obstacle(config: RunConfig, world: World) -> str:
    """Why the fused engine cannot run on all ranks, empty if it can; the same on every rank."""
    return next((text for text in world.all_gather(_obstacle_here(config)) if text), "")


def _obstacle_here(config: RunConfig) -> str:
    try:
        from distmlp.engine.device import find_obstacle
    except ImportError as error:
        return str(error)
    return find_obstacle()
