"""The text of an error that no code of this package expects: what, where, and in which step."""

import re
import sysconfig
import traceback
from pathlib import Path

from mingpt_ddp.config.builders import MAX_ERROR_LENGTH
from mingpt_ddp.errors import relative_path

PACKAGE = f"{Path(__file__).parents[1]}/"
# Parts of the names of files that are not the user's; the last two are of generated code.
OTHERS = (
    "/site-packages/",
    "/dist-packages/",
    f"{sysconfig.get_path('stdlib')}/",
    "/torchinductor",
    "<",
)
# Some of their errors are no OSErrors.
NETWORK_LIBRARIES = ("aiohttp", "botocore", "httpcore", "httpx", "urllib3")
MACHINE = re.compile(r"DataLoader worker (\(pid|was killed)|out of memory|CUDA error")
# A call in a traceback, as the error of a DataLoader process has it in its message.
CALL = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)


def describe_error(error: BaseException, activity: str = "") -> str:
    """Return one line: the error, where the user's code or else this package raised it, and when.

    Args:
        activity: of the rank, as its heartbeat has it; "": unknown.
    """
    message = str(error)
    text = f"{type(error).__name__}: {message}"
    if CALL.search(message):
        text = message.strip().splitlines()[-1]
    text = " ".join(text.split())[:MAX_ERROR_LENGTH]
    location = _locate(error)
    if location:
        text += f" ({location})"
    return f"{text}, {activity}" if activity else text


def _locate(error: BaseException) -> str:
    """Return `file:line` of the innermost call in a user's file, else in this package."""
    location_in_package = ""
    for raised in (error, error.__cause__):  # one of all ranks has the traceback in its cause
        for file, line in reversed(_calls(raised)):
            location = f"{relative_path(Path(file))}:{line}"
            if file.startswith(PACKAGE):
                location_in_package = location_in_package or location
            elif not any(part in file for part in OTHERS):
                return location
    return location_in_package


def _calls(error: BaseException | None) -> list[tuple[str, int]]:
    """Return the file and the line of each call in the traceback, the innermost last."""
    if error is None:
        return []
    passed_on = CALL.findall(str(error))
    if passed_on:
        return [(file, int(line)) for file, line in passed_on]
    calls = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line) for frame, line in calls]


def is_transient(error: BaseException | None) -> bool:
    """Return whether a restart may succeed although the error came twice.

    So it is if a machine, its memory or a network caused it, or an error behind it.
    """
    if error is None:
        return False
    if isinstance(error, (OSError, MemoryError)) and not isinstance(error, FileNotFoundError):
        return True
    if type(error).__module__.partition(".")[0] in NETWORK_LIBRARIES or MACHINE.search(str(error)):
        return True
    return is_transient(error.__cause__ or error.__context__)


def without_addresses(text: str) -> str:
    """Return the text without addresses and ids of objects, which differ between processes."""
    return re.sub(r"0x[0-9a-fA-F]+|\d{14,}", "", text)
