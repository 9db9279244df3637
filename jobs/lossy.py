"""What pydantic writes into JSON as something else, without an error."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from pydantic import Secret, SecretBytes, SecretStr

__all__ = ["MASK", "held_by", "holds_secret", "loses_numbers", "not_finite"]

MASK = b'"**********"'  # for SecretStr, SecretBytes and Secret


def holds_secret(value: object) -> bool:
    """Whether there is one in it that is not empty."""
    match value:
        case SecretStr() | SecretBytes() | Secret():
            return bool(cast(object, value.get_secret_value()))
        case Mapping():
            return any(map(holds_secret, cast(Mapping[object, object], value).values()))
        case list() | tuple() | set() | frozenset():
            return any(map(holds_secret, cast(Iterable[object], value)))
        case _:
            return False


def not_finite(value: object) -> int:
    """How many floats in it are NaN or infinite."""
    match value:
        case float():
            return not math.isfinite(value)
        case Mapping():
            return sum(map(not_finite, cast(Mapping[object, object], value).values()))
        case list() | tuple() | set() | frozenset():
            return sum(map(not_finite, cast(Iterable[object], value)))
        case _:
            return 0


def loses_numbers(value: object, read: object) -> bool:
    """Whether a float that is NaN or infinite in `value` is None in what was `read` of its JSON, in the same order."""
    match value, read:
        case float(), None:
            return not math.isfinite(value)
        case Mapping(), Mapping():
            some: Iterable[object] = cast(Mapping[object, object], value).values()
            there: Iterable[object] = cast(Mapping[object, object], read).values()
        case list() | tuple() | set() | frozenset(), list():
            some, there = cast(Iterable[object], value), cast(Iterable[object], read)
        case _:
            return False
    return any(loses_numbers(held, its) for held, its in zip(some, there, strict=False))


def held_by(dump: Callable[..., object]) -> object:
    """What a model holds, which `dump` tells; in its form for JSON where Python has none, as of a set of models, which
    would be one of dicts."""
    try:
        return dump()
    except TypeError:
        return dump(mode="json")
