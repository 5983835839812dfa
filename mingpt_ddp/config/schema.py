"""Every key of the configuration: type, unit, limits and default, one frozen dataclass per group."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mingpt_ddp.config.validation import Bounds, check, refuse_credentials

PositiveInt = Annotated[int, Bounds(ge=1)]
NonNegativeInt = Annotated[int, Bounds(ge=0)]
PositiveFloat = Annotated[float, Bounds(gt=0)]
NonNegativeFloat = Annotated[float, Bounds(ge=0)]
DecayFactor = Annotated[float, Bounds(ge=0, lt=1)]  # of a moving average, per step
LearningRate = Annotated[PositiveFloat, Bounds(ge=1e-30, le=1e30)]  # fp32 holds its products
DIRECTORY_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+=,-]{0,149}"


def _check_directory(key: str, path: str) -> None:
    """Require the path of a local directory."""
    refuse_credentials(key, path)
    check(bool(path.strip()) and "://" not in path, f"{key}={path} must be a local directory")


def _check_url(key: str, url: str) -> None:
    """Require a path or URL without credentials."""
    refuse_credentials(key, url)
    check(bool(url.strip()), f"{key} is empty; give it a path or URL")


@dataclass(frozen=True)
class RunConfig:
    """Which run this is, and where its directory is."""

    name: str | None  # a directory below root, or two: group/name; null: derived from the configuration
    root: str  # local directory of all runs
    resume: str  # auto | never | path or URL of a snapshot to start from
    seed: NonNegativeInt  # determines every random number of the run

    def __post_init__(self) -> None:
        fits = self.name is None or re.fullmatch(rf"{DIRECTORY_NAME}(/{DIRECTORY_NAME})?", self.name)
        check(bool(fits), f"run.name={self.name} must be a directory name of letters, digits and . _ + = , -")
        _check_directory("run.root", self.root)
        _check_url("run.resume", self.resume)


@dataclass(frozen=True)
class UserCodeConfig:
    """A group that users can extend with their own Python file (mingpt_ddp/config/registry.py)."""

    code: str | None = field(default=None, kw_only=True)  # Python file, relative to the YAML file that names it
    code_sha256: str | None = field(default=None, kw_only=True)  # of that file; null: any content

    def __post_init__(self) -> None:
        """Check what several keys must satisfy together; subclasses override this."""


@dataclass(frozen=True)
class ModelConfig(UserCodeConfig):
    """The keys of every model."""

    name: str  # a label for directories and logs
    architecture: str  # the registered model to build


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """The keys of the built-in decoders."""

    n_layer: Annotated[PositiveInt, Bounds(le=10_000)]  # blocks
    n_head: Annotated[PositiveInt, Bounds(le=1_000_000)]  # attention heads per block
    n_embd: Annotated[PositiveInt, Bounds(le=1_000_000)]  # width of the residual stream
    dropout: Annotated[float, Bounds(ge=0, lt=1)]  # probability

    def __post_init__(self) -> None:
        divides = self.n_embd % self.n_head == 0
        check(divides, f"model.n_embd={self.n_embd} must be divisible by model.n_head={self.n_head}")


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """A GPT-2 style decoder (mingpt_ddp/models/gpt.py)."""

    bias: bool  # in linear layers and layer norms, as in GPT-2
    activation: Literal["gelu", "gelu_tanh"]  # exact, or GPT-2's approximation, which is slower on a CPU


@dataclass(frozen=True)
class ModernConfig(TransformerConfig):
    """A decoder with rotary position embeddings and no biases or gains (mingpt_ddp/models/modern.py)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.n_embd // self.n_head % 2 == 0
        check(even, f"model.n_embd={self.n_embd} over model.n_head={self.n_head} must be even, for rotary positions")


@dataclass(frozen=True)
class OptimizerConfig(UserCodeConfig):
    """The keys of every optimizer: learning rate, weight decay and schedule (mingpt_ddp/optim)."""

    name: str  # the registered optimizer to build
    lr: LearningRate  # the peak of the schedule
    weight_decay: Annotated[NonNegativeFloat, Bounds(le=1e6)]  # of matrices; vectors are not decayed
    schedule: Literal["cosine", "linear", "wsd", "constant"]
    schedule_steps: PositiveInt | None  # null: the steps of the run
    warmup_steps: NonNegativeInt  # of linear growth from 0
    min_lr_ratio: Annotated[float, Bounds(ge=0, le=1)]  # final learning rate over the peak
    decay_ratio: Annotated[float, Bounds(gt=0, le=1)]  # wsd: the last fraction of the schedule, in which lr decays


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    betas: tuple[DecayFactor, DecayFactor]  # of the first and second moment
    eps: PositiveFloat


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    momentum: DecayFactor
    nesterov: bool

    def __post_init__(self) -> None:
        check(not self.nesterov or self.momentum > 0, "optimizer.nesterov=true needs optimizer.momentum > 0")


