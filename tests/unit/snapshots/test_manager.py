"""Resuming: the settings in which a run must agree with its snapshot, and the restored state."""

from __future__ import annotations

import dataclasses
import errno
import json
from functools import partial

import pytest
import torch
from hydra import compose, initialize_config_dir
from launching import wait_for
from tasks import ENCODED, text_task, trainable

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.data.dataloader import BatchPlan
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import SnapshotError, StorageUnavailableError, StorageUnusableError
from mingpt_ddp.models import build_model
from mingpt_ddp.optim import build_optimizer
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.format import Snapshot
from mingpt_ddp.snapshots.manager import RunState, SnapshotManager
from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.storage import Storage
from mingpt_ddp.training.saves.resume import check_state, restore, snapshot_state
from mingpt_ddp.training.train_state import TrainState

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = ENCODED.tokenizer["vocabulary"]
OVERRIDES = ["model=gpt_nano", "trainer.device=cpu", "data.block_size=8", "snapshot.keep_last=2"]


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return from_mapping(to_plain(compose("config", [*OVERRIDES, *overrides])))


@pytest.fixture(scope="module")
def config() -> Config:
    return composed()


def with_value(config: Config, key: str, value: object) -> Config:
    group, name = key.split(".")
    values = config.to_dict()
    values[group][name] = value
    return from_mapping(values)


def state_of(config: Config) -> dict:
    """Return the state that a snapshot of this configuration has, after a round trip by JSON."""
    runtime = Runtime(config, DistEnv())
    content = snapshot_state(
        TrainState(step=8), runtime, text_task(config), BatchPlan(12, 4, 1), steps=9
    )
    return json.loads(json.dumps(content))


# Settings that must not change


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.n_layer", 5),
        ("model.n_embd", 96),
        ("model.n_head", 1),
        ("model.bias", True),
        ("data.block_size", 32),
        ("data.stride", 1),
        ("data.train_split", 0.5),
        ("data.truncate", 0.5),
        ("trainer.batch_size", 24),
        ("run.seed", 7),
    ],
)
def test_a_changed_key_is_named_with_both_values(key, value, config):
    old = config.to_dict()[key.split(".")[0]][key.split(".")[1]]
    with pytest.raises(SnapshotError) as refused:
        check_state(8, state_of(config), text_task(with_value(config, key, value)))
    message = str(refused.value)
    assert message.startswith(
        "snapshot error: the snapshot of step 8 was saved with other settings: "
    )
    assert f" {key} ({old} in the snapshot, {value} now);" in message
    assert message.endswith("use the old settings, or choose another run.name, or run.resume=never")
    elsewhere = with_value(with_value(config, key, value), "run.resume", "outputs/other")
    with pytest.raises(
        SnapshotError,
        match=r"or write run.init_from=outputs/other to start from its weights alone$",
    ):
        check_state(8, state_of(config), text_task(elsewhere))


def test_every_difference_is_named(config):
    other = with_value(with_value(config, "model.n_layer", 5), "run.seed", 7)
    optimizer = composed("optimizer=sgd")
    text = dataclasses.replace(ENCODED, sha256="2" * 64)
    for task, message in (
        (
            text_task(other),
            r"model.n_layer \(3 in the snapshot, 5 now\), run.seed \(1337 in the snapshot, 7 now\)",
        ),
        (text_task(optimizer), r"optimizer.name \(adamw in the snapshot, sgd now\)"),
        (
            text_task(config, encoded=text),
            r"content of the data \(SHA-256\) \(1{16} in the snapshot, 2222",
        ),
    ):
        with pytest.raises(SnapshotError, match=message):
            check_state(8, state_of(config), task)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 5e-4),
        ("model.dropout", 0.5),
        ("model.name", "other"),
        ("data.path", "the/same/text/elsewhere.txt"),
        ("data.name", "other"),
        ("trainer.max_steps", 7),
        ("trainer.micro_batch_size", 6),
        ("trainer.log_every", 7),
        ("snapshot.keep_last", 7),
        ("ddp.backend", "gloo"),
        ("run.name", "other"),
    ],
)
def test_keys_that_may_change(key, value, config):
    check_state(8, state_of(config), text_task(with_value(config, key, value)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_state", {"step": 7}),
        ("train_state", {"step": "8"}),
        ("train_state", {"step": 8, "skipped_steps": 7}),
        ("train_state", {"position": 8}),
        ("train_state", None),
        ("micro_batch_size", 5),
        ("micro_batch_size", 0),
        ("micro_batch_size", "x"),
        ("config", "text"),
        ("text", None),
    ],
)
def test_an_invalid_state(key, value, config):
    """The manifest of such a snapshot may be valid."""
    with pytest.raises(SnapshotError, match="the snapshot of step 8 has an invalid state"):
        check_state(8, {**state_of(config), key: value}, text_task(config))


# Format 2


def test_the_names_in_state_json(config):
    """Names may be added but not changed. A rename in the code must not change files."""
    state = state_of(config)
    assert list(state) == names(
        "train_state scaler micro_batch_size steps vocabulary text config environment"
    )
    assert set(state["train_state"]) == {
        *names("step train_loss val_loss val_metrics val_step best_val_loss best_step world_size"),
        *names("wall_seconds loss_sum loss_part_sums loss_steps stall_seconds wasted_seconds"),
        *names("saved_at loss_ema consecutive_skips skipped_steps patience_loss run_id"),
        *names("evaluations_above save_stall_s save_durable_s train_metrics"),
        *names("timed_steps timed_seconds step_seconds block_paces paced_at"),
    }
    assert list(state["text"]) == ["sha256", "length"]
    assert list(state["environment"]) == names(
        "torch device precision compiled threads world_size strategy tensor_parallel transport "
        "comm_hook reduction"
    )


