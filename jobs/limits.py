"""What pydantic writes into JSON and does not read, for its depth or its digits."""

import re
from collections.abc import Mapping
from itertools import repeat
from typing import cast

from pydantic_core import from_json, to_json

from .lossy import fields_of
from .schemas import named_parts, parts_of

__all__ = ["may_be_nested", "too_much_in"]

_DEEPEST, _MOST_DIGITS = 200, 4_300  # that pydantic reads
_SIZE = _MOST_DIGITS // 2
_TWO_DIGITS, _ALL_DIGITS = re.compile(rb"[0-9](?=[0-9])"), re.compile(b"[0-9]{%d}" % _SIZE)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def may_be_nested(schema: object) -> bool:
    """Whether a value of this core schema of pydantic's may be nested to any depth: by models that hold themselves, or
    by what is not declared."""
    within = {
        name: {its["schema_ref"] for its in parts_of(part) if its.get("type") == "definition-ref"}
        for name, part in named_parts(schema).items()
    }
    for _ in list(within):
        within = {name: its.union(*(within.get(other, ()) for other in its)) for name, its in within.items()}
    return any(name in its for name, its in within.items()) or any(map(_holds_undeclared, parts_of(schema)))


def _holds_undeclared(part: Mapping[str, object]) -> bool:
    match part:
        case {"type": "any"} | {"extra_behavior": "allow"} | {"extra_fields_behavior": "allow"}:
            return True
        case _:
            return False


def too_much_in(value: object, text: bytes, *, nested: bool) -> str:
    """What in JSON of a value is more than pydantic reads, and in which fields; empty where nothing is. nested: as
    `may_be_nested` has told."""
    deep = nested and _is_deep(text)
    if not deep and (len(text) <= _MOST_DIGITS or not _has_digits(text)):
        return ""
    try:
        from_json(text)
        return ""
    except ValueError as error:
        told = "is nested deeper than by 200" if "recursion" in str(error) else "has a number of more than 4,300 digits"
    if isinstance(value, Mapping):
        parts = dict(cast(Mapping[object, object], value))
    else:
        parts = {name: getattr(value, name) for name in fields_of(value)}
    names = [str(name) for name, part in parts.items() if _is_too_much({name: part})]
    return f"{', '.join(names) or 'it'} {told}, more than the handler's model can be read of"


def _is_deep(text: bytes) -> bool:
    """Whether it may be nested so deep: unless taking away the innermost brackets, again and again, takes all."""
    if text.count(b"[") + text.count(b"{") <= _DEEPEST:
        return False
    left = text.translate(None, _NO_BRACKETS)
    for _ in range(_DEEPEST // 2):  # two levels at most
        inside, left = len(left), left.replace(b"[]", b"").replace(b"{}", b"")
        if len(left) == inside:  # nothing is left, or some are in texts
            break
    return bool(left)


def _has_digits(text: bytes) -> bool:
    """Whether it may hold so many in a row: those have two of every so many characters, and all between them."""
    starts = map(_SIZE.__mul__, map(re.Match[bytes].start, _TWO_DIGITS.finditer(text[::_SIZE])))
    return any(map(_ALL_DIGITS.match, repeat(text), starts))


def _is_too_much(value: object) -> bool:
    try:
        from_json(to_json(value))
    except ValueError:
        return True
    return False
