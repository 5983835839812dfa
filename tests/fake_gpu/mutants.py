"""Faults put into the code of the package, which the observers must find."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fake_gpu.cases import Case


@dataclass(frozen=True)
class Mutant:
    """A module whose code is changed, and what shows the change."""

    module: str
    old: str
    new: str
    case: Case
    phase: str
    found: str  # a wait that is not expected, a collective, or an error


MUTANTS = {
    "item in the step": Mutant(
        "training.train_step",
        "outputs_of(self.task.loss(self.parallel_model, batch), self.model)",
        "(outputs := outputs_of(self.task.loss(self.parallel_model, batch)), "
        "outputs.losses['loss'].item())[0]",
        Case(),
        "steps",
        "read in training/train_step.py forward",
    ),
    "synchronization in the step": Mutant(
        "training.trainer",
        "self.saves.wait_for_staging()",
        "torch.cuda.synchronize()",
        Case(),
        "steps",
        "wait for the GPU in training/trainer.py _train",
    ),
    "scalar of the host in the loss": Mutant(
        "training.train_step",
        'loss = outputs.losses["loss"] * ',
        'loss = outputs.losses["loss"] * torch.ones(()) * ',
        Case(),
        "steps",
        "mul of host and GPU in training/train_step.py passes",
    ),
    "vector of the host in the loss": Mutant(
        "training.train_step",
        'loss = outputs.losses["loss"] * ',
        'loss = (outputs.losses["loss"] * torch.ones(2)).sum() * ',
        Case(),
        "steps",
        "FakeTensorDeviceMismatchError",
    ),
    "indices of what is not zero": Mutant(
        "training.train_step",
        'loss = outputs.losses["loss"] * ',
        'loss = outputs.losses["loss"] * torch.nonzero(outputs.losses["loss"]).sum() * ',
        Case(),
        "steps",
        "DynamicOutputShapeException",
    ),
    "copy that blocks": Mutant(
        "data.dataloader",
        "host.to(self._device, non_blocking=True)",
        "host.to(self._device)",
        Case(),
        "evaluate",
        "blocking copy to the GPU in data/dataloader.py _send",
    ),
    "copy of memory that is not pinned": Mutant(
        "data.dataloader",
        "host = host.pin_memory()",
        "pass",
        Case(),
        "evaluate",
        "copy of pageable memory to the GPU in data/dataloader.py _send",
    ),
    "all-reduce of every micro-batch": Mutant(
        "training.train_step",
        "maybe_no_sync(self.parallel_model, last=micro.is_last)",
        "maybe_no_sync(self.parallel_model, last=True)",
        Case(strategy="ddp", ranks=8, accumulation=3),
        "steps",
        "all_reduce of 8",
    ),
}


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Run the changed code of a module in its namespace; put back what it defined before."""
    module = importlib.import_module(f"mingpt_ddp.{mutant.module}")
    source = inspect.getsource(module)
    assert source.count(mutant.old) == 1, f"{mutant.module} has not exactly one {mutant.old}"
    before = dict(vars(module))
    exec(
        compile(source.replace(mutant.old, mutant.new), str(module.__file__), "exec"), vars(module)
    )
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)
