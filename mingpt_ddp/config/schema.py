"""The groups of the configuration: every key with its type, its unit and its check."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from mingpt_ddp.config.validation import check as _check
from mingpt_ddp.config.validation import refuse_credentials

Schedule = Literal["cosine", "linear", "wsd", "constant"]
DIRECTORY = r"[A-Za-z0-9_][A-Za-z0-9._+=,-]{0,149}"  # the names that a run's directory may have


@dataclass(frozen=True)
class RunConfig:
    """Which run this is and where it lives."""

    name: str | None  # a directory below root, or two: group/name; null: derived from the configuration
    root: str  # local directory of all runs
    resume: str  # auto | never | a snapshot's path or URL to start from
    seed: int  # every random number of the run follows from it

    def __post_init__(self) -> None:
        if self.name is not None:
            fits = re.fullmatch(rf"{DIRECTORY}(/{DIRECTORY})?", self.name)
            _check(bool(fits), f"run.name={self.name} must be a directory name of letters, digits and . _ + = , -")
        refuse_credentials("run.root", self.root)
        _check(bool(self.root.strip()), "run.root is empty; name a directory")
        _check("://" not in self.root, f"run.root={self.root} must be a local directory; snapshot.path may be a URL")
        _check(bool(self.resume.strip()), "run.resume is empty; use auto, never or the path of a snapshot")
        _check(0 <= self.seed < 2**63, f"run.seed={self.seed} must lie in 0 .. 2^63 - 1")
        refuse_credentials("run.resume", self.resume)


@dataclass(frozen=True)
class UserCodeConfig:
    """What the groups have in common to which users add code of their own (mingpt_ddp/config/registry.py)."""

    code: str | None = field(default=None, kw_only=True)  # a Python file beside the YAML file that names it
    code_sha256: str | None = field(default=None, kw_only=True)  # of that file; null: any content


@dataclass(frozen=True)
class ModelConfig(UserCodeConfig):
    """What every model has."""

    name: str  # a label for directories and logs
    architecture: str  # which of the registered models


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """What our decoders have in common."""

    n_layer: int  # blocks
    n_head: int  # attention heads per block
    n_embd: int  # width of the residual stream
    dropout: float  # probability, in [0, 1)

    def __post_init__(self) -> None:
        for key, most in (("n_layer", 10_000), ("n_head", 1_000_000), ("n_embd", 1_000_000)):
            _check(getattr(self, key) >= 1, f"model.{key}={getattr(self, key)} must be at least 1")
            _check(getattr(self, key) <= most, f"model.{key}={getattr(self, key)} must be at most {most:,}")
        divides = self.n_embd % self.n_head == 0
        _check(divides, f"model.n_embd={self.n_embd} must be divisible by model.n_head={self.n_head}")
        _check(0 <= self.dropout < 1, f"model.dropout={self.dropout} must lie in [0, 1)")


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """A GPT-2 style decoder (mingpt_ddp/models/gpt.py)."""

    bias: bool  # in linear layers and layer norms, as GPT-2 has them
    activation: Literal["gelu", "gelu_tanh"]  # exact, or GPT-2's approximation, which is slower on a CPU


@dataclass(frozen=True)
class ModernConfig(TransformerConfig):
    """A decoder with rotary positions, without biases and gains (mingpt_ddp/models/modern.py)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.n_embd // self.n_head % 2 == 0
        _check(even, f"model.n_embd={self.n_embd} over model.n_head={self.n_head} must be even, for rotary positions")