@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of the hidden layers, AdamW for everything else (mingpt_ddp/optim/muon.py)."""

    momentum: DecayFactor  # Muon's, as `lr` is
    embedding_lr: LearningRate  # AdamW's for embeddings, at the peak of the schedule
    head_lr: LearningRate  # AdamW's for a matrix in the model's `head`
    vector_lr: LearningRate  # AdamW's for parameters that are not matrices
    betas: tuple[DecayFactor, DecayFactor]  # AdamW's, of the first and second moment
    eps: PositiveFloat  # AdamW's


@dataclass(frozen=True)
class DataConfig(UserCodeConfig):
    """Which text, and how it is split and cut into windows (mingpt_ddp/data/dataset.py and dataloader.py)."""

    name: str  # a label for directories and logs
    path: str  # a file, any fsspec URL, or builtin:python_docs; `reader` may give it another meaning
    sha256: str | None  # of the file's bytes, or of the text that a reader yields, as UTF-8; null: any content
    block_size: PositiveInt  # context length in characters
    stride: PositiveInt | None  # characters between the starts of two windows; null: block_size
    train_split: Annotated[float, Bounds(gt=0, lt=1)]  # fraction of the text, from its start, to train on
    truncate: Annotated[float, Bounds(gt=0, le=1)]  # fraction of the text, from its start, to use at all
    cache_dir: str | None  # local directory of downloads and encoded texts; null: the user's cache directory
    reader: str | None = field(default=None, kw_only=True)  # a registered function from `path` to text; null: UTF-8

    def __post_init__(self) -> None:
        _check_url("data.path", self.path)
        if self.cache_dir is not None:
            _check_directory("data.cache_dir", self.cache_dir)
        is_sha = self.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", self.sha256)
        check(bool(is_sha), f"data.sha256={self.sha256} must be 64 lower-case hexadecimal digits or null")


@dataclass(frozen=True)
class DDPConfig:
    """How workers start, find each other and average gradients (mingpt_ddp/distributed)."""

    strategy: Literal["ddp"]
    launcher: Literal["forkserver", "spawn"]  # how nproc_per_node workers start: forked, or as new interpreters
    backend: Literal["auto", "nccl", "gloo", "mpi"]  # auto: nccl on GPUs, else gloo, or shared memory on one machine
    timeout_s: Annotated[float, Bounds(ge=1, le=1e7)]  # seconds a rank waits for the others
    nproc_per_node: NonNegativeInt | None  # workers to start on this machine; 0 or null: none, this process trains
    max_restarts: NonNegativeInt  # of the workers that nproc_per_node starts
    bucket_cap_mb: PositiveFloat  # MiB of gradients per all-reduce
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: Literal["none", "fp16", "bf16"]  # type that gradients are cast to for the all-reduce
    sync_batchnorm: bool

    def __post_init__(self) -> None:
        both = self.static_graph and self.find_unused_parameters
        check(not both, "ddp.static_graph=true cannot be combined with ddp.find_unused_parameters=true")
        half = self.comm_hook != "none" and self.backend == "mpi"
        check(not half, f"ddp.comm_hook={self.comm_hook} needs 16-bit all-reduce, which MPI lacks; use gloo or nccl")


@dataclass(frozen=True)
class TrainerConfig:
    """The training loop: limits, batch sizes, precision, reports (mingpt_ddp/training/trainer.py)."""

    max_epochs: PositiveInt | None  # passes over the training characters
    max_steps: PositiveInt | None  # optimizer steps; the smaller of the two limits ends the run
    batch_size: PositiveInt  # sequences per optimizer step over all ranks
    micro_batch_size: PositiveInt | None  # sequences per rank per forward; null: the largest that fits the first start
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16", "fp16"]  # auto: bf16 on a GPU that supports it, else fp32
    compile: bool | Literal["auto", "cuda_graphs"]  # torch.compile; auto: on a GPU (mingpt_ddp/distributed/ddp.py)
    grad_norm_clip: PositiveFloat | None  # largest global gradient norm; null: no clipping
    log_every: PositiveInt  # steps
    eval_every: PositiveInt | None  # steps; there is always a final evaluation
    sample_every: PositiveInt | None  # steps
    on_nonfinite: Literal["stop", "skip", "rollback"]  # after a step with a non-finite or spiking loss or gradient
    spike_factor: Annotated[float, Bounds(gt=1)] | None  # a spike is a loss above this times its average; null: none
    deterministic: bool  # bit-identical results on a GPU too, slower there
    prune: Literal["none", "median"] = "none"  # median: stop a sweep's jobs that do worse than most
    prune_after: NonNegativeInt = 500  # steps that every job gets
    activation_checkpointing: bool = False  # recompute activations: less memory, a third more time, same numbers

    def __post_init__(self) -> None:
        limits = (self.max_epochs, self.max_steps)
        check(limits != (None, None), "trainer.max_epochs and trainer.max_steps are both null; set one of them")
        micro, batch = self.micro_batch_size, self.batch_size
        fits = micro is None or batch % micro == 0
        check(fits, f"trainer.batch_size={batch} must be a multiple of trainer.micro_batch_size={micro}")


@dataclass(frozen=True)
class SnapshotConfig:
    """When snapshots are saved, where, and how many are kept (mingpt_ddp/snapshots)."""

    path: str | None  # a directory or any fsspec URL, to which the run's name is appended; null: in the run directory
    every_steps: PositiveInt | Literal["auto"] | None  # auto: loses least time (mingpt_ddp/training/save_schedule.py)
    mtbf_hours: PositiveFloat  # auto: mean time between failures of the whole run
    every_epochs: PositiveInt | None
    every_minutes: PositiveFloat | None  # by rank 0's clock
    keep_last: PositiveInt  # how many of the newest snapshots to keep
    keep_best: bool  # also keep the one with the lowest validation loss
    background: bool  # write from a thread; training waits only for the copy in memory
    max_failures: NonNegativeInt  # consecutive failed saves that training survives
    fallback_path: str | None  # where to write when `path` fails: a directory or URL, the run's name is appended
    grace_seconds: NonNegativeFloat  # between SIGTERM and SIGKILL

    def __post_init__(self) -> None:
        for key, url in (("path", self.path), ("fallback_path", self.fallback_path)):
            if url is not None:
                _check_url(f"snapshot.{key}", url)
                check("::" not in url, f"snapshot.{key}={url} must be one URL, not a chain of them")
        same = self.path is not None and self.path.rstrip("/") == (self.fallback_path or "").rstrip("/")
        check(not same, f"snapshot.fallback_path={self.fallback_path} must differ from snapshot.path")


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
