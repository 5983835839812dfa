"""Tasks, models, optimizers, datasets and readers by name: built in, or of a user's Python file.

A file is run only if the command line, or a YAML file that it selects, names it as `code`; names in
a snapshot or in a run's recorded configuration are never followed. docs/your-own-model.md is the
tutorial.
"""

import contextlib
import hashlib
import shlex
import stat
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mingpt_ddp.config import loaded_code
from mingpt_ddp.config.keys.components import DataConfig, DatasetConfig, TaskConfig
from mingpt_ddp.config.keys.model_config import PARTS, ModelConfig, PartConfig
from mingpt_ddp.config.keys.optimizer_config import SCHEDULES, OptimizerConfig, ScheduleConfig
from mingpt_ddp.config.keys.schema import BASES, COMM_HOOKS, GROUPS, DDPConfig
from mingpt_ddp.config.validation import check, field_types, is_supported
from mingpt_ddp.errors import CodeError, ConfigError, DataError, UserError, reason, relative_path

__all__ = [
    "DataConfig",
    "DataError",
    "DatasetConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PartConfig",
    "ScheduleConfig",
    "TaskConfig",
    "check",
    "register",
    "register_comm_hook",
]

Builder = TypeVar("Builder", bound=Callable[..., Any])
# By kind and name; the hooks of a run have no configuration.
BUILDERS: dict[str, dict[str, Callable[..., Any]]] = {
    kind: {} for kind in (*BASES, "hook", "action")
}
# Of the kinds that are the value of a key of their group.
VALUES = {"comm_hook": COMM_HOOKS, "schedule": SCHEDULES, **PARTS}
TAKEN = "the name is taken; choose another"
MAX_ERROR_LENGTH = 500  # characters
MAX_CODE_BYTES = 1 << 24


@dataclass(frozen=True)
class Registration:
    """What a user's file has registered."""

    group: str
    name: str
    config: type | None
    builder: Callable[..., Any]
    files: Callable[[Any], Iterable[str | Path]] | None = None  # that a reader reads

    def add(self) -> None:
        BUILDERS[self.group][self.name] = self.builder
        if self.config is not None:
            _configs(self.group)[self.name] = self.config

    def remove(self) -> None:
        BUILDERS[self.group].pop(self.name, None)
        if self.config is not None:
            _configs(self.group).pop(self.name, None)


def _configs(kind: str) -> dict[str | None, type]:
    """Return the configurations of a kind by name, where the schema looks them up."""
    if kind in VALUES:
        return VALUES[kind]
    return GROUPS["data" if kind == "dataset" else kind][1]


@dataclass(frozen=True)
class UserFile:
    """A user's file that has been run."""

    sha256: str
    entries: list[Registration]


_files: dict[Path, UserFile] = {}  # files run so far
_entries: list[Registration] = []  # registered so far, one after the other
CHOSEN: dict[str, Path] = {}  # the files that the configuration names, by group


