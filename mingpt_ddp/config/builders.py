"""Register tasks, models, optimizers, datasets and readers by name, and run users' Python files.

A file is run only if the command line, or a YAML file that the command line selects, names it as
`code`. A file that a snapshot or a recorded configuration names is never run.
docs/your-own-model.md is the tutorial.
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
# A builder is a registered class or function that makes a component, such as a model. This table
# has all builders by kind and name. Hooks and actions have builders, but no configuration.
BUILDERS: dict[str, dict[str, Callable[..., Any]]] = {
    kind: {} for kind in (*BASES, "hook", "action")
}
# Configuration classes by kind and name, for the kinds without a group of their own. A key of
# another group, such as ddp.comm_hook, selects the name.
CONFIGS_WITHOUT_GROUP = {"comm_hook": COMM_HOOKS, "schedule": SCHEDULES, **PARTS}
NAME_TAKEN = "the name is taken; choose another name"
MAX_ERROR_LENGTH = 500  # characters
MAX_CODE_BYTES = 1 << 24


@dataclass(frozen=True)
class Registration:
    """A builder that a user's file has registered under a name."""

    group: str
    name: str
    config: type | None
    builder: Callable[..., Any]
    # For a reader of text: returns the local files that the reader depends on. None if unknown.
    files: Callable[[Any], Iterable[str | Path]] | None = None

    def add(self) -> None:
        BUILDERS[self.group][self.name] = self.builder
        if self.config is not None:
            _configs(self.group)[self.name] = self.config

    def remove(self) -> None:
        BUILDERS[self.group].pop(self.name, None)
        if self.config is not None:
            _configs(self.group).pop(self.name, None)


def _configs(kind: str) -> dict[str | None, type]:
    """Return the schema's table of configuration classes of a kind, by name."""
    if kind in CONFIGS_WITHOUT_GROUP:
        return CONFIGS_WITHOUT_GROUP[kind]
    return GROUPS["data" if kind == "dataset" else kind][1]


@dataclass(frozen=True)
class UserFile:
    """A user's file that this process has run."""

    sha256: str
    registrations: list[Registration]


_files: dict[Path, UserFile] = {}  # all files run so far
_registrations: list[Registration] = []
CHOSEN_FILES: dict[str, Path] = {}  # files that the current configuration names, by group


def register(
    group: str,
    name: str,
    config: type,
    *,
    files: Callable[[Any], Iterable[str | Path]] | None = None,
) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a class or function under a name.

    Args:
        group: The kind of the class or function:
            "task": a subclass of `mingpt_ddp.tasks.Task`.
            "model": (config, outputs, inputs) -> nn.Module. See `Task.build_model`.
            "optimizer": (model, config) -> torch.optim.Optimizer.
            "dataset": (config) -> `mingpt_ddp.data.samples.Datasets`.
            "data": (config) -> an iterator of str, the pieces of the text in order.
            "schedule": (step, steps, config) -> the learning rate of a step, divided by
            `optimizer.lr`. A pure function. Steps count from 1.
            "attention", "mlp", "norm", "activation": a part of a block, as in `mingpt_ddp.parts`.
        name: The name. A configuration selects it as the value of `task.name`,
            `model.architecture`, `optimizer.name`, `data.dataset`, `data.reader`,
            `optimizer.schedule`, or `model.attention` and the other parts.
        config: The keys of the class or function: a frozen dataclass that inherits from TaskConfig,
            ModelConfig, OptimizerConfig, DatasetConfig, DataConfig, ScheduleConfig or PartConfig.
        files: Only for "data": (config) -> the local files on which the text depends. The reader is
            called again if one of them, or the Python file, has changed. Without `files`, the
            reader is called at every start.

    Raises:
        ValueError: The group is unknown, or the name is taken.
        TypeError: `config` is not a suitable class.
    """
    if group not in BASES:
        raise ValueError(f"@register({group!r}, ...): the group must be one of {', '.join(BASES)}")
    if files is not None and group != "data":
        raise ValueError(
            f'@register({group!r}, {name!r}, ...): files is only for a reader of text ("data")'
        )
    if name in _configs(group):
        raise ValueError(f"@register({group!r}, {name!r}, ...): {NAME_TAKEN}")
    label = getattr(config, "__name__", repr(config))
    inherits = isinstance(config, type) and issubclass(config, BASES[group])
    # vars() ignores the fields of the base class, so it shows if `config` itself is a dataclass.
    if not inherits or "__dataclass_fields__" not in vars(config):
        raise TypeError(
            f"{label} must be a subclass of {BASES[group].__name__} with @dataclass(frozen=True)"
        )
    inherited = field_types(BASES[group])
    for field, hint in field_types(config).items():
        if hint != inherited.get(field) and not is_supported(hint):
            raise TypeError(
                f"{label}.{field} has a type that YAML cannot represent; use numbers, text, "
                "lists or null"
            )

    def add(builder: Builder) -> Builder:
        add_registration(Registration(group, name, config, builder, files))
        return builder

    return add


def register_comm_hook(name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a communication hook of DDP under a name.

    The hook is a function (state, bucket: torch.distributed.GradBucket) ->
    torch.futures.Future[Tensor], like the hooks of torch. The future holds the average of
    `bucket.buffer()` over all ranks, with the same bits on each rank. `state` is None, because
    snapshots do not contain the state of hooks.

    Args:
        name: The value of `ddp.comm_hook` that selects the hook.

    Raises:
        ValueError: The name is taken.
    """
    return register("comm_hook", name, DDPConfig)


