"""One training run. Read me first: the objects of a run are built here, in the order the data flows."""

import contextlib
import logging
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.registry import uses_user_code
from mingpt_ddp.data.dataloader import TokenLoader, plan_batches
from mingpt_ddp.data.dataset import EncodedText, TextDataset
from mingpt_ddp.data.prepare import prepare
from mingpt_ddp.data.rng import derive_seed
from mingpt_ddp.data.tokenizer import CharTokenizer
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import process_start_time
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.distributed.signals import SignalHandler
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.inference.generate import SamplingParams, generate_text
from mingpt_ddp.metrics.processor import NATS_PER_BIT, MetricsProcessor
from mingpt_ddp.snapshots.load import load, stores_of_run
from mingpt_ddp.snapshots.manager import Check, SnapshotManager
from mingpt_ddp.snapshots.store import SnapshotStore
from mingpt_ddp.storage.run_dir import LOCK_WAIT_S, RunDirectory, RunStatus, difference, recorded_config, run_directory
from mingpt_ddp.storage.urls import open_storage
from mingpt_ddp.training.evaluate import Evaluator
from mingpt_ddp.training.preflight import check_fits, check_resumes_exactly
from mingpt_ddp.training.save_schedule import SaveSchedule
from mingpt_ddp.training.start_log import log_changes, log_start, warn_of_lost_snapshots, warn_of_unused_changes
from mingpt_ddp.training.train_state import Context, TrainState, check_state, restore
from mingpt_ddp.training.train_step import TrainStep, build_model_and_optimizer, count_steps
from mingpt_ddp.training.trainer import Trainer
from mingpt_ddp.training.trial_pruning import MedianPruner

log = logging.getLogger(__name__)

SAMPLE_CHARACTERS = 400
MIN_GOODPUT_S = 600.0  # shorter runs are dominated by startup
PER_NODE = ("nproc_per_node", "launcher", "max_restarts")  # keys of ddp that may differ between ranks


def run(
    config: Config,
    runtime: Runtime,
    hydra_files: dict[str, str],
    interrupt: SignalHandler | None = None,
    started_at: float | None = None,
) -> float | None:
    """Train to the limits of `config`, from the newest snapshot if there is one.

    Args:
        hydra_files: content of `.hydra/`, by file name.
        interrupt: handler of the signals that may end the run early; None: no handler.
        started_at: time.monotonic() when this attempt began; None: when the process did.

    Returns:
        The last validation loss in nats per character, or None if a signal ended the run early.
    """
    interrupt, started_at = interrupt or SignalHandler(), started_at or process_start_time()
    _check_same_config(config, runtime)
    text = EncodedText(**runtime.group.run_on_rank_zero(lambda: asdict(prepare(config.data)), per_node=True))
    dataset = TextDataset(text, config.data)
    block_size, batch_size, seed = config.data.block_size, config.trainer.batch_size, config.run.seed
    loader = TokenLoader(dataset.train, block_size, config.data.stride, batch_size, seed, runtime.device)
    steps = count_steps(config, loader.steps_per_epoch)
    check = partial(check_state, config=config, text=text)
    directory = run_directory(config)
    stores = [SnapshotStore(url) for url in snapshot_urls(config, directory)]
    _preflight(config, runtime, stores, dataset.vocab_size, loader, check)  # refuses before anything is written

    with contextlib.ExitStack() as resources:
        owner = _lock_directory(config, runtime, directory, stores, resources)
        last_log_time = owner.last_log_time() if owner else 0.0
        logs.to_file(directory, runtime.group.env)
        manager = SnapshotManager(config, runtime, stores, directory)
        snapshot = manager.load_latest(check)

        model, optimizer = build_model_and_optimizer(config, runtime, dataset.vocab_size)
        state = restore(snapshot, model, optimizer, runtime.scaler) if snapshot else TrainState()
        windows = config.trainer.eval_steps and config.trainer.eval_steps * batch_size
        evaluator = Evaluator(dataset.val, block_size, runtime, windows)
        sample = partial(_sample, config, runtime, model, CharTokenizer(dataset.vocabulary))
        log_start(config, runtime, dataset, model, directory, range(state.step, steps))

        is_complete = state.step > steps or (state.step == steps and state.val_step == steps)
        previous = recorded_config(directory) if owner else None
        if owner and not (is_complete and previous):
            owner.record_start(config.to_dict(), hydra_files)
        if is_complete:
            status = RunStatus.COMPLETE
            if previous:
                warn_of_unused_changes(previous, config)
            if state.val_step != state.step:  # saved between two evaluations, under a larger limit
                state.val_loss = evaluator.run(model)
            log.info("a sample:\n%s\n", sample(state.step))
        else:
            if owner and snapshot:
                log_changes(snapshot, config, runtime, loader.steps_per_epoch)
            elif owner:
                warn_of_lost_snapshots(directory)
            micro_batch_size = snapshot.state["micro_batch_size"] if snapshot else None
            plan = plan_batches(config.trainer, runtime.group.world_size, micro_batch_size)
            state.world_size = runtime.group.world_size
            undone = max(0.0, last_log_time - state.saved_at) if state.saved_at else 0.0
            state.wasted_seconds += undone + time.monotonic() - started_at
            train_step = TrainStep(config, runtime, loader, plan, model, optimizer)
            metrics = MetricsProcessor(config, runtime, directory, model, range(state.step, steps), started_at)
            context = Context(config, runtime, state, metrics, MedianPruner(config, runtime, directory), interrupt)
            saves = SaveSchedule(context, manager, train_step, text)
            trainer = Trainer(context, saves, evaluator, sample)
            if owner:
                owner.clear_result()
            status = trainer.fit()
            state = context.state

        if owner:
            owner.write_result(_result(state, config, loader.steps_per_epoch, status))
            if status is RunStatus.COMPLETE:
                _log_end(state, directory)
    return None if status is RunStatus.PREEMPTED else state.val_loss


