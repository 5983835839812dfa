"""Evaluate a model: compute the task's metrics over a split, and generate a sample.

The ranks share the batches of a split, and every item counts once.
"""

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
    """Computes the means of the task's metrics over its splits."""

    def __init__(self, task: Task, runtime: Runtime) -> None:
        self.task = task
        self.runtime = runtime
        self._has_run = False
        self.splits = {name: task.split(name, runtime.device) for name in task.split_names()}

    def run(self, model: nn.Module, name: str) -> dict[str, float]:
        """Evaluate a split. Return its metrics by name, or {} if there is no such split.

        The splits `val_<text>` of additional validation texts are evaluated together with `val`.
        Their metrics are called <text>_<metric>. A collective.

        Args:
            model: The model to evaluate.
            name: Name of the split, `val` or `test`.

        Raises:
            ConfigError: The first evaluation does not fit into memory.
            CodeError: There are too many metrics to record, or there is no loss.
        """
        metrics = self.run_unless_stopped(model, name, lambda: False)
        return {} if metrics is None else metrics

    def run_unless_stopped(
        self, model: nn.Module, name: str, stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Evaluate a split like `run`, unless `stop` returns True on a rank. Then return None.

        Args:
            model: The model to evaluate.
            name: Name of the split, `val` or `test`.
            stop: Called before every batch. If it returns True on one rank, the evaluation ends on
                all ranks.
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
        for split_name, split in self.splits.items():
            if split is None or not (split_name == name or split_name.startswith(f"{name}_")):
                continue
            measured = self._means(model, split, stop)
            if measured is None:
                return None
            prefix = "" if split_name == name else split_name.removeprefix(f"{name}_") + "_"
            for key, value in measured.items():
                metrics[prefix + key] = value
        task = self.task.config.task.name
        check_metrics(task, metrics)
        if metrics and "loss" not in metrics:
            raise CodeError(
                f"the task {task}: the loss of the split {name} has no items; "
                "metrics(model, batch) must return each sum with its number of items"
            )
        return metrics

    def _means(
        self, model: nn.Module, split: Split, stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return the means of the metrics over a split.

        Each copy of the model, on one rank or several, computes its share of the batches: batch i
        is computed by copy i mod the number of copies. Return None if `stop` returns True.
        """
        group = self.runtime.group
        # The sums of each metric: a single sum, or with ddp.reduction=canonical one for each batch.
        sums: dict[str, list[Tensor]] = defaultdict(list)
        counts: dict[str, Tensor | int] = {}
        stopped = False
        bar = progress_bar(group.env, len(split), "evaluating", "batch")
        with eval_mode(model), bar:
            for batch, is_counted in self._passes(split):
                stopped = self.runtime.strategy.any_in_pass(stop())
                if stopped:
                    break
                group.set_activity(
                    group.heartbeat["activity"], self.runtime.strategy.waits_in_passes
                )
                with self.runtime.autocast():
                    metrics = self.task.metrics(model, self.runtime.to_device(batch))
                if is_counted:
                    for name, (value, n) in metrics.items():
                        value = torch.as_tensor(value).double()
                        if sums[name] and not self.runtime.strategy.is_canonical:
                            sums[name][0] = sums[name][0] + value
                        else:
                            sums[name].append(value)
                        counts[name] = counts.get(name, 0) + n
                bar.update(group.data_size)
        with group.waiting():  # reading the sums waits for the GPU
            sums_and_counts = {}
            for name, values in sums.items():
                sums_and_counts[name] = ([float(value) for value in values], float(counts[name]))
        parts = group.all_gather((stopped, sums_and_counts))
        if any(was_stopped for was_stopped, _ in parts):
            return None
        return means_of_ranks([part for _, part in parts])

    def _passes(self, split: Split) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of this rank, each with True if its metrics count.

        If each pass is a collective, all ranks need the same number of batches. A rank that has
        fewer computes the first batch of the split once more, which then does not count.
        """
        group = self.runtime.group
        count = 0
        for batch in split.batches(group.data_rank, group.data_size):
            count += 1
            yield batch, True
        for _ in range(count, self.runtime.strategy.passes(len(split))):
            yield next(iter(split.batches(0, group.data_size))), False

    def sample(self, model: nn.Module, step: int) -> str | None:
        """Generate a text with the model, if the task can. A collective.

        Return None on the ranks that do not generate the text.
        """
        if type(self.task).sample is Task.sample:
            return None
        return self.runtime.strategy.on_whole_model(
            model, self.task.build_model, lambda whole: self.task.sample(whole, step)
        )


def means_of_ranks(parts: list[dict[str, tuple[list[float], float]]]) -> dict[str, float]:
    """Return the mean of each metric over all ranks.

    The sums are added in the order of the batches.

    Args:
        parts: For each rank, the sums of each metric by name, and the number of its items. There is
            one sum, or with ddp.reduction=canonical one for each batch of the rank.
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
        # Rank i mod the number of ranks has computed batch i.
        for batches in zip_longest(*lists, fillvalue=0.0):
            # Do not use sum(), since Python 3.12 compensates for rounding errors in it.
            for value in batches:
                total += value
        if counts[name]:  # a metric without items has no mean
            means[name] = total / counts[name]
    return means