@dataclass(frozen=True)
class OptimizerConfig(UserCodeConfig):
    """What every optimizer has: a learning rate, weight decay and a schedule (mingpt_ddp/optim.py)."""

    name: str
    lr: float  # the peak of the schedule
    weight_decay: float  # of matrices; vectors are not decayed
    schedule: Schedule
    schedule_steps: int | None  # null: the steps of the run
    warmup_steps: int  # of linear growth from 0
    min_lr_ratio: float  # the final learning rate over the peak
    decay_ratio: float  # wsd: the last fraction of the schedule, in which the learning rate falls

    def __post_init__(self) -> None:
        _check_lr("lr", self.lr)
        _check(self.weight_decay >= 0, f"optimizer.weight_decay={self.weight_decay} must not be negative")
        _check(self.weight_decay <= 1e6, f"optimizer.weight_decay={self.weight_decay} must be at most 1e6")
        _check(self.warmup_steps >= 0, f"optimizer.warmup_steps={self.warmup_steps} must not be negative")
        _check(0 <= self.min_lr_ratio <= 1, f"optimizer.min_lr_ratio={self.min_lr_ratio} must lie in [0, 1]")
        _check(0 < self.decay_ratio <= 1, f"optimizer.decay_ratio={self.decay_ratio} must lie in (0, 1]")
        steps = self.schedule_steps
        _check(steps is None or steps >= 1, f"optimizer.schedule_steps={steps} must be at least 1")


def _check_lr(key: str, lr: float) -> None:
    _check(lr > 0, f"optimizer.{key}={lr} must be greater than 0")
    _check(1e-30 <= lr <= 1e30, f"optimizer.{key}={lr} must lie in [1e-30, 1e30], where fp32 has room for its products")


def check_adam(betas: tuple[float, float], eps: float) -> None:
    _check(all(0 <= b < 1 for b in betas), f"optimizer.betas={list(betas)} must lie in [0, 1)")
    _check(eps > 0, f"optimizer.eps={eps} must be greater than 0")


@dataclass(frozen=True)
class AdamWConfig(OptimizerConfig):
    betas: tuple[float, float]  # decay of the first and second moment per step
    eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adam(self.betas, self.eps)


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(0 <= self.momentum < 1, f"optimizer.momentum={self.momentum} must lie in [0, 1)")
        _check(not self.nesterov or self.momentum > 0, "optimizer.nesterov=true needs optimizer.momentum > 0")


