"""What is touched of Hydra and OmegaConf without their promise."""

import argparse
import contextlib
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from hydra._internal import utils
from omegaconf import DictConfig

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


@contextlib.contextmanager
def own_parser() -> Iterator[None]:
    """Have Hydra build this parser of the command line in this context.

    Nobody but Hydra sees another argparse.
    """
    seen = {**vars(argparse), "ArgumentParser": _ArgumentParser}
    hydra_utils: Any = utils
    hydra_utils.argparse = types.SimpleNamespace(**seen)
    try:
        yield
    finally:
        hydra_utils.argparse = argparse


def full_key(cfg: DictConfig) -> str:
    """Return the dotted key of a node in the configuration that it is part of; "" for all of it."""
    return str(cfg._get_full_key(None))
