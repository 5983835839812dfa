"""The only module that uses private parts of Hydra and OmegaConf."""

import argparse
import contextlib
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from hydra._internal import utils
from omegaconf import DictConfig

from mingpt_ddp.errors import ConfigError


class _ArgumentParser(argparse.ArgumentParser):
    """A parser that accepts any object as a help text, and reports errors without the usage.

    Hydra 1.3 passes an object that is converted to a text only when it is shown. Since Python 3.14,
    argparse checks help texts early, and would refuse this object.
    """

    def _check_help(self, action: argparse.Action) -> None:
        pass

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@contextlib.contextmanager
def patched_argument_parser() -> Iterator[None]:
    """Let Hydra parse the command line with `_ArgumentParser` inside this context.

    Only Hydra's module `hydra._internal.utils` sees the replacement. All other code keeps the
    argparse of the standard library.
    """
    replacement = {**vars(argparse), "ArgumentParser": _ArgumentParser}
    hydra_utils: Any = utils
    hydra_utils.argparse = types.SimpleNamespace(**replacement)
    try:
        yield
    finally:
        hydra_utils.argparse = argparse


def full_key(cfg: DictConfig) -> str:
    """Return the dotted key of a node in its configuration. Return "" for the root."""
    return str(cfg._get_full_key(None))
