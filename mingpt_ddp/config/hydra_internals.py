"""What is touched of Hydra without its promise."""

import argparse
import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

from hydra._internal import utils

from mingpt_ddp.errors import ConfigError


class _ArgumentParser(argparse.ArgumentParser):
    """Take the help of an argument as it comes, and report errors without the usage.

    Hydra 1.3 gives an object that becomes a text when it is shown. argparse checks the help since
    Python 3.14, and refuses that.
    """

    def _check_help(self, action: argparse.Action) -> None:
        pass

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def with_own_parser(run: Callable[[], Any]) -> Callable[[], Any]:
    """Have Hydra build this parser of the command line while `run` runs.

    Nobody but Hydra sees another argparse.
    """

    @functools.wraps(run)
    def wrapped() -> Any:
        seen = {**vars(argparse), "ArgumentParser": _ArgumentParser}
        hydra_utils: Any = utils
        hydra_utils.argparse = types.SimpleNamespace(**seen)
        try:
            return run()
        finally:
            hydra_utils.argparse = argparse

    return wrapped
