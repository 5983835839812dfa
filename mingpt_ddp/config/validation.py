"""Validate plain values by pydantic; a value that does not fit is one line that names its key."""

import dataclasses
import difflib
import functools
import json
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic.fields import FieldInfo

from mingpt_ddp.errors import ConfigError

T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
SCALARS = (bool, int, float, str, type(None))  # what YAML has, and of what
NESTED = (list, tuple, types.UnionType, typing.Union)
# What pydantic's types of errors ask for.
WANTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
}
COMPARISONS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


def check(ok: bool, message: str) -> None:
    """Raise ConfigError with `message`, which begins `group.key=value` and says what to do, unless `ok`."""
    if not ok:
        raise ConfigError(message)


def did_you_mean(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that is most like `key`, if one is like it at all."""
    return next(iter(difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)), None)


def hint_at(key: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a question for the known key that is most like `key`, or else the list of all."""
    meant = did_you_mean(key, known)
    return f"did you mean {prefix}{meant}?" if meant else f"there are {', '.join(known)}"


def field_types(cls: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, with what `Annotated` adds to them."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of a dataclass."""
    return TypeAdapter(with_config(STRICT)(cls))


def build(cls: type[T], values: Any, where: str) -> T:
    """Make an instance of the dataclass `cls` from a mapping with its fields.

    Args:
        values: plain Python values, with interpolations resolved.
        where: the dotted name of the group, for messages.

    Raises:
        ConfigError: an unknown key, a missing key, or a value of another type or outside its bounds.
    """
    check(isinstance(values, Mapping), f"{where}={values!r} must be a group of keys")
    hints = field_types(cls)
    plain = {key: _without_loss(value, hints.get(key)) for key, value in values.items()}
    prefix = f"{where}." if where else ""
    garbled = [key for key, value in plain.items() if isinstance(value, str) and re.search("[\ud800-\udfff]", value)]
    check(not garbled, f"{prefix}{', '.join(garbled)} holds bytes that are not UTF-8; use other characters")
    try:
        validator: TypeAdapter[T] = adapter(typing.cast(Any, cls))
        return validator.validate_json(json.dumps(plain, default=str))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        cause = errors[0].get("ctx", {}).get("error")
        if isinstance(cause, Exception):  # an AssertionError or ValueError of a user's __post_init__
            raise cause from None
        raise ConfigError(_message(errors, hints, prefix)) from error


def is_supported(hint: Any) -> bool:
    """Return whether YAML has values of this type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return is_supported(args[0])
    return origin is Literal or (all(map(is_supported, args)) if origin in NESTED else hint in SCALARS)


def parts(hint: Any) -> Iterator[Any]:
    """Yield a type and all that it consists of, from the inside out."""
    for part in typing.get_args(hint):
        yield from parts(part)
    yield hint


def _without_loss(value: Any, hint: Any) -> Any:
    """Return 1e3 as a whole number where one fits, and 7 as text where only text fits: so they are typed."""
    if isinstance(value, (list, tuple)) and {list, tuple}.intersection(map(typing.get_origin, parts(hint))):
        return [_without_loss(item, hint) for item in value]
    kinds = {int, float, str}.intersection(part for part in parts(hint) if isinstance(part, type))
    if type(value) is int and (kinds == {str} or (int in kinds and abs(value) >= 2**63)):  # which torch does not hold
        return str(value)
    whole = int in kinds and isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    return int(value) if whole else value


def _message(errors: list[Any], hints: dict[str, Any], prefix: str) -> str:
    """Return what is wrong with the first key that has an error; an unknown key comes before all others."""
    first = min(errors, key=lambda error: error["type"] != "unexpected_keyword_argument")
    key = first["loc"][0]
    if first["type"] == "unexpected_keyword_argument":
        return f"{prefix}{key} is not a key; {hint_at(key, hints, prefix)}"
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return f"{prefix}{key} is missing; give it a value"
    of_key = [error for error in errors if error["loc"][0] == key]
    index = min(map(_index, of_key))  # a list that is too short comes before its values
    errors, hint = [error for error in of_key if _index(error) == index], hints[key]
    wanted = dict.fromkeys(_wanted(error, hint) for error in errors if error["type"] != "literal_error")
    literals = [str(v) for part in parts(hint) if typing.get_origin(part) is Literal for v in typing.get_args(part)]
    must = " or ".join([*wanted, *literals]) if wanted else f"be one of {', '.join(literals)}"  # all that a union takes
    return f"{prefix}{key}{index}={_shown(errors[0])} must {must}"


def _index(error: Any) -> str:
    """Return where in a list an error is, as [1]; the other parts of a location name members of unions."""
    return "" if error["type"] == "missing" else "".join(f"[{i}]" for i in error["loc"] if isinstance(i, int))


def _wanted(error: Any, hint: Any) -> str:
    """Return what a value must be instead."""
    if error["type"] in WANTED:
        return f"be {WANTED[error['type']]}"
    for field in (part for part in parts(hint) if isinstance(part, FieldInfo)):
        limits = {name: getattr(m, name) for m in field.metadata for name in COMPARISONS if hasattr(m, name)}
        if error["type"].startswith(("greater_", "less_")) and not all(
            getattr(operator, name)(error["input"], limit) for name, limit in limits.items()
        ):
            return _interval(limits)
    sizes = [len(typing.get_args(part)) for part in parts(hint) if typing.get_origin(part) is tuple]
    return f"be a list of {sizes[0]} values" if sizes else f"satisfy: {error['msg']}"


def _interval(limits: dict[str, float]) -> str:
    texts = [show_number(limit) for limit in limits.values()]
    if len(limits) == 2:
        return f"lie in {'[' if 'ge' in limits else '('}{', '.join(texts)}{']' if 'le' in limits else ')'}"
    return " and ".join(f"be {COMPARISONS[name]} {text}" for name, text in zip(limits, texts, strict=True))


def show_number(value: float) -> str:
    """Return 10,000 and 1e6."""
    return re.sub(r"e\+0*", "e", f"{value:,g}")


def _shown(error: Any) -> str:
    """Return the value that was refused: that of a float as 0.0, even if it was given as 0."""
    limit = next(iter(error.get("ctx", {}).values()), None)
    value = float(error["input"]) if isinstance(limit, float) else error["input"]
    return "null" if value is None else repr(value)


def refuse_credentials(key: str, text: str) -> None:
    """Refuse a URL that contains a secret, in an error that does not show it: configurations are logged and saved."""
    # A password may have slashes in it, but host:8080/path has none; http takes a token as the name of the user.
    password = re.search(r"(?<!github:)//[^/\s,:@]*:(?!\d+/)[^\s,@]*@|https?://[^/?#\s,@]*@", text)
    secret = re.search(r"(?i)[?&][^=&\s]*(secret|token|passw|pwd|auth|sig|key|credential)[^=&\s]*=", text)
    if "://" in text and (password or secret):
        raise ConfigError(f"{key} holds credentials; give them in the environment (AWS_..., ~/.netrc), not in a URL")
