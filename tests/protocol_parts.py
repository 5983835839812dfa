"""Run the package's protocols on all ranks, and return the traffic of each rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from counting import Network
from counting_store import Count
from torch import Tensor
from torch.distributed import PrefixStore

from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.distributed import watchdog
from mingpt_ddp.distributed.group.rendezvous import join_attempt
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.manager import RunState, SnapshotManager
from mingpt_ddp.snapshots.write.async_writer import AsyncSave
from mingpt_ddp.snapshots.write.store import SnapshotStore

TIMEOUT_S = 600.0  # the default of ddp.timeout_s
LATE_S = 1.0  # a late rank starts this long after the others
VALUE_BYTES = 20_000  # size of a state.json with the configuration and the history of losses
KINDS = ("model", "optimizer", "optimizer")
MOMENTS = ("", ":exp_avg", ":exp_avg_sq")
PARAMETERS = 50  # each has two moments, which makes 150 tensors


class Ranks:
    """The package's process group on each rank."""

    def __init__(self, world_size: int, config: Config) -> None:
        """Let all ranks join. Their traffic is not counted."""
        self.config = config
        self.network = Network(world_size)
        with self.network.patched():
            self.runtimes: list[Runtime] = self.network.run(self._join)
        self.network.take_counts()

    def _join(self, rank: int) -> Runtime:
        return Runtime(self.config, _env(rank, self.network.world_size))

    def count(self, work: Callable[[int], Any]) -> list[Count]:
        """Call `work` with each rank. Return the traffic by rank."""
        with self.network.patched():
            self.network.run(work)
        return self.network.take_counts()


def _env(rank: int, world_size: int) -> DistEnv:
    return DistEnv(rank=rank, local_rank=rank % 8, world_size=world_size, is_standalone=False)


def join(world_size: int, late_s: float = 0.0, attempts: int = 1) -> list[Count]:
    """Count the traffic of all ranks when they join an attempt through the store.

    Args:
        world_size: Number of ranks.
        late_s: Seconds by which the last rank starts after the others.
        attempts: Number of attempts. Only the last is counted; the earlier ones leave their keys
            in the store.
    """
    network = Network(world_size)

    def work(rank: int) -> None:
        if rank == world_size - 1:
            network.turns.sleep(late_s)
        store = PrefixStore("mingpt_ddp/0", network.stores[rank])
        join_attempt(store, _env(rank, world_size), TIMEOUT_S)

    counts: list[Count] = []
    with network.patched():
        for _ in range(attempts):
            network.take_counts()
            network.run(work)
            counts = network.take_counts()
    return counts


def heartbeats(ranks: Ranks) -> list[Count]:
    """Count the traffic of watchdogs in a second of training.

    Each rank's watchdog writes and reads four times.
    """
    network = ranks.network
    # The watchdog suppresses errors of a lost store. Here they must fail the test.
    names = vars(contextlib) | {"suppress": lambda *_: contextlib.nullcontext()}
    raising = mock.patch.object(watchdog, "contextlib", SimpleNamespace(**names))

    def begin(rank: int) -> None:
        ranks.runtimes[rank].group.set_activity("training")

    with network.patched(), raising:
        network.run(begin)
        network.take_counts()
        network.run(lambda rank: network.held[rank].play())
    return network.take_counts()


def rank_zero_value(ranks: Ranks) -> list[Count]:
    """Count the traffic of a call on rank zero whose value of 20 kB all ranks receive."""
    value = "x" * (VALUE_BYTES - len('""'))

    def work(rank: int) -> None:
        assert ranks.runtimes[rank].group.run_on_rank_zero(lambda: value) == value

    return ranks.count(work)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable logging, since all ranks would log to the same loggers."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def tensors_by_kind() -> dict[str, dict[str, Tensor]]:
    """Return small tensors of a model and its optimizer, with names of a usual length."""
    found: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for number in range(PARAMETERS):
        for kind, moment in zip(KINDS, MOMENTS, strict=True):
            name = f"transformer.blocks.{number}.attention.projection.weight{moment}"
            found[kind][name] = torch.full((8, 8), float(number))
    return found


def commit(ranks: Ranks, directory: Path, saves: int = 2) -> list[Count]:
    """Count the collectives of a snapshot of 150 tensors, from staging to its commit.

    Only the last save is counted: the first save of a run also finds out which ranks share a
    storage.
    """
    tensors = tensors_by_kind()
    # As for a large model, each rank writes its own shard, as long as there are enough tensors.
    shares = mock.patch("mingpt_ddp.snapshots.format.MIN_SHARD_BYTES", 256)
    inline = mock.patch.object(AsyncSave, "start", AsyncSave.run)
    state = {"losses": "x" * VALUE_BYTES}
    managers: list[SnapshotManager] = []
    for runtime in ranks.runtimes:
        store = SnapshotStore(str(directory / "snapshots"))
        managers.append(SnapshotManager(ranks.config, runtime, store, directory))
    counts: list[Count] = []
    with shares, inline, quiet():
        for step in range(1, saves + 1):

            def work(rank: int, step: int = step) -> None:
                managers[rank].save(RunState(step, state, tensors, None))
                save = managers[rank]._save
                assert save is not None
                if save.error is not None:
                    raise save.error
                assert save.failure is None, save.failure
                managers[rank]._save = None

            counts = ranks.count(work)
    return counts


def configuration(directory: Path, world_size: int) -> Config:
    """Write a text to a directory. Return the configuration of a small run on it."""
    text = directory / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 500)
    from hydra import compose, initialize_config_dir

    from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
    from mingpt_ddp.config.config import to_plain

    overrides = [
        "model=gpt_nano",
        "model.n_layer=1",
        "model.n_embd=12",
        f"data.path={text}",
        "data.sha256=null",
        "data.block_size=16",
        f"trainer.batch_size={world_size}",
        "trainer.device=cpu",
        "trainer.precision=fp32",
        "trainer.compile=false",
        f"run.root={directory}",
        "run.name=counted",
        f"ddp.timeout_s={TIMEOUT_S:g}",
    ]
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", overrides)))
