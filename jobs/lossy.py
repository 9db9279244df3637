"""What pydantic writes into JSON as something else, or reads as something else again, without an error."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from numbers import Number
from operator import itemgetter
from typing import cast

import pydantic_core
from pydantic import BaseModel, Secret, SecretBytes, SecretStr
from pydantic_core import PydanticSerializationError, SchemaSerializer

from .doubts import Leaving, LeftOut
from .kinds import ONE_KIND, other_kind

__all__ = [
    "HALF",
    "MASK",
    "STAR",
    "becomes_another",
    "changed_fields",
    "fields_of",
    "has_half_characters",
    "held_by",
    "holds_secret",
    "is_changed",
    "is_other",
    "loses_numbers",
    "masks_secret",
    "not_finite",
    "same_but_for_order",
    "told",
]

MASK = b'"**********"'  # for SecretStr, SecretBytes and Secret
STAR = MASK[1]  # looked for first: one byte is found in a tenth of the time
HALF = "\ufffd".encode()  # for half a character, in a key

_MISSING: object = getattr(pydantic_core, "MISSING", object())  # came with pydantic 2.12
_LEAVES = frozenset((str, int, float, bool, type(None)))
_NO_TEXT = (
    "it holds bytes that are no UTF-8, as which JSON gets them: give the model that they stand in "
    "ConfigDict(ser_json_bytes='base64', val_json_bytes='base64')"
)
_BYTES = "bytes of which the handler would get others: ConfigDict(val_json_bytes=) has to be what ser_json_bytes= is"


def told(error: Exception) -> str:
    """What there is to say of an error of pydantic's."""
    no_text = isinstance(error, PydanticSerializationError) and "invalid utf-8 sequence" in str(error)
    return _NO_TEXT if no_text else str(error)


def masks_secret(dump: Callable[..., object]) -> bool:
    """Whether a mask in the JSON of what `dump` tells stands for a secret. Also where Python has no form of that, so
    that nothing tells it from a text."""
    try:
        return holds_secret(dump())
    except TypeError:
        return True


def holds_secret(value: object) -> bool:
    """Whether there is a secret in it that is not empty."""
    match value:
        case SecretStr() | SecretBytes() | Secret():
            return bool(cast(object, value.get_secret_value()))
        case Mapping():
            pairs = cast(Mapping[object, object], value)
            return any(map(holds_secret, (*pairs, *pairs.values())))
        case list() | tuple() | set() | frozenset() | deque():
            return any(map(holds_secret, cast(Iterable[object], value)))
        case _:
            return False


def has_half_characters(value: object) -> bool:
    """Whether a key in it has a lone surrogate, of which JSON gets `HALF`. In values, and in keys that
    are not declared as texts, pydantic refuses it."""
    match value:
        case Mapping():
            pairs = cast(Mapping[object, object], value)
            keys = "".join(key for key in pairs if isinstance(key, str))
            return keys.encode(errors="replace") != keys.encode(errors="surrogatepass") or any(
                map(has_half_characters, pairs.values())
            )
        case list() | tuple() | deque():
            return any(map(has_half_characters, cast(Iterable[object], value)))
        case _:
            return False


def not_finite(value: object) -> int:
    """How many floats in it are NaN or infinite."""
    match value:
        case float():
            return not math.isfinite(value)
        case Mapping():
            return sum(map(not_finite, cast(Mapping[object, object], value).values()))
        case list() | tuple() | set() | frozenset() | deque():
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
        case list() | tuple() | set() | frozenset() | deque(), list():
            some, there = cast(Iterable[object], value), cast(Iterable[object], read)
        case _:
            return False
    return any(loses_numbers(held, its) for held, its in zip(some, there, strict=False))


