"""The composition root: every object of a run, named once, in the order the data flows."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import uses_own_code
from mingpt_ddp.data.dataloader import Loader, plan_batches
from mingpt_ddp.data.dataset import Corpus, Encoded, Vocabulary, prepare
from mingpt_ddp.data.rng import key_to_seed, seed_everything
from mingpt_ddp.distributed import logging as logs
from mingpt_ddp.distributed.env import started_at
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import Interrupt
from mingpt_ddp.distributed.watchdog import Watch
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.inference.generate import generate_text
from mingpt_ddp.metrics.jsonl import METRICS, History
from mingpt_ddp.metrics.matmul_rate import Utilisation
from mingpt_ddp.metrics.meters import NATS_PER_BIT, Board
from mingpt_ddp.metrics.processor import Journal
from mingpt_ddp.models import build_model, count_parameters, flops_per_token
from mingpt_ddp.models.activation_checkpoint import recompute_blocks
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.snapshots.load import load, places
from mingpt_ddp.snapshots.manager import Saver
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.snapshots.train_state import Position, check_state
from mingpt_ddp.storage.run_dir import LOCK_WAIT_S, RunDirectory, difference, recorded_config, run_directory
from mingpt_ddp.storage.status import Status
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.training.evaluate import Evaluator
from mingpt_ddp.training.preflight import check_fits, rehearse
from mingpt_ddp.training.pruning import MedianRule
from mingpt_ddp.training.train_step import Stepper
from mingpt_ddp.training.trainer import Trainer, count_steps

log = logging.getLogger(__name__)

SAMPLE_CHARACTERS = 400
PER_MACHINE = ("nproc_per_node", "launcher", "max_restarts")  # keys of ddp that may differ from rank to rank


def run(
    config: Config,
    runtime: Runtime,
    hydra_files: dict[str, str],
    interrupt: Interrupt | None = None,
    begun_at: float | None = None,
) -> float | None:
    """Train to the limits of `config`, from the newest snapshot if there is one.

    Args:
        hydra_files: what goes to `.hydra/`, by file name.
        interrupt: the signals that may end the run early; None: there are none.
        begun_at: when this start began, in seconds since 1970; None: with the process.

    Returns:
        The last validation loss in nats per character, or None where a signal has ended the run early.
    """
    interrupt, begun_at = interrupt or Interrupt(), begun_at or started_at()
    # Whatever can be refused is refused here, before anything is written.
    _check_same(runtime, config)
    encoded = Encoded(**runtime.first(lambda: asdict(prepare(config.data)), per_node=True))
    corpus = Corpus(encoded, config.data)
    loader = Loader(
        corpus.train,
        config.data.block_size,
        config.data.stride,
        config.trainer.batch_size,
        config.run.seed,
        runtime.device,
    )
    plan = plan_batches(config.trainer, runtime.world_size)
    steps = count_steps(config, loader.steps_per_epoch)
    runtime.first(lambda: _check_resume(config, encoded, runtime.world_size))
    check_fits(config, runtime, corpus.vocab_size)
    if uses_own_code(config):
        runtime.first(lambda: rehearse(config, runtime, corpus.vocab_size, loader.step(1, plan, 0)[0]))

    with contextlib.ExitStack() as held:
        owner, directory = _own_directory(config, runtime, held)
        last_sign = owner.last_sign() if owner else 0.0
        logs.to_file(directory, runtime.place)
        saver = _saver(config, runtime, owner, directory, encoded)
        found = saver.find()

        seed_everything("weights", config.run.seed)
        model = build_model(config.model, corpus.vocab_size, config.data.block_size).to(runtime.device)
        if config.trainer.activation_checkpointing:
            recompute_blocks(model)
        optimizer = build_optimizer(model, config.optimizer)
        position = saver.restore(found, model, optimizer) if found else Position(world_size=runtime.world_size)
        evaluator = Evaluator(corpus.val, config.data.block_size, runtime)
        sample = partial(_sample, model, Vocabulary(corpus.vocabulary), config.run.seed, runtime.is_main)
        _introduce(config, runtime, corpus, model, directory, position.step, steps)

        ended = position.step > steps or (position.step == steps and position.val_step == steps)
        if not ended:
            plan = plan_batches(config.trainer, runtime.world_size, found.state["micro_batch_size"] if found else None)
        if owner and not (ended and recorded_config(directory)):  # what has nothing left to do stays what it was
            owner.record_start(config.to_dict(), hydra_files)
        if not ended:
            position.world_size = runtime.world_size
            undone = max(0.0, last_sign - position.saved_at) if position.saved_at else 0.0
            position.lost_seconds += undone + time.time() - begun_at
            stepper = Stepper(config, runtime, loader, plan, model, optimizer, steps)
            board = Board(
                directory / "tensorboard" / f"rank{runtime.rank}", first_step=position.step + 1, is_main=runtime.is_main
            )
            history = History(directory / METRICS if runtime.is_main else None)
            utilisation = Utilisation(flops_per_token(model), runtime.device, runtime.dtype)
            journal = Journal(config, runtime, board, history, utilisation, position.step, steps, begun_at)
            rule = MedianRule(config, runtime, directory)
            trainer = Trainer(config, runtime, stepper, evaluator, saver, journal, position, sample, rule, interrupt)
            if owner:
                owner.forget_result()
            status = _fit(trainer, runtime, interrupt)
        else:
            status = Status.COMPLETE
            if position.val_step != position.step:  # it was saved under a larger limit, between two evaluations
                position.val_loss = evaluator.run(model)
            log.info("a sample:\n%s\n", sample(position.step))

        if owner:
            owner.write_result(_result(position, config, loader.steps_per_epoch, status))
            if status is Status.COMPLETE:
                _conclude(position, directory)
    return None if status is Status.PREEMPTED else position.val_loss


def snapshot_urls(config: Config, directory: Path) -> list[str]:
    """Where the run's snapshots are: below snapshot.path in a directory named like the run, or in the run directory.

    Where there is a snapshot.fallback_path, a second place follows.
    """
    name = directory.relative_to(config.run.root).as_posix()
    paths = [config.snapshot.path, config.snapshot.fallback_path]
    below = [f"{path}{name}" if path.endswith("/") else f"{path}/{name}" for path in paths if path is not None]
    return below if config.snapshot.path is not None else [str(directory / "snapshots"), *below]


def _own_directory(config: Config, runtime: Runtime, held: contextlib.ExitStack) -> tuple[RunDirectory | None, Path]:
    """The run directory, the same on every rank; its owner is rank 0, until `held` is closed."""
    owner: RunDirectory | None = None

    def take() -> str:
        nonlocal owner
        wanted = run_directory(config)
        owner = RunDirectory(wanted, wait_s=min(LOCK_WAIT_S, config.ddp.timeout_s / 2))
        held.callback(owner.release)
        for url in snapshot_urls(config, wanted):
            owner.own_snapshots(Storage(url))
        return str(wanted)

    directory = Path(runtime.first(take))
    return owner, directory


def _saver(config: Config, runtime: Runtime, owner: RunDirectory | None, directory: Path, corpus: Encoded) -> Saver:
    stores = [SnapshotStore(url) for url in snapshot_urls(config, directory)]
    for store in stores:
        store.lease = owner.leases.get(store.url) if owner else None
    urls = {store.url for store in stores}
    former = runtime.first(lambda: [store.url for store in places(str(directory)) if store.url not in urls])
    return Saver(config, runtime, stores, corpus, [SnapshotStore(url) for url in former] if owner else [])


def _fit(trainer: Trainer, runtime: Runtime, interrupt: Interrupt) -> Status:
    """Train while signals are heeded and the other ranks are watched."""
    watch = Watch(runtime, interrupt.stalled)
    interrupt.heeded = True
    try:
        return trainer.fit()
    finally:
        interrupt.heeded = False
        watch.stop()


def _conclude(position: Position, directory: Path) -> None:
    log.info("goodput %.1f%%: the share of the time that became lasting progress", 100 * position.goodput)
    log.info(
        "done: validation loss %.4f nats (%.4f bits) per character after %d steps; the run is in %s",
        *(position.val_loss, (position.val_loss or 0) / NATS_PER_BIT, position.step, directory),
    )


def _check_same(runtime: Runtime, config: Config) -> None:
    """Ranks that were started by hand may have been given different words; how many a machine starts is its own."""
    values = config.to_dict()
    values["ddp"] = {key: value for key, value in values["ddp"].items() if key not in PER_MACHINE}
    configs = runtime.gather(values)
    for rank, other in enumerate(configs):
        differing = difference(configs[0], other)
        if differing:
            raise ConfigError(f"rank {rank} is configured otherwise than rank 0: {'; '.join(differing)}")


def _check_resume(config: Config, corpus: Encoded, world_size: int) -> None:
    """The place of the snapshots can be read, and what run.resume names can be continued."""
    own = [step for url in snapshot_urls(config, run_directory(config)) for step in SnapshotStore(url).steps()]
    if config.run.resume not in ("auto", "never") and not own:
        source = load(config.run.resume)
        check_state(source.step, source.state, config, corpus)
        plan_batches(config.trainer, world_size, source.state["micro_batch_size"])


def _introduce(
    config: Config, runtime: Runtime, corpus: Corpus, model: nn.Module, directory: Path, done: int, steps: int
) -> None:
    """What is about to be trained, in three lines."""
    log.info("run %s", directory)
    log.info(
        "%s: %s training and %s validation characters, %d distinct",
        *(config.data.name, f"{len(corpus.train):,}", f"{len(corpus.val):,}", corpus.vocab_size),
    )
    log.info(
        "%s: %.2fM parameters, on %d x %s in %s",
        *(
            config.model.name,
            count_parameters(model) / 1e6,
            runtime.world_size,
            runtime.device.type,
            runtime.precision,
        ),
    )
    if config.trainer.max_steps is not None and steps < config.trainer.max_steps:
        log.info(
            "trainer.max_epochs=%d ends the run at step %d, before trainer.max_steps=%d; set it to null to go on",
            *(config.trainer.max_epochs, steps, config.trainer.max_steps),
        )
    if done >= steps:
        log.info("complete: the snapshot of step %d has reached the limit of %d steps", done, steps)
    elif done:
        log.info("resuming from the snapshot of step %d of %d", done, steps)


def _sample(model: nn.Module, vocabulary: Vocabulary, seed: int, is_main: bool, step: int) -> str | None:
    """A piece of text, the same for the same weights, seed and step; one rank is enough to write it."""
    if not is_main:
        return None
    texts = generate_text(
        model, vocabulary, "", SAMPLE_CHARACTERS, key_to_seed("sample", seed, step), temperature=0.8, top_k=40
    )
    return texts[0]


def _result(position: Position, config: Config, steps_per_epoch: int, status: Status) -> dict[str, Any]:
    val_loss = position.val_loss
    return {
        "status": status.value,
        "step": position.step,
        "epoch": position.step / steps_per_epoch,
        "train_loss": position.train_loss,
        "val_loss": val_loss,
        "bits_per_char": val_loss and val_loss / NATS_PER_BIT,
        "best_val_loss": position.best_val_loss,
        "tokens": position.step * config.trainer.batch_size * config.data.block_size,
        "wall_seconds": position.wall_seconds,
        "goodput": position.goodput,
        "world_size": position.world_size,
    }
