"""Random faults on runs that end early, load augmented samples, divide a model, or lose the process
that forks them.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import pytest
from chaos_store import deck
from launching import TINY, WITH_DIGITS, Job, UnforkedJob, python_main
from pause_points import SETTINGS as PAUSES
from pause_points import PausedJob, patches
from random_faults import ENDS, VICTIMS, FaultyRun, names, result, tensors

from mingpt_ddp.metrics.jsonl import METRICS, read_history

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]
SEEDS = os.environ.get("FAULT_SEEDS", "1").split(",")  # several: other moments and victims
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
# No evaluation is lower by a whole nat than the first one.
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_random_faults(case, seed):
    settings, victims, ends, start_job = CASES[case]
    generator = random.Random(f"{case} {seed}")
    # short: sockets in TMPDIR have long names
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        undisturbed = FaultyRun(Path(root, "undisturbed"), [*python_main(), *settings], generator)
        assert undisturbed.start().wait() == 0, undisturbed.jobs[-1].text()
        last = result(undisturbed.run)["step"]
        assert result(undisturbed.run).get("stopped_early", False) == (case == "early stopping")

        faulty = FaultyRun(Path(root, "faulty"), undisturbed.command, generator, start_job)
        steps = sorted(generator.sample(range(1, last), FAULTS - 4))
        moments = [None, *steps[:3], None, *steps[3:], last, last]
        try:
            faulty.suffer(moments, deck(generator, victims), deck(generator, ends))
            faulty.finish()
        finally:
            print(*faulty.faults, sep="\n")
            faulty.kill()
        check(faulty, undisturbed)


PAUSE = """
def patch(module):
    owner = module.<owner>
    original = owner.<method>
    def paused(self, *arguments, **named):
        if <condition>:
            pause("<method>")
        return original(self, *arguments, **named)
    owner.<method> = paused
PATCHES["mingpt_ddp.<module>"] = patch
"""
AT_END = "self.state.step == 80"
POINTS = [
    ("training.after_evaluation", "Validation", "_metrics_of", AT_END),
    ("training.after_evaluation", "Validation", "stop_early", f"{AT_END} == self.state.val_step"),
    ("metrics.processor", "MetricsProcessor", "complete", "True"),  # the last snapshot is committed
    ("storage.run_directory", "RunDirectory", "write_result", "True"),
]


def test_killed_wherever_a_run_stops_early():
    """Before and after its last evaluation, after its last snapshot, and before its result is
    written.
    """
    settings = [*PAUSES, *EARLY]
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        undisturbed, faulty = (
            FaultyRun(Path(root, name), [*python_main(), *settings]) for name in ("a", "b")
        )
        assert undisturbed.start().wait() == 0, undisturbed.jobs[-1].text()
        assert (result(undisturbed.run)["step"], result(undisturbed.run)["stopped_early"]) == (
            80,
            True,
        )
        for module, owner, method, condition in POINTS:
            text = patches(PAUSE, module=module, owner=owner, method=method, condition=condition)
            paused = PausedJob(
                python_main(),
                faulty.cwd,
                text,
                *EARLY,
                "run.name=run",
                TMPDIR=str(faulty.tmpdir),
            )
            paused.wait_until(method)
            paused.job.kill_tree()
            faulty.jobs.append(paused.job)
        faulty.finish()
        check(faulty, undisturbed)


def check(faulty: FaultyRun, undisturbed: FaultyRun) -> None:
    """Compare the end of a run with that of the undisturbed one."""
    run, reference = faulty.run, undisturbed.run
    assert result(run) == result(reference)
    histories = [read_history(path / METRICS) for path in (run, reference)]
    for key in ("train_loss", "val_loss"):
        found, expected = (history.series(key) for history in histories)
        assert found == expected, key
    assert tensors(run) == tensors(reference)
    assert names(run) == names(reference)
    # a killed parent leaves the directory of its sockets
    left = [
        name for name in names(faulty.tmpdir) if not name.startswith(("torchinductor_", "mingpt-"))
    ]
    assert left == []
    assert [job.text() for job in faulty.jobs if "Traceback" in job.text()] == []
