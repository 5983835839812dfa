"""Tasks, selected by `task.name`. A task has the data, builds the model, and computes the loss.

Nothing else in the package knows what a run learns. docs/your-own-model.md shows how to write a
task.
"""

from typing import Any

from mingpt_ddp.config.builders import BUILDERS
from mingpt_ddp.config.config import Config
from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import CodeError
from mingpt_ddp.tasks.language_model import LanguageModel
from mingpt_ddp.tasks.task import Mean, Task

__all__ = ["LanguageModel", "Mean", "Task", "build_task"]

BUILDERS["task"]["language_model"] = LanguageModel


def build_task(
    config: Config,
    group: ProcessGroup,
    initial_state: dict[str, Any] | None = None,
    recorded_state: dict[str, Any] | None = None,
) -> Task:
    """Build the task that `config` describes. A collective.

    Args:
        initial_state: The untrusted state.json of another run, whose weights the model starts from
            (run.init_from). The task is adapted to these weights by `Task.extend`.
        recorded_state: The untrusted state.json of the snapshot to resume or to evaluate. A
            language model takes its tokenizer from there, unless data.tokenizer is char.

    Raises:
        CodeError: The user has registered something other than a Task.
    """
    kind = BUILDERS["task"][config.task.name]
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise CodeError(f"the task {config.task.name} must be a subclass of mingpt_ddp.tasks.Task")
    task = kind.build(config, group, initial_state or recorded_state or {})
    if initial_state:
        with task.discarded_if_refused():
            task.extend(initial_state)
    return task
