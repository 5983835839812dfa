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
from mingpt_ddp.config.registry import uses_user_code
from mingpt_ddp.data.dataloader import TokenLoader, plan_batches
from mingpt_ddp.data.dataset import EncodedText, TextDataset
from mingpt_ddp.data.prepare import prepare
from mingpt_ddp.data.rng import derive_seed, seed_everything
from mingpt_ddp.data.tokenizer import CharTokenizer
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import process_start_time
from mingpt_ddp.distributed.exit import exit_hang
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.distributed.watchdog import Watchdog
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.inference.generate import generate_text
from mingpt_ddp.metrics.processor import NATS_PER_BIT, MetricsProcessor
from mingpt_ddp.models import apply_activation_checkpointing, build_model, count_parameters
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.snapshots.load import candidate_stores, load
from mingpt_ddp.snapshots.manager import SnapshotManager
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.snapshots.train_state import TrainState, check_state
from mingpt_ddp.storage.run_dir import LOCK_WAIT_S, RunDirectory, RunStatus, difference, recorded_config, run_directory
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.training.evaluate import Evaluator
from mingpt_ddp.training.preflight import check_fits, check_resumes_exactly
from mingpt_ddp.training.pruning import MedianPruner
from mingpt_ddp.training.train_step import TrainStep
from mingpt_ddp.training.trainer import Trainer, count_steps

log = logging.getLogger(__name__)

SAMPLE_CHARACTERS = 400
PER_MACHINE = ("nproc_per_node", "launcher", "max_restarts")  # keys of ddp that may differ from rank to rank