def names(words: str) -> list[str]:
    return words.split()


def test_keys_of_other_versions_are_ignored(config):
    """A later version may add keys. Keys of ddp do not change results, so they may differ."""
    state = state_of(config) | {"added_later": [1]}
    state["train_state"] |= {"added_later": 12.5, "skipped_steps": [7], "wasted_seconds": 2.5}
    state["text"] |= {"added_later": None}
    state["config"]["ddp"] |= {"powersgd_rank": 4, "bucket_cap_mb": "auto"}
    del state["environment"]
    check_state(8, state, text_task(config))
    model, optim = build(config)
    snapshot = Snapshot(8, model_state(model), optimizer_state(model, optim), state)
    restored = restore(
        snapshot, trainable(model, optim), torch.amp.GradScaler("cpu", enabled=False)
    )
    expected = TrainState(step=8, skipped_steps=[7], wasted_seconds=2.5, saved_at=restored.saved_at)
    assert restored == expected


@pytest.mark.parametrize(("wall", "wasted"), [(-50.0, 30.0), (60.0, -5183989.0), (1e12, 0.0)])
def test_goodput_is_between_zero_and_one(wall, wasted):
    """This holds even if a clock went back during a run."""
    assert (
        0 <= TrainState(wall_seconds=wall, stall_seconds=70.0, wasted_seconds=wasted).goodput <= 1
    )
    state = TrainState(wall_seconds=90, stall_seconds=10, wasted_seconds=10)
    assert state.goodput == pytest.approx(0.8)


# Saved and restored in one process


def build(config: Config) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, len(VOCABULARY), config.data.block_size)
    return model, build_optimizer(model, config.optimizer)


def manager_at(path, config: Config) -> SnapshotManager:
    return SnapshotManager(config, Runtime(config, DistEnv()), SnapshotStore(str(path)), path)


def save(
    manager: SnapshotManager,
    train_state: TrainState,
    model: torch.nn.Module,
    optim: torch.optim.Optimizer,
) -> None:
    task = text_task(manager.config)
    tensors = {"model": model_state(model), "optimizer": optimizer_state(model, optim)}
    plan = BatchPlan(12, 12, 1)
    state = snapshot_state(train_state, manager.runtime, task, plan, steps=9)
    manager.save(RunState(train_state.step, state, tensors, train_state.best_step))
    manager.wait()
    assert manager.last_step == train_state.step


def load_latest(manager: SnapshotManager) -> Snapshot | None:
    return manager.load_latest(partial(check_state, task=text_task(manager.config)))


def test_a_run_starts_from_run_resume_until_it_has_snapshots_of_its_own(
    tmp_path, config, log_lines
):
    model, optim = build(config)
    save(manager_at(tmp_path / "old" / "snapshots", config), TrainState(step=5), model, optim)
    resuming_config = with_value(config, "run.resume", str(tmp_path / "old"))
    manager = manager_at(tmp_path / "new", resuming_config)
    assert load_latest(manager).step == 5
    assert manager.last_step is None  # the run has no snapshot yet
    assert not any("is ignored" in line for line in log_lines)
    save(manager, TrainState(step=2), model, optim)
    assert load_latest(manager).step == 2
    assert (
        f"INFO run.resume={tmp_path / 'old'} is ignored, because the run has its own snapshots"
        in log_lines
    )


def test_a_slow_deletion_is_not_a_hang(tmp_path, config, monkeypatch):
    """The watchdog gets heartbeats, also when the step is already saved and others are deleted."""
    model, optim = build(config)
    manager = manager_at(tmp_path, config)
    for step in (1, 2, 3):
        save(manager, TrainState(step=step, best_step=1), model, optim)
    assert manager.store.steps() == [1, 2, 3]
    delete = Storage.delete
    before = manager.runtime.group.heartbeat["count"]

    def delete_slowly(storage, name):
        beats = lambda: manager.runtime.group.heartbeat["count"] - before  # noqa: E731
        wait_for(lambda: beats() >= 2, timeout=60, what="two heartbeats")
        delete(storage, name)

    monkeypatch.setattr(Storage, "delete", delete_slowly)
    save(manager, TrainState(step=3, best_step=3), model, optim)
    assert manager.store.steps() == [2, 3]


def test_weights_of_another_shape_are_refused(tmp_path, config):
    model, optim = build(config)
    manager = manager_at(tmp_path, config)
    save(manager, TrainState(step=5), model, optim)
    wider, wider_optim = build(with_value(config, "model.n_embd", 96))
    with pytest.raises(SnapshotError, match="the snapshot's weights do not fit the model: "):
        restore(load_latest(manager), trainable(wider, wider_optim), manager.runtime.scaler)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, StorageUnusableError),
        (errno.EACCES, StorageUnusableError),
        (errno.EIO, StorageUnavailableError),
        (None, StorageUnavailableError),
    ],
)
def test_storage_failures_are_permanent_or_transient(code, expected, tmp_path, config, monkeypatch):
    """A permanent failure ends the run. After a transient one, its workers start again."""
    model, optim = build(config)
    manager = manager_at(tmp_path, with_value(config, "snapshot.max_failures", 0))
    error = OSError("broken")
    error.errno = code

    def fail(storage, name, content):
        raise error

    monkeypatch.setattr(Storage, "write", fail)
    with pytest.raises(expected, match=r"cannot write the snapshot of step 2: .*: broken; older"):
        save(manager, TrainState(step=2), model, optim)
