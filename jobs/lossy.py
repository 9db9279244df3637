"""What pydantic writes into JSON as something else, without an error."""

import math
from collections.abc import Iterable, Mapping
from typing import cast

from pydantic import Secret, SecretBytes, SecretStr

__all__ = ["MASK", "holds_secret", "not_finite"]

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
