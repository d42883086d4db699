"""Everything a run needs, opened in one order on all ranks and closed again: data, engine, output, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmlp import output as outputs
from distmlp.checkpoint import Checkpoint, load, network_of
from distmlp.checkpoint.resume import continue_run
from distmlp.checkpoint.store import Store, newest
from distmlp.comm.world import World
from distmlp.config import RunConfig
from distmlp.data.feed import Feed
from distmlp.data.shards import Shards
from distmlp.data.standardize import measure
from distmlp.engine import Engine, State
from distmlp.engine.select import open_engine
from distmlp.errors import ConfigError
from distmlp.events import EventFile, require_tensorboard
from distmlp.metrics import Reporter
from distmlp.network import Network
from distmlp.order import Order
from distmlp.output import RunOutput
from distmlp.rank_log import RankLog
from distmlp.timeline import Timeline


@dataclass
class Job:
    """A run that is ready to go. Lives as long as `open_job`'s context."""

    config: RunConfig  # all widths known
    world: World
    network: Network
    shards: Shards
    validation: Shards | None
    feed: Feed
    engine: Engine
    timeline: Timeline
    start: Checkpoint  # where training begins: the initial weights, or those of the checkpoint resumed from
    output: RunOutput
    store: Store | None  # on rank 0, the only writer
    reporter: Reporter
    events: EventFile | None

    def check_replicas(self, state: State) -> None:
        """Make sure that every rank holds the same weights. Collective.

        Raises RuntimeError (nothing a user does can cause it) naming the updates done and the ranks that differ.
        """
        prints = self.world.all_gather(self.network.fingerprint(state.parameters))
        if len(set(prints)) > 1:
            odd = [rank for rank, other in enumerate(prints) if other != prints[0]]
            raise RuntimeError(f"after {state.step} updates the weights of ranks {odd} differ from those of rank 0")


@contextmanager
def open_job(
    config: RunConfig, world: World, *, resume: bool, overwrite: bool, reporter: Reporter, stop: Callable[[], bool]
) -> Iterator[Job]:
    """Check and open everything, cheapest first, so that what is wrong shows before the first step.

    Raises the errors of each part, as AgreedError where ranks have to agree on them.
    """
    with ExitStack() as stack:
        shards = Shards.open(config.data, world, loss=config.model.loss, layers=config.model.layers)
        config = config.with_layers(shards.features, shards.outputs)
        validation = None
        if config.data.validation:
            validation = Shards.open(
                config.data, world, patterns=config.data.validation, loss=config.model.loss, layers=config.model.layers
            )
        if world.size > config.data.streams:
            raise ConfigError(
                f"data.streams = {config.data.streams}: fewer than the {world.size} ranks; a rank owns whole streams: "
                f"set data.streams to {world.size} or more (a multiple shares the work evenly)"
            )
        network = network_of(config)
        output = RunOutput(config, world, resume, overwrite)
        stack.callback(output.close)
        start = _resumed(output, config, shards, world, reporter) if resume else None
        if start is None:
            standardization = measure(shards, world, config.data.standardize)
            state = State(network.initial(config.run.seed, config.model.init))
            start = Checkpoint(config, state, standardization, rows=shards.rows, versions=outputs.versions())
        order = Order(shards.rows, config.data.streams, config.data.batch, config.run.seed, config.data.shuffle)
        feed = Feed(shards, order, world, config.data.residence, config.data.readers, config.data.scratch)
        stack.callback(feed.close)
        for advice in feed.advice():
            reporter.warn(advice)
        engine, reason = open_engine(config, network, world, feed, start.standardization, stop)
        stack.callback(engine.close)
        engine.load(start.state)
        world.agree(lambda: output.begin(config, start.step), "output")
        if config.run.log_ranks:
            reporter.keep(world.agree(lambda: RankLog(output.path, world), "run.log_ranks"))
        store = world.agree(lambda: Store(output.checkpoints, network, config.run.keep) if world.rank == 0 else None)
        if store:
            stack.enter_context(store)  # a run that fails leaves its last checkpoint whole
        events = world.agree(lambda: _events(config, output, world))
        if events:
            stack.callback(events.close)
        timeline = Timeline.of(config.run, order.batches_per_epoch)
        _introduce(reporter, config, network, shards, world, engine, reason, output)
        reporter.exchange()
        yield Job(
            config, world, network, shards, validation, feed, engine, timeline, start, output,
            store, reporter, events,
        )  # fmt: skip


def _resumed(
    output: RunOutput, config: RunConfig, shards: Shards, world: World, reporter: Reporter
) -> Checkpoint | None:
    """The checkpoint to continue from: rank 0 chooses, the others load that very file."""

    def choose() -> tuple[Path, list[str]] | None:
        found = newest(output.checkpoints) if world.rank == 0 else None
        return (found.path, found.rejected) if found else None

    chosen = world.broadcast(world.agree(choose, "resuming"))
    if chosen is None:
        metrics = output.path / outputs.METRICS
        if world.rank == 0 and metrics.is_file() and metrics.stat().st_size:
            reporter.warn(f"no checkpoint in {output.checkpoints}: the run begins anew, and so does {metrics.name}")
        return None
    path, rejected = chosen

    def continued() -> tuple[Checkpoint, dict[str, Any]]:
        saved = load(path)
        return saved, continue_run(saved, config, shards.rows)

    saved, changes = world.agree(continued, "resuming")
    if world.rank == 0:
        for reason in rejected:
            reporter.warn(f"passed over: {reason}")
        for key, (old, new) in changes.items():
            reporter.warn(f"{key} changed on resume: {old!r} → {new!r}")
    reporter.say(f"resumed from {path} after step {saved.step}")
    return saved


def _events(config: RunConfig, output: RunOutput, world: World) -> EventFile | None:
    if not config.run.tensorboard or world.rank > 0:
        return None
    require_tensorboard()
    return EventFile(output.path / outputs.EVENTS)


def _introduce(
    reporter: Reporter, config: RunConfig, network: Network, shards: Shards, world: World, engine: Engine,
    reason: str, output: RunOutput,
) -> None:  # fmt: skip
    widths = "-".join(map(str, network.widths))
    ranks = f"{_count(world.size, 'rank')} on {_count(len(set(world.hosts)), 'host')}"
    rule = f"{config.model.loss}, {config.optimizer.name}"
    shards_text = f"{shards.rows:,} rows in {_count(len(shards.paths), 'shard')}"
    reporter.say(f"network {widths}, {network.parameter_count:,} parameters, {rule}")
    reporter.say(f"data {shards_text}, global batch {config.data.batch}, {ranks}")
    why, *details = reason.splitlines()
    reporter.say(f"engine {engine.name}, {engine.precision} ({why})")
    for line in details:  # which rank drives which GPU, and the transport between them
        reporter.say(line)
    reporter.say(f"output {output.path}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