def becomes_another(
    value: object,
    read: object,
    classes: frozenset[type],
    in_doubt: Mapping[type, Mapping[str, bool]],
    left_out: LeftOut,
) -> str:
    """What in `value` is another one in what was `read` of its JSON, and what to do; empty where nothing is. classes:
    those of its schema. What is of none of them, as where the schema says `Any`, arrives without its class by design,
    and an instance of a class derived from one of them as that one. in_doubt: as `fields_in_doubt` has told, and
    left_out: as `fields_left_out` has."""
    some, there = list[object](), list[object]()
    match value, read:
        case Mapping(), _ if type(read) in classes:
            return f"a dict of which the handler would get a {type(read).__name__}: {ONE_KIND}"
        case bytes(), _:
            return _BYTES if (read.encode() if isinstance(read, str) else read) != value else ""
        case Mapping(), Mapping():
            pairs, its_pairs = cast(Mapping[object, object], value), cast(Mapping[object, object], read)
            for name, leaving in left_out.keys.items():
                is_there = name in its_pairs
                # What is left out is there again only as a default.
                if name not in pairs or (is_there and name not in left_out.defaults):
                    continue
                if _is_out(pairs[name], leaving) and (
                    not is_there or is_changed(pairs[name], its_pairs[name], classes, left_out=left_out)
                ):
                    return (
                        f"in {name} a value that is left out of the JSON (exclude_if, or MISSING), in place of which "
                        "the handler would get none, or the default: leave out the key, or exclude_if"
                    )
            names = [name for name in pairs if name in its_pairs]
            if len(names) < len(its_pairs):  # keys arrive as others
                some += pairs.values()
                there += its_pairs.values()
            else:
                some += [pairs[name] for name in names]
                there += [its_pairs[name] for name in names]
        case list() | tuple() | deque(), list() | tuple() | deque():
            some += cast(Iterable[object], value)
            there += cast(Iterable[object], read)
        case set() | frozenset(), set() | frozenset():
            some, there = _paired(cast(frozenset[object], value), cast(frozenset[object], read), classes, left_out)
        case _:
            kind = _kind_of(value, classes)
            if kind is not None and kind is not type(read):
                return (
                    f"a {kind.__name__} of which the handler would get a {type(read).__name__}: give the models "
                    "of the union a Literal field each, and Field(discriminator=)"
                )
            for name, leaving in left_out.fields.get(kind or type(None), {}).items():
                its = getattr(read, name, None)  # of an InitVar there is nothing
                held = getattr(value, name, its)
                if _is_out(held, leaving) and is_changed(held, its, classes, left_out=left_out):
                    return (
                        f"in {name} a value that is left out of the JSON (exclude_if, or MISSING), in place of which "
                        "the handler would get the default: make that value the default"
                    )
            names = fields_of(read) if kind is not None else []
            some += [getattr(value, name) for name in names]
            there += [getattr(read, name) for name in names]
            doubtful = in_doubt.get(type(read), {})
            for name in names:
                declared = doubtful.get(name)
                if declared is not None and (told := other_kind(getattr(value, name), getattr(read, name), declared)):
                    return f"in {name} {told}"
    for held, its in zip(some, there, strict=False):
        if type(held) not in _LEAVES and (told := becomes_another(held, its, classes, in_doubt, left_out)):
            return told
    return ""


def _is_out(held: object, leaving: Iterable[Leaving]) -> bool:
    """Whether JSON has left it out. leaving: what decides that; some may be made for values of another typed dict."""
    for leaves in leaving:
        with suppress(Exception):  # it has not left it out: pydantic would have raised, too
            if leaves(held):
                return True
    return held is _MISSING


def _kind_of(value: object, classes: frozenset[type]) -> type | None:
    return next((kind for kind in type(value).__mro__ if kind in classes), None)


def _paired(
    given: frozenset[object],
    got: frozenset[object],
    classes: frozenset[type],
    left_out: LeftOut,
) -> tuple[list[object], list[object]]:
    """What has not arrived, and what has in place of it: it may stand in any order, and is found by what JSON has of
    it, as it stands there or else in order, or by kinds."""
    lost, rest = list(given - got), list(got - given or got)
    some, there = list[object](), list[object]()
    for in_order in (False, True):  # as it stands tells apart what differs in the order of a list
        if not lost:
            return some, there
        places = [(_place(item, classes, left_out, in_order=in_order), item) for item in lost]
        arrived = {_place(its, classes, left_out, in_order=in_order): its for its in rest}
        some += [item for place, item in places if place in arrived]
        there += [arrived[place] for place, _ in places if place in arrived]
        lost = [item for place, item in sorted(places, key=itemgetter(0)) if place not in arrived]
        rest = [arrived[place] for place in sorted(arrived.keys() - dict(places).keys() or arrived)]
    return some + lost, there + (rest if lost else [])


def _place(item: object, classes: frozenset[type], left_out: LeftOut, *, in_order: bool) -> tuple[int, str]:
    """Its kind, and what JSON has of it. in_order: also of the lists in it, as those of sets."""
    kind = _kind_of(item, classes)
    if serializer := cast(SchemaSerializer | None, getattr(kind, "__pydantic_serializer__", None)):
        text = serializer.to_json(item, round_trip=True, by_alias=False, warnings=False, fallback=repr)
        return id(kind), repr(_in_order(json.loads(text))) if in_order else text.decode()
    if kind is not None:  # a dataclass of the standard library
        its = left_out.fields.get(kind) or {field.name: list[Leaving]() for field in fields(kind)}
        held = [(getattr(item, name, None), leaving) for name, leaving in its.items()]
        parts: Iterable[object] = [_MISSING if _is_out(each, leaving) else each for each, leaving in held]
    elif isinstance(item, tuple | set | frozenset):
        parts = cast(Iterable[object], item)
    else:
        return id(kind), repr(item)
    places = [_place(part, classes, left_out, in_order=in_order) for part in parts]
    return id(kind), repr(sorted(places) if isinstance(item, set | frozenset) else places)


