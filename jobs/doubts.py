"""Of which types JSON may make other values, or leave some out: what their core schemas of pydantic's tell of that,
asked once a type. Only values of such types are looked at, by `lossy`."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple, cast

from .schemas import DICTS, Schema, parts_of

__all__ = [
    "Leaving",
    "LeftOut",
    "classes_in",
    "fields_left_out",
    "may_be_unreadable",
    "may_become_another",
    "may_change",
    "may_have_keys",
    "may_hold_floats",
    "runs_again",
    "wants_the_future",
]

Leaving = Callable[[object], bool]  # a field's exclude_if


class LeftOut(NamedTuple):
    """What JSON may leave out of a value, with all that decides it; empty where it leaves out nothing."""

    fields: Mapping[type, Mapping[str, list[Leaving]]]  # of models and dataclasses, all those that JSON may have
    keys: Mapping[str, list[Leaving]]  # of all typed dicts, as no value tells which it is of
    defaults: set[str]  # those of the keys that may be read though they were left out


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


def wants_the_future(schema: object) -> bool:
    """Whether a value of this core schema of pydantic's may be none later, since it holds a time that must not have
    come yet. What must be past stays so."""
    return any(part.get("now_op") == "future" for part in parts_of(schema))


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


def fields_left_out(schema: object) -> LeftOut:
    """What JSON may leave out of a value of this core schema of pydantic's."""
    fields, keys, defaults = dict[type, dict[str, list[Leaving]]](), dict[str, list[Leaving]](), set[str]()
    parts = list(parts_of(schema))
    for part in parts if any(map(_may_be_left_out, parts)) else []:
        if part.get("type") == "typed-dict":
            its = cast(Mapping[str, Schema], _fields(part))
            for name, leaving in _leaving(its).items():
                keys.setdefault(name, []).extend(leaving)
            defaults.update(name for name, field in its.items() if cast(Schema, field["schema"])["type"] == "default")
        if part.get("type") in ("model", "dataclass"):
            inner = cast(Schema, part["schema"])
            while str(inner.get("type")).startswith("function-") and "schema" in inner:  # validators of the whole
                inner = cast(Schema, inner["schema"])
            its = {"root": inner} if part.get("root_model") else cast(Mapping[str, Schema], _fields(inner))
            fields[cast(type, part["cls"])] = _leaving(its)
    return LeftOut(fields, keys, defaults)


def _leaving(fields: Mapping[str, Schema]) -> dict[str, list[Leaving]]:
    """Of those that JSON may have, what they have as `exclude_if`."""
    return {
        name: [cast(Leaving, leaves)] if (leaves := field.get("serialization_exclude_if")) else []
        for name, field in fields.items()
        if not field.get("serialization_exclude")
    }


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
