"""Channels between a launcher and real forked workers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal

import pytest

from mingpt_ddp.config.job import Outcome, RunStatus
from mingpt_ddp.distributed.launch.channels import Channels, WorkerEnds
from mingpt_ddp.distributed.launch.workers import join_workers
from mingpt_ddp.errors import ConfigError, RunError, UserError


def evaluate(ends: WorkerEnds) -> None:
    """Run a worker that reports until a step is pruned, sends the reason and exits."""
    ends.open()
    for step in (1, 2, 3):
        reason = ends.ask_pruner(step, {"loss": 1.0 / step})
        if reason is not None:
            error = ConfigError(f"pruned at {step}: {reason}")
            ends.send(Outcome(RunStatus.FAILED, error=error, exit_code=3))
            os._exit(3)
    os._exit(0)


def wait_for_signal(ends: WorkerEnds) -> None:
    ends.open()
    ends.ask_pruner(1, {"loss": 1.0})
    while True:
        signal.pause()


def run(target, report, n: int = 1) -> tuple[tuple[int, str], UserError | None]:
    """Run the target as rank zero of `n` workers. Return how they ended, and their error."""

    async def serve() -> tuple[tuple[int, str], UserError | None]:
        context = multiprocessing.get_context("fork")
        with Channels(report, has_console=False) as channels:
            workers = []
            for index, worker in enumerate([target, *[idle] * (n - 1)]):
                ends = channels.for_worker(index)
                workers.append(context.Process(target=worker, args=(ends,), name=f"rank {index}"))
            for worker in workers:
                worker.start()
            ended = await channels.serve(join_workers(workers, 10, 0), workers)
            return ended, channels.error()

    return asyncio.run(serve())


def idle(ends: WorkerEnds) -> None:
    ends.open()
    assert ends.has_pruner, "every rank knows that there is a pruner"
    os._exit(0)


def test_evaluations_reach_the_pruner_and_the_error_arrives():
    seen = []

    def pruner_callback(step, metrics):
        seen.append((step, metrics))
        return "too high" if step == 2 else None

    ended, error = run(evaluate, pruner_callback, n=2)
    assert seen == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]
    assert ended == (3, "rank 0")
    assert isinstance(error, ConfigError)
    assert str(error) == "config error: pruned at 2: too high"


def test_an_error_in_the_pruner_callback_ends_the_workers():
    def pruner_callback(step, metrics):
        raise RunError("cannot write study.journal")

    with pytest.raises(RunError, match="cannot write"):
        run(wait_for_signal, pruner_callback)


def test_much_output_does_not_block_a_worker():
    def talk(ends: WorkerEnds) -> None:
        ends.open()
        for _ in range(2_000):
            os.write(1, b"x" * 1_000 + b"\n")
        os.kill(os.getpid(), signal.SIGKILL)

    ended, error = run(talk, lambda step, metrics: None)
    assert ended == (-signal.SIGKILL, "rank 0")
    assert error is None


def evaluate_much(ends: WorkerEnds) -> None:
    ends.open()
    ends.ask_pruner(1, {f"loss of a label {i:020d}": 1.0 for i in range(30_000)})
    os._exit(0)


def test_the_metrics_of_a_large_evaluation():
    counts = []
    ended, _ = run(evaluate_much, lambda step, metrics: counts.append(len(metrics)))
    assert (ended, counts) == ((0, ""), [30_000])
