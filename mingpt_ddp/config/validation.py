"""Plain mappings in, typed frozen dataclasses out; whatever does not fit is one line that names the key."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from mingpt_ddp.errors import ConfigError

T = TypeVar("T")
NAMES: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}


def check(ok: bool, message: str) -> None:
    """
    Raises:
        ConfigError: with this message, which begins `group.key=value` and says what to do.
    """
    if not ok:
        raise ConfigError(message)


def did_you_mean(key: str, known: Iterable[str]) -> str | None:
    """The known word that resembles `key` most, if one does."""
    matches = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def build(cls: type[T], values: Any, where: str) -> T:
    """An instance of the dataclass `cls` from a mapping with exactly its fields.

    Args:
        values: what was configured, already resolved to plain Python values.
        where: the dotted name of the group, for messages.

    Raises:
        ConfigError: an unknown key, a missing key or a value of another type.
    """
    prefix = f"{where}." if where else ""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}={values!r} must be a group of keys")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            meant = did_you_mean(str(key), fields)
            hint = f"did you mean {prefix}{meant}?" if meant else f"there are {', '.join(fields)}"
            raise ConfigError(f"{prefix}{key} is not a key; {hint}")
    required = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{prefix}{missing[0]} is missing; give it a value")
    return cls(**{key: convert(value, hints[key], prefix + str(key)) for key, value in values.items()})


def convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint`, accepting only what loses nothing (1000.0 is a whole number, "7" is not)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, args, where)
    if origin is Literal:
        if value in args and type(value) in {type(choice) for choice in args}:
            return value
        raise ConfigError(f"{where}={_shown(value)} must be one of {', '.join(map(str, args))}")
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(args):
            raise ConfigError(f"{where}={value!r} must be a list of {len(args)} values")
        return tuple(convert(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(zip(value, args, strict=True)))
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}={value!r} must be a list")
        return [convert(v, args[0], f"{where}[{i}]") for i, v in enumerate(value)]
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    return _convert_scalar(value, hint, where)


def is_known(hint: Any) -> bool:
    """Whether `convert` can make a value of this type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return True
    if origin in (types.UnionType, typing.Union):
        kinds = [a for a in args if a is not type(None) and typing.get_origin(a) is not Literal]
        return len(kinds) <= 1 and all(map(is_known, kinds))
    if origin in (tuple, list):
        return Ellipsis not in args and all(map(is_known, args))
    return dataclasses.is_dataclass(hint) or hint in NAMES


def _convert_union(value: Any, args: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in args:
        return None
    inner = [a for a in args if a is not type(None)]
    words = [w for a in inner if typing.get_origin(a) is Literal for w in typing.get_args(a)]
    if value in words and isinstance(value, str):
        return value
    kinds = [a for a in inner if typing.get_origin(a) is not Literal]
    if len(kinds) != 1:
        raise TypeError(f"{where}: a field has at most one type beside None and words")
    try:
        return convert(value, kinds[0], where)
    except ConfigError as error:
        raise ConfigError(" or ".join([error.args[0], *words])) from error


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and number and abs(value) < 2**63 and value == int(value):
        return int(value)
    if hint is float and number and abs(value) < sys.float_info.max:  # neither infinite nor nan, nor a giant integer
        return float(value)
    if hint is str and isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{where}={_shown(value)} must be {NAMES[hint]}")


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def refuse_credentials(key: str, text: str) -> None:
    """Refuse a secret in a URL without repeating it: configurations are logged and saved."""
    password = re.search(r"(?<!github:)//[^/\s,:@]*:[^/\s,@]*@", text)
    secret = re.search(r"(?i)[?&][^=&\s]*(secret|token|passw|pwd|auth|sig|key|credential)[^=&\s]*=", text)
    if "://" in text and (password or secret):
        raise ConfigError(f"{key} holds credentials; give them in the environment (AWS_..., ~/.netrc), not in a URL")
