"""Look after snapshots by hand.

    python -m mingpt_ddp.snapshots list   URL
    python -m mingpt_ddp.snapshots verify URL
    python -m mingpt_ddp.snapshots prune  URL keep_last=2 keep_best=true
    python -m mingpt_ddp.snapshots export URL to=DIRECTORY step=1000

URL        a run directory, a directory of snapshots or one snapshot; a path or any fsspec URL
list       what is there, by manifests and sizes: quick
verify     read every byte; exit code 1 where one is not as it was written
prune      delete all but the last keep_last whole ones and, with keep_best, the one with the lowest validation loss
export     the weights as one model.safetensors beside a config.json in a new local directory; the newest, or step
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mingpt_ddp.cli.sample import values_of
from mingpt_ddp.config.validation import build, did_you_mean
from mingpt_ddp.distributed import logs
from mingpt_ddp.distributed.env import DistEnv
from mingpt_ddp.distributed.exit import cli_errors
from mingpt_ddp.errors import ConfigError
from mingpt_ddp.storage.storage import check_url

COMMANDS = ("list", "verify", "prune", "export")


def main() -> None:
    """The entry point of `python -m mingpt_ddp.snapshots`."""
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return
    logs.to_console(DistEnv())
    with cli_errors():
        sys.exit(_command(words))


def _command(words: list[str]) -> int:
    """Do what the words ask for; the exit code.

    Raises:
        UserError: it cannot be done.
    """
    command, arguments = words[0], words[1:]
    if command not in COMMANDS:
        meant = did_you_mean(command, COMMANDS)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"{command} is not a command; {hint}")
    if not arguments:
        raise ConfigError(f"{command} needs a URL; name a run directory, its snapshots or one of them")
    from mingpt_ddp.cli import snapshots_manage as manage
    from mingpt_ddp.cli import snapshots_survey as survey

    works: tuple[tuple[type, Callable[[Any], int]], ...] = (  # in the order of COMMANDS
        (survey.ListConfig, survey.list_),
        (survey.ListConfig, survey.verify),
        (manage.PruneConfig, manage.prune),
        (manage.ExportConfig, manage.export),
    )
    shape, work = dict(zip(COMMANDS, works, strict=True))[command]
    config: Any = build(shape, {**values_of(arguments[1:], literal=("to",)), "url": arguments[0]}, "")
    check_url(config.url, "URL")
    return work(config)


if __name__ == "__main__":
    main()