def register(
    group: str,
    name: str,
    config: type,
    *,
    files: Callable[[Any], Iterable[str | Path]] | None = None,
) -> Callable[[Builder], Builder]:
    """Register a class or function under a name, as a decorator.

    Args:
        group: "task", for a subclass of `mingpt_ddp.tasks.Task`; "model", for a class or function
            (config, outputs, inputs) -> nn.Module, see `Task.build_model`; "optimizer", for (model,
            config) -> torch.optim.Optimizer; "dataset", for (config) ->
            `mingpt_ddp.data.samples.Datasets`; "data", for (config) -> an iterator of str, the
            pieces of the text in order; "schedule", for a pure function (step, steps, config) ->
            the learning rate of a step over `optimizer.lr`, where steps count from 1; "attention",
            "mlp", "norm" or "activation", for a part of a block as in `mingpt_ddp.parts`.
        name: the value of `task.name`, `model.architecture`, `optimizer.name`, `data.dataset`,
            `data.reader`, `optimizer.schedule` or `model.<the part>` that selects it.
        config: its keys: a frozen dataclass that inherits from TaskConfig, ModelConfig,
            OptimizerConfig, DatasetConfig, DataConfig, ScheduleConfig or PartConfig.
        files: Only for "data": (config) -> the local files on which the text depends. The reader is
            called again if one of them, or the Python file, has changed. Without `files`, the
            reader is called at every start.

    Raises:
        ValueError, TypeError: an unknown group, a name that is taken, or an unsuitable `config`.
    """
    if group not in BASES:
        raise ValueError(f"@register({group!r}, ...): the group must be one of {', '.join(BASES)}")
    if files is not None and group != "data":
        raise ValueError(f"@register({group!r}, {name!r}, ...): only a reader of text has files")
    if name in _configs(group):
        raise ValueError(f"@register({group!r}, {name!r}, ...): {TAKEN}")
    label = getattr(config, "__name__", repr(config))
    inherits = isinstance(config, type) and issubclass(config, BASES[group])
    if not inherits or "__dataclass_fields__" not in vars(config):  # its base's does not count
        raise TypeError(
            f"{label} must be a subclass of {BASES[group].__name__} with @dataclass(frozen=True)"
        )
    inherited = field_types(BASES[group])
    for field, hint in field_types(config).items():
        if field in inherited:
            continue
        if not is_supported(hint) and hint != field_types(BASES[group]).get(field):
            raise TypeError(
                f"{label}.{field} has a type that YAML cannot represent; use numbers, text, "
                "lists or null"
            )

    def add(builder: Builder) -> Builder:
        add_entry(Registration(group, name, config, builder, files))
        return builder

    return add


def register_comm_hook(name: str) -> Callable[[Builder], Builder]:
    """Register a communication hook of DDP under a name, as a decorator.

    The hook is a function (state, bucket: torch.distributed.GradBucket) ->
    torch.futures.Future[Tensor], as torch's own: the future holds the average of `bucket.buffer()`
    over all ranks, with the same bits on each. `state` is None, because snapshots hold no state of
    hooks.

    Args:
        name: the value of `ddp.comm_hook` that selects it.

    Raises:
        ValueError: the name is taken.
    """
    return register("comm_hook", name, DDPConfig)


def add_entry(entry: Registration) -> None:
    """Register what a user's file has."""
    entry.add()
    _entries.append(entry)


def reader_of(name: str) -> tuple[Registration, str] | None:
    """Return a reader and the SHA-256 of its file, or None if it is not in a user's file."""
    for file in _files.values():
        for entry in file.entries:
            if entry.builder is BUILDERS["data"][name]:
                return entry, file.sha256
    return None


def run_code(
    values: dict[str, Any], directories: list[Path], presets: Mapping[str, Any] | None = None
) -> None:
    """Run the files that a configuration names.

    Args:
        values: a configuration composed from the command line, never one read from a run or
            snapshot.
        directories: of presets, in Hydra's order.
        presets: the chosen ones by group.

    Raises:
        CodeError: a file raised an exception; names the file and line.
        ConfigError: a file does not exist.
    """
    for file in _files.values():  # of earlier jobs of the sweep
        for entry in file.entries:
            entry.remove()
    CHOSEN.clear()
    for group in BASES:
        keys = values.get(group)
        if isinstance(keys, dict) and keys.get("code") is not None:
            folders = _folders(group, directories, presets or {})
            CHOSEN[group] = _find(keys["code"], f"{group}.code", folders)
            run_file(CHOSEN[group], f"{group}.code")


def code_roots() -> list[Path]:
    """List the user's files that a run begins with; what they import belongs to its code too.

    These are the files that the configuration names, and the script that was started if it
    registers a part.
    """
    roots = [path.resolve() for path in CHOSEN.values()]
    parts = [part for by_name in BUILDERS.values() for part in by_name.values()]
    if any(getattr(part, "__module__", "") == "__main__" for part in parts):
        roots += filter(None, [loaded_code.script_path()])
    return roots


