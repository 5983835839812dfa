"""The state of hooks is discarded, rolled back and saved together with the steps of the run."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from multiprocess.ranks import configure
from tasks import text_task
from torch import Tensor

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.config import Config, from_mapping
from mingpt_ddp.config.job import Job
from mingpt_ddp.data.dataloader import BatchPlan, MicroBatch
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.errors import CodeError, ConfigError
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.hook_state import unpack_states
from mingpt_ddp.snapshots.read.load import load
from mingpt_ddp.training.dry_run.trial_run import DryRun
from mingpt_ddp.training.dry_run.user_code import check_parts, check_resumes_exactly
from mingpt_ddp.training.hooks.actions import Actions, refuse_unfit_hooks
from mingpt_ddp.training.run import train_run

SETTINGS = ["model=gpt_nano", "trainer.device=cpu", "trainer.max_epochs=null"]
LIMITS = ["trainer.max_steps=12", "snapshot.every_steps=4", "trainer.eval_every=4"]


class Noted:
    """A hook that records the steps. It sets the gradients of step 7 to NaN."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.total = torch.zeros(())

    def __call__(self, step: int, gradients: dict[str, Tensor]) -> None:
        self.steps.append(step)
        for gradient in gradients.values():
            self.total += gradient.sum()
            if step == 7:
                gradient.fill_(torch.nan)

    def state_dict(self) -> Any:
        return {"steps": " ".join(map(str, self.steps)), "total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.steps = [int(step) for step in state["steps"].split()]
        self.total = state["total"]


def config_of(*overrides: str) -> Config:
    return from_mapping(configure(*SETTINGS, *overrides))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_state_of_a_discarded_step_is_discarded(policy, tmp_path, monkeypatch):
    monkeypatch.setitem(BUILDERS["action"], "gradients mine.Noted", Noted)
    more = [f"run.root={tmp_path}", "run.name=run", f"trainer.on_nonfinite={policy}"]
    config = config_of(*LIMITS, "data.truncate=0.02", *more)
    runtime = Runtime(config, DistEnv())
    train_run(Job(config), runtime)
    runtime.close()
    found = load(str(tmp_path / "run"), ("hooks",))
    [state] = unpack_states(found.hooks, torch.device("cpu")).values()
    assert state["steps"] == "1 2 3 4 5 6 8 9 10 11 12"
    assert state["total"].isfinite()


CONFIG = config_of("trainer.max_steps=10", "model.n_layer=1")


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(CONFIG, DistEnv())


def change(actions: Actions, step: int, values: list[float]) -> None:
    model = torch.nn.Linear(len(values), 1, bias=False)
    model.weight.grad = torch.tensor([values])
    actions.change_gradients(step, model)


def test_discarding_a_step_needs_a_copy_of_the_state(runtime):
    """With trainer.on_nonfinite=stop there is no copy, because the run ends."""
    actions = Actions(CONFIG, runtime, [("gradients x", Noted)])
    change(actions, 1, [1.0])
    actions.discard()
    with pytest.raises(ConfigError, match=r"needs trainer\.on_nonfinite=skip"):
        change(actions, 2, [1.0])


def test_a_snapshot_of_other_hooks(runtime):
    """A hook whose state the snapshot lacks begins anew, also after a rollback."""
    saved = Actions(CONFIG, runtime, [("update x", Noted)])
    actions = Actions(CONFIG, runtime, [("gradients x", Noted)])
    change(actions, 1, [1.0])
    assert actions.load(saved.state()) == [
        "no state of the hook gradients Noted, which begins with its initial state",
        "state of the hook update Noted, which is not registered any more",
    ]
    assert actions.actions[0].hook.steps == []
    with pytest.raises(CodeError, match=r"Noted of .* another hook has this name"):
        Actions(CONFIG, runtime, [("update x", Noted), ("update y", Noted)])


def test_random_numbers_of_a_hook_depend_on_its_key(runtime):
    drawn: list[float] = []

    def noise(step: int, gradients: dict[str, Tensor]) -> None:
        drawn.append(float(torch.rand(())))

    actions = Actions(CONFIG, runtime, [("gradients x", noise)])
    for step in (1, 2, 1):
        change(actions, step, [1.0])
    assert drawn[0] == drawn[2] != drawn[1]


class Forgetful(Noted):
    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Load nothing."""

    def __call__(self, step: int, gradients: dict[str, Tensor]) -> None:
        self.steps.append(step)
        for gradient in gradients.values():
            gradient.mul_(len(self.steps))


class Lossy(Noted):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state | {"total": torch.zeros(())})


class LossyEvaluation(Lossy):
    """A hook that counts evaluations."""

    event = "evaluation"

    def __call__(self, evaluation: Any) -> None:
        self.total = self.total + 1


class Shared(Noted):
    steps: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.total = torch.zeros(())


class NoJSON(Noted):
    def state_dict(self) -> Any:
        return {"steps": {*self.steps}}


class Nested(Noted):
    def state_dict(self) -> Any:
        return {"steps": self.steps}


class Held(Noted):
    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}

    def __call__(self, step: int, tensors: dict[str, Tensor]) -> None:
        for name, last in self.last.items():
            tensors[name].add_(last)
        self.last = dict(tensors)

    def state_dict(self) -> Any:
        return self.last

    def load_state_dict(self, state: Any) -> None:
        self.last = state


class HeldWeights(Held):
    event = "update"


class ClonedLate(Held):
    def state_dict(self) -> Any:
        return {name: each.clone() for name, each in self.last.items()}


class ClonedWeights(ClonedLate):
    event = "update"


generator = torch.Generator().manual_seed(0)


def unkeyed(step: int, gradients: dict[str, Tensor]) -> None:
    for gradient in gradients.values():
        gradient.add_(torch.rand((), generator=generator))


def clashing(*values: Any) -> Any:
    return {"accuracy": 1.0}


class ClashingEvaluation(Noted):
    event = "evaluation"
    __call__ = clashing


def taken_name(step: int, gradients: dict[str, Tensor]) -> Any:
    return {"lr": 1.0}


def text(step: int, gradients: dict[str, Tensor]) -> Any:
    return {"largest": "x"}


called: list[int] = []


def remembering(step: int, weights: dict[str, Tensor]) -> Any:
    called.append(step)
    return {"calls": float(len(called))}


remembering.event = "update"  # type: ignore[attr-defined]


def greedy(step: int, gradients: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """A hook that allocates more memory than there is."""


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Noted, None),
        (remembering, "a repeated step gives a different result; keep the hook.s memory"),
        (greedy, r"must take \(step, gradients\): missing a required argument: 'weights'"),
        (Forgetful, "a repeated step gives a different result; keep the hook.s memory"),
        (unkeyed, "a repeated step gives a different result; keep the hook.s memory"),
        (LossyEvaluation, r"state_dict\(\) returns a different state"),
        (Lossy, r"after load_state_dict\(state\), state_dict\(\) returns a different state"),
        (Shared, "its initial state depends on an earlier run; set the state in __init__"),
        (NoJSON, r"@acts\('gradients'\): state_dict\(\)\['steps'\] cannot be saved: it holds set"),
        (
            Nested,
            r"\['steps'\] cannot be saved: it holds list; use a flat dictionary of numbers, text",
        ),
        (Held, r"its state holds a gradient itself; keep a clone\(\) of it"),
        (HeldWeights, r"its state holds a weight itself; keep a clone\(\) of it"),
        (ClonedLate, "a repeated step gives a different result; keep the hook.s memory"),
        (ClonedWeights, "a repeated step gives a different result; keep the hook.s memory"),
        (clashing, "the task or another hook has a metric accuracy, too; choose another name"),
        (
            ClashingEvaluation,
            "the task or another hook has a metric accuracy, too; choose another name",
        ),
        (taken_name, "a metric cannot have the name 'lr'"),
        (text, "the metric largest must be a scalar"),
    ],
)
def test_hooks_that_would_not_resume_exactly_are_refused(hook, message, runtime):
    event = getattr(hook, "event", "gradients")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(BUILDERS["action"], f"{event} mine.hook", hook)
        if message is None:
            preflight(runtime)
            return
        with pytest.raises(CodeError, match=message) as caught:
            preflight(runtime)
    where = rf"test_actions\.py:\d+: {hook.__qualname__} of @acts\('{event}'\)"
    assert re.search(where, str(caught.value))
    assert "\n" not in str(caught.value)


def preflight(runtime: Runtime) -> None:
    """Take the trial steps that rank zero takes before a run. The task has a metric `accuracy`."""
    task: Any = text_task(CONFIG)
    loss, metrics = task.loss, task.metrics
    task.loss = lambda model, batch: (loss(model, batch), {"accuracy": 0.5})
    task.metrics = lambda model, batch: metrics(model, batch) | {"accuracy": (1, 2)}
    tokens = torch.arange(2 * CONFIG.data.block_size).view(2, -1) % 8
    batch = [MicroBatch(index, (tokens, tokens.roll(-1, 1))) for index in range(2)]
    loader: Any = SimpleNamespace(steps_per_epoch=1, items_per_step=1, get_batch=lambda *_: batch)
    dry_run = DryRun(runtime, task, loader, BatchPlan(4, 2, 1))
    check_resumes_exactly(dry_run, check_parts(dry_run))


class Measuring(Noted):
    def micro_batch(self, gradients: dict[str, Tensor]) -> Any:
        return {}


@pytest.mark.parametrize(
    ("weights", "hook", "refused"),
    [
        ("rows", Noted, True),
        ("columns", Noted, True),
        ("rows", Measuring, False),
        ("columns", Measuring, True),
        ("whole", Noted, False),
        ("rows", lambda step, gradients: None, False),
    ],
)
def test_hooks_of_weights_need_all_weights_on_every_rank(weights, hook, refused, monkeypatch):
    monkeypatch.setitem(BUILDERS["action"], "gradients noted", hook)
    ddp = SimpleNamespace(sync_batchnorm=False)
    strategy: Any = SimpleNamespace(weights=weights, ddp=ddp)
    if refused:
        with pytest.raises(ConfigError, match="needs all weights on every rank; use a function"):
            refuse_unfit_hooks(strategy)
    else:
        refuse_unfit_hooks(strategy)
