"""What pydantic writes into JSON as something else, or reads as something else again, without an error."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from numbers import Number
from typing import cast

import pydantic_core
from pydantic import BaseModel, Secret, SecretBytes, SecretStr
from pydantic_core import PydanticSerializationError

from .kinds import ONE_KIND, other_kind
from .schemas import DICTS, Schema, parts_of

__all__ = [
    "HALF",
    "MASK",
    "STAR",
    "Leaving",
    "becomes_another",
    "changed_fields",
    "classes_in",
    "fields_left_out",
    "fields_of",
    "has_half_characters",
    "held_by",
    "is_changed",
    "is_other",
    "loses_numbers",
    "masks_secret",
    "may_be_unreadable",
    "may_become_another",
    "may_change",
    "may_have_keys",
    "may_hold_floats",
    "not_finite",
    "runs_again",
    "same_but_for_order",
    "told",
]

Leaving = Callable[[object], bool]  # a field's exclude_if

MASK = b'"**********"'  # for SecretStr, SecretBytes and Secret
STAR = MASK[1]  # looked for first: one byte is found in a tenth of the time
HALF = "\ufffd".encode()  # for half a character, in a key

# Types of pydantic's core schemas that hold no float themselves; a Decimal that is no number is written as text.
_WITHOUT_FLOATS = frozenset(
    (
        *("bool", "bytes", "date", "datetime", "decimal", "int", "literal", "none", "str", "time", "timedelta", "uuid"),
        *("model", "model-field", "model-fields", "dataclass", "dataclass-args", "dataclass-field"),
        *("typed-dict", "typed-dict-field", "dict", "frozenset", "list", "set", "tuple"),
        *("default", "definition-ref", "definitions", "nullable", "tagged-union", "union", "url", "multi-host-url"),
    )
)
_PLAIN = frozenset(  # of which no member of a union is taken for a model, or a list of such
    (
        *("bool", "bytes", "date", "datetime", "decimal", "enum", "float", "int", "literal", "none", "str", "time"),
        *("timedelta", "url", "uuid"),
    )
)
_OF_A_CLASS = frozenset(("model", "dataclass", "definition-ref"))
_TEMPORAL = frozenset(("ser_json_temporal", "val_temporal_unit"))
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
        return _holds_secret(dump())
    except TypeError:
        return True


def _holds_secret(value: object) -> bool:
    """Whether there is one in it that is not empty."""
    match value:
        case SecretStr() | SecretBytes() | Secret():
            return bool(cast(object, value.get_secret_value()))
        case Mapping():
            pairs = cast(Mapping[object, object], value)
            return any(map(_holds_secret, (*pairs, *pairs.values())))
        case list() | tuple() | set() | frozenset() | deque():
            return any(map(_holds_secret, cast(Iterable[object], value)))
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


def may_have_keys(schema: object) -> bool:
    """Whether a value of this core schema of pydantic's may have texts as keys that its model does not name."""
    return any(part.get("type") in DICTS for part in parts_of(schema))


def may_hold_floats(schema: object) -> bool:
    """Whether a value of this core schema of pydantic's may have a float in it: most payloads cannot, and need no look
    at each of their values. True also where that does not tell, as of `Any` or a serializer of the author's."""
    return any(map(_may_hold_floats, parts_of(schema)))


def _may_hold_floats(part: Schema) -> bool:
    match part:
        case {"type": "enum"}:
            return any(isinstance(member.value, float) for member in cast(list[Enum], part["members"]))
        case _ if _takes_more(part):
            return True
        case _:
            return isinstance(kind := part.get("type"), str) and kind not in _WITHOUT_FLOATS


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


def may_become_another(schema: object) -> bool:
    """Whether a value of this core schema of pydantic's may be read from its own JSON as another one: where a union has
    several models, of which the first that fits best is taken; where a function chooses, which finds names in place of
    aliases; and where bytes are not read as they are written."""
    return any(map(_may_become_another, parts_of(schema)))


