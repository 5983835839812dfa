"""Inject random faults into runs and compare their results with undisturbed runs.

The runs stop early, load augmented samples, split a model over ranks, or lose their fork server.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import pytest
from chaos_store import deck
from holding import SETTINGS as SMALL
from holding import HeldRun
from launching import TINY, WITH_DIGITS, Job, UnforkedJob, python_main
from random_faults import ENDS, VICTIMS, FaultyRun, names, result, tensors
from runs import read_history

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]
# Each seed gives other moments and victims.
SEEDS = os.environ.get("FAULT_SEEDS", "1").split(",")
FAULTS = 10
TWO = "ddp.nproc_per_node=2"
SETTINGS = [
    *TINY,
    "trainer.device=cpu",
    "trainer.ema=0.9",
    "snapshot.keep_last=1",
    "ddp.max_restarts=2",
]
TEXT = [
    *SETTINGS,
    "trainer.max_steps=100",
    "trainer.eval_every=20",
    "model.n_embd=48",
    "data.block_size=64",
    "data.truncate=0.2",
    "trainer.batch_size=24",
]
# The run stops early, since no later evaluation is better than the first by a whole nat.
EARLY = [*TEXT, "model.dropout=0.1", "trainer.patience=3", "trainer.min_delta=1"]
DIGITS = [
    WITH_DIGITS,
    "experiment=digits_convnet",
    "data.num_workers=1",
    "data.shift=2",
    "trainer.max_epochs=null",
    "trainer.max_steps=100",
    "trainer.eval_every=20",
    "trainer.log_every=1",
    "snapshot.every_steps=7",
    *SETTINGS[-4:],
    "trainer.precision=fp32",
    TWO,
]
TENSOR_PARALLEL = [
    *TEXT,
    "trainer.max_steps=60",
    "model.n_head=4",
    "ddp.tensor_parallel=2",
    "ddp.nproc_per_node=4",
]
CASES = {
    "early stopping": ([*EARLY, TWO], VICTIMS, ENDS, Job),
    "augmented digits": (DIGITS, VICTIMS, ENDS, Job),
    "tensor parallel": (TENSOR_PARALLEL, VICTIMS, ENDS, Job),
    "fork server": (
        [*TEXT, TWO],
        {"server": 4, "parent": 1},
        {"KILL": 3, "STOP KILL": 1, "STOP TERM CONT": 1},
        UnforkedJob,
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_random_faults(case, seed):
    settings, victims, ends, start_job = CASES[case]
    generator = random.Random(f"{case} {seed}")
    # The path has to be short, since sockets in TMPDIR have long names.
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        undisturbed = FaultyRun(Path(root, "undisturbed"), [*python_main(), *settings], generator)
        assert undisturbed.start().wait() == 0, undisturbed.jobs[-1].text()
        last = result(undisturbed.run)["step"]
        assert result(undisturbed.run).get("stopped_early", False) == (case == "early stopping")

        faulty = FaultyRun(Path(root, "faulty"), undisturbed.command, generator, start_job)
        steps = sorted(generator.sample(range(1, last), FAULTS - 4))
        moments = [None, *steps[:3], None, *steps[3:], last, last]
        try:
            faulty.inject_faults(moments, deck(generator, victims), deck(generator, ends))
            faulty.finish()
        finally:
            print(*faulty.faults, sep="\n")
            faulty.kill()
        check(faulty, undisturbed)


# The last evaluation comes after step 80.
PAUSES = """
from mingpt_ddp.registry import on

@acts("evaluation")
def evaluating(evaluation):
    if evaluation.step == 80 and "<point>" == "evaluating":
        pause("evaluating")

@on("evaluate")
def evaluated(step, metrics):
    if step == 80 and "<point>" == "evaluated":
        pause("evaluated")

@on("end")
def ended(result):
    if "<point>" == "ended":
        pause("ended")

def reach(step, rank):
    pass
"""


def test_killed_wherever_a_run_stops_early():
    """Kill the run during its last evaluation, after it, and at the end of the run."""
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        command = [*python_main(), *SMALL, *EARLY]
        undisturbed, faulty = (FaultyRun(Path(root, name), command) for name in ("a", "b"))
        assert undisturbed.start().wait() == 0, undisturbed.jobs[-1].text()
        assert result(undisturbed.run)["step"] == 80
        assert result(undisturbed.run)["stopped_early"]
        for point in ("evaluating", "evaluated", "ended"):
            code, tmpdir = PAUSES.replace("<point>", point), str(faulty.tmpdir)
            held = HeldRun([*command, "run.name=run"], faulty.cwd, code, TMPDIR=tmpdir)
            held.wait_until(point)
            held.job.kill_tree()
            faulty.jobs.append(held.job)
        faulty.finish()
        check(faulty, undisturbed)


def check(faulty: FaultyRun, undisturbed: FaultyRun) -> None:
    """Compare the final state of a run with that of the undisturbed run."""
    run, reference = faulty.run, undisturbed.run
    found, expected = (
        {key: value for key, value in result(path).items() if key != "code"}
        for path in (run, reference)
    )
    assert found == expected
    histories = [read_history(path) for path in (run, reference)]
    for key in ("train_loss", "val_loss"):
        found, expected = (history.series(key) for history in histories)
        assert found == expected, key
    assert tensors(run) == tensors(reference)
    assert names(run) == names(reference)
    # A killed parent leaves the directory of its sockets behind.
    left = [
        name for name in names(faulty.tmpdir) if not name.startswith(("torchinductor_", "mingpt-"))
    ]
    assert left == []
    assert [job.text() for job in faulty.jobs if "Traceback" in job.text()] == []
