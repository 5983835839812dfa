"""Every key of the configuration, once: type, unit, bounds, default, meaning, and whether it changes the numbers.

One frozen dataclass per group; pydantic checks the values (mingpt_ddp/config/validation.py). docs/configuration.md and
`main.py --help` are generated from this file.
"""

# ruff: noqa: RUF009  key() returns a dataclass field
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field

from mingpt_ddp.config.fields import (
    DecayFactor,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    key,
    neutral,
)
from mingpt_ddp.config.validation import check, check_directory, check_url, did_you_mean

DIRECTORY_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+=,-]{0,149}"
BUILTIN_PREFIX = "builtin:"  # of a text that ships with Python


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Which run this is, and where its directory is."""

    name: str | None = neutral(None, "a directory below root, or two: group/name; null: derived from the configuration")
    root: str = neutral("outputs", "local directory of all runs")
    resume: str = neutral("auto", "auto, never (a new directory -2, -3 ...), or a snapshot's path or URL")
    seed: NonNegativeInt = key(1337, "determines every random number of the run")

    def __post_init__(self) -> None:
        fits = self.name is None or re.fullmatch(rf"{DIRECTORY_NAME}(/{DIRECTORY_NAME})?", self.name)
        check(bool(fits), f"run.name={self.name} must be a directory name of letters, digits and . _ + = , -")
        check_directory("run.root", self.root)
        check_url("run.resume", self.resume)

    @property
    def source(self) -> str | None:
        """The snapshots of another run to start from, if `resume` names some."""
        return None if self.resume in ("auto", "never") else self.resume


@dataclass(frozen=True, kw_only=True)
class UserCodeConfig:
    """A group that users can extend with their own Python file (mingpt_ddp/config/registry.py)."""

    code: str | None = neutral(None, "your Python file, relative to the YAML file that names it")
    code_sha256: str | None = neutral(None, "SHA-256 of that file; null: any content")

    def __post_init__(self) -> None:
        """Check what several keys must satisfy together; subclasses override this."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(UserCodeConfig):
    """The keys of every model."""

    name: str = neutral(..., "a label for directories and logs")
    architecture: str = key(..., "the registered model to build: gpt, modern or your own")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """The keys of the built-in decoders."""

    n_layer: Annotated[PositiveInt, Field(le=10_000)] = key(..., "blocks")
    n_head: Annotated[PositiveInt, Field(le=1_000_000)] = key(..., "attention heads per block; a divisor of n_embd")
    n_embd: Annotated[PositiveInt, Field(le=1_000_000)] = key(..., "width of the residual stream", "features")
    dropout: DecayFactor = key(0.0, "fraction of the activations that dropout zeroes", "probability")

    def __post_init__(self) -> None:
        divides = self.n_embd % self.n_head == 0
        check(divides, f"model.n_embd={self.n_embd} must be divisible by model.n_head={self.n_head}")


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A GPT-2 style decoder (mingpt_ddp/models/gpt.py)."""

    bias: bool = key(False, "biases in linear layers and layer norms, as in GPT-2")
    activation: Literal["gelu", "gelu_tanh"] = key("gelu", "exact, or GPT-2's approximation, which is slower on a CPU")


@dataclass(frozen=True, kw_only=True)
class ModernConfig(TransformerConfig):
    """A decoder with rotary position embeddings and no biases or gains (mingpt_ddp/models/modern.py)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.n_embd // self.n_head % 2 == 0
        check(even, f"model.n_embd={self.n_embd} over model.n_head={self.n_head} must be even, for rotary positions")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(UserCodeConfig):
    """The keys of every optimizer: learning rate, weight decay and schedule (mingpt_ddp/optim)."""

    name: str = key(..., "the registered optimizer to build: adamw, muon, sgd or your own")
    lr: LearningRate = key(1e-3, "learning rate at the peak of the schedule; muon's is for matrices")
    weight_decay: Annotated[NonNegativeFloat, Field(le=1e6)] = key(0.1, "of matrices; vectors are not decayed")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key("cosine", "how the learning rate decays")
    schedule_steps: PositiveInt | None = key(None, "length of the schedule; null: the run's", "steps")
    warmup_steps: NonNegativeInt = key(100, "linear warm-up of the learning rate from 0", "steps")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = key(0.1, "final learning rate over the peak")
    decay_ratio: UnitInterval = key(0.2, "wsd: the last fraction of the schedule, in which lr decays")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW for all parameters."""

    betas: tuple[DecayFactor, DecayFactor] = key((0.9, 0.99), "decay per step of both moments")
    eps: PositiveFloat = key(1e-8, "added to the root of the second moment")


@dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum for all parameters."""

    momentum: DecayFactor = key(0.9, "decay per step of the moving average")
    nesterov: bool = key(True, "Nesterov's momentum")

    def __post_init__(self) -> None:
        check(not self.nesterov or self.momentum > 0, "optimizer.nesterov=true needs optimizer.momentum > 0")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of the hidden layers, AdamW for everything else (mingpt_ddp/optim/muon.py)."""

    momentum: DecayFactor = key(0.95, "Muon's decay per step of the moving average")
    embedding_lr: LearningRate = key(0.1, "AdamW's peak for embeddings")
    head_lr: LearningRate = key(0.02, "AdamW's peak for a matrix in the model's `head`")
    vector_lr: LearningRate = key(0.1, "AdamW's peak for parameters that are not matrices")
    betas: tuple[DecayFactor, DecayFactor] = key((0.9, 0.95), "AdamW's decay per step of both moments")
    eps: PositiveFloat = key(1e-10, "AdamW's, added to the root of the second moment")


@dataclass(frozen=True, kw_only=True)
class DataConfig(UserCodeConfig):
    """Which text, and how it is split and cut into windows (mingpt_ddp/data/dataset.py and dataloader.py)."""

    name: str | None = neutral(None, "a label for directories and logs; null: the file name of path")
    path: str = key(..., "a file, any fsspec URL, or builtin:python_docs; a reader may read it otherwise")
    sha256: str | None = key(None, "SHA-256 of the file, or of a reader's text as UTF-8; null: any content")
    block_size: PositiveInt = key(64, "context length", "characters")
    stride: PositiveInt | None = key(None, "between the starts of windows; null: block_size", "characters")
    train_split: Annotated[float, Field(gt=0, lt=1)] = key(0.9, "share of the text to train on, from its start")
    truncate: UnitInterval = key(1.0, "share of the text to use at all, from its start")
    cache_dir: str | None = neutral(None, "local directory of encoded texts; null: the user's cache directory")
    reader: str | None = key(None, "your registered function from path to text; null: UTF-8")

    def __post_init__(self) -> None:
        check_url("data.path", self.path)
        if self.cache_dir is not None:
            check_directory("data.cache_dir", self.cache_dir)
        is_sha = self.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", self.sha256)
        check(bool(is_sha), f"data.sha256={self.sha256} must be 64 lower-case hexadecimal digits or null")

    @property
    def label(self) -> str:
        """The name of the text in directories and logs."""
        return self.name or PurePosixPath(self.path.removeprefix(BUILTIN_PREFIX).partition("?")[0]).stem or "text"


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """How workers start, find each other and average gradients (mingpt_ddp/distributed)."""

    strategy: Literal["ddp"] = neutral("ddp", "DistributedDataParallel")
    launcher: Literal["forkserver", "spawn"] = neutral("forkserver", "how workers start: forked, or new interpreters")
    backend: Literal["auto", "nccl", "gloo", "mpi"] = neutral("auto", "auto: nccl on GPUs, else gloo or shared memory")
    timeout_s: Annotated[float, Field(ge=1, le=1e7)] = neutral(600.0, "how long a rank waits for the others", "seconds")
    nproc_per_node: NonNegativeInt | None = neutral(None, "local workers to start; null or 0: this process trains")
    max_restarts: NonNegativeInt = neutral(3, "of the nproc_per_node workers")
    preempted_exit_code: Annotated[int, Field(ge=0, le=255)] = neutral(
        0, "after a preemption; 143 in pods to start again"
    )
    bucket_cap_mb: PositiveFloat = neutral(25.0, "gradients per all-reduce", "MiB")
    gradient_as_bucket_view: bool = neutral(True, "gradients are views of the buckets: less memory")
    static_graph: bool = neutral(False, "the same parameters are used in every step")
    find_unused_parameters: bool = neutral(False, "for models with parameters that get no gradient")
    comm_hook: str = neutral("none", "how gradients are averaged: none, fp16, bf16, ring or your own")
    sync_batchnorm: bool = neutral(False, "batch normalisation over all ranks")

    def __post_init__(self) -> None:
        taken = self.preempted_exit_code in (1, 2, 75)  # a crash, a user's error, storage that is unavailable
        check(not taken, f"ddp.preempted_exit_code={self.preempted_exit_code} means a failure; use 0, or 143 in pods")
        both = self.static_graph and self.find_unused_parameters
        check(not both, "ddp.static_graph=true cannot be combined with ddp.find_unused_parameters=true")
        hooks = [*map(str, COMM_HOOKS)]
        meant = did_you_mean(self.comm_hook, hooks)
        hint = f"{', '.join(hooks)}{f'; did you mean {meant}?' if meant else ''}"
        check(self.comm_hook in hooks, f"ddp.comm_hook={self.comm_hook} must be one of {hint}")
        half = self.comm_hook in ("fp16", "bf16") and self.backend == "mpi"
        check(not half, f"ddp.comm_hook={self.comm_hook} needs 16-bit all-reduce, which MPI lacks; use gloo or nccl")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The training loop: limits, batch sizes, precision, reports (mingpt_ddp/training/trainer.py)."""

    max_epochs: PositiveInt | None = neutral(
        4, "limit of passes over the text; if typed alone, the only limit", "epochs"
    )
    max_steps: PositiveInt | None = neutral(None, "limit of optimizer steps; if typed alone, the only limit", "steps")
    batch_size: PositiveInt = key(12, "per optimizer step over all ranks", "sequences")
    micro_batch_size: PositiveInt | None = key(None, "per rank per forward; null: the largest that fits", "sequences")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: the GPU if there is one")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key("auto", "auto: bf16 on a GPU that supports it, else fp32")
    compile: bool | Literal["auto", "cuda_graphs"] = key(
        "auto", "torch.compile; auto: on a GPU; cuda_graphs: auto, with CUDA graphs for small models on one GPU"
    )
    grad_norm_clip: PositiveFloat | None = key(1.0, "largest global gradient norm; null: no clipping")
    log_every: PositiveInt = neutral(10, "between two log lines", "steps")
    eval_every: PositiveInt | None = neutral(250, "between evaluations; there is always a final one", "steps")
    eval_steps: PositiveInt | None = neutral(None, "evaluate this many steps' windows; null: the whole split", "steps")
    sample_every: PositiveInt | None = neutral(None, "between two samples in the log; null: none", "steps")
    on_nonfinite: Literal["stop", "skip", "rollback"] = key(
        "stop", "after a non-finite or spiking loss or gradient; rollback: to the last snapshot, then skip the batch"
    )
    spike_factor: Annotated[float, Field(gt=1)] | None = key(None, "a spike is a loss above this times its average")
    deterministic: bool = key(False, "bit-identical results on a GPU too, slower there")
    prune: Literal["none", "median"] = neutral("none", "median: stop a sweep's jobs that do worse than most")
    prune_after: NonNegativeInt = neutral(500, "before a job of a sweep can be pruned", "steps")
    activation_checkpointing: bool = neutral(False, "recompute activations: less memory, a third more time")

    def __post_init__(self) -> None:
        limits = (self.max_epochs, self.max_steps)
        check(limits != (None, None), "trainer.max_epochs and trainer.max_steps are both null; set one of them")
        micro, batch = self.micro_batch_size, self.batch_size
        fits = micro is None or batch % micro == 0
        check(fits, f"trainer.batch_size={batch} must be a multiple of trainer.micro_batch_size={micro}")


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """When snapshots are saved, where, and how many are kept (mingpt_ddp/snapshots)."""

    path: str | None = neutral(None, "a directory or URL; the run's name is appended; null: in the run directory")
    every_steps: PositiveInt | Literal["auto"] | None = neutral(250, "between snapshots; auto: by mtbf_hours", "steps")
    mtbf_hours: PositiveFloat = neutral(24.0, "mean time between failures of the whole run", "hours")
    every_epochs: PositiveInt | None = neutral(None, "between snapshots", "epochs")
    every_minutes: PositiveFloat | None = neutral(None, "between snapshots, by rank 0's clock", "minutes")
    keep_last: PositiveInt = neutral(2, "how many of the newest snapshots to keep")
    keep_best: bool = neutral(True, "also keep the one with the lowest validation loss")
    background: bool = neutral(True, "write on a thread; training waits only for the staging copy")
    max_failures: NonNegativeInt = neutral(3, "consecutive failed saves that training survives")
    fallback_path: str | None = neutral(None, "where to write when path fails; the run's name is appended")
    grace_seconds: NonNegativeFloat = neutral(25.0, "between SIGTERM and SIGKILL; torchrun waits 30", "seconds")

    def __post_init__(self) -> None:
        for name, url in (("path", self.path), ("fallback_path", self.fallback_path)):
            if url is not None:
                check_url(f"snapshot.{name}", url)
                check("::" not in url, f"snapshot.{name}={url} must be one URL, not a chain of them")
        urls = [u.rstrip("/") if "://" in u else str(PurePosixPath(u)) for u in (self.path, self.fallback_path) if u]
        check(len({*urls}) == len(urls), f"snapshot.fallback_path={self.fallback_path} must differ from snapshot.path")


# The registered values of ddp.comm_hook; none of them has keys of its own.
COMM_HOOKS: dict[str | None, type] = dict.fromkeys(("none", "fp16", "bf16", "ring"), DDPConfig)
MODELS: dict[str | None, type] = {"gpt": GPTConfig, "modern": ModernConfig}
# Per group: the key that selects its dataclass (None if there is only one), and the dataclasses by its value.
GROUPS: dict[str, tuple[str | None, dict[str | None, type]]] = {
    "run": (None, {None: RunConfig}),
    "model": ("architecture", MODELS),
    "optimizer": ("name", {"adamw": AdamWConfig, "muon": MuonConfig, "sgd": SGDConfig}),
    "data": ("reader", {None: DataConfig}),
    "ddp": (None, {None: DDPConfig}),
    "trainer": (None, {None: TrainerConfig}),
    "snapshot": (None, {None: SnapshotConfig}),
}
