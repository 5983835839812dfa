"""The text of an error that no code of this package expects: what, where, and in which step."""

import re
import sysconfig
import traceback
from pathlib import Path

from mingpt_ddp.config.registry import MAX_ERROR_LENGTH, relative_path

PACKAGE = f"{Path(__file__).parents[1]}/"
# Parts of the names of files that are not the user's; the last two are of generated code.
LIBRARIES = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/")
GENERATED = ("/torchinductor", "<")
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
    of_package = ""
    for raised in (error, error.__cause__):  # one of all ranks has the traceback in its cause
        for file, line in reversed(_calls(raised)):
            location = f"{relative_path(Path(file))}:{line}"
            if file.startswith(PACKAGE):
                of_package = of_package or location
            elif not any(part in file for part in (*LIBRARIES, *GENERATED)):
                return location
    return of_package


def _calls(error: BaseException | None) -> list[tuple[str, int]]:
    """Return the file and the line of each call in the traceback, the innermost last."""
    if error is None:
        return []
    passed_on = CALL.findall(str(error))
    if passed_on:
        return [(file, int(line)) for file, line in passed_on]
    calls = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line) for frame, line in calls]


def may_pass(error: BaseException) -> bool:
    """Return whether a restart may succeed although the error came twice: it is of the machine."""
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    return re.search(r"DataLoader worker (\(pid|was killed)", str(error)) is not None


def comparable(text: str) -> str:
    """Return the text without addresses and ids of objects, which differ between processes."""
    return re.sub(r"0x[0-9a-fA-F]+|\d{14,}", "", text)
