"""Convert plain mappings to typed frozen dataclasses; a value that does not fit is one line that names its key."""

import dataclasses
import difflib
import operator
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from mingpt_ddp.errors import ConfigError

T = TypeVar("T")
SCALARS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}


def check(ok: bool, message: str) -> None:
    """Raise ConfigError with `message`, which begins `group.key=value` and says what to do, unless `ok`."""
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True)
class Bounds:
    """Limits of a number, as in `Annotated[int, Bounds(ge=1)]`; the keywords are those of pydantic's Field."""

    ge: float | None = None  # greater than or equal to
    gt: float | None = None  # greater than
    le: float | None = None  # less than or equal to
    lt: float | None = None  # less than

    def check(self, value: float, key: str) -> None:
        """Raise ConfigError unless `value` is within the limits."""
        limits = {name: limit for name, limit in vars(self).items() if limit is not None}
        text = {name: re.sub(r"e\+0*", "e", f"{limit:,g}") for name, limit in limits.items()}  # 10,000 and 1e6
        if len(limits) == 2:
            low, high = text.values()
            must = f"lie in {'[' if 'ge' in limits else '('}{low}, {high}{']' if 'le' in limits else ')'}"
        else:
            words = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
            must = " and ".join(f"be {words[name]} {text[name]}" for name in limits)
        inside = all(getattr(operator, name)(value, limit) for name, limit in limits.items())
        check(inside, f"{key}={value} must {must}")


def did_you_mean(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that is most like `key`, if one is like it at all."""
    return next(iter(difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)), None)


def hint_at(key: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question for the known key that is most like `key`, or else the list of all."""
    meant = did_you_mean(key, known)
    return f"did you mean {prefix}{meant}?" if meant else f"there are {', '.join(known)}"


def build(cls: type[T], values: Any, where: str) -> T:
    """Make an instance of the dataclass `cls` from a mapping with exactly its fields.

    Args:
        values: plain Python values, with interpolations resolved.
        where: the dotted name of the group, for messages.

    Raises:
        ConfigError: an unknown key, a missing key, or a value of another type or outside its bounds.
    """
    prefix = f"{where}." if where else ""
    check(isinstance(values, Mapping), f"{where}={values!r} must be a group of keys")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(f"{prefix}{key} is not a key; {hint_at(str(key), fields, prefix)}")
    for name, f in fields.items():
        if name not in values and f.default is f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing; give it a value")
    return cls(**{key: convert(value, hints[key], prefix + key) for key, value in values.items()})


def convert(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as the type `hint`, accepting only lossless conversions (1000.0 is a whole number, "7" is not).

    Args:
        where: the dotted key, for messages.

    Raises:
        ConfigError: it is of another type, or outside the `Bounds` of the type.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = convert(value, args[0], where)
        for bounds in args[1:]:
            if isinstance(bounds, Bounds):
                bounds.check(value, where)
        return value
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, args, where)
    if origin is Literal:
        if value in args and type(value) in {type(choice) for choice in args}:
            return value
        raise ConfigError(f"{where}={_shown(value)} must be one of {', '.join(map(str, args))}")
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)) or (origin is tuple and len(value) != len(args)):
            size = f" of {len(args)} values" if origin is tuple else ""
            raise ConfigError(f"{where}={value!r} must be a list{size}")
        items = args if origin is tuple else args * len(value)
        return origin(convert(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(zip(value, items, strict=True)))
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    return _convert_scalar(value, hint, where)


def is_supported(hint: Any) -> bool:
    """Return whether `convert` can make a value of this type, which has no `Annotated` in it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return True
    if origin in (types.UnionType, typing.Union):
        kinds = [a for a in args if a is not type(None) and typing.get_origin(a) is not Literal]
        return len(kinds) <= 1 and all(map(is_supported, kinds))
    if origin in (tuple, list):
        return Ellipsis not in args and all(map(is_supported, args))
    return dataclasses.is_dataclass(hint) or hint in SCALARS


def _convert_union(value: Any, args: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in args:
        return None
    literals = [v for a in args if typing.get_origin(a) is Literal for v in typing.get_args(a)]
    if value in literals and isinstance(value, str):
        return value
    (kind,) = [a for a in args if a is not type(None) and typing.get_origin(a) is not Literal]  # see is_supported
    try:
        return convert(value, kind, where)
    except ConfigError as error:
        raise ConfigError(" or ".join([error.args[0], *literals])) from error


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
    raise ConfigError(f"{where}={_shown(value)} must be {SCALARS[hint]}")


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def refuse_credentials(key: str, text: str) -> None:
    """Refuse a URL that contains a secret, in an error that does not show it: configurations are logged and saved."""
    password = re.search(r"(?<!github:)//[^/\s,:@]*:[^/\s,@]*@|https?://[^/?#\s,@]*@", text)  # a token needs no colon
    secret = re.search(r"(?i)[?&][^=&\s]*(secret|token|passw|pwd|auth|sig|key|credential)[^=&\s]*=", text)
    if "://" in text and (password or secret):
        raise ConfigError(f"{key} holds credentials; give them in the environment (AWS_..., ~/.netrc), not in a URL")