def _may_become_another(part: Schema) -> bool:
    if part.get("ser_json_bytes", "utf8") != part.get("val_json_bytes", "utf8"):
        return True
    if part.get("type") == "tagged-union" and callable(part["discriminator"]):
        return True
    if part.get("type") != "union":
        return False
    choices = cast(list[tuple[Schema, str] | Schema], part["choices"])
    kinds = [choice[0] if isinstance(choice, tuple) else choice for choice in choices]
    several = sum(kind["type"] not in _PLAIN for kind in kinds) > 1
    # A value of it may be, or have in it, a model or a dataclass: a list of numbers is read as one.
    return several and any(its.get("type") in _OF_A_CLASS for its in parts_of(kinds))


def may_be_unreadable(schema: object) -> bool:
    """Whether JSON that is written of a value of this core schema of pydantic's may not be taken by it: where an enum
    has values for which JSON has no form of their own, where a literal is a member of an enum, of which its value is
    written, where a field is left out and has no default, and where fields of a derived class are written; or may be
    taken without a value that is left out, in place of which stands the default."""
    return any(map(_may_be_unreadable, parts_of(schema)))


def _may_be_unreadable(part: Schema) -> bool:
    match part:
        case {"type": "enum"}:
            members = cast(list[Enum], part["members"])
            return not all(isinstance(member.value, str | int | float | None) for member in members)
        case {"type": "literal"}:
            return not all(isinstance(value, str | int | None) for value in cast(list[object], part["expected"]))
        case {"serialization_exclude": True, "schema": {"type": str() as kind}} if kind != "default":
            return True
        case {"serialization": {"type": "any"}} | {"config": {"polymorphic_serialization": True}}:
            return True
        case _:
            return _may_be_left_out(part)


def may_change(schema: object) -> bool:
    """Whether a value of this core schema of pydantic's may be read from its own JSON with other values in it: where a
    validator, or what runs when a model has been made, changes again what it has changed before; where a field's alias
    is the name of another one, or may be that of an extra value; and where times are numbers, of which it is guessed
    what they count."""
    parts = list(parts_of(schema))
    return any(map(_may_change, parts)) or (any(map(_takes_more, parts)) and any(map(_has_other_names, parts)))


def _may_change(part: Schema) -> bool:
    match part:
        case {"type": "function-before" | "function-after" | "function-wrap" | "function-plain"}:
            return True
        case {"post_init": bool() | str() as post_init} if post_init:
            return True
        case {"type": "dataclass-field", "init": False}:  # it is written, and not read
            return True
        case {"custom_init": True}:
            return True
        case _:
            return bool(part.keys() & _TEMPORAL) or _has_names_as_aliases(part)


def runs_again(schema: object) -> bool:
    """Whether a model of this core schema of pydantic's, that was made before, has code of its authors run when it is
    checked: a validator of the whole model, or all of them."""
    match schema:
        case {"type": "definitions"}:
            return runs_again(cast(Mapping[str, object], schema)["schema"])
        case {"type": "model" | "dataclass"}:
            parts = cast(Mapping[str, Mapping[str, object]], schema)
            ways = (parts.get("revalidate_instances"), parts.get("config", {}).get("revalidate_instances"))
            return any(way not in (None, "never") for way in ways)
        case _:
            return True


def _takes_more(part: Schema) -> bool:
    """Whether values are kept of which the model has no field."""
    return "allow" in (part.get("extra_behavior"), part.get("extra_fields_behavior"))


def _has_names_as_aliases(part: Schema) -> bool:
    aliases = _aliases(part)
    return any((names & aliases.keys()) - {name} for name, names in aliases.items())


def _has_other_names(part: Schema) -> bool:
    return any(names - {name, None} for name, names in _aliases(part).items())


def _aliases(part: Schema) -> dict[object, set[object]]:
    """Of each field in it what `_first_names` tells."""
    return {name: _first_names(field.get("validation_alias")) for name, field in _fields(part).items()}


def _fields(part: Schema) -> Mapping[object, Schema]:
    match part:
        case {"type": "model-fields" | "typed-dict"}:
            return cast(Mapping[object, Schema], part["fields"])
        case {"type": "dataclass-args"}:
            return {field["name"]: field for field in cast(list[Schema], part["fields"])}
        case _:
            return {}


