"""Call the hooks of a user's file that act on a run (config/hooks.py), on all ranks."""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from mingpt_ddp.config.registry import BUILDERS, attribute_errors_to_user_code
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError
from mingpt_ddp.models import eval_mode
from mingpt_ddp.tasks.evaluation import Evaluation
from mingpt_ddp.tasks.outputs import Mean, Outputs, as_means, check_outputs
from mingpt_ddp.tasks.task import Task
from mingpt_ddp.training.evaluator import means_of_ranks


class Actions:
    """The hooks of this run, called in the order in which the file registers them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def change_gradients(self, step: int, model: nn.Module) -> dict[str, Tensor]:
        """Let the hooks change the gradients in place; return this rank's shares of metrics."""
        if not _hooks("gradients"):
            return {}
        local = self.runtime.strategy.local
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        return self._shares("gradients", step, {n: local(gradient) for n, gradient in named})

    def change_weights(self, step: int, model: nn.Module) -> dict[str, Tensor]:
        """Let the hooks change the weights in place; return this rank's shares of metrics."""
        if not _hooks("update"):
            return {}
        local = self.runtime.strategy.local
        weights = {n: local(p.detach()) for n, p in model.named_parameters()}
        return self._shares("update", step, weights)

    @torch.no_grad()
    def _shares(self, event: str, step: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        metrics = self._call(event, step, tensors)
        outputs = Outputs({"loss": torch.zeros((), device=self.runtime.device)}, metrics)
        weight = self.runtime.strategy.metric_weight
        shares = outputs.shares(1, copies=1)
        return {name: share * weight for name, share in shares.items() if name != "loss"}

    @torch.no_grad()
    def evaluate(
        self, step: int, model: nn.Module, task: Task, taken: Container[str] = ()
    ) -> dict[str, float]:
        """Return the means of the hooks' metrics over all ranks. A collective.

        Args:
            taken: names of the task's metrics.

        Raises:
            CodeError: a hook raises an exception, or returns a metric that is none or is taken.
        """
        if not _hooks("evaluation"):
            return {}
        with eval_mode(model), self.runtime.autocast():
            metrics = self._call("evaluation", Evaluation(step, model, task, self.runtime))
        for name in metrics:
            if name in taken:
                raise CodeError(f"a hook of @acts('evaluation'): the task has a metric {name}, too")
        group = self.runtime.group
        with group.waiting():  # reading waits for a GPU
            own = {name: ([float(total)], float(n)) for name, (total, n) in metrics.items()}
        return means_of_ranks(group.all_gather(own))

    def _call(self, event: str, *values: Any) -> dict[str, Mean]:
        """Call the hooks of an event; return their metrics.

        Raises:
            CodeError: one raises an exception, or returns what is no metric.
        """
        group = self.runtime.group
        before = group.heartbeat
        found: dict[str, Mean] = {}
        for hook in _hooks(event):
            activity = f"in a hook of @acts({event!r}), {before['activity']}"
            group.set_activity(activity, self.runtime.strategy.waits_in_passes)
            with attribute_errors_to_user_code():
                returned = hook(*values)
            found |= as_means(returned or {}, f"a hook of @acts({event!r})")
        check_outputs(f"a hook of @acts({event!r})", Outputs({}, found))
        group.set_activity(before["activity"], before["waiting"])
        return found


def _hooks(event: str) -> list[Any]:
    return [hook for name, hook in BUILDERS["action"].items() if name.startswith(f"{event} ")]
