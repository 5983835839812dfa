"""Measure the cost of a snapshot of a 124M-parameter model.

The cost is the stall of training, the time until the snapshot is durable, and the time to restore
it. The model has the shapes of GPT-2 small (vocabulary 50,257, context 1,024) and trains with AdamW
on the CPU. Its state of 1.5 GB is saved to a local disk. Two ways of saving alternate in one
process:

A. Training waits for `torch.save` of the model's and the optimizer's state_dict, as nanoGPT does.
B. The package's SnapshotManager: training waits in `save`, runs the next forward and backward pass,
   and waits in `wait_for_staging` before it may change the weights. The stall is the sum of these
   two waits. Forward and backward passes are timed with and without a concurrent copy, because on a
   CPU both compete for memory bandwidth.

Then the time from the start of a save to its commit is measured (staging, SHA-256, write, fsync,
manifest), and the time to read, verify and restore the snapshot. This is done on one rank, and with
the tensors sharded over several ranks on the same disk.

    python benchmarks/snapshots.py
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from common import cell, compare, compose_config, log, parser, report, spread

# The shape of the forward and backward pass that hides the copy.
MICRO_BATCH, CONTEXT = 4, 256
VOCABULARY = 50_257
# The time of a restart to notice the failure and start the processes. This is a round figure, which
# is not measured here.
START_S = 25


def build(root: str, *overrides: str) -> tuple[Any, Any, Any, Any]:
    """Build the SnapshotManager, the model, the optimizer and the runtime of this rank.

    The optimizer takes one step, so that its moments exist.
    """
    import torch

    from mingpt_ddp.distributed.runtime import Runtime
    from mingpt_ddp.models import build_model
    from mingpt_ddp.optim import build_optimizer
    from mingpt_ddp.process.env import read_env
    from mingpt_ddp.snapshots.manager import SnapshotManager
    from mingpt_ddp.snapshots.write.store import SnapshotStore

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
    words = [
        "model=gpt2",
        "data.block_size=1024",
        "trainer.device=cpu",
        "snapshot.keep_last=1",
        "trainer.precision=fp32",
    ]
    config = compose_config(*words, *overrides)
    runtime = Runtime(config, read_env())
    model = build_model(config.model, VOCABULARY, config.data.block_size).to(runtime.device)
    optimizer = build_optimizer(model, config.optimizer)
    tokens = torch.randint(VOCABULARY, (1, 9), device=runtime.device)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    return (
        SnapshotManager(config, runtime, SnapshotStore(root), Path(root)),
        model,
        optimizer,
        runtime,
    )


def save(manager: Any, step: int, model: Any, optimizer: Any) -> None:
    from mingpt_ddp.snapshots.manager import RunState
    from mingpt_ddp.snapshots.state_dict import model_state, optimizer_state

    tensors = {"model": model_state(model), "optimizer": optimizer_state(model, optimizer)}
    manager.save(RunState(step, {}, tensors, best_step=None))


def compare_stalls(root: str, repetitions: int, *overrides: str) -> dict[str, list[float]]:
    """Measure stalls and durations in seconds, in each repetition.

    Args:
        root: Directory for the snapshots.
        repetitions: Number of repetitions.
        overrides: Overrides of the configuration, for example for a GPU or another size.
    """
    import torch

    saver, model, optimizer, runtime = build(f"{root}/ours", *overrides)
    tokens = torch.randint(
        VOCABULARY, (MICRO_BATCH, min(CONTEXT, model.block_size) + 1), device=runtime.device
    )

    def forward_backward() -> None:
        with runtime.autocast():
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.zero_grad(set_to_none=False)
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()

    figures: dict[str, list[float]] = {
        name: [] for name in ("first", "sync", "stall", "alone", "beside", "durable")
    }
    forward_backward()
    clock = Clock()
    save(saver, 1, model, optimizer)  # the first save of a run allocates the staging buffer
    saver.wait_for_staging()
    figures["first"].append(clock.lap())
    saver.wait()
    for step in range(2, repetitions + 2):
        clock = Clock()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{root}/theirs.pt"
        )
        figures["sync"].append(clock.lap())
        forward_backward()
        figures["alone"].append(clock.lap())
        save(saver, step, model, optimizer)
        stall = clock.lap()
        forward_backward()
        figures["beside"].append(clock.lap())
        saver.wait_for_staging()
        figures["stall"].append(stall + clock.lap())
        saver.wait()
        figures["durable"].append(saver.durable_s)
        log(
            f"repetition {step - 1}: "
            + ", ".join(f"{name} {values[-1]:.3f} s" for name, values in figures.items())
        )
    return figures


class Clock:
    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds


def rank_main(environment: dict[str, str], root: str, repetitions: int, results: Any) -> None:
    """Save and restore on one rank of several.

    Rank zero puts the seconds of each repetition into `results`: until the snapshot is durable, and
    to restore it.
    """
    from mingpt_ddp.snapshots.state_dict import load_model_state, load_optimizer_state

    os.environ.update(environment)
    saver, model, optimizer, runtime = build(root)
    save(saver, 1, model, optimizer)
    saver.wait()
    times = []
    for step in range(2, repetitions + 2):
        runtime.group.barrier()
        clock = Clock()
        save(saver, step, model, optimizer)
        saver.wait()
        durable = clock.lap()
        found = saver.load_latest(lambda step, state: None)
        load_model_state(model, found.model)
        load_optimizer_state(model, optimizer, found.optimizer)
        times.append((durable, clock.lap()))
    if runtime.group.is_rank_zero:
        results.put(times)
    runtime.close()


def on_ranks(root: str, ranks: int, repetitions: int) -> list[tuple[float, float]]:
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(probe.getsockname()[1]),
        }
    results = spawn.Queue()
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    workers = [
        spawn.Process(target=rank_main, args=(environment, root, repetitions, results))
        for environment in environments
    ]
    for worker in workers:
        worker.start()
    times: list[tuple[float, float]] = results.get(timeout=600)
    for worker in workers:
        worker.join()
    return times


def main() -> None:
    command = parser(__doc__, "snapshots")
    command.add_argument("--repetitions", type=int, default=5)
    command.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = command.parse_args()
    with tempfile.TemporaryDirectory() as root:
        figures = compare_stalls(root, arguments.repetitions)
    divided = {}
    for ranks in arguments.ranks:
        log(f"{ranks} ranks")
        with tempfile.TemporaryDirectory() as root:
            divided[ranks] = on_ranks(root, ranks, arguments.repetitions)
    write(arguments.out, figures, divided)


def readme(results: dict[str, Any]) -> list[tuple[str, str]]:
    what = (
        "stall of training for a snapshot of a 124M-parameter model (1.5 GB; the copy "
        "hides behind the next forward"
    )
    stall = (
        f"{1e3 * results['stall_s']['median']:.0f} ms, {cell(results['stall_shorter'])} "
        "times shorter"
    )
    return [
        (f"{what} and backward pass), against `torch.save`", stall),
        (
            "until that snapshot is durable on the local disk, beside training",
            f"{cell(results['durable_s'], '.1f')} s",
        ),
    ]


def write(
    out: Path, figures: dict[str, list[float]], divided: dict[int, list[tuple[float, float]]]
) -> None:
    shorter = compare(figures["sync"], figures["stall"])
    results: dict[str, Any] = {f"{name}_s": spread(values) for name, values in figures.items()}
    results["sync_save_s"] = results.pop("sync_s")
    results["stall_shorter"] = shorter
    results["ranks"] = {
        n: {"durable_s": spread([d for d, _ in times]), "restore_s": spread([r for _, r in times])}
        for n, times in divided.items()
    }
    results["restart_s"] = results["ranks"][min(divided)]["restore_s"]["median"] + START_S
    rows = [
        ["torch.save while training waits", cell(results["sync_save_s"], ".2f"), "s"],
        ["stall of a snapshot in the background", cell(results["stall_s"], ".4f"), "s"],
        [
            "the first copy, with its allocation, nothing concurrent",
            cell(results["first_s"], ".2f"),
            "s",
        ],
        ["times shorter", cell(shorter, ",.0f"), ""],
        ["forward and backward pass alone", cell(results["alone_s"], ".2f"), "s"],
        ["the same during staging and writing", cell(results["beside_s"], ".2f"), "s"],
        ["until the snapshot is durable, while training", cell(results["durable_s"], ".2f"), "s"],
    ]
    for n, times in results["ranks"].items():
        rows.append(
            [f"until it is durable, {n} ranks, no training", cell(times["durable_s"], ".2f"), "s"]
        )
        rows.append(
            [f"found, verified and restored, {n} ranks", cell(times["restore_s"], ".2f"), "s"]
        )
    report(out, results, ["what", "median (range)", "unit"], rows, readme(results))


if __name__ == "__main__":
    main()
