"""List the command-line arguments with which a user confirms untrusted values of a recorded run.

Such a value could run a program or send files somewhere, and the record may be a stranger's.
"""

import contextlib
import re
from pathlib import Path
from typing import Any

from mingpt_ddp.config.compose.hydra_utils import config_flags, hydra_value
from mingpt_ddp.config.recorded import untrusted_values
from mingpt_ddp.storage.yaml_and_json import read_yaml

UNQUOTED = r"[\w./:+-]*[/.][\w./:+-]*[a-zA-Z]"  # a path or URL that Hydra reads without quotes


def confirming_words(directory: Path, recorded: dict[str, Any]) -> list[str]:
    """List the arguments that a user must add to `again` to confirm untrusted values.

    Args:
        recorded: The configuration of the run by dotted key.
    """
    untrusted = untrusted_values(recorded)
    words = []
    for key, value in untrusted.items():
        needs_no_quotes = isinstance(value, str) and re.fullmatch(UNQUOTED, value)
        words.append(f"{key}={value if needs_no_quotes else hydra_value(value)}")
    if any(key.endswith(".code") for key in untrusted):
        flags = ["--config-dir=DIR"]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            flags = config_flags(read_yaml(directory / ".hydra" / "hydra.yaml")["hydra"])
        words = [*flags, *words]
    return words
