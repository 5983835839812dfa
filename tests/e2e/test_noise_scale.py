"""Check examples/noise_scale.py: its numbers, the bits of its run, and a run that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_files import EXAMPLES, command_of, run_in_shell
from launching import TINY, call, python_main
from multiprocess.ranks import configure
from runs import fail, read_history, read_result, tensor_files, write_files
from torch.nn import functional as F

from mingpt_ddp.config.config import from_mapping
from mingpt_ddp.data.dataloader import plan_batches
from mingpt_ddp.distributed.runtime import Runtime
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.snapshots.read.load import load
from mingpt_ddp.tasks import build_task
from mingpt_ddp.training.trainable import build_trainable

EXAMPLE = EXAMPLES / "noise_scale.py"
STEPS, KILLED_AT = 8, 6
MICRO_BATCHES = 6  # more than there are ranks, of which there are at most three
SETTINGS = [
    *TINY,
    "trainer.device=cpu",
    "trainer.eval_every=null",
    "trainer.sample_every=null",
    f"trainer.max_steps={STEPS}",
    "trainer.micro_batch_size=2",
    "snapshot.every_steps=1",
    f"snapshot.keep_last={STEPS}",
    "snapshot.background=false",
]
WITH_HOOK = ["--config-dir=mine", "+task.code=hooks.py"]
# Kills one rank in a pass of a step, but only once.
KILL = f"""

import os, pathlib, signal

@acts("update")
def note(step, weights):
    note.step = step

note.step = 0

class Killed(NoiseScale):
    def micro_batch(self, gradients):
        marker = pathlib.Path("killed")
        is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        if note.step == {KILLED_AT} - 1 and is_last and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().micro_batch(gradients)
"""


def train(cwd: Path, hooks: str | None, *words: str, code: int = 0) -> Path:
    """Train a run with the hooks in a file, or without hooks. Return the run directory."""
    write_files(cwd, {"mine/hooks.py": hooks or "", "mine/x.yaml": ""})
    done = call([*python_main(), *SETTINGS, *WITH_HOOK, *words, "run.name=run"], cwd)
    assert done.returncode == code, done.stdout
    return cwd / "outputs" / "run"


def with_kill() -> str:
    """Return the example's source with another class registered in place of its own."""
    source, decorator = EXAMPLE.read_text(), '@acts("gradients")\n'
    assert source.count(decorator) == 1
    return source.replace(decorator, "") + KILL.replace("class Killed", f"{decorator}class Killed")


def trained_bytes(run: Path) -> dict[str, bytes]:
    """Return the weight and optimizer files of the newest snapshot by name."""
    files = tensor_files(run)
    return {name: content for name, content in files.items() if not name.startswith("hooks")}


def measured(run: Path) -> dict[int, dict[str, float]]:
    """Return the hook's metrics by step."""
    prefix = "train_noise_scale"
    return {
        step: {key: value for key, value in row.items() if key.startswith(prefix)}
        for step, row in read_history(run).by_step().items()
        if row.get(prefix) is not None
    }


def by_hand(run: Path, cwd: Path, prefix: str) -> dict[int, float]:
    """Compute the noise scale of each step from the gradients at the weights of its snapshots.

    Args:
        run: The run directory.
        cwd: The working directory of the run.
        prefix: Only parameters whose names begin with this prefix count.
    """
    keys = {word.partition("=")[0]: word for word in SETTINGS}
    words = [*keys.values(), f"run.root={cwd}", f"data.cache_dir={cwd / 'cache'}"]
    config = from_mapping(configure(*words))
    runtime = Runtime(config, DistEnv())
    task = build_task(config, runtime.group)
    loader = task.train_loader(runtime.device)
    plan = plan_batches(config, 1)
    model = build_trainable(runtime, task).model
    chosen = [each for name, each in model.named_parameters() if name.startswith(prefix)]
    found = {}
    trace = square = None
    for step in range(1, STEPS + 1):
        if step > 1:
            model.load_state_dict(load(str(run), ("model",), step - 1).model)
        gradients = []
        for micro in loader.get_batch(step, plan, 0):
            tokens, targets = micro.batch
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            parts = torch.autograd.grad(loss, chosen)
            gradients.append(torch.cat([part.flatten() for part in parts]).double())
        each = torch.stack(gradients)
        assert len(each) == MICRO_BATCHES
        # The sample covariance is unbiased. So is the squared mean without its own variance.
        now = each.var(dim=0).sum()
        signal = each.mean(dim=0).square().sum() - now / MICRO_BATCHES
        trace = now if trace is None else 0.95 * trace + 0.05 * now
        square = signal if square is None else 0.95 * square + 0.05 * signal
        found[step] = float(trace / square)
    loader.close()
    runtime.close()
    return found