def snapshot_urls(config: Config, directory: Path) -> list[str]:
    """Return the URLs of the run's snapshots: in the run directory, or in snapshot.path below the run's name.

    With snapshot.fallback_path a second URL follows.
    """
    name = directory.relative_to(config.run.root).as_posix()
    paths = [config.snapshot.path, config.snapshot.fallback_path]
    below = [f"{path}{name}" if path.endswith("/") else f"{path}/{name}" for path in paths if path is not None]
    return below if config.snapshot.path is not None else [str(directory / "snapshots"), *below]


def _check_same_config(config: Config, runtime: Runtime) -> None:
    """Refuse ranks that were started by hand with different overrides."""
    values = config.to_dict()
    values["ddp"] = {key: value for key, value in values["ddp"].items() if key not in PER_NODE}
    configs = runtime.group.all_gather(values)
    for rank, other in enumerate(configs):
        if differences := difference(configs[0], other):
            raise ConfigError(f"rank {rank} has another configuration than rank 0: {'; '.join(differences)}")


def _preflight(
    config: Config, runtime: Runtime, stores: list[SnapshotStore], vocab_size: int, loader: TokenLoader, check: Check
) -> None:
    """Check the batch, the snapshots, the memory and the user's code. A collective."""
    plan = plan_batches(config.trainer, runtime.group.world_size)

    def check_resume() -> None:
        # For any run.resume: refuse another format or an unreadable location before anything is written.
        own = [store.check_format() for store in stores_of_run(stores, run_directory(config))]
        if config.run.source is not None and not any(own):
            source = load(config.run.source)
            check(source.step, source.state)
            plan_batches(config.trainer, runtime.group.world_size, source.state["micro_batch_size"])

    runtime.group.run_on_rank_zero(check_resume)
    check_fits(config, runtime, vocab_size)
    if uses_user_code(config):
        first = partial(loader.get_batch, 1, plan, 0)
        runtime.group.run_on_rank_zero(lambda: check_resumes_exactly(config, runtime, vocab_size, first()[0]))


def _lock_directory(
    config: Config, runtime: Runtime, directory: Path, stores: list[SnapshotStore], resources: contextlib.ExitStack
) -> RunDirectory | None:
    """Lock the run directory and those of its snapshots until `resources` is closed; return the owner on rank zero."""
    owner: RunDirectory | None = None

    def lock() -> None:
        nonlocal owner
        owner = RunDirectory(directory, wait_s=min(LOCK_WAIT_S, config.ddp.timeout_s / 2))
        resources.callback(owner.release)
        for store in stores:
            owner.lock_snapshots(open_storage(store.url))
            store.lease = owner.leases.get(store.url)

    runtime.group.run_on_rank_zero(lock)
    return owner


def _log_end(state: TrainState, directory: Path) -> None:
    total_s = state.wall_seconds + state.wasted_seconds
    if total_s >= MIN_GOODPUT_S:
        lost, total = (timedelta(seconds=round(s)) for s in (state.stall_seconds + state.wasted_seconds, total_s))
        causes = "startup, stalls for snapshots and repeated steps"
        log.info("goodput %.1f%%: %s took %s of %s", 100 * state.goodput, causes, lost, total)
    nats = state.val_loss or 0.0
    loss = f"{nats:.4f} nats ({nats / NATS_PER_BIT:.4f} bits) per character"
    log.info("done: validation loss %s after %d steps; the run is in %s", loss, state.step, directory)


def _sample(config: Config, runtime: Runtime, model: nn.Module, tokenizer: CharTokenizer, step: int) -> str | None:
    """Generate a text on rank zero, keyed by the seed and the step; return None on other ranks."""
    seed = derive_seed("sample", config.run.seed, step)
    sampling = SamplingParams(temperature=0.8, top_k=40)
    generate = partial(generate_text, model, tokenizer, "", SAMPLE_CHARACTERS, sampling, seed)
    return runtime.group.env.call_on_rank_zero(lambda: generate()[0])


def _result(state: TrainState, config: Config, steps_per_epoch: int, status: RunStatus) -> dict[str, Any]:
    return {
        "status": status.value,
        "step": state.step,
        "epoch": state.step / steps_per_epoch,
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        "bits_per_char": state.val_loss and state.val_loss / NATS_PER_BIT,
        "best_val_loss": state.best_val_loss,
        "tokens": state.step * config.trainer.batch_size * config.data.block_size,
        "wall_seconds": state.wall_seconds,
        "goodput": state.goodput,
        "world_size": state.world_size,
    }
