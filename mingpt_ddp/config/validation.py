"""Validate plain values with pydantic. The error of an invalid value is one line with its key."""

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from mingpt_ddp.errors import ConfigError

T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
SCALARS = (bool, int, float, str, type(None))  # types that YAML can represent
NESTED = (list, tuple, dict, types.UnionType, typing.Union)
# Names that other programs use for our values.
SYNONYMS = {
    **dict.fromkeys(("float32", "32", "32-true", "float", "no"), "fp32"),
    **dict.fromkeys(("float16", "16", "16-mixed", "half", "amp"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("gpu", "mps"), "cuda"),
}
# Descriptions of valid values, by pydantic's names for types.
DESCRIPTIONS = {
    "integer": "must be a whole number",
    "number": "must be a number",
    "boolean": "must be true or false",
    "string": "must be a text",
}
MAX_NAME_BYTES = 255  # longest name of a file on Linux


class NotRegisteredError(ConfigError):
    """A selected name, such as the name of a model, is not registered.

    If a Python file of the user registers the name, the `code` key of the group has to name that
    file.
    """


def check(ok: object, message: str) -> None:
    """Raise a ConfigError if `ok` is false or empty.

    Args:
        message: Begins with `group.key=value` and ends with what to do.
    """
    if not ok:
        raise ConfigError(message)


def did_you_mean(key: str, known: Iterable[str], min_similarity: float = 0.6) -> str | None:
    """Return the known key that is most similar to `key`. None if no key is similar enough."""
    return next(iter(difflib.get_close_matches(key, list(known), n=1, cutoff=min_similarity)), None)


def check_choice(key: str, value: str, known: Iterable[str | None], also: str = "") -> None:
    """Refuse a value that is not registered.

    Args:
        also: Text about other valid values, which follows the registered ones in the message.

    Raises:
        NotRegisteredError: The message lists the registered values, and suggests one of them.
    """
    names = [*map(str, known)]
    if value in names:
        return
    if not names:
        raise NotRegisteredError(
            f"{key}={value} is not registered: the configuration does not name the Python file "
            f"that registers it ({key.partition('.')[0]}.code){also}"
        )
    meant = did_you_mean(value, names)
    hint = f"{', '.join(names)}{also}{f'; did you mean {meant}?' if meant else ''}"
    raise NotRegisteredError(f"{key}={value} must be one of {hint}")


def hint_at(key: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `did you mean ...?` for the most similar known key, or else the list of all keys."""
    meant = did_you_mean(key, known)
    return f"did you mean {prefix}{meant}?" if meant else f"use one of {', '.join(known)}"


def field_types(cls: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, with their `Annotated` metadata."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator for a dataclass."""
    return TypeAdapter(with_config(STRICT)(cls))


def build(cls: type[T], values: Any, where: str) -> T:
    """Build an instance of the dataclass `cls` from a mapping of its fields.

    Args:
        values: Plain Python values, with interpolations resolved.
        where: Dotted name of the group, for messages.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type or is out of bounds.
    """
    check(isinstance(values, Mapping), f"{where}={values!r} must be a group of keys")
    hints = field_types(cls)
    plain = {key: _convert_exact_number(value, hints.get(key)) for key, value in values.items()}
    prefix = f"{where}." if where else ""
    not_utf8 = []
    for key, value in plain.items():
        text = json.dumps([key, value], default=str, ensure_ascii=False)
        if re.search("[\ud800-\udfff]", text):  # surrogates stand for bytes that are not UTF-8
            not_utf8.append(str(key))
    check(
        not not_utf8,
        f"{prefix}{', '.join(not_utf8)} has bytes that are not UTF-8; use other characters",
    )
    validator = adapter(typing.cast(Any, cls))
    try:
        return typing.cast(T, validator.validate_json(json.dumps(plain, default=str)))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        cause = errors[0].get("ctx", {}).get("error")
        # The cause is an AssertionError or ValueError from a user's __post_init__.
        if isinstance(cause, Exception):
            raise cause from None
        raise ConfigError(_message(errors, hints, prefix)) from error


def is_supported(hint: Any) -> bool:
    """Return True if YAML can represent values of this type."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Annotated:
        return is_supported(args[0])
    if origin is Literal:
        return True
    if origin in NESTED:
        return all(is_supported(part) for part in args)
    return hint in SCALARS


def type_parts(hint: Any) -> Iterator[Any]:
    """Yield all type arguments of a type, nested ones first, then the type itself."""
    for part in typing.get_args(hint):
        yield from type_parts(part)
    yield hint


def _convert_exact_number(value: Any, hint: Any) -> Any:
    """Convert 1e3 to an int if an int is allowed, and 7 to a str if only a str is allowed."""
    allowed = list(type_parts(hint))
    takes_list = any(typing.get_origin(part) in (list, tuple) for part in allowed)
    if isinstance(value, (list, tuple)) and takes_list:
        return [_convert_exact_number(item, hint) for item in value]
    kinds = [kind for kind in (int, float, str) if kind in allowed]
    if type(value) is int:
        is_too_large = int in kinds and abs(value) >= 2**63  # beyond int64
        return str(value) if kinds == [str] or is_too_large else value
    if isinstance(value, float) and int in kinds and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return value


def _message(errors: list[Any], hints: dict[str, Any], prefix: str) -> str:
    """Describe the first error of pydantic in one line. Unknown keys come before other errors."""
    first = min(errors, key=lambda error: error["type"] != "unexpected_keyword_argument")
    key = first["loc"][0]
    if first["type"] == "unexpected_keyword_argument":
        return f"{prefix}{key} is not a key; {hint_at(key, hints, prefix)}"
    index = _index(first)
    if first["type"] == "missing":
        return f"{prefix}{key}{index} is missing; give it a value"
    wanted = []  # descriptions of valid values, one for each member of a union
    for error in errors:
        if error["loc"][0] == key and _index(error) == index:
            what = re.sub(r"^\w+ should ", "must ", error["msg"])
            wanted.append(DESCRIPTIONS.get(what.removeprefix("must be a valid "), what))
    text = " or ".join(dict.fromkeys(wanted)).replace(" or must be ", " or ")
    text = re.sub(r"0\.0{5,}\d+|\d{7,}", lambda digits: f"{float(digits[0]):g}", text)
    value = "null" if first["input"] is None else repr(first["input"])
    return f"{prefix}{key}{index}={value} {text}{_question(first['input'], hints[key])}"


def _question(value: Any, hint: Any) -> str:
    """Return `; did you mean ...?` if a text is similar to one of the allowed texts, else ""."""
    if not isinstance(value, str):
        return ""
    literals: list[str] = []
    for part in type_parts(hint):
        if typing.get_origin(part) is Literal:
            literals += map(str, typing.get_args(part))
    synonym = SYNONYMS.get(value.lower())
    meant = synonym if synonym in literals else did_you_mean(value, literals)
    return f"; did you mean {meant}?" if meant else ""


def _index(error: Any) -> str:
    """Return the list index in the location of an error, as in [1].

    If the type of the key is a union, the location also has the name of a type of that union.
    """
    return "".join(f"[{part}]" for part in error["loc"] if isinstance(part, int))


def refuse_credentials(key: str, text: str, one_url: bool = False) -> None:
    """Refuse a URL that contains a secret, because configurations are logged and saved.

    The error message does not show the secret.

    Args:
        one_url: True if the text is a single path or URL, whose password may contain spaces and
            commas. False if it may be several words.
    """
    end = "" if one_url else r"\s,@"
    # A password may contain slashes, but the text after the colon in host:8080/path is a port. http
    # accepts a token as the user name.
    secret = rf"(?<!github:)//[^/:{end}]*:(?!\d+/)[^@{end}]*@|https?://[^/?#@{end}]*@"
    secret += rf"|(?<!http:)(?<!https:)//[^/:@{end}]*:\d+/[^/@{end}]*@[^/{end}]+/"
    secret += r"|[?&#][^=&\s]*(secret|token|passw|pwd|auth|sig|key|credential)[^=&\s]*="
    if "://" in text and re.search(secret, text, re.IGNORECASE):
        raise ConfigError(
            f"{key} contains credentials; put them in environment variables (AWS_...) or in "
            "~/.netrc, not in a URL"
        )


def check_directory(name: str, path: str) -> None:
    """Require the path of a local directory."""
    refuse_credentials(name, path, one_url=True)
    check(path.strip() and "://" not in path, f"{name}={path} must be a local directory")
    longest = max(len(part.encode(errors="surrogatepass")) for part in path.split("/"))
    check(
        longest <= MAX_NAME_BYTES,
        f"{name} has a directory name of more than {MAX_NAME_BYTES} bytes; shorten it",
    )


def check_url(name: str, url: str) -> None:
    """Require a path or URL without credentials."""
    refuse_credentials(name, url, one_url=True)
    check(url.strip(), f"{name} is empty; set it to a path or a URL")
