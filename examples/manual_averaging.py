"""Average the gradients by hand: examples/train.py with a few changed lines.

    torchrun --standalone --nproc_per_node=2 examples/manual_averaging.py

DDP averages gradients during the backward pass. Here `no_sync` turns that off, and an all-reduce
for each parameter follows the backward pass. The weights are those of DDP, except for rounding.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mingpt_ddp.loop import (
    Config,
    Evaluator,
    Meter,
    RunState,
    Runtime,
    SnapshotManager,
    SnapshotStore,
    TrainState,
    TrainStep,
    build_task,
    build_trainable,
    from_mapping,
    plan_batches,
    process_exit,
    read_env,
    restore_newest,
    snapshot_state,
)

# All other keys have the defaults of docs/configuration.md.
SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"name": "manual_averaging", "seed": 1337},
    "model": {"name": "tiny", "architecture": "gpt", "n_layer": 3, "n_head": 3, "n_embd": 48},
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "data": {"name": "python_docs", "path": "builtin:python_docs", "block_size": 64},
    "trainer": {
        "max_epochs": None,
        "max_steps": 100,
        "batch_size": 16,
        "micro_batch_size": 8,
    },
    "ddp": {},
    "snapshot": {},
}
LOG_EVERY = 10  # steps
EVAL_EVERY = 100
SAVE_EVERY = 100


def train(config: Config) -> TrainState:
    """Train to trainer.max_steps; return what was reached."""
    runtime = Runtime(config, read_env())  # device, precision, process group, strategy
    task = build_task(config, runtime.group)  # the data, and what a model learns from it
    loader = task.train_loader(runtime.device)
    plan = plan_batches(config, runtime.group.data_size)
    trained = build_trainable(runtime, task)  # model, optimizer, average of the weights
    step = TrainStep(runtime, task, loader, plan, trained)
    evaluator = Evaluator(task, runtime)
    meter = Meter(runtime, loader.items_per_step, task.unit)

    directory = Path(config.run.root, str(config.run.name))
    store = SnapshotStore(str(directory / "snapshots"))
    snapshots = SnapshotManager(config, runtime, store, directory)
    state = restore_newest(snapshots, task, trained) or TrainState()

    def log(text: str) -> None:
        runtime.group.env.call_on_rank_zero(lambda: print(text, flush=True))

    begin = f"from step {state.step} of {step.steps}"
    log(f"{task.describe_data()}; {trained.parameters:,} parameters; {begin}")
    step.warm_up()
    ddp = step.parallel_model
    assert isinstance(ddp, DistributedDataParallel), "start several ranks"
    for n in range(state.step + 1, step.steps + 1):
        with ddp.no_sync():  # DDP averages nothing
            losses = step.passes(n)  # forward, backward
        gradients = [p.grad for p in trained.model.parameters() if p.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        snapshots.wait_for_staging()  # the last snapshot may still be copying the weights
        norm = step.clip()
        step.update(n)
        meter.record(losses, norm, step.phase.fetch_s)
        state.step = n

        if n % LOG_EVERY == 0:
            metrics = meter.read()
            log(f"step {n}: loss {metrics['train/loss']:.4f}, {metrics['speed/step_ms']:.1f} ms")
        if n % EVAL_EVERY == 0:
            with meter.paused(), trained.average.applied():
                val = evaluator.run(trained.model, "val")
            state.val_loss = val["loss"]
            log(f"step {n}: {task.describe(val)}")
        if n % SAVE_EVERY == 0 or n == step.steps:
            snapshots.wait()  # for the previous save; this one is written while training goes on
            content = snapshot_state(state, runtime, task, plan, step.steps)
            snapshots.save(RunState(n, content, trained.tensors(), best_step=None))
    snapshots.wait()
    loader.close()
    runtime.close()
    return state


if __name__ == "__main__":
    with process_exit():  # an error is one line
        train(from_mapping(SETTINGS))