def fields_left_out(schema: object) -> dict[type, dict[str, Leaving | None]]:
    """The models and dataclasses of this core schema of pydantic's, with their fields, and what each of these has as
    `exclude_if`; empty where it leaves out no value."""
    parts = list(parts_of(schema))
    if not any(map(_may_be_left_out, parts)):
        return {}
    found = dict[type, dict[str, Leaving | None]]()
    for part in parts:
        if part.get("type") in ("model", "dataclass"):
            inner = cast(Schema, part["schema"])
            while str(inner.get("type")).startswith("function-") and "schema" in inner:  # validators of the whole
                inner = cast(Schema, inner["schema"])
            fields = cast(Mapping[str, Schema], _fields(inner))
            found[cast(type, part["cls"])] = {
                name: cast("Leaving | None", field.get("serialization_exclude_if")) for name, field in fields.items()
            }
    return found


def _may_be_left_out(part: Schema) -> bool:
    return part.get("serialization_exclude_if") is not None or part.get("type") == "missing-sentinel"


def _first_names(alias: object) -> set[object]:
    """Of an alias, of one with a path, or of a choice of such: what has to be there for it."""
    if not isinstance(alias, list):
        return {alias}
    paths = cast(list[object], alias)
    return set[object]().union(*map(_first_names, paths if isinstance(paths[0], list) else paths[:1]))


def classes_in(schema: object) -> frozenset[type]:
    """The models and dataclasses that this core schema of pydantic's names."""
    return frozenset(cast(type, part["cls"]) for part in parts_of(schema) if part.get("type") in ("model", "dataclass"))


def becomes_another(
    value: object,
    read: object,
    classes: frozenset[type],
    in_doubt: Mapping[type, Mapping[str, bool]],
    left_out: Mapping[type, Mapping[str, Leaving | None]],
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
            some += cast(Mapping[object, object], value).values()
            there += cast(Mapping[object, object], read).values()
        case list() | tuple() | deque(), list() | tuple() | deque():
            some += cast(Iterable[object], value)
            there += cast(Iterable[object], read)
        case set() | frozenset(), set() | frozenset():  # what has not arrived, which may stand in any order, by kinds
            given, got = cast(frozenset[object], value), cast(frozenset[object], read)
            some += sorted(given - got, key=lambda item: id(_kind_of(item, classes)))
            there += sorted(got - given or got, key=lambda item: id(_kind_of(item, classes)))
        case _:
            kind = _kind_of(value, classes)
            if kind is not None and kind is not type(read):
                return (
                    f"a {kind.__name__} of which the handler would get a {type(read).__name__}: give the models "
                    "of the union a Literal field each, and Field(discriminator=)"
                )
            for name, leaves in left_out.get(kind or type(None), {}).items():
                its = getattr(read, name, None)  # of an InitVar there is nothing
                held = getattr(value, name, its)
                is_out = held is _MISSING or (leaves is not None and leaves(held))
                if is_out and held != its and not _is_the_same(held, its, tidied=False):
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


def _kind_of(value: object, classes: frozenset[type]) -> type | None:
    return next((kind for kind in type(value).__mro__ if kind in classes), None)


def is_changed(value: object, read: object, classes: frozenset[type], *, tidied: bool = False) -> bool:
    """Whether what was `read` of the JSON of `value` has other values in it. What arrives in another type, as where the
    schema says `Any`, is not looked into. classes: as of `becomes_another`. tidied: texts with the same letters and
    digits are the same, and times of which parts of a second were cut off."""
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
        case _:
            if not any(kind in classes for kind in type(value).__mro__):
                if type(value) is not type(read) and not (isinstance(value, Number) and isinstance(read, Number)):
                    return False
                if type(value).__eq__ is object.__eq__:
                    return False
                if tidied:
                    value, read = _tidied(value), _tidied(read)
                return value != read and not _is_the_same(value, read, tidied)
            if not isinstance(value, type(read)):
                return True
            names = fields_of(read)
            some += [getattr(value, name) for name in names]
            there += [getattr(read, name) for name in names]
    return len(some) != len(there) or any(
        is_changed(held, its, classes, tidied=tidied) for held, its in zip(some, there, strict=True)
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
