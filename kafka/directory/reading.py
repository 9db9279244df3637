"""How a directory reads its records, as a text: what a store was read with is compared with it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from functools import partial
from hashlib import sha256
from operator import attrgetter, is_not, itemgetter, methodcaller
from types import CodeType
from typing import Any, cast

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

__all__ = ["reading_of"]

# Of a model, what changes texts, and the several names of a field: JSON Schema has no word for them.
_FORMS = frozenset({"strip_whitespace", "to_lower", "to_upper", "validation_alias"})


def reading_of(model: type[object] | None, key: object, decoder: object, flags: Collection[str]) -> str:
    """The text for these, which are as `Rows` has them. It stays the same from one process to the next, and from one
    release to the next: it stands in files that are there."""
    schema = forms = None
    if model is not None:
        adapter = TypeAdapter[Any](model)
        schema = _in_order(adapter.json_schema(schema_generator=_Schema, mode="validation"))
        forms = list(_forms(adapter.core_schema))
    return repr((schema, forms, _name(key), _name(decoder), sorted(flags)))


class _Schema(GenerateJsonSchema):
    """Of any model: a field that JSON Schema has no word for, as a class of the author's, is told by its kind. What
    comes from a set is put in order, as that is another one in each process. All else stays as pydantic tells it: it is
    compared with what stands in files that are there."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {"kind": schema["type"], "of": getattr(schema.get("cls"), "__qualname__", None)}

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        told = super().model_schema(schema)
        if any(_in_order(info.examples) is not info.examples for info in schema["cls"].model_fields.values()):
            for each in told.get("properties", {}).values():
                each.pop("examples", None)  # they say nothing of how it is read, nor which of their lists were sets
        return told

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        ordered = {"default": _in_order(schema["default"])} if "default" in schema else {}
        return super().default_schema(schema | ordered)


def _in_order(value: object) -> object:
    """The value with each set in it as a sorted list, alike in each process; the value itself where it holds none."""
    if isinstance(value, AbstractSet):
        items: list[Any] = [_in_order(item) for item in cast(AbstractSet[object], value)]
        try:
            return sorted(items)
        except TypeError:  # they are of several kinds, or of one without an order
            return sorted(items, key=repr)
    if isinstance(value, list | tuple):
        before = cast(Sequence[object], value)
        after = [_in_order(item) for item in before]
        return after if any(map(is_not, after, before)) else cast(object, value)
    if not isinstance(value, Mapping | BaseModel) and not is_dataclass(value):
        return value
    members = cast(Mapping[str, object], value if isinstance(value, Mapping) else getattr(value, "__dict__", {}))
    ordered = {name: _in_order(member) for name, member in members.items()}
    return ordered if any(map(is_not, ordered.values(), members.values())) else cast(object, value)


def _forms(schema: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], object]]:
    """Where a model says one of `_FORMS`, be it in its `ConfigDict`, and what."""
    if isinstance(schema, dict):
        items = cast(dict[object, object], schema).items()
    elif isinstance(schema, list | tuple):
        items = enumerate(cast(list[object], schema))
    else:
        return
    for name, each in items:
        if str(name).removeprefix("str_") in _FORMS and not isinstance(each, dict):  # which would be a field's
            yield (*path, name), each
        else:
            yield from _forms(each, (*path, name))


def _name(given: object) -> str | None:
    """What stays the same from one process to the next. Of a function it tells what it does itself; what that calls may
    change all the same."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, int | float | bytes | attrgetter | itemgetter | methodcaller):
        return repr(cast(object, given))
    if isinstance(given, partial):
        made = cast(partial[object], given)
        named = [(name, _name(value)) for name, value in sorted(made.keywords.items())]
        return repr(("partial", _name(made.func), [_name(value) for value in made.args], named))
    named = cast(object, given if hasattr(given, "__qualname__") else type(given))
    name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}()"
    code = getattr(given, "__code__", None)
    return f"{name} {sha256(repr(_code(code)).encode()).hexdigest()}" if isinstance(code, CodeType) else name


def _code(code: CodeType) -> tuple[object, ...]:
    """What a function does, without the places of its lines. A set has another order in each process."""
    constants: list[object] = []
    for each in code.co_consts:
        if isinstance(each, CodeType):
            constants.append(_code(each))
        else:
            constants.append(sorted(map(repr, cast(frozenset[object], each))) if isinstance(each, frozenset) else each)
    return code.co_code, code.co_names, constants
