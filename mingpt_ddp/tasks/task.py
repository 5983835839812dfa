"""The base class of all tasks: a map-style dataset, a model, batch -> loss and metrics."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.keys.components import DatasetConfig
from mingpt_ddp.config.keys.model_config import TransformerConfig
from mingpt_ddp.data.dataloader import Loader, Split
from mingpt_ddp.data.samples import Datasets, SampleLoader, SampleSplit, build_datasets
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import CodeError, ConfigError, DataError, UserError
from mingpt_ddp.models import build_model, eval_mode
from mingpt_ddp.storage.lines import MAX_LINE_BYTES
from mingpt_ddp.tasks.outputs import Mean, Returned, check_outputs, is_pair, outputs_of

BYTES_PER_METRIC = 40  # of a line, besides the name as the task gives it
MAX_METRICS_BYTES = MAX_LINE_BYTES // 4  # of one evaluation


class Task:
    """What a run learns from a map-style dataset.

    A task of your own inherits from it and has a `loss`.

    Attributes:
        config: the whole configuration.
        datasets: the splits.
        sha256: of the data; a run resumes only with the same.
        shape: what the model's builder receives besides its configuration: the outputs, and the
            shape of an input; of gpt and modern the vocabulary size and the context length.
    """

    unit = "samples"  # what a step consumes; metrics count them per second
    comparable: tuple[str, ...] = ()  # metrics that result.json repeats without `val_`

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        """Load the data, first on one rank of every node, which may download it. A collective.

        Raises:
            ConfigError: the configuration selects text.
            DataError: the data cannot be read or is too small.
        """
        self.config = config
        if not isinstance(config.data, DatasetConfig):
            raise ConfigError(
                f"task.name={config.task.name} needs a dataset of yours "
                f"(docs/your-own-model.md); {config.data.label} is a text, whose task is "
                "language_model or derives from mingpt_ddp.tasks.LanguageModel"
            )
        built: list[Datasets] = []

        def build() -> str:
            built.append(build_datasets(config.data))
            return built[0].digest()

        self.sha256 = group.prepare_on_each_node(
            build, f"loading data.dataset={config.data.dataset}"
        )
        self.datasets = built[0] if built else build_datasets(config.data)
        sample = self.datasets.val[0]  # without augmentation
        x = sample[0] if isinstance(sample, (tuple, list)) else sample
        inputs: Any = tuple(getattr(x, "shape", ()))
        is_tokens = len(inputs) == 1 and x.dtype == torch.int64
        if is_tokens and isinstance(config.model, TransformerConfig):
            inputs = len(x)
        self.shape: tuple[int, Any] = (self.datasets.outputs, inputs)

    @classmethod
    def build(cls, config: Config, group: ProcessGroup, kept: dict[str, Any]) -> "Task":
        """Build the task. A collective.

        Args:
            kept: of the snapshot whose weights the model will get, untrusted; {} if there is none.
        """
        return cls(config, group)

    # Data.

    def discard(self) -> None:
        """Delete what this object has added to a cache, because the configuration is refused."""

    @contextlib.contextmanager
    def discarded_if_refused(self) -> Iterator[None]:
        """Leave no cache behind if the body refuses the configuration."""
        try:
            yield
        except UserError:
            self.discard()
            raise

    def train_loader(self, device: torch.device) -> Loader:
        """Return the loader of the training split."""
        batch_size = self.config.trainer.batch_size
        seed = self.config.run.seed
        on_gpu = device.type == "cuda"
        return SampleLoader(self.datasets.train, self.config.data, batch_size, seed, on_gpu)

    def split_names(self) -> list[str]:
        """Return the splits to evaluate: `val`, `test`, and further ones as `val_<name>`.

        Those are measured with `val`.
        """
        return ["val", "test"]

    def split(self, name: str, device: torch.device) -> Split | None:
        """Return a split to evaluate, `val` or `test`; None if there is none.

        `test` is always whole.
        """
        dataset = getattr(self.datasets, name)
        if dataset is None:
            return None
        steps = self.config.trainer.eval_steps if name == "val" else None
        samples = steps and steps * self.config.trainer.batch_size
        on_gpu = device.type == "cuda"
        return SampleSplit(dataset, self.config.data, on_gpu, samples)

    def data_notes(self) -> list[str]:
        """Return further lines about the data for the log."""
        return []

    def describe_data(self) -> str:
        """Return a line about the data for the log."""
        sizes = []
        for name in ("train", "val", "test"):
            dataset = getattr(self.datasets, name) or ()
            sizes.append(f"{len(dataset):,} {name}")
        return f"{self.config.data.label}: {', '.join(sizes)} samples"

    def state(self) -> dict[str, Any]:
        """Return JSON values for a snapshot: what identifies the data, and what sampling needs."""
        return {"data": {"sha256": self.sha256}}

    def extend(self, state: dict[str, Any]) -> None:
        """Take from a snapshot what its weights need to keep their meaning.

        Other data may need more of it.

        Args:
            state: of the snapshot, untrusted.
        """

    def files(self) -> dict[str, str]:
        """Return further files of the run directory by name, for a reader of the snapshots."""
        return {}

    def adopt(self, state: dict[str, Any], is_other_data: bool) -> None:
        """Check that a snapshot's model fits the data, to evaluate it.

        Args:
            state: of the snapshot, untrusted.
            is_other_data: the user has named other data than that of the snapshot's run.

        Raises:
            DataError: the data is not that of the snapshot's run.
        """
        if not is_other_data and recorded_sha256(state) != self.sha256:
            raise DataError("the data has changed since the run; give data.path, where it is now")

    # The model.

    def set_outputs(self, outputs: int) -> None:
        """Let the model have other outputs than the data needs, for a plan.

        Raises:
            ConfigError: they are those of the data.
        """
        raise ConfigError(f"vocab_size={outputs} is of texts; leave it out")

    def build_model(self) -> nn.Module:
        """Build the model of `config.model`; torch's global generator draws its weights."""
        return build_model(self.config.model, *self.shape)

    # What it learns.

    def loss(self, model: nn.Module, batch: Any) -> Returned:
        """Return the mean loss of a batch, or several by name, whose sum is trained.

        With metrics, by name, it returns a pair: the loss or losses, and the metrics, each a scalar
        or a pair of a sum and the number of items in it. They are logged, and not trained.

        Args:
            model: call it as model(...), not its methods: what wraps it averages the gradients.
                Call it once, since with fsdp each call gathers all weights; for two passes with
                other dropout masks pass the batch twice, as in `model(torch.cat([x, x]))`.
            batch: collated samples, on the device.
        """
        raise NotImplementedError

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        """Return what evaluation measures: sums over the batch, each with its number of items.

        `loss` is required: snapshots and sweeps compare it. The sums of all ranks are added.
        """
        outputs = outputs_of(self.loss(model, batch), model)
        n = batch_length(batch)
        losses = {name: (loss.detach() * n, n) for name, loss in outputs.losses.items()}
        return losses | outputs.metrics

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Return metrics as text for the log."""
        texts = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()]
        return ", ".join(texts)

    # Optional.

    def sample(self, model: nn.Module, step: int) -> str | None:
        """Return a text that the model generates; None: the task has none."""
        return None

    # Checks of a user's code, before anything is written.

    def trial_batch(self, batch: Any) -> Any:
        """Return a part of a batch that suffices for trial steps."""
        return batch

    def check_model(self, model: nn.Module, batch: Any, trained: bool) -> None:
        """Check what a user's model and task return.

        Args:
            trained: called again after trial steps, with `trial_batch`.

        Raises:
            CodeError: another type or shape than the task needs.
        """
        name = self.config.task.name
        outputs = outputs_of(self.loss(model, batch))
        check_outputs(f"the task {name}", outputs)
        check_metrics(name, outputs.losses | outputs.metrics)
        self.check_measured(model, batch)

    def check_measured(self, model: nn.Module, batch: Any) -> None:
        """Check what a user's `metrics` returns.

        Raises:
            CodeError: It does not return pairs by name, or there is no loss.
        """
        name = self.config.task.name
        with eval_mode(model), torch.no_grad():
            metrics = self.metrics(model, batch)
        is_named = isinstance(metrics, Mapping) and "loss" in metrics
        if not is_named or not all(map(is_pair, metrics.values())):
            raise CodeError(
                f"the task {name}: metrics(model, batch) must return pairs (sum, number) by name, "
                "among them loss"
            )
        check_metrics(name, metrics)


def check_metrics(task: str, metrics: Mapping[str, Any]) -> None:
    """Refuse metrics of which a line of metrics.jsonl or a message to a sweep could not be read.

    Raises:
        CodeError: names the task.
    """
    size = sum(len(json.dumps(name)) + BYTES_PER_METRIC for name in metrics)
    if size > MAX_METRICS_BYTES:
        raise CodeError(
            f"the task {task} has {len(metrics):,} metrics or losses, which take {size:,} bytes of "
            f"at most {MAX_METRICS_BYTES:,}; return fewer"
        )


def recorded_sha256(state: Any) -> str:
    """Return the SHA-256 of the data of a snapshot.

    Raise LookupError or TypeError for an invalid state.
    """
    return str(recorded_data(state)["sha256"])


def batch_length(batch: Any) -> int:
    """Return the number of samples in a collated batch."""
    if isinstance(batch, Mapping):
        return batch_length(next(iter(batch.values())))
    if isinstance(batch, Tensor):
        return len(batch)
    return batch_length(batch[0])


def recorded_data(state: Any) -> Any:
    """Return the part of a task's state that identifies its text or data by SHA-256."""
    return state.get("text") or state["data"]
