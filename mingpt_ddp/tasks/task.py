"""The base class of all tasks. It has a map-style dataset, and builds the model.

A subclass computes the loss of a batch.
"""

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

# A line of metrics.jsonl takes at most this many bytes for a metric, besides its name.
BYTES_PER_METRIC = 40
MAX_METRICS_BYTES = MAX_LINE_BYTES // 4  # limit for the metrics of one evaluation


class Task:
    """A task with a map-style dataset.

    To write a task of your own, inherit from this class and define `loss`.

    Attributes:
        config: The whole configuration.
        datasets: The training, validation and test splits.
        sha256: Hash of the data. A run resumes only if its data still has this hash.
        shape: Two arguments for the model's builder: the number of outputs, and the shape of an
            input. For gpt and modern these are the vocabulary size and the context length.
    """

    unit = "samples"  # the items of a step; the log shows how many are trained per second
    # Metrics by which runs are compared. For the validation split, result.json has each of them
    # under two names: with the prefix `val_`, and without it.
    comparable: tuple[str, ...] = ()

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        """Load the data. A collective.

        One rank of every node loads the data first, and may download it for the other ranks.

        Raises:
            ConfigError: The configuration selects a text instead of a dataset of samples.
            DataError: The data cannot be read, or there is too little of it.
        """
        self.config = config
        if not isinstance(config.data, DatasetConfig):
            raise ConfigError(
                f"task.name={config.task.name} needs your own dataset "
                f"(docs/your-own-model.md), but {config.data.label} is a text; for a text use "
                "language_model, or a task that inherits from mingpt_ddp.tasks.LanguageModel"
            )
        built: list[Datasets] = []

        def build() -> str:
            built.append(build_datasets(config.data))
            return built[0].digest()

        self.sha256 = group.prepare_on_each_node(
            build, f"loading data.dataset={config.data.dataset}"
        )
        self.datasets = built[0] if built else build_datasets(config.data)
        # Look at a sample of the validation split, because training samples may be augmented.
        sample = self.datasets.val[0]
        x = sample[0] if isinstance(sample, (tuple, list)) else sample
        inputs: Any = tuple(getattr(x, "shape", ()))
        is_tokens = len(inputs) == 1 and x.dtype == torch.int64
        if is_tokens and isinstance(config.model, TransformerConfig):
            inputs = len(x)
        self.shape: tuple[int, Any] = (self.datasets.outputs, inputs)

    @classmethod
    def build(cls, config: Config, group: ProcessGroup, recorded_state: dict[str, Any]) -> "Task":
        """Build the task. A collective.

        Args:
            recorded_state: The untrusted state.json of the snapshot whose weights the model will
                get. {} if there is none.
        """
        return cls(config, group)

    # Data.

    def discard(self) -> None:
        """Delete the files that this task has added to a cache.

        Called if the configuration is refused.
        """

    @contextlib.contextmanager
    def discarded_if_refused(self) -> Iterator[None]:
        """In this context, discard new files of the cache if the configuration is refused."""
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
        """Return the names of the splits to evaluate: `val`, `test`, and any `val_<name>`.

        The splits `val_<name>` are evaluated together with `val`.
        """
        return ["val", "test"]

    def split(self, name: str, device: torch.device) -> Split | None:
        """Return a split to evaluate, or None if the data has no such split.

        `val` is limited to trainer.eval_steps batches. `test` is always evaluated completely.

        Args:
            name: The name of the split, `val` or `test`.
            device: The device on which the model expects its inputs.
        """
        dataset = getattr(self.datasets, name)
        if dataset is None:
            return None
        steps = self.config.trainer.eval_steps if name == "val" else None
        samples = steps and steps * self.config.trainer.batch_size
        on_gpu = device.type == "cuda"
        return SampleSplit(dataset, self.config.data, on_gpu, samples)

    def data_notes(self) -> list[str]:
        """Return lines about the data for the log, in addition to `describe_data`."""
        return []

    def describe_data(self) -> str:
        """Describe the data in one line for the log: its name, and the size of each split."""
        sizes = []
        for name in ("train", "val", "test"):
            dataset = getattr(self.datasets, name) or ()
            sizes.append(f"{len(dataset):,} {name}")
        return f"{self.config.data.label}: {', '.join(sizes)} samples"

    def state(self) -> dict[str, Any]:
        """Return the state of the task for a snapshot, as JSON values.

        It identifies the data, and contains the values that sampling needs, such as a vocabulary.
        """
        return {"data": {"sha256": self.sha256}}

    def extend(self, state: dict[str, Any]) -> None:
        """Adapt this task to the weights of a snapshot that was trained on other data.

        A language model, for example, takes over the vocabulary of the snapshot, since each row of
        the embedding belongs to a token. It adds the characters that only the new text has.

        Args:
            state: The untrusted state.json of the snapshot.
        """

    def files(self) -> dict[str, str]:
        """Return files to write to the run directory, as text by file name.

        Other programs may need them to read the snapshots, for example a tokenizer.json.
        """
        return {}

    def adopt(self, state: dict[str, Any], is_other_data: bool) -> None:
        """Check that a snapshot's model fits the data, to evaluate it.

        Args:
            state: The untrusted state.json of the snapshot.
            is_other_data: True if the user has asked to evaluate other data than the data that the
                model was trained on.

        Raises:
            DataError: The data differs from the data of the run, although the user has not asked
                for other data.
        """
        if not is_other_data and recorded_sha256(state) != self.sha256:
            raise DataError(
                "the data has changed since the run; set data.path to the place of the original "
                "data"
            )

    # The model.

    def set_outputs(self, outputs: int) -> None:
        """Give the model a different number of outputs than the data needs, for the command `plan`.

        Raises:
            ConfigError: The data determines the number of outputs.
        """
        raise ConfigError(f"vocab_size={outputs} works only for texts; leave it out")

    def build_model(self) -> nn.Module:
        """Build the model of `config.model`. Its weights come from torch's global generator."""
        return build_model(self.config.model, *self.shape)

    # Loss and metrics.

    def loss(self, model: nn.Module, batch: Any) -> Returned:
        """Compute the mean loss of a batch, or several losses by name, whose sum is trained.

        To log metrics as well, return a pair: the loss or losses, and a dictionary of metrics. A
        metric is a scalar, or a pair of a sum and its number of items. Metrics are only logged.

        Args:
            model: The model. Call it as model(...), and do not call its methods: the call runs the
                wrapper that averages the gradients. Call it only once, since with fsdp each call
                gathers all weights. For two passes with different dropout masks pass the batch
                twice, as in `model(torch.cat([x, x]))`.
            batch: Collated samples, on the device.
        """
        raise NotImplementedError

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        """Compute the metrics of evaluation: sums over the batch, each with its number of items.

        The sums and numbers of all batches and ranks are added up, and the log shows the means. One
        metric must be called `loss`, since snapshots and sweeps compare it.
        """
        outputs = outputs_of(self.loss(model, batch), model)
        n = batch_length(batch)
        losses = {name: (loss.detach() * n, n) for name, loss in outputs.losses.items()}
        return losses | outputs.metrics

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Return the text that the log shows for these metrics."""
        texts = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()]
        return ", ".join(texts)

    # Optional.

    def sample(self, model: nn.Module, step: int) -> str | None:
        """Generate a text with the model. Return None if the task does not generate texts."""
        return None

    # Checks of a user's code, before anything is written.

    def trial_batch(self, batch: Any) -> Any:
        """Return a part of a batch that is large enough for the steps of the dry run."""
        return batch

    def check_model(self, model: nn.Module, batch: Any, trained: bool) -> None:
        """Check the values that a user's model and task return.

        Args:
            model: The model to check.
            batch: A whole batch in the first call, and a `trial_batch` in the second one.
            trained: False in the first call. True in the second call, after the trial steps.

        Raises:
            CodeError: A value has the wrong type or shape.
        """
        name = self.config.task.name
        outputs = outputs_of(self.loss(model, batch))
        check_outputs(f"the task {name}", outputs)
        check_metrics(name, outputs.losses | outputs.metrics)
        self.check_measured(model, batch)

    def check_measured(self, model: nn.Module, batch: Any) -> None:
        """Check the metrics that a user's method `metrics` returns.

        Raises:
            CodeError: The metrics are not pairs by name, or none of them is called `loss`.
        """
        name = self.config.task.name
        with eval_mode(model), torch.no_grad():
            metrics = self.metrics(model, batch)
        is_named = isinstance(metrics, Mapping) and "loss" in metrics
        if not is_named or not all(map(is_pair, metrics.values())):
            raise CodeError(
                f"the task {name}: metrics(model, batch) must return a dictionary of pairs (sum, "
                "number), and one of its keys must be loss"
            )
        check_metrics(name, metrics)


def check_metrics(task: str, metrics: Mapping[str, Any]) -> None:
    """Refuse more metrics than a line of metrics.jsonl or a message to a sweep can hold.

    Raises:
        CodeError: There are too many metrics. The message names the task.
    """
    size = sum(len(json.dumps(name)) + BYTES_PER_METRIC for name in metrics)
    if size > MAX_METRICS_BYTES:
        raise CodeError(
            f"the task {task} has {len(metrics):,} metrics or losses, which take {size:,} bytes; "
            f"at most {MAX_METRICS_BYTES:,} bytes are allowed: return fewer metrics"
        )


def recorded_sha256(state: Any) -> str:
    """Return the SHA-256 of the data that a snapshot was trained on.

    Args:
        state: The untrusted state.json of the snapshot.

    Raises:
        LookupError, TypeError: The state is invalid.
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
