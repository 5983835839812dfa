"""Every key of the configuration, once, in a frozen dataclass per group; GROUPS lists them all.

A key has a type, a unit, bounds, a default and a meaning, and says whether it changes the numbers.
pydantic checks the values (validation.py). The larger groups are in modules of their own:
trainer_config.py, and those that users can extend in components.py and optimizer_config.py.
docs/configuration.md and `--help` are generated from all of them.
"""

# ruff: noqa: RUF009  key() returns a dataclass field
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from mingpt_ddp.config.keys.components import ClassesConfig, DataConfig, DatasetConfig, TaskConfig
from mingpt_ddp.config.keys.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    key,
    neutral,
)
from mingpt_ddp.config.keys.model_config import (
    PARTS,
    GPTConfig,
    ModelConfig,
    ModernConfig,
    PartConfig,
)
from mingpt_ddp.config.keys.optimizer_config import (
    OPTIMIZERS,
    OptimizerConfig,
    ScheduleConfig,
)
from mingpt_ddp.config.keys.sweep_config import SweepConfig
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.config.validation import check, check_choice, check_directory, check_url

DIRECTORY_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+=,-]{0,149}"
RUN_NAME = rf"{DIRECTORY_NAME}(/{DIRECTORY_NAME})?"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Which run this is, and where its directory is."""

    name: str | None = neutral(
        None, "a directory below root, or two: group/name; null: derived from the configuration"
    )
    root: str = neutral("outputs", "local directory of all runs")
    resume: str = neutral(
        "auto",
        "auto, never (a new directory -2, -3 ...), or a snapshot's path or URL",
        changes="training",
    )
    init_from: str | None = key(
        None,
        "weights to start from: a run, snapshot, export or GPT-2 folder, path or URL; null: "
        "random ones",
    )
    init_sha256: str | None = neutral(
        None,
        "SHA-256 of these weights; null: any, recorded at the first start",
        changes="training",
    )
    seed: NonNegativeInt = key(1337, "determines every random number of the run")
    accept_code: bool = neutral(
        False,
        "accept results that other versions of your files have trained, in a sweep and in compare",
    )

    def __post_init__(self) -> None:
        check(
            self.name is None or re.fullmatch(RUN_NAME, self.name),
            f"run.name={self.name} must be a directory name of letters, digits and . _ + = , -, or "
            "two with one slash between them: group/name",
        )
        check_directory("run.root", self.root)
        check_url("run.resume", self.resume)
        if self.init_from is not None:
            check_url("run.init_from", self.init_from)

    @property
    def source(self) -> str | None:
        """The snapshots of another run to start from, if `resume` names some."""
        return None if self.resume in ("auto", "never") else self.resume


StrategyName: TypeAlias = Literal["auto", "single", "ddp", "zero1", "fsdp", "hsdp"]


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """How workers start, find each other and average gradients (mingpt_ddp/distributed)."""

    strategy: StrategyName = neutral(
        "auto",
        "how ranks share a model (docs/strategies.md); auto: single on one rank, else ddp",
        changes="rounding",
    )
    reduction: Literal["fast", "canonical"] = key(
        "fast",
        "canonical: gradients are added in the order of micro-batches, with the same bits on any "
        "number of ranks",
        changes="rounding",
    )
    launcher: Literal["forkserver", "spawn"] = neutral(
        "forkserver", "how workers start: forked, or new interpreters"
    )
    backend: Literal["auto", "nccl", "gloo", "mpi"] = neutral(
        "auto", "auto: nccl on GPUs, else gloo or shared memory", changes="rounding"
    )
    timeout_s: Annotated[float, Field(ge=1, le=1e7)] = neutral(
        600.0, "how long a rank waits for the others", "seconds"
    )
    nproc_per_node: NonNegativeInt | Literal["gpu"] | None = neutral(
        None,
        "local workers to start; null or 0: this process trains; gpu: one per visible GPU",
        changes="rounding",
    )
    max_restarts: NonNegativeInt = neutral(3, "of the nproc_per_node workers")
    preempted_exit_code: Annotated[int, Field(ge=0, le=255)] = neutral(
        0, "after a preemption; 143 in pods to start again"
    )
    bucket_cap_mb: PositiveFloat = neutral(
        25.0, "gradients per all-reduce", "MiB", changes="rounding"
    )
    gradient_as_bucket_view: bool = neutral(True, "gradients are views of the buckets: less memory")
    static_graph: bool = neutral(
        False, "the same parameters are used in every step", changes="rounding"
    )
    find_unused_parameters: bool = neutral(
        False, "for models with parameters that get no gradient", changes="rounding"
    )
    tensor_parallel: PositiveInt = neutral(
        1, "ranks that split the heads and MLPs of one gpt; a divisor of n_head", changes="rounding"
    )
    comm_hook: str = neutral(
        "none", "how gradients are averaged: none, fp16, bf16 or your own", changes="training"
    )
    sync_batchnorm: bool = neutral(False, "batch normalization over all ranks", changes="training")

    @property
    def local_workers(self) -> int:
        """The number of workers to start; `nproc_per_node=gpu` has been resolved."""
        return int(self.nproc_per_node or 0)

    @property
    def ranks_here(self) -> int:
        """The number of ranks of a job that this command starts itself."""
        return self.local_workers or 1

    def __post_init__(self) -> None:
        check(
            # a crash, a user's error, storage that is unavailable
            self.preempted_exit_code not in (1, 2, 75),
            f"ddp.preempted_exit_code={self.preempted_exit_code} means a failure; use 0, or "
            "143 in pods",
        )
        check(
            not (self.static_graph and self.find_unused_parameters),
            "ddp.static_graph=true cannot be combined with ddp.find_unused_parameters=true",
        )
        needs_ddp = self.comm_hook != "none" or self.find_unused_parameters
        lacks_it = self.strategy in ("fsdp", "hsdp")
        check(
            not (needs_ddp and lacks_it),
            f"ddp.strategy={self.strategy} has no comm_hook and no find_unused_parameters; "
            "use ddp or zero1",
        )
        check_choice("ddp.comm_hook", self.comm_hook, COMM_HOOKS)
        check(
            self.tensor_parallel == 1 or self.comm_hook == "none",
            f"ddp.tensor_parallel={self.tensor_parallel} needs ddp.comm_hook=none",
        )
        check(
            self.tensor_parallel == 1 or self.backend != "mpi",
            f"ddp.tensor_parallel={self.tensor_parallel} needs ddp.backend=auto, gloo or "
            "nccl, not mpi",
        )
        check(
            self.backend != "mpi" or self.comm_hook not in ("fp16", "bf16"),
            f"ddp.comm_hook={self.comm_hook} needs 16-bit all-reduce, which MPI lacks; use gloo or "
            "nccl",
        )


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """When snapshots are saved, where, and how many are kept (mingpt_ddp/snapshots)."""

    path: str | None = neutral(
        None, "a directory or URL; the run's name is appended; null: in the run directory"
    )
    every_steps: PositiveInt | Literal["auto"] | None = neutral(
        250, "between snapshots; auto: by mtbf_hours", "steps"
    )
    mtbf_hours: PositiveFloat = neutral(
        24.0, "mean time between failures of the whole run", "hours"
    )
    every_epochs: PositiveInt | None = neutral(None, "between snapshots", "epochs")
    every_minutes: PositiveFloat | None = neutral(
        None, "between snapshots, by rank 0's clock", "minutes"
    )
    keep_last: PositiveInt = neutral(2, "how many of the newest snapshots to keep")
    keep_best: bool = neutral(True, "also keep the one with the lowest validation loss")
    keep_every: PositiveInt | None = neutral(
        None, "between milestones, which are saved and never deleted", "steps"
    )
    background: bool = neutral(True, "write on a thread; training waits only for the staging copy")
    max_failures: NonNegativeInt = neutral(3, "consecutive failed saves that training survives")
    grace_seconds: NonNegativeFloat = neutral(
        25.0, "between SIGTERM and SIGKILL; torchrun waits 30", "seconds"
    )

    def __post_init__(self) -> None:
        if self.path is not None:
            check_url("snapshot.path", self.path)
            is_chain = "::" in self.path
            check(not is_chain, f"snapshot.path={self.path} must be one URL, not a chain of them")


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """Where metrics go besides the log and metrics.jsonl; any number at once (docs/trackers.md)."""

    tensorboard: bool = neutral(
        False, "event files of every rank; the preset tensorboard is the default"
    )
    wandb: bool = neutral(False, "Weights & Biases; WANDB_API_KEY, or WANDB_MODE=offline")
    mlflow: bool = neutral(False, "MLflow, at uri or MLFLOW_TRACKING_URI")
    trackio: bool = neutral(False, "Trackio, on this machine or at TRACKIO_SERVER_URL")
    project: str = neutral("mingpt_ddp", "of W&B and Trackio; the experiment of MLflow")
    entity: str | None = neutral(None, "W&B's user or team; null: its default")
    uri: str | None = neutral(
        None, "MLflow's server or database; null: MLFLOW_TRACKING_URI, or MLflow's default"
    )

    def __post_init__(self) -> None:
        check(
            re.fullmatch(r"[\w/][\w./@ -]{0,126}", self.project, re.ASCII),
            f"tracker.project={self.project} must be a name of letters, digits, spaces and . "
            "_ / @ -",
        )
        if self.uri is not None:
            check_url("tracker.uri", self.uri)


# What can be registered, by kind: the class that its configuration must inherit from.
BASES: dict[str, type] = {
    "task": TaskConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "dataset": DatasetConfig,  # of samples, in the group data
    "data": DataConfig,  # readers of text
    "comm_hook": DDPConfig,
    "schedule": ScheduleConfig,  # of the learning rate
    **dict.fromkeys(PARTS, PartConfig),  # of a block of gpt or modern
}
# The registered values of ddp.comm_hook; none of them has keys of its own.
COMM_HOOKS: dict[str | None, type] = dict.fromkeys(("none", "fp16", "bf16"), DDPConfig)
# Per group: the keys that select its dataclass, and the dataclasses by value; None is that of a
# group without a value.
Selection: TypeAlias = tuple[tuple[str, ...], dict[str | None, type]]
MODELS: dict[str | None, type] = {"gpt": GPTConfig, "modern": ModernConfig}
GROUPS: dict[str, Selection] = {
    "run": ((), {None: RunConfig}),
    "task": (("name",), {"language_model": ClassesConfig}),
    "model": (("architecture",), MODELS),
    "optimizer": (("name",), OPTIMIZERS),
    "data": (("dataset", "reader"), {None: DataConfig}),
    "ddp": ((), {None: DDPConfig}),
    "trainer": ((), {None: TrainerConfig}),
    "snapshot": ((), {None: SnapshotConfig}),
    "tracker": ((), {None: TrackerConfig}),
    "sweep": ((), {None: SweepConfig}),
}


def selected(group: str, values: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key that selects the dataclass of a group, and its value; None without one."""
    keys, _ = GROUPS[group]
    for name in keys:
        if values.get(name) is not None:
            return name, values[name]
    return (keys[-1] if keys else ""), None
