"""Whether what a run records can be read again: checked before it trains."""

from mingpt_ddp.config.validation import check
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.snapshots.format import MAX_STATE_BYTES, STATE, encode_json
from mingpt_ddp.storage.records import dump_yaml, load_yaml
from mingpt_ddp.tasks.task import Task

PROGRESS = 1 << 20  # bytes of a state.json that are left for what training adds


def check_records(task: Task, hydra_files: dict[str, str], *, is_new: bool = True) -> None:
    """Refuse a configuration, or a state of the data, that readers would refuse.

    Args:
        hydra_files: content of `.hydra/`, by file name.
        is_new: the run has no snapshot, whose state could be read.

    Raises:
        ConfigError: says what is too large.
    """
    config = task.config.to_dict()
    try:
        dump_yaml(config)
        for content in hydra_files.values():
            load_yaml(content)
    except ValueError as error:
        raise ConfigError(
            f"the recorded configuration could not be read again: {error}; shorten it, as by a "
            "directory instead of its files"
        ) from error
    size = len(encode_json({**task.state(), "config": config})) if is_new else 0
    check(
        size <= MAX_STATE_BYTES - PROGRESS,
        f"no snapshot could be read again: {STATE} would begin with {size:,} bytes, of which "
        f"at most {MAX_STATE_BYTES - PROGRESS:,} leave room for training; it holds the "
        "configuration and what the data needs to be read; make one of them smaller",
    )
