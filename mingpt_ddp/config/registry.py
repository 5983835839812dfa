"""Models, optimizers and readers of data by name: ours, and those of a Python file that the user names now.

Such a file is run because a command, or a YAML file that the command has chosen, says `code`; what a snapshot or the
record of a run says is never run. docs/your-own-model.md walks through it.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mingpt_ddp.config.config import Config
from mingpt_ddp.config.schema import GROUPS, DataConfig, ModelConfig, OptimizerConfig, UserCodeConfig
from mingpt_ddp.config.validation import check, is_supported
from mingpt_ddp.errors import CodeError, ConfigError, DataError, UserError

__all__ = ["DataConfig", "DataError", "ModelConfig", "OptimizerConfig", "check", "register"]

Builder = TypeVar("Builder", bound=Callable[..., Any])
BASES: dict[str, type[UserCodeConfig]] = {"model": ModelConfig, "optimizer": OptimizerConfig, "data": DataConfig}
BUILDERS: dict[str, dict[str, Callable[..., Any]]] = {group: {} for group in BASES}
TAKEN = "the name is taken; choose another"
LONGEST = 500  # characters of what went wrong in a file


def register(group: str, name: str, config: type[UserCodeConfig]) -> Callable[[Builder], Builder]:
    """Make what follows known as `name`: a decorator of a class or function.

    Args:
        group: "model", for a class or function (config, vocab_size, block_size) -> nn.Module that has the form of
            `mingpt_ddp.models.LanguageModel`; "optimizer", for (model, config) -> torch.optim.Optimizer; "data", for
            (config) -> an iterator of str, the pieces of the text in their order.
        name: what `model.architecture`, `optimizer.name` or `data.reader` selects it by.
        config: its keys: a frozen dataclass below ModelConfig, OptimizerConfig or DataConfig.

    Raises:
        ValueError, TypeError: it cannot be registered so.
    """
    if group not in BASES:
        raise ValueError(f"@register({group!r}, ...): the first word must be one of {', '.join(BASES)}")
    if name in GROUPS[group][1]:
        raise ValueError(f"@register({group!r}, {name!r}, ...): {TAKEN}")
    where = getattr(config, "__name__", repr(config))
    if not (isinstance(config, type) and issubclass(config, BASES[group]) and "__dataclass_fields__" in vars(config)):
        raise TypeError(f"{where} must be a class below {BASES[group].__name__} with @dataclass(frozen=True)")
    for field, hint in typing.get_type_hints(config).items():
        if not is_supported(hint):
            raise TypeError(f"{where}.{field} has a type that YAML does not have; use numbers, text, lists or null")

    def add(builder: Builder) -> Builder:
        GROUPS[group][1][name] = config
        BUILDERS[group][name] = builder
        _entries.append((group, name, config, builder))
        return builder

    return add


Entry: TypeAlias = tuple[str, str, type[UserCodeConfig], Callable[..., Any]]  # group, name, keys, builder


@dataclass
class _File:
    """A user's file that has been run."""

    digest: str  # SHA-256
    entries: list[Entry]  # what it has registered


_files: dict[Path, _File] = {}
_entries: list[Entry] = []  # registered since the last file was begun


def is_user_defined(group: str, name: str) -> bool:
    """Whether that is a user's, not one of ours."""
    return BUILDERS[group][name].__module__.split(".")[0] != __name__.split(".")[0]


def uses_user_code(config: Config) -> bool:
    """Whether the model or the optimizer is a user's."""
    return is_user_defined("model", config.model.architecture) or is_user_defined("optimizer", config.optimizer.name)


# The files


def run_code(values: dict[str, Any], directories: Iterable[Path]) -> dict[str, Any]:
    """Run the files that the groups of a configuration name; the same values with the digests of those files.

    Args:
        values: of the configuration that the user gives now, nobody else's.
        directories: where to look for a file, in this order.

    Raises:
        CodeError: naming the file and the line that is wrong.
        ConfigError: there is no such file, or it has another digest than the configuration says.
    """
    for file in _files.values():  # another job's of a sweep, which may have something else of that name
        for group, name, _, _ in file.entries:
            BUILDERS[group].pop(name, None)
            GROUPS[group][1].pop(name, None)
    values = dict(values)
    for group in BASES:
        keys = values.get(group)
        if not isinstance(keys, dict) or keys.get("code") is None:
            continue
        path = _find(keys["code"], f"{group}.code", list(directories))
        values[group] = {**keys, "code_sha256": run_file(path, f"{group}.code", keys.get("code_sha256"))}
    return values


def _find(code: Any, key: str, directories: list[Path]) -> Path:
    _refuse_other_than_files(code, key)
    found = [path for path in (directory / code for directory in directories) if path.is_file()]
    if not found:
        looked = ", ".join(map(str, directories))
        raise ConfigError(f"{key}={code} is in none of {looked}; put it beside the YAML file and give --config-dir")
    return found[0]


def _refuse_other_than_files(code: Any, key: str) -> None:
    if not isinstance(code, str) or "://" in code or not code.endswith(".py"):
        raise ConfigError(f"{key}={code} must be a local Python file, as in mine.py")


def run_file(path: Path, key: str, wanted: str | None = None) -> str:
    """Run a file, once per process, and let what it registers be known; its SHA-256.

    Args:
        key: what named it, for messages.
        wanted: the only digest that will do.
    """
    _refuse_other_than_files(str(path), key)
    path = path.resolve()
    if path in _files:
        for group, name, config, builder in _files[path].entries:
            if BUILDERS[group].get(name, builder) is not builder:
                raise CodeError(f"{_short(path)}: @register({group!r}, {name!r}, ...): {TAKEN}")
            GROUPS[group][1][name], BUILDERS[group][name] = config, builder
        return _files[path].digest
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    if wanted not in (None, digest):
        raise ConfigError(f"{key}={path} has SHA-256 {digest}, not {key}_sha256={wanted}; set that to null to use it")
    module = types.ModuleType(f"_own_{path.stem}_{digest[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look for it there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that what lies beside it hides nothing that is installed
    _files[path] = _File(digest, [])
    _entries.clear()
    try:
        with (
            attribute_errors_to_user_code()
        ):  # compiled from what was read: no __pycache__ is written beside the user's files
            exec(compile(content, str(path), "exec"), module.__dict__)
    finally:
        _files[path].entries.extend(_entries)
    return digest


@contextlib.contextmanager
def attribute_errors_to_user_code() -> Iterator[None]:
    """What goes wrong inside a user's file becomes one line that names it.

    Raises:
        CodeError: with the file and the line.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        place = _place(error)
        if place is None:
            raise
        raise CodeError(f"{place}: {type(error).__name__}: {error}"[:LONGEST]) from error


def _place(error: BaseException) -> str | None:
    """`file:line` of the innermost call in a user's file, or of what Python cannot read there."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) in _files:
        return f"{_short(Path(error.filename))}:{error.lineno}"
    found = None
    trace = error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path in _files:
            found = f"{_short(path)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
