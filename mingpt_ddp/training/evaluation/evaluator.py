"""Evaluate a model: the task's metrics over a split, every item once, over all ranks; a sample."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.data.dataloader import Split
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError
from mingpt_ddp.models import eval_mode
from mingpt_ddp.process.logs import progress_bar
from mingpt_ddp.tasks.task import Task, check_metrics
from mingpt_ddp.training.memory import refuse_out_of_memory


class Evaluator:
    """Means of the task's metrics over its splits."""

    def __init__(self, task: Task, runtime: Runtime) -> None:
        self.task = task
        self.runtime = runtime
        self._has_run = False
        self.splits = {name: task.split(name, runtime.device) for name in task.split_names()}

    def run(self, model: nn.Module, name: str) -> dict[str, float]:
        """Return the metrics of a split by name. A collective.

        The metrics of a further split `val_<other>` are named <other>_<metric>.

        Args:
            name: `val` or `test`. Its further splits are measured with it. Without such a split
                {} is returned.

        Raises:
            ConfigError: The first evaluation does not fit into memory.
            CodeError: There are too many metrics to record, or no loss.
        """
        metrics = self.run_unless_stopped(model, name, lambda: False)
        return {} if metrics is None else metrics

    def run_unless_stopped(
        self, model: nn.Module, name: str, stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return what `run` returns, or None on all ranks if `stop` has returned True on any.

        Args:
            stop: Called before every batch.
        """
        fits = refuse_out_of_memory(self.task.config, self.runtime, "the first evaluation")
        with nullcontext() if self._has_run else fits, torch.no_grad():
            metrics = self._run(model, name, stop)
        self._has_run = True
        return metrics

    def _run(
        self, model: nn.Module, name: str, stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        metrics: dict[str, float] = {}
        for other, split in self.splits.items():
            if split is None or not (other == name or other.startswith(f"{name}_")):
                continue
            measured = self._means(model, split, stop)
            if measured is None:
                return None
            prefix = "" if other == name else other.removeprefix(f"{name}_") + "_"
            for key, value in measured.items():
                metrics[prefix + key] = value
        task = self.task.config.task.name
        check_metrics(task, metrics)
        if metrics and "loss" not in metrics:
            raise CodeError(f"the task {task}: the loss of the split {name} has no items")
        return metrics

    def _means(
        self, model: nn.Module, split: Split, stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return the metrics of a split: batch i is computed by copy i mod copies of the model."""
        group = self.runtime.group
        sums: dict[str, list[Tensor]] = defaultdict(list)  # one, or with canonical one per batch
        counts: dict[str, Tensor | int] = {}
        stopped = False
        bar = progress_bar(group.env, len(split), "evaluating", "batch")
        with eval_mode(model), bar:
            for batch, is_own in self._passes(split):
                stopped = self.runtime.strategy.any_in_pass(stop())
                if stopped:
                    break
                group.set_activity(
                    group.heartbeat["activity"], self.runtime.strategy.waits_in_passes
                )
                with self.runtime.autocast():
                    metrics = self.task.metrics(model, self.runtime.to_device(batch))
                if is_own:
                    for name, (value, n) in metrics.items():
                        value = torch.as_tensor(value).double()
                        if sums[name] and not self.runtime.strategy.is_canonical:
                            sums[name][0] = sums[name][0] + value
                        else:
                            sums[name].append(value)
                        counts[name] = counts.get(name, 0) + n
                bar.update(group.data_size)
        with group.waiting():  # reading waits for a GPU
            sums_and_counts = {}
            for name, values in sums.items():
                sums_and_counts[name] = ([float(value) for value in values], float(counts[name]))
        parts = group.all_gather((stopped, sums_and_counts))
        if any(was_stopped for was_stopped, _ in parts):
            return None
        return means_of_ranks([part for _, part in parts])

    def _passes(self, split: Split) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of this rank, and whether they count.

        The others make up for a rank that has more, where each pass is a collective.
        """
        group = self.runtime.group
        count = 0
        for batch in split.batches(group.data_rank, group.data_size):
            count += 1
            yield batch, True
        for _ in range(count, self.runtime.strategy.passes(len(split))):
            yield next(iter(split.batches(0, group.data_size))), False

    def sample(self, model: nn.Module, step: int) -> str | None:
        """Return a text that the model generates, if the task has one. A collective.

        Return None on ranks without it.
        """
        if type(self.task).sample is Task.sample:
            return None
        return self.runtime.strategy.on_whole_model(
            model, self.task.build_model, lambda whole: self.task.sample(whole, step)
        )


def means_of_ranks(parts: list[dict[str, tuple[list[float], float]]]) -> dict[str, float]:
    """Return the means over all ranks.

    Args:
        parts: by rank and name: the sum over its items, or with ddp.reduction=canonical one for
            each of its batches, and the number of its items. Batches are added in their order.
    """
    by_rank: dict[str, list[list[float]]] = defaultdict(list)
    counts: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, (sums, n) in part.items():
            by_rank[name].append(sums)
            counts[name] += n
    means = {}
    for name, lists in by_rank.items():
        total = 0.0
        for turn in zip_longest(*lists, fillvalue=0.0):  # batch i was computed by rank i mod ranks
            for value in turn:  # not sum(): that of Python 3.12 compensates for rounding
                total += value
        if counts[name]:  # else it has no mean
            means[name] = total / counts[name]
    return means
