"""Whether the locks of a directory that several nodes share hold between them."""

import contextlib
import tempfile
from pathlib import Path

import torch

from mingpt_ddp.distributed.group.process_group import ProcessGroup
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.lock import LOCK, lock_now


def check_shared_locks(group: ProcessGroup, directory: Path, key: str) -> None:
    """Refuse a directory that several nodes see, each with locks of its own. A collective.

    Rank zero holds a lock there for a moment, or in the directory above if there is none yet. A
    rank that finds the file must not get the lock.

    Args:
        key: of the directory, for the message.

    Raises:
        ConfigError: a rank gets the lock.
    """
    is_first = group.env.local_rank == 0 or group.is_rank_zero
    nodes = group.all_reduce(torch.tensor([float(is_first)]))
    if nodes == 1:
        return
    with contextlib.ExitStack() as held:

        def hold() -> str:
            with contextlib.suppress(OSError):  # who needs the directory reports that
                path = directory.absolute()
                existing = next(each for each in (path, *path.parents) if each.exists())
                temporary = tempfile.TemporaryDirectory(prefix=".partial-", dir=existing)
                file = Path(held.enter_context(temporary)) / LOCK
                lock_now(held.enter_context(file.open("w")))
                return str(file)
            return ""

        gets_lock = group.all_gather(_gets_lock(group.run_on_rank_zero(hold)))
    if True in gets_lock:
        raise ConfigError(
            f"{key}={directory} is shared by rank 0 and rank {gets_lock.index(True)}, but locks "
            "there do not hold between nodes; choose a directory on a disk of each node"
        )


def _gets_lock(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "r+") as file:  # no such file: it is not shared
        lock_now(file)
        return True
    return False