def chosen_sha256() -> dict[str, str]:
    """Return the SHA-256 of the files that the configuration names, by group."""
    return {group: _files[path.resolve()].sha256 for group, path in CHOSEN.items()}


def _folders(group: str, directories: list[Path], presets: Mapping[str, Any]) -> list[Path]:
    """List the folders to search: next to the preset, next to the recipe, then above both."""
    folders = []
    for each in (group, "experiment"):
        preset = Path(each, str(presets.get(each)))  # perhaps in a subfolder
        folders += [directory / preset.parent for directory in directories]
    return [*dict.fromkeys([*filter(Path.is_dir, folders), *directories])]


def _find(code: Any, key: str, folders: list[Path]) -> Path:
    _require_local_file(code, key)
    for folder in folders:
        if (folder / code).is_file():
            return folder / code
    looked = ", ".join(map(str, folders))
    advice = "put it next to the YAML file and pass --config-dir"
    if (here := Path(code)).is_file():
        advice = shlex.join(["write", f"--config-dir={here.parent}", f"{key}={here.name}"])
    raise ConfigError(f"{key}={code} was not found in {looked}; {advice}")


def _require_local_file(code: Any, key: str) -> None:
    if not isinstance(code, str) or "://" in code or not code.endswith(".py"):
        raise ConfigError(f"{key}={code} must be a local Python file, as in mine.py")


def run_file(path: Path, key: str) -> None:
    """Run a file, unless this process has run it before, and register its names.

    Args:
        key: the configuration key that names the file, for messages.
    """
    _require_local_file(str(path), key)
    path = path.resolve()
    if path in _files:
        _register_again(path)
        return
    content = _read_code(path, key)
    digest = hashlib.sha256(content).hexdigest()
    module = types.ModuleType(f"_own_{path.stem}_{digest[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses looks it up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: files there shadow no installed packages
    _files[path] = UserFile(digest, [])
    first = len(_entries)
    try:
        # compile, unlike import, writes no __pycache__ to the user's directory
        with attribute_errors_to_user_code():
            exec(_compile(content, path), module.__dict__)
    except BaseException:  # the next job of the sweep is to see it, too
        del _files[path]
        for entry in _entries[first:]:
            entry.remove()
        raise
    _files[path].entries.extend(_entries[first:])
    loaded_code.keep(path, content)
    loaded_code.look()


def _register_again(path: Path) -> None:
    """Register the names of a file that this process has run."""
    for entry in _files[path].entries:
        if BUILDERS[entry.group].get(entry.name, entry.builder) is not entry.builder:
            decorator = f"@register({entry.group!r}, {entry.name!r}, ...)"
            raise CodeError(f"{relative_path(path)}: {decorator}: {TAKEN}")
        entry.add()


def _read_code(path: Path, key: str) -> bytes:
    try:
        status = path.stat()
        # reading a pipe would block
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CODE_BYTES:
            raise OSError(f"it is not a file of at most {MAX_CODE_BYTES:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read: {reason(error)}") from error


def _compile(content: bytes, path: Path) -> types.CodeType:
    try:
        return compile(content, str(path), "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        # with the line, which attribute_errors_to_user_code shows
        if getattr(error, "filename", None):
            raise
        raise CodeError(f"{relative_path(path)} is not Python: {error}") from error


@contextlib.contextmanager
def attribute_errors_to_user_code() -> Iterator[None]:
    """Re-raise an exception from a user's file as a one-line CodeError with its file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        location = None if isinstance(error, UserError) else _location(error)
        if location is None:
            raise
        message = f"{location}: {type(error).__name__}: {error}"
        raise CodeError(message[:MAX_ERROR_LENGTH]) from error


def _location(error: BaseException) -> str | None:
    """Return `file:line` of the innermost call in a user's file, or of a syntax error in one."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) in _files:
        return f"{relative_path(Path(error.filename))}:{error.lineno}"
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path in _files:
            location = f"{relative_path(path)}:{line}"
    return location