def is_changed(
    value: object,
    read: object,
    classes: frozenset[type],
    *,
    tidied: bool = False,
    left_out: LeftOut | None = None,
) -> bool:
    """Whether what was `read` of the JSON of `value` has other values in it. What arrives in another type, as where the
    schema says `Any`, is not looked into. classes: as of `becomes_another`. tidied: texts with the same letters and
    digits are the same, and times of which parts of a second were cut off. left_out: as `fields_left_out` has told,
    where `read` is a default, of which no field was read: all count that JSON would have, and so does another type."""
    some, there = list[object](), list[object]()
    match value, read:
        case Mapping(), Mapping():
            pairs, its_pairs = cast(Mapping[object, object], value), cast(Mapping[object, object], read)
            if pairs.keys() == its_pairs.keys():  # in any order
                its_pairs = {key: its_pairs[key] for key in pairs}
            some += [*pairs, *pairs.values()]
            there += [*its_pairs, *its_pairs.values()]
        case list() | tuple() | deque(), list() | tuple() | deque():
            some += cast(Iterable[object], value)
            there += cast(Iterable[object], read)
        case set() | frozenset(), set() | frozenset() if left_out is not None:
            given, got = cast(frozenset[object], value), cast(frozenset[object], read)
            if len(given) != len(got):
                return True
            some, there = _paired(given, got, classes, left_out)
        case _:
            if not any(kind in classes for kind in type(value).__mro__):
                is_alike = type(value) is type(read) or (isinstance(value, Number) and isinstance(read, Number))
                if not is_alike and left_out is None:
                    return False
                if is_alike and type(value).__eq__ is object.__eq__ and not isinstance(value, Enum):
                    return False
                if tidied:
                    value, read = _tidied(value), _tidied(read)
                return value != read and not _is_the_same(value, read, tidied)
            if left_out is not None:
                kind = _kind_of(value, classes)
                if kind is None or kind is not _kind_of(read, classes):
                    return True
                names = [name for name in left_out.fields[kind] if hasattr(value, name) and hasattr(read, name)]
                some.append(getattr(value, "model_extra", None) or {})
                there.append(getattr(read, "model_extra", None) or {})
            elif isinstance(value, type(read)):
                names = fields_of(read)
            else:
                return True
            some += [getattr(value, name) for name in names]
            there += [getattr(read, name) for name in names]
    return len(some) != len(there) or any(
        is_changed(held, its, classes, tidied=tidied, left_out=left_out) for held, its in zip(some, there, strict=True)
    )


def _is_the_same(value: object, read: object, tidied: bool) -> bool:
    """Whether these are the same, though they do not compare as equal."""
    match value, read:
        case float() | Decimal(), float() | Decimal() if isinstance(value, float) or isinstance(read, float):
            # As of a Decimal that was set as 0.1, or of shares that are divided by their sum once more.
            if math.isclose(value, read, rel_tol=1e-13):
                return True
        case (datetime() | time(), datetime() | time()) if (value.tzinfo is None) != (read.tzinfo is None):
            return True  # another type, as it were
        case datetime(), datetime():  # in an hour that comes twice, those of two zones are never equal
            none = timedelta()
            zones = (value.utcoffset() or none) - (read.utcoffset() or none)
            apart = abs(value.replace(tzinfo=None) - read.replace(tzinfo=None) - zones)
            return apart < timedelta(seconds=1) if tidied else not apart
        case _:
            pass
    return value != value and read != read  # NaN


def _tidied(value: object) -> object:
    match value:
        case str():
            return "".join(filter(str.isalnum, value.casefold()))
        case set() | frozenset():
            return frozenset(map(_tidied, cast(Iterable[object], value)))
        case _:
            return value


def same_but_for_order(text: bytes, other: bytes) -> bool:
    """Whether these are the same JSON, of which lists, as those of sets, may come in any order. With a key twice, as of
    a field and an extra value, it is longer."""
    return len(text) == len(other) and repr(_in_order(json.loads(text))) == repr(_in_order(json.loads(other)))


def is_other(text: bytes, other: bytes) -> bool:
    """Whether these are JSON of other values, save for what is put in order."""
    if text == other or same_but_for_order(text, other):
        return False
    return is_changed(json.loads(text), json.loads(other), frozenset(), tidied=True)


def _in_order(value: object) -> object:
    match value:
        case dict():
            pairs = cast(dict[str, object], value)
            return {name: _in_order(pairs[name]) for name in sorted(pairs)}
        case list():
            return sorted(map(_in_order, cast(list[object], value)), key=repr)
        case _:
            return value


def changed_fields(value: object, read: object, classes: frozenset[type]) -> str:
    """The names of those that `is_changed` finds, for people."""
    names = fields_of(read)
    return ", ".join(name for name in names if is_changed(getattr(value, name), getattr(read, name), classes))


def fields_of(read: object) -> list[str]:
    """The names of those of a model's, or a dataclass' fields that were read; not of those with `exclude`, say."""
    if isinstance(read, BaseModel):
        return [name for name in type(read).model_fields if name in read.model_fields_set]
    return [field.name for field in fields(read)] if is_dataclass(read) and not isinstance(read, type) else []


def held_by(dump: Callable[..., object]) -> object:
    """What a model holds, which `dump` tells; in its form for JSON where Python has none, as of a set of models, which
    would be one of dicts."""
    try:
        return dump()
    except TypeError:
        return dump(mode="json")