def run(
    config: Config,
    runtime: Runtime,
    hydra_files: dict[str, str],
    interrupt: SignalHandler | None = None,
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
    interrupt, begun_at = interrupt or SignalHandler(), begun_at or process_start_time()
    # Whatever can be refused is refused here, before anything is written.
    _check_same(runtime, config)
    encoded = EncodedText(**runtime.group.run_on_rank_zero(lambda: asdict(prepare(config.data)), per_node=True))
    corpus = TextDataset(encoded, config.data)
    loader = TokenLoader(
        corpus.train,
        config.data.block_size,
        config.data.stride,
        config.trainer.batch_size,
        config.run.seed,
        runtime.device,
    )
    plan = plan_batches(config.trainer, runtime.group.world_size)
    steps = count_steps(config, loader.steps_per_epoch)
    runtime.group.run_on_rank_zero(lambda: _check_resume(config, encoded, runtime.group.world_size))
    check_fits(config, runtime, corpus.vocab_size)
    if uses_user_code(config):
        runtime.group.run_on_rank_zero(
            lambda: check_resumes_exactly(config, runtime, corpus.vocab_size, loader.get_batch(1, plan, 0)[0])
        )

    with contextlib.ExitStack() as held:
        owner, directory = _own_directory(config, runtime, held)
        last_log_time = owner.last_log_time() if owner else 0.0
        logs.to_file(directory, runtime.group.env)
        saver = _saver(config, runtime, owner, directory, encoded)
        found = saver.load_latest()

        seed_everything("weights", config.run.seed)
        model = build_model(config.model, corpus.vocab_size, config.data.block_size).to(runtime.device)
        if config.trainer.activation_checkpointing:
            apply_activation_checkpointing(model)
        optimizer = build_optimizer(model, config.optimizer)
        position = saver.restore(found, model, optimizer) if found else TrainState(world_size=runtime.group.world_size)
        evaluator = Evaluator(corpus.val, config.data.block_size, runtime)
        sample = partial(_sample, model, CharTokenizer(corpus.vocabulary), config.run.seed, runtime.group.is_rank_zero)
        _introduce(config, runtime, corpus, model, directory, position.step, steps)

        ended = position.step > steps or (position.step == steps and position.val_step == steps)
        if not ended:
            plan = plan_batches(
                config.trainer, runtime.group.world_size, found.state["micro_batch_size"] if found else None
            )
        if owner and not (ended and recorded_config(directory)):  # what has nothing left to do stays what it was
            owner.record_start(config.to_dict(), hydra_files)
        if not ended:
            position.world_size = runtime.group.world_size
            undone = max(0.0, last_log_time - position.saved_at) if position.saved_at else 0.0
            position.wasted_seconds += undone + time.time() - begun_at
            train_step = TrainStep(config, runtime, loader, plan, model, optimizer, steps)
            metrics = MetricsProcessor(config, runtime, directory, model, range(position.step, steps), begun_at)
            pruner = MedianPruner(config, runtime, directory)
            trainer = Trainer(
                config, runtime, train_step, evaluator, saver, metrics, position, sample, pruner, interrupt
            )
            if owner:
                owner.clear_result()
            status = _fit(trainer, runtime, interrupt)
        else:
            status = RunStatus.COMPLETE
            if position.val_step != position.step:  # it was saved under a larger limit, between two evaluations
                position.val_loss = evaluator.run(model)
            log.info("a sample:\n%s\n", sample(position.step))

        if owner:
            owner.write_result(_result(position, config, loader.steps_per_epoch, status))
            if status is RunStatus.COMPLETE:
                _conclude(position, directory)
    return None if status is RunStatus.PREEMPTED else position.val_loss


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
            owner.lock_snapshots(Storage(url))
        return str(wanted)

    directory = Path(runtime.group.run_on_rank_zero(take))
    return owner, directory


def _saver(
    config: Config, runtime: Runtime, owner: RunDirectory | None, directory: Path, corpus: EncodedText
) -> SnapshotManager:
    stores = [SnapshotStore(url) for url in snapshot_urls(config, directory)]
    for store in stores:
        store.lease = owner.leases.get(store.url) if owner else None
    urls = {store.url for store in stores}
    previous_stores = runtime.group.run_on_rank_zero(
        lambda: [store.url for store in candidate_stores(str(directory)) if store.url not in urls]
    )
    return SnapshotManager(
        config, runtime, stores, corpus, [SnapshotStore(url) for url in previous_stores] if owner else []
    )


def _fit(trainer: Trainer, runtime: Runtime, interrupt: SignalHandler) -> RunStatus:
    """Train while signals are heeded and the other ranks are watched."""
    watch = Watchdog(runtime.group, exit_hang)
    interrupt.deferred = True
    try:
        return trainer.fit()
    finally:
        interrupt.deferred = False
        watch.stop()


def _conclude(position: TrainState, directory: Path) -> None:
    log.info("goodput %.1f%%: the share of the time that became lasting progress", 100 * position.goodput)
    log.info(
        "done: validation loss %.4f nats (%.4f bits) per character after %d steps; the run is in %s",
        *(position.val_loss, (position.val_loss or 0) / NATS_PER_BIT, position.step, directory),
    )


def _check_same(runtime: Runtime, config: Config) -> None:
    """Ranks that were started by hand may have been given different words; how many a machine starts is its own."""
    values = config.to_dict()
    values["ddp"] = {key: value for key, value in values["ddp"].items() if key not in PER_MACHINE}
    configs = runtime.group.all_gather(values)
    for rank, other in enumerate(configs):
        differing = difference(configs[0], other)
        if differing:
            raise ConfigError(f"rank {rank} is configured otherwise than rank 0: {'; '.join(differing)}")


def _check_resume(config: Config, corpus: EncodedText, world_size: int) -> None:
    """The place of the snapshots can be read, and what run.resume names can be continued."""
    own = [step for url in snapshot_urls(config, run_directory(config)) for step in SnapshotStore(url).steps()]
    if config.run.resume not in ("auto", "never") and not own:
        source = load(config.run.resume)
        check_state(source.step, source.state, config, corpus)
        plan_batches(config.trainer, world_size, source.state["micro_batch_size"])


def _introduce(
    config: Config, runtime: Runtime, corpus: TextDataset, model: nn.Module, directory: Path, done: int, steps: int
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
            runtime.group.world_size,
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


def _sample(model: nn.Module, vocabulary: CharTokenizer, seed: int, is_main: bool, step: int) -> str | None:
    """A piece of text, the same for the same weights, seed and step; one rank is enough to write it."""
    if not is_main:
        return None
    texts = generate_text(
        model, vocabulary, "", SAMPLE_CHARACTERS, derive_seed("sample", seed, step), temperature=0.8, top_k=40
    )
    return texts[0]


def _result(position: TrainState, config: Config, steps_per_epoch: int, status: RunStatus) -> dict[str, Any]:
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