def test_the_command_of_the_example(tmp_path):
    done = run_in_shell(command_of(EXAMPLE), tmp_path)
    assert done.returncode == 0, done.stdout
    run = tmp_path / "outputs" / "noise"
    assert read_result(run)["status"] == "complete"
    names = measured(run)[20].keys()
    assert {"train_noise_scale", "train_noise_scale_blocks.0", "train_noise_scale_head"} <= names


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, []),
        (2, []),
        (3, []),
        (2, ["ddp.strategy=zero1"]),
        (2, ["ddp.reduction=canonical"]),
        (2, ["ddp.strategy=fsdp"]),
        (2, ["trainer.activation_checkpointing=true"]),
    ],
    ids=["1", "2", "3", "zero1", "canonical", "fsdp", "activation checkpointing"],
)
def test_the_noise_scale_matches_the_gradients_even_after_a_kill(ranks, words, tmp_path):
    """The weights have the same bits as those of a run without the hook."""
    more = [*words, f"ddp.nproc_per_node={ranks}"] if ranks > 1 else words
    without = train(tmp_path / "without", None, *more)
    run = train(tmp_path / "with", EXAMPLE.read_text(), *more)
    assert trained_bytes(run) == trained_bytes(without)
    found = measured(run)
    for metric, prefix in {"": "", "_blocks.1": "blocks.1."}.items():
        expected = by_hand(run, tmp_path, prefix)
        values = {step: row[f"train_noise_scale{metric}"] for step, row in found.items()}
        assert values == pytest.approx(expected, rel=1e-3)
    killed = tmp_path / "killed"
    if ranks == 1:
        train(killed, with_kill(), *more, code=-9)
        assert max(measured(killed / "outputs" / "run")) < KILLED_AT
    again = train(killed, with_kill(), *more)
    assert (killed / "killed").exists() and read_history(again).starts == 2
    assert measured(again) == found
    assert trained_bytes(again) == trained_bytes(run)


def test_the_numbers_are_the_same_on_any_number_of_ranks_with_canonical_reduction(tmp_path):
    found = []
    for ranks in (1, 3):
        words = ["ddp.reduction=canonical", f"ddp.nproc_per_node={ranks}", "trainer.max_steps=4"]
        found.append(measured(train(tmp_path / str(ranks), EXAMPLE.read_text(), *words)))
    assert len(found[0]) == 4 and found[0] == found[1]


MEASURES = """
from mingpt_ddp.registry import acts

@acts("gradients")
class Measured:
    def __init__(self):
        self.calls = 0

    def micro_batch(self, gradients):
        return {"one": 1.0}

    def __call__(self, step, gradients, micro_batches):
        pass

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
"""


@pytest.mark.parametrize(
    ("hooks", "words", "message"),
    [
        (None, ["ddp.tensor_parallel=2", "model.n_head=4"], "ddp.tensor_parallel=2 needs built-in"),
        (
            None,
            ["ddp.sync_batchnorm=true", "trainer.micro_batch_size=null"],
            "measures each micro-batch, but ddp.sync_batchnorm=true makes one batch of them",
        ),
        (
            MEASURES.replace('return {"one": 1.0}', "self.calls += 1; return {}"),
            [],
            "micro_batch changes the hook's state, which must be the same on all ranks; return",
        ),
        (
            MEASURES.replace('{"one": 1.0}', "[1.0]"),
            [],
            "micro_batch must return a dictionary of tensors or numbers",
        ),
        (
            "import itertools\ncount = itertools.count()\n"
            + MEASURES.replace('"one": 1.0', '"one": [1.0] * next(count)'),
            [],
            "micro_batch must return the same names and shapes for every micro-batch",
        ),
        (MEASURES.replace(", micro_batches", ""), [], "must take (step, gradients, micro_batches)"),
        (MEASURES.replace("self, gradients)", "self)"), [], "micro_batch must take (gradients)"),
        (MEASURES.replace('"gradients"', '"update"'), [], "only @acts("),
    ],
)
def test_a_mistake_is_reported_in_one_line_and_nothing_is_written(hooks, words, message, tmp_path):
    cwd = write_files(tmp_path, {"mine/hooks.py": hooks or EXAMPLE.read_text()})
    ranks = ["ddp.nproc_per_node=2", "ddp.max_restarts=0"] if words else []
    text = fail([*python_main(), *SETTINGS, *WITH_HOOK, *ranks, *words], cwd)
    line = [line for line in text.splitlines() if "error: " in line][-1]
    assert message in line
    assert not (cwd / "outputs").exists()
