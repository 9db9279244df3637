"""Of which values JSON does not tell the kind, so that pydantic may read another one than was written: of a union of,
say, Decimals and texts, and of the keys of a dict. What a schema tells of that is found out once."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from numbers import Number
from typing import cast

from pydantic import BaseModel

from .schemas import DICTS, Schema, named_parts

__all__ = ["ONE_KIND", "ROOT", "fields_in_doubt", "other_kind"]

ROOT = type(None)  # stands for a payload that is no model
_TOLD_APART = frozenset(  # in a union: JSON has a form for each, or `lossy` tells of what is of another class
    ("any", "bool", "float", "int", "none", "model", "dataclass", "typed-dict", "generator")
)
_CONTAINERS = DICTS | {"deque", "frozenset", "list", "set", "tuple"}
_INNER = ("choices", "items_schema", "keys_schema", "schema", "values_schema")
_KEYS = frozenset(
    (
        *("any", "bool", "bytes", "date", "datetime", "decimal", "float", "int", "str", "time", "timedelta"),
        *("lax-or-strict", "multi-host-url", "url", "uuid"),
        *("function-after", "function-before", "function-plain", "function-wrap"),
    )
)
_ASIDE = ("definitions", "default", "metadata", "python_schema", "serialization")  # of a schema: no values' own
_ARRAYS = (list, tuple, set, frozenset)
ONE_KIND = "declare one kind there, or models that have a Literal field each"


def fields_in_doubt(schema: object) -> dict[type, dict[str, bool]]:
    """The models and dataclasses of this core schema of pydantic's, with the names of their fields that hold such a
    union, or dict; of what is a payload without any model, `ROOT`. False: something in the field is declared as Any,
    which arrives as JSON has it, so that only its own keys can be told of."""
    found, refs, seen = dict[type, dict[str, bool]](), named_parts(schema), set[object]()
    undeclared = set[tuple[type, str]]()

    def collect(part: object, owner: type, field: str) -> None:
        if isinstance(part, list | tuple):
            for its in cast(Iterable[object], part):
                collect(its, owner, field)
        if not isinstance(part, Mapping):
            return
        parts = cast(Schema, part)
        match parts.get("type"):
            case "lax-or-strict":
                collect(_held(parts), owner, field)
            case "definition-ref":
                if (key := (parts["schema_ref"], owner, field)) not in seen:
                    seen.add(key)
                    collect(refs.get(parts["schema_ref"]), owner, field)
            case "model" | "dataclass":
                if (cls := cast(type, parts["cls"])) not in seen:
                    seen.add(cls)
                    collect(parts["schema"], cls, "root")
            case "model-fields":
                for name, its in cast(Schema, parts["fields"]).items():
                    collect(its, owner, name)
            case "dataclass-field":
                collect(parts["schema"], owner, cast(str, parts["name"]))
            case kind:
                if kind == "any":
                    undeclared.add((owner, field))
                if _is_in_doubt(parts, refs):
                    found.setdefault(owner, {})[field] = True
                aside = _ASIDE if isinstance(kind, str) else ()
                for name, its in parts.items():
                    if name not in aside:
                        collect(its, owner, field)

    collect(schema, ROOT, "root")
    return {owner: {name: (owner, name) not in undeclared for name in names} for owner, names in found.items()}


def _is_in_doubt(parts: Schema, refs: Mapping[object, object]) -> bool:
    match parts.get("type"):
        case "union":
            choices = cast(list[tuple[object, str] | Schema], parts["choices"])
            kinds = [_resolved(one[0] if isinstance(one, tuple) else one, refs) for one in choices]
            if parts.get("mode") == "left_to_right":
                return True
            containers = [kind for kind in kinds if kind.get("type") in _CONTAINERS]
            held = [leaf for kind in containers for leaf in _leaves(kind, refs, set())] if len(containers) > 1 else []
            scalars = [_scalar(kind) for kind in kinds if kind.get("type") not in _CONTAINERS]
            keys = {_resolved(kind["keys_schema"], refs).get("type") for kind in containers if "keys_schema" in kind}
            return len(keys) > 1 or _are_alike(scalars) or _are_alike(list(dict.fromkeys(held)))
        case "tagged-union":
            return callable(parts["discriminator"])  # it sees what JSON has made of a value
        case _ if "keys_schema" in parts:
            keys = _resolved(parts["keys_schema"], refs)
            match keys.get("type"):
                case "enum":
                    return not all(isinstance(member.value, str) for member in cast(list[Enum], keys["members"]))
                case "literal":
                    return not all(isinstance(value, str) for value in _expected(keys))
                case kind:
                    return kind not in _KEYS
        case _:
            return False


def _scalar(parts: Schema) -> object:
    """Its type; of a literal of an enum's members: the enum's."""
    kind = parts.get("type")
    return "enum" if kind == "literal" and any(isinstance(value, Enum) for value in _expected(parts)) else kind


def _expected(parts: Schema) -> list[object]:
    return cast(list[object], parts["expected"])


def _are_alike(kinds: list[object]) -> bool:
    """Whether JSON has one form for some of these."""
    doubtful = {"str" if kind == "literal" else kind for kind in kinds if kind not in _TOLD_APART}
    several = len([kind for kind in kinds if kind not in _TOLD_APART]) > 1
    return (several and doubtful != {"str"}) or ("enum" in kinds and len(kinds) > 1)


def _leaves(schema: object, refs: Mapping[object, object], seen: set[int]) -> list[object]:
    """The kinds of what lists, dicts and unions hold."""
    parts = _resolved(cast(tuple[object, str], schema)[0] if isinstance(schema, tuple) else schema, refs)
    if (kind := parts.get("type")) not in _CONTAINERS and kind not in ("nullable", "union"):
        return [kind]
    if id(parts) in seen:
        return []
    seen.add(id(parts))
    some = list[object]()
    for name in _INNER:
        part = parts.get(name)
        some += cast(list[object], part) if isinstance(part, list) else [part]
    return [leaf for one in some if one is not None for leaf in _leaves(one, refs, seen)]


def _resolved(schema: object, refs: Mapping[object, object]) -> Schema:
    while isinstance(schema, Mapping):
        parts = cast(Schema, schema)
        if parts.get("type") == "definition-ref":
            schema = refs.get(parts["schema_ref"])
        elif parts.get("type") in ("default", "function-after", "function-before", "function-wrap"):
            schema = parts["schema"]
        elif parts.get("type") == "lax-or-strict" and (held := _held(parts)):
            schema = held
        else:
            return parts
    return {}


def _held(parts: Schema) -> object:
    """The list or dict in this schema that is "lax-or-strict", which pydantic before 2.14 has for a deque, a Mapping
    and an OrderedDict; None of a single class, as Path."""
    lax = cast(Schema, parts["lax_schema"])
    return lax if lax.get("type") in ("function-after", "function-wrap") else None


def other_kind(value: object, read: object, declared: bool) -> str:
    """What in the value of a field in doubt is of another kind in what was `read` of its JSON, and what to do; empty
    where nothing is. Models in it have their own fields. declared: as `fields_in_doubt` tells of the field."""
    match value, read:
        case Mapping(), Mapping():
            some, there = cast(Mapping[object, object], value), cast(Mapping[object, object], read)
            if len(some) != len(there):
                return f"keys that JSON writes alike, as 1 and '1', of which the handler would get one: {ONE_KIND}"
            held, its = list(some), list(there)
            if declared:
                held, its = [*held, *some.values()], [*its, *there.values()]
        case (list() | tuple() | set() | frozenset() | deque(), list() | tuple() | deque()) if declared:
            held, its = list(cast(Iterable[object], value)), list(cast(Iterable[object], read))
        case (set() | frozenset(), set() | frozenset()) if declared:
            given, got = cast(frozenset[object], value), cast(frozenset[object], read)
            if len(given) != len(got):
                return f"items that JSON writes alike, of which the handler would get one: {ONE_KIND}"
            held, its = list(given - got), list(got - given)
        case _:
            kind, its_kind = cast(type, type(value)), cast(type, type(read))
            arrives = not declared or issubclass(kind, its_kind) or value == read or its_kind in _ARRAYS
            if arrives or isinstance(value, BaseModel) or is_dataclass(value):
                return ""
            if isinstance(value, Number) and isinstance(read, Number):
                return ""
            return f"a {kind.__name__} of which the handler would get a {its_kind.__name__}: {ONE_KIND}"
    pairs = zip(held, its, strict=False)
    return next((told for some, there in pairs if (told := other_kind(some, there, declared=True))), "")
