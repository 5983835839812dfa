"""Train a small GPT in a loop of your own, with the parts of main.py but without Hydra.

    python examples/train.py
    torchrun --nproc_per_node=2 examples/train.py

Copy this file and change it. If you run the same command again, it resumes from the newest
snapshot. Its weights then equal, bit for bit, the weights of a run that never stopped.
"""

from typing import Any

from mingpt_ddp.loop import (
    Config,
    Evaluator,
    RunLog,
    Runtime,
    TrainState,
    TrainStep,
    build_task,
    build_trainable,
    from_mapping,
    plan_batches,
    process_exit,
    read_env,
)

# All other keys have their defaults, which docs/configuration.md lists.
SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"name": "example", "seed": 1337},
    "model": {"name": "tiny", "architecture": "gpt", "n_layer": 3, "n_head": 3, "n_embd": 48},
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "data": {"name": "python_docs", "path": "builtin:python_docs", "block_size": 64},
    "trainer": {
        "max_epochs": None,
        "max_steps": 500,
        "batch_size": 16,
        "micro_batch_size": 8,
    },
    "ddp": {},
    "snapshot": {},
    "tracker": {"tensorboard": True},
}
# Intervals in steps.
LOG_EVERY = 10
EVAL_EVERY = 100
SAVE_EVERY = 100


def train(config: Config) -> TrainState:
    """Train to trainer.max_steps, and return the step and the losses that the run has reached."""
    runtime = Runtime(config, read_env())  # device, precision, process group, strategy
    task = build_task(config, runtime.group)  # the data, the loss and the metrics
    loader = task.train_loader(runtime.device)
    plan = plan_batches(config, runtime.group.data_size)
    trained = build_trainable(runtime, task)  # the model, its optimizer and its averaged weights
    step = TrainStep(runtime, task, loader, plan, trained)
    evaluator = Evaluator(task, runtime)
    with RunLog(step) as run:  # locks the run directory and loads the newest snapshot
        for n in range(run.state.step + 1, step.steps + 1):
            losses = step.passes(n)  # forward, backward; the gradients are averaged over the ranks
            run.wait_for_staging()  # the last snapshot may still be copying the weights
            norm = step.clip()
            lr = step.update(n)
            run.record_step(n, losses, norm, lr)

            if n % LOG_EVERY == 0:
                run.log_steps()
            if n % EVAL_EVERY == 0 or n == step.steps:
                with run.evaluating():
                    run.log_evaluation(evaluator.run(trained.model, "val"))
                    run.log_sample(evaluator.sample(trained.model, n))
            if n % SAVE_EVERY == 0:
                run.save()  # this snapshot is written while training goes on
    loader.close()
    runtime.close()
    return run.state


if __name__ == "__main__":
    with process_exit():  # an error is shown as one line, without a traceback
        train(from_mapping(SETTINGS))