@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of the hidden layers, AdamW for everything else (mingpt_ddp/optim/muon.py)."""

    momentum: float  # Muon's, per step
    embedding_lr: float  # AdamW's for embeddings, at the peak of the schedule like `lr`, which is Muon's
    head_lr: float  # AdamW's for a matrix in the model's `head`
    vector_lr: float  # AdamW's for what is no matrix
    betas: tuple[float, float]  # AdamW's decay of the first and second moment per step
    eps: float  # AdamW's

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(0 <= self.momentum < 1, f"optimizer.momentum={self.momentum} must lie in [0, 1)")
        for key in ("embedding_lr", "head_lr", "vector_lr"):
            _check_lr(key, getattr(self, key))
        check_adam(self.betas, self.eps)


@dataclass(frozen=True)
class DataConfig(UserCodeConfig):
    """Which text, and how it is cut (mingpt_ddp/data/dataset.py and loader.py)."""

    name: str
    path: str  # a file, any fsspec URL, or builtin:python_docs; what a reader makes of it is the reader's business
    sha256: str | None  # of the file's bytes, or of a reader's text as UTF-8; null: any content
    block_size: int  # context length in characters
    stride: int | None  # characters between the starts of two windows; null: block_size
    train_split: float  # the first fraction of the text trains, the rest validates
    truncate: float  # the fraction of the text that is used at all, from its start
    cache_dir: str  # local directory of downloads and encoded texts
    reader: str | None = field(default=None, kw_only=True)  # a registered function from `path` to text; null: UTF-8

    def __post_init__(self) -> None:
        _check(bool(self.path.strip()), "data.path is empty; name a text file or an fsspec URL")
        refuse_credentials("data.path", self.path)
        refuse_credentials("data.cache_dir", self.cache_dir)
        local = bool(self.cache_dir.strip()) and "://" not in self.cache_dir
        _check(local, f"data.cache_dir={self.cache_dir} must be a local directory")
        is_sha = self.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", self.sha256)
        _check(bool(is_sha), f"data.sha256={self.sha256} must be 64 lower-case hexadecimal digits or null")
        _check(self.block_size >= 1, f"data.block_size={self.block_size} must be at least 1")
        stride = self.stride
        _check(stride is None or stride >= 1, f"data.stride={stride} must be at least 1")
        _check(0 < self.train_split < 1, f"data.train_split={self.train_split} must lie between 0 and 1")
        _check(0 < self.truncate <= 1, f"data.truncate={self.truncate} must lie in (0, 1]")


@dataclass(frozen=True)
class DDPConfig:
    """How the ranks find each other and share gradients (mingpt_ddp/distributed/runtime.py)."""

    strategy: Literal["ddp"]
    launcher: Literal["elastic", "spawn"]  # nproc_per_node starts its workers by torch's elastic agent or mp.spawn
    backend: Literal["auto", "nccl", "gloo", "mpi"]  # auto: nccl on GPUs, else gloo, or shared memory on one machine
    timeout_s: float  # seconds a rank waits for the others
    nproc_per_node: int | None  # workers to start on this machine; 0 or null: none, this process trains
    max_restarts: int  # of the workers that nproc_per_node starts
    bucket_cap_mb: float  # MiB of gradients per all-reduce
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: Literal["none", "fp16", "bf16"]  # compression of the gradients on the wire
    sync_batchnorm: bool

    def __post_init__(self) -> None:
        _check(1 <= self.timeout_s <= 1e7, f"ddp.timeout_s={self.timeout_s} must lie in 1 .. 10,000,000 seconds")
        workers = self.nproc_per_node
        _check(workers is None or workers >= 0, f"ddp.nproc_per_node={workers} must not be negative")
        _check(self.max_restarts >= 0, f"ddp.max_restarts={self.max_restarts} must not be negative")
        _check(self.bucket_cap_mb > 0, f"ddp.bucket_cap_mb={self.bucket_cap_mb} must be greater than 0")
        both = self.static_graph and self.find_unused_parameters
        _check(not both, "ddp.static_graph=true cannot be combined with ddp.find_unused_parameters=true")
        half = self.comm_hook != "none" and self.backend == "mpi"
        _check(not half, f"ddp.comm_hook={self.comm_hook} needs sums of 16 bits, which MPI lacks; use gloo or nccl")


@dataclass(frozen=True)
class TrainerConfig:
    """The loop: how long, how much at once, how often it reports (mingpt_ddp/training/trainer.py)."""

    max_epochs: int | None  # passes over the training characters
    max_steps: int | None  # optimizer steps; the smaller limit of the two ends the run
    batch_size: int  # sequences per optimizer step over all ranks
    micro_batch_size: int | None  # sequences per rank per forward; null: the largest that fits the first start
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16", "fp16"]  # auto: bf16 on a GPU that has it, else fp32
    compile: bool | Literal["auto", "cuda_graphs"]  # torch.compile; auto: on a GPU (mingpt_ddp/distributed/compile.py)
    grad_norm_clip: float | None  # largest global gradient norm; null: no clipping
    log_every: int  # steps
    eval_every: int | None  # steps; there is always a final evaluation
    sample_every: int | None  # steps
    on_nonfinite: Literal["stop", "skip", "rollback"]  # what to do about a step that must not be taken
    spike_factor: float | None  # a loss so many times its running average is such a step too; null: none is
    deterministic: bool  # bit-identical results on a GPU too, slower there
    prune: Literal["none", "median"] = (
        "none"  # end a sweep's jobs that do worse than most (mingpt_ddp/training/pruning.py)
    )
    prune_after: int = 500  # steps that each of them gets
    activation_checkpointing: bool = (
        False  # less memory, a third more time, the same numbers (mingpt_ddp/models/activation_checkpoint.py)
    )

    def __post_init__(self) -> None:
        limits = (self.max_epochs, self.max_steps)
        _check(limits != (None, None), "trainer.max_epochs and trainer.max_steps are both null; set one of them")
        for key in ("max_epochs", "max_steps", "batch_size", "micro_batch_size", "log_every", "eval_every"):
            value = getattr(self, key)
            _check(value is None or value >= 1, f"trainer.{key}={value} must be at least 1")
        every = self.sample_every
        _check(every is None or every >= 1, f"trainer.sample_every={every} must be at least 1")
        spike = self.spike_factor
        _check(self.prune_after >= 0, f"trainer.prune_after={self.prune_after} must not be negative")
        _check(spike is None or spike > 1, f"trainer.spike_factor={spike} must be greater than 1 or null")
        clip = self.grad_norm_clip
        _check(clip is None or clip > 0, f"trainer.grad_norm_clip={clip} must be greater than 0 or null")
        micro, batch = self.micro_batch_size, self.batch_size
        fits = micro is None or batch % micro == 0
        _check(fits, f"trainer.batch_size={batch} must be a multiple of trainer.micro_batch_size={micro}")


@dataclass(frozen=True)
class SnapshotConfig:
    """When the state is saved, where, and how much of it is kept (mingpt_ddp/snapshots)."""

    path: str | None  # a directory or any fsspec URL, to which the run's name is appended; null: in the run directory
    every_steps: int | Literal["auto"] | None  # auto: what loses least time, see mingpt_ddp/training/save_interval.py
    mtbf_hours: float  # auto: mean time between failures of the whole run
    every_epochs: int | None
    every_minutes: float | None  # by rank 0's clock
    keep_last: int  # the newest snapshots that are kept
    keep_best: bool  # the one with the lowest validation loss as well
    background: bool  # write beside training, which waits for the copy in memory alone
    max_failures: int  # in a row, after which a snapshot that cannot be written ends the run
    fallback_path: str | None  # where to write when `path` fails: a directory or URL, the run's name is appended
    grace_seconds: float  # between a SIGTERM and the SIGKILL that follows

    def __post_init__(self) -> None:
        for key in ("every_steps", "every_epochs", "keep_last"):
            value = getattr(self, key)
            _check(value in (None, "auto") or value >= 1, f"snapshot.{key}={value} must be at least 1")
        _check(self.mtbf_hours > 0, f"snapshot.mtbf_hours={self.mtbf_hours} must be greater than 0")
        _check(self.max_failures >= 0, f"snapshot.max_failures={self.max_failures} must not be negative")
        _check(self.grace_seconds >= 0, f"snapshot.grace_seconds={self.grace_seconds} must not be negative")
        minutes = self.every_minutes
        _check(minutes is None or minutes > 0, f"snapshot.every_minutes={minutes} must be greater than 0")
        same = self.path is not None and self.path.rstrip("/") == (self.fallback_path or "").rstrip("/")
        _check(not same, f"snapshot.fallback_path={self.fallback_path} must be another place than snapshot.path")
        for key in ("path", "fallback_path"):
            url = getattr(self, key)
            _check(url is None or bool(url.strip()), f"snapshot.{key} is empty; name a directory or URL, or null")
            refuse_credentials(f"snapshot.{key}", url or "")
            _check("::" not in (url or ""), f"snapshot.{key}={url} must be one URL, not a chain of them")


MODELS: dict[str | None, type] = {"gpt": GPTConfig, "modern": ModernConfig}
OPTIMIZERS: dict[str | None, type] = {"adamw": AdamWConfig, "muon": MuonConfig, "sgd": SGDConfig}
READERS: dict[str | None, type] = {None: DataConfig}
# Each group: the key that selects its dataclass (none where there is one only), and the dataclasses to select from.
GROUPS: dict[str, tuple[str | None, dict[str | None, type]]] = {
    "run": (None, {None: RunConfig}),
    "model": ("architecture", MODELS),
    "optimizer": ("name", OPTIMIZERS),
    "data": ("reader", READERS),
    "ddp": (None, {None: DDPConfig}),
    "trainer": (None, {None: TrainerConfig}),
    "snapshot": (None, {None: SnapshotConfig}),
}
