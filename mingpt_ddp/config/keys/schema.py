"""The schema of the configuration: a frozen dataclass for each group. GROUPS lists all groups.

Each key has a type, bounds, a default, a unit, a description, and its effect on results. pydantic
checks the values (validation.py). Larger groups have their own modules: trainer_config.py and
sweep_config.py. The groups that users can extend are in components.py, model_config.py and
optimizer_config.py. docs/configuration.md and `--help` are generated from all of them.
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
    """Name, directory and seed of the run, and the weights or snapshot that it starts from."""

    name: str | None = neutral(
        None,
        "Directory of the run, below run.root. It may have two levels, as in group/name. null "
        "derives a name from the configuration.",
    )
    root: str = neutral("outputs", "Local directory of all runs.")
    resume: str = neutral(
        "auto",
        "auto continues from the newest snapshot of this run. never starts a new run, in a "
        "directory with the suffix -2, -3 ... With the path or URL of a snapshot, the run starts "
        "from that snapshot.",
        changes="training",
    )
    init_from: str | None = key(
        None,
        "Path or URL of weights to start from: a run, a snapshot, an export or a GPT-2 "
        "folder. null starts from random weights.",
    )
    init_sha256: str | None = neutral(
        None,
        "Expected SHA-256 of the weights of run.init_from. null accepts any weights, and records "
        "their hash at the first start.",
        changes="training",
    )
    seed: NonNegativeInt = key(1337, "Seed of all random numbers of the run.")
    accept_code: bool = neutral(
        False,
        "In sweeps and in `report compare`, accept results that other versions of your Python"
        " files have trained.",
    )

    def __post_init__(self) -> None:
        check(
            self.name is None or re.fullmatch(RUN_NAME, self.name),
            f"run.name={self.name} must be a directory name of letters, digits and . _ + = , -, or "
            "two such names with a slash between them, as in group/name",
        )
        check_directory("run.root", self.root)
        check_url("run.resume", self.resume)
        if self.init_from is not None:
            check_url("run.init_from", self.init_from)

    @property
    def source(self) -> str | None:
        """The snapshot of another run that `resume` names. None for auto and never."""
        return None if self.resume in ("auto", "never") else self.resume


StrategyName: TypeAlias = Literal["auto", "single", "ddp", "zero1", "fsdp", "hsdp"]


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """How workers start, find each other and average gradients (mingpt_ddp/distributed)."""

    strategy: StrategyName = neutral(
        "auto",
        "How ranks share a model (docs/strategies.md). auto uses single on one rank, and ddp "
        "on several.",
        changes="rounding",
    )
    reduction: Literal["fast", "canonical"] = key(
        "fast",
        "canonical adds gradients in the order of the micro-batches, which gives the same "
        "bits on any number of ranks.",
        changes="rounding",
    )
    launcher: Literal["forkserver", "spawn"] = neutral(
        "forkserver", "How workers start: forked from a server process, or as new interpreters."
    )
    backend: Literal["auto", "nccl", "gloo", "mpi"] = neutral(
        "auto",
        "How ranks communicate. auto uses nccl on GPUs, and gloo or shared memory on CPUs.",
        changes="rounding",
    )
    timeout_s: Annotated[float, Field(ge=1, le=1e7)] = neutral(
        600.0, "How long a rank waits for the other ranks.", "seconds"
    )
    nproc_per_node: NonNegativeInt | Literal["gpu"] | None = neutral(
        None,
        "Number of local workers to start. null or 0 trains in this process. gpu starts one "
        "worker per visible GPU.",
        changes="rounding",
    )
    max_restarts: NonNegativeInt = neutral(
        3, "How often the local workers start again after a failure."
    )
    preempted_exit_code: Annotated[int, Field(ge=0, le=255)] = neutral(
        0, "Exit code after a preemption. Use 143 in pods, so that they start again."
    )
    bucket_cap_mb: PositiveFloat = neutral(
        25.0, "Size of the gradients that one all-reduce averages.", "MiB", changes="rounding"
    )
    gradient_as_bucket_view: bool = neutral(
        True, "Keep gradients as views of the buckets, which saves memory."
    )
    static_graph: bool = neutral(
        False, "Assume that every step uses the same parameters.", changes="rounding"
    )
    find_unused_parameters: bool = neutral(
        False, "Support models with parameters that get no gradient.", changes="rounding"
    )
    tensor_parallel: PositiveInt = neutral(
        1,
        "Number of ranks that split the heads and MLPs of one gpt model. Must divide model.n_head.",
        changes="rounding",
    )
    comm_hook: str = neutral(
        "none",
        "How gradients are averaged: none, fp16, bf16, or the name that your code registers.",
        changes="training",
    )
    sync_batchnorm: bool = neutral(
        False, "Normalize batches over all ranks together.", changes="training"
    )

    @property
    def local_workers(self) -> int:
        """The number of workers to start, once `nproc_per_node=gpu` is resolved to a number."""
        return int(self.nproc_per_node or 0)

    @property
    def ranks_here(self) -> int:
        """The number of ranks on this machine: the local workers, or this process alone."""
        return self.local_workers or 1

    def __post_init__(self) -> None:
        check(
            # These codes mean a crash, an error of the user, and storage that is unavailable.
            self.preempted_exit_code not in (1, 2, 75),
            f"ddp.preempted_exit_code={self.preempted_exit_code} already means a failure; use 0, "
            "or 143 in pods",
        )
        check(
            not (self.static_graph and self.find_unused_parameters),
            "ddp.static_graph=true cannot be combined with ddp.find_unused_parameters=true",
        )
        needs_ddp = self.comm_hook != "none" or self.find_unused_parameters
        lacks_ddp = self.strategy in ("fsdp", "hsdp")
        check(
            not (needs_ddp and lacks_ddp),
            f"ddp.strategy={self.strategy} does not support ddp.comm_hook and "
            "ddp.find_unused_parameters; use ddp.strategy=ddp or zero1",
        )
        check_choice("ddp.comm_hook", self.comm_hook, COMM_HOOKS)
        check(
            self.tensor_parallel == 1 or self.comm_hook == "none",
            f"ddp.tensor_parallel={self.tensor_parallel} needs ddp.comm_hook=none",
        )
        check(
            self.tensor_parallel == 1 or self.backend != "mpi",
            f"ddp.tensor_parallel={self.tensor_parallel} does not work with ddp.backend=mpi; use "
            "auto, gloo or nccl",
        )
        check(
            self.backend != "mpi" or self.comm_hook not in ("fp16", "bf16"),
            f"ddp.comm_hook={self.comm_hook} needs a 16-bit all-reduce, which MPI does not have; "
            "use ddp.backend=gloo or nccl",
        )


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """When and where snapshots are saved, and how many are kept (mingpt_ddp/snapshots)."""

    path: str | None = neutral(
        None,
        "Directory or URL for snapshots. The run's name is appended. null saves them in the "
        "run directory.",
    )
    every_steps: PositiveInt | Literal["auto"] | None = neutral(
        250, "Interval between snapshots. auto derives it from snapshot.mtbf_hours.", "steps"
    )
    mtbf_hours: PositiveFloat = neutral(
        24.0, "Mean time between failures of the whole run.", "hours"
    )
    every_epochs: PositiveInt | None = neutral(None, "Interval between snapshots.", "epochs")
    every_minutes: PositiveFloat | None = neutral(
        None, "Interval between snapshots, by the clock of rank 0.", "minutes"
    )
    keep_last: PositiveInt = neutral(2, "Number of newest snapshots to keep.")
    keep_best: bool = neutral(True, "Also keep the snapshot with the lowest validation loss.")
    keep_every: PositiveInt | None = neutral(
        None, "Interval between milestones: snapshots that are never deleted.", "steps"
    )
    background: bool = neutral(
        True, "Write snapshots in a background thread. Training waits only until they are copied."
    )
    max_failures: NonNegativeInt = neutral(
        3, "Number of consecutive failed saves that training survives."
    )
    grace_seconds: NonNegativeFloat = neutral(
        25.0, "Time between SIGTERM and SIGKILL. torchrun waits 30 seconds.", "seconds"
    )

    def __post_init__(self) -> None:
        if self.path is not None:
            check_url("snapshot.path", self.path)
            is_chain = "::" in self.path
            check(not is_chain, f"snapshot.path={self.path} must be one URL, not a chain of URLs")


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """Trackers that get the metrics, in addition to metrics.jsonl (docs/trackers.md)."""

    tensorboard: bool = neutral(
        False, "Write event files of every rank. The default preset, tensorboard, turns this on."
    )
    wandb: bool = neutral(
        False, "Log to Weights & Biases. Set WANDB_API_KEY, or WANDB_MODE=offline."
    )
    mlflow: bool = neutral(False, "Log to MLflow, at tracker.uri or MLFLOW_TRACKING_URI.")
    trackio: bool = neutral(False, "Log to Trackio, on this machine or at TRACKIO_SERVER_URL.")
    project: str = neutral("mingpt_ddp", "Project in W&B and Trackio; experiment in MLflow.")
    entity: str | None = neutral(None, "User or team in W&B. null uses its default.")
    uri: str | None = neutral(
        None, "MLflow server or database. null uses MLFLOW_TRACKING_URI, or else MLflow's default."
    )

    def __post_init__(self) -> None:
        check(
            re.fullmatch(r"[\w/][\w./@ -]{0,126}", self.project, re.ASCII),
            f"tracker.project={self.project} must be a name of letters, digits, spaces and . "
            "_ / @ -, at most 127 characters long",
        )
        if self.uri is not None:
            check_url("tracker.uri", self.uri)


# The base class of each kind of component that a user can register. The configuration of such a
# component must inherit from the base class of its kind.
BASES: dict[str, type] = {
    "task": TaskConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "dataset": DatasetConfig,  # a dataset of samples, selected by data.dataset
    "data": DataConfig,  # a reader of text, selected by data.reader
    "comm_hook": DDPConfig,
    "schedule": ScheduleConfig,
    **dict.fromkeys(PARTS, PartConfig),  # parts of the blocks of gpt and modern
}
# The registered values of ddp.comm_hook. None of them has its own keys.
COMM_HOOKS: dict[str | None, type] = dict.fromkeys(("none", "fp16", "bf16"), DDPConfig)
# The keys of a group that select its dataclass, and the dataclasses by the value of such a key.
# The dataclass for None applies if no key selects one.
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
    """Return the key that selects the dataclass of a group, and its value (None if not set)."""
    keys, _ = GROUPS[group]
    for name in keys:
        if values.get(name) is not None:
            return name, values[name]
    return (keys[-1] if keys else ""), None