def add_registration(registration: Registration) -> None:
    """Register a builder, and record that the file which is now running has registered it."""
    registration.add()
    _registrations.append(registration)


def reader_of(name: str) -> tuple[Registration, str] | None:
    """Return the registration of a user's reader of text, and the SHA-256 of its Python file.

    Return None if no user's file has registered the reader.
    """
    for file in _files.values():
        for registration in file.registrations:
            if registration.builder is BUILDERS["data"][name]:
                return registration, file.sha256
    return None


def run_code(
    values: dict[str, Any], directories: list[Path], presets: Mapping[str, Any] | None = None
) -> None:
    """Run the Python files that a configuration names as `code`.

    Args:
        values: A configuration composed from the command line. Never pass one that was read from a
            run or a snapshot, because it is untrusted.
        directories: Directories of presets, in Hydra's order.
        presets: The chosen preset of each group.

    Raises:
        CodeError: A file raised an exception. The message names the file and the line.
        ConfigError: A file does not exist.
    """
    for file in _files.values():  # earlier jobs of a sweep may have run these
        for registration in file.registrations:
            registration.remove()
    CHOSEN_FILES.clear()
    for group in BASES:
        keys = values.get(group)
        if isinstance(keys, dict) and keys.get("code") is not None:
            folders = _folders(group, directories, presets or {})
            CHOSEN_FILES[group] = _find(keys["code"], f"{group}.code", folders)
            run_file(CHOSEN_FILES[group], f"{group}.code")


def code_roots() -> list[Path]:
    """List the user's Python files that a run loads directly.

    These are the files that the configuration names, and the started script if it registers
    something. The files that they import also belong to the code of the run.
    """
    roots = [path.resolve() for path in CHOSEN_FILES.values()]
    builders = [builder for by_name in BUILDERS.values() for builder in by_name.values()]
    if any(getattr(builder, "__module__", "") == "__main__" for builder in builders):
        roots += filter(None, [loaded_code.script_path()])
    return roots


def chosen_sha256() -> dict[str, str]:
    """Return the SHA-256 of the files that the configuration names, by group."""
    return {group: _files[path.resolve()].sha256 for group, path in CHOSEN_FILES.items()}


def _folders(group: str, directories: list[Path], presets: Mapping[str, Any]) -> list[Path]:
    """List the folders to search for a file.

    The folder of the group's preset comes first. The folder of the experiment and the directories
    of all presets follow.
    """
    folders = []
    for each in (group, "experiment"):
        preset = Path(each, str(presets.get(each)))  # the name may contain a subfolder
        folders += [directory / preset.parent for directory in directories]
    return [*dict.fromkeys([*filter(Path.is_dir, folders), *directories])]


def _find(code: Any, key: str, folders: list[Path]) -> Path:
    _require_local_file(code, key)
    for folder in folders:
        if (folder / code).is_file():
            return folder / code
    searched = ", ".join(map(str, folders))
    advice = "put it next to the YAML file and pass --config-dir"
    if (here := Path(code)).is_file():
        advice = shlex.join(["write", f"--config-dir={here.parent}", f"{key}={here.name}"])
    raise ConfigError(f"{key}={code} was not found in {searched}; {advice}")


def _require_local_file(code: Any, key: str) -> None:
    if not isinstance(code, str) or "://" in code or not code.endswith(".py"):
        raise ConfigError(f"{key}={code} must be a local Python file, such as mine.py")


def run_file(path: Path, key: str) -> None:
    """Register the names of a user's file. Run the file if this process has not run it before.

    Args:
        path: The file.
        key: The configuration key that names the file, for messages.
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
        # Append the folder, so that its files do not hide installed packages.
        sys.path.append(str(path.parent))
    _files[path] = UserFile(digest, [])
    first = len(_registrations)
    try:
        # Unlike an import, `compile` writes no __pycache__ to the user's directory.
        with attribute_errors_to_user_code():
            exec(_compile(content, path), module.__dict__)
    except BaseException:
        # Forget the file, so that the next job of the sweep fails in the same way.
        del _files[path]
        for registration in _registrations[first:]:
            registration.remove()
        raise
    _files[path].registrations.extend(_registrations[first:])
    loaded_code.record_file(path, content)
    loaded_code.record_imports()


def _register_again(path: Path) -> None:
    """Register the names of a file again that this process has run for an earlier job."""
    for registration in _files[path].registrations:
        if (
            BUILDERS[registration.group].get(registration.name, registration.builder)
            is not registration.builder
        ):
            decorator = f"@register({registration.group!r}, {registration.name!r}, ...)"
            raise CodeError(f"{relative_path(path)}: {decorator}: {NAME_TAKEN}")
        registration.add()


def _read_code(path: Path, key: str) -> bytes:
    try:
        status = path.stat()
        # Refuse a pipe, because reading it would block.
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CODE_BYTES:
            raise OSError(f"it is not a file of at most {MAX_CODE_BYTES:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be read: {reason(error)}") from error


def _compile(content: bytes, path: Path) -> types.CodeType:
    try:
        return compile(content, str(path), "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        # An error with a file name also has a line, which attribute_errors_to_user_code shows.
        if getattr(error, "filename", None):
            raise
        raise CodeError(f"{relative_path(path)} is not Python code: {error}") from error


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
