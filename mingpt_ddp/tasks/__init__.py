"""Tasks, selected by `task.name`: which data, which model, batch -> loss and metrics.

Nothing else in the package knows what a run learns. docs/your-own-model.md shows how to write one.
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
    state: dict[str, Any] | None = None,
    kept: dict[str, Any] | None = None,
) -> Task:
    """Build the task that `config` describes. A collective.

    Args:
        state: of a snapshot whose weights the model will get; see `Task.extend`.
        kept: state of the snapshot to resume or evaluate, untrusted; a tokenizer that was trained
            or given is kept.

    Raises:
        CodeError: the user has registered something other than a Task.
    """
    kind = BUILDERS["task"][config.task.name]
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise CodeError(f"the task {config.task.name} must be a subclass of mingpt_ddp.tasks.Task")
    task = kind.build(config, group, state or kept or {})
    if state:
        with task.discarded_if_refused():
            task.extend(state)
    return task
