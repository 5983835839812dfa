"""Describe an unexpected error in one line: what happened, where, and in which step."""

import re
import sysconfig
import traceback
from pathlib import Path

from mingpt_ddp.config.builders import MAX_ERROR_LENGTH
from mingpt_ddp.errors import relative_path

PACKAGE = f"{Path(__file__).parents[1]}/"
# If the name of a file contains one of these texts, the file is not the user's code. The last two
# mark generated code.
NOT_USER_CODE = (
    "/site-packages/",
    "/dist-packages/",
    f"{sysconfig.get_path('stdlib')}/",
    "/torchinductor",
    "<",
)
# Network errors of these libraries are not always an OSError.
NETWORK_LIBRARIES = ("aiohttp", "botocore", "httpcore", "httpx", "urllib3")
# Matches messages of errors that the machine or its memory causes.
MACHINE_ERROR = re.compile(r"DataLoader worker (\(pid|was killed)|out of memory|CUDA error")
# A call in the text of a traceback. An error from a DataLoader process has such a text in its
# message.
TRACEBACK_CALL = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)


def describe_error(error: BaseException, activity: str = "") -> str:
    """Describe an error in one line: the error, its location, and what the rank was doing.

    The location is in the user's code if possible, otherwise in this package.

    Args:
        activity: What the rank was doing, such as `step 40`, or "" if it is not known.
    """
    message = str(error)
    text = f"{type(error).__name__}: {message}"
    if TRACEBACK_CALL.search(message):
        text = message.strip().splitlines()[-1]
    text = " ".join(text.split())[:MAX_ERROR_LENGTH]
    location = _locate(error)
    if location:
        text += f" ({location})"
    return f"{text}, {activity}" if activity else text


def _locate(error: BaseException) -> str:
    """Return `file:line` of the innermost call in the user's code, or else in this package.

    Return "" if there is no such call.
    """
    location_in_package = ""
    # If an error is raised on all ranks, its cause has the traceback.
    for raised in (error, error.__cause__):
        for file, line in reversed(_calls(raised)):
            location = f"{relative_path(Path(file))}:{line}"
            if file.startswith(PACKAGE):
                location_in_package = location_in_package or location
            elif not any(part in file for part in NOT_USER_CODE):
                return location
    return location_in_package


def _calls(error: BaseException | None) -> list[tuple[str, int]]:
    """Return the file and the line of each call in the traceback. The innermost call is last."""
    if error is None:
        return []
    # The traceback of another process, which is part of the message.
    calls_in_message = TRACEBACK_CALL.findall(str(error))
    if calls_in_message:
        return [(file, int(line)) for file, line in calls_in_message]
    calls = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line) for frame, line in calls]


def is_transient(error: BaseException | None) -> bool:
    """Return True if a restart may succeed even after the same error has occurred twice.

    This is the case if a machine, its memory or a network has caused the error, or has caused an
    earlier error that led to it.
    """
    if error is None:
        return False
    if isinstance(error, (OSError, MemoryError)) and not isinstance(error, FileNotFoundError):
        return True
    library = type(error).__module__.partition(".")[0]
    if library in NETWORK_LIBRARIES or MACHINE_ERROR.search(str(error)):
        return True
    return is_transient(error.__cause__ or error.__context__)


def without_addresses(text: str) -> str:
    """Remove addresses and ids of objects from a text, because they differ between processes."""
    return re.sub(r"0x[0-9a-fA-F]+|\d{14,}", "", text)
