"""What pydantic's core schemas are made of."""

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

__all__ = ["DICTS", "Schema", "named_parts", "parts_of"]

Schema = Mapping[str, object]

DICTS = frozenset(("counter", "dict", "frozendict", "ordered-dict"))  # the types of those that have keys of their own

_VALUES = ("default", "metadata")  # of a schema, which are none themselves


def parts_of(schema: object) -> Iterator[Schema]:
    """All mappings in it, itself first; also those that are no schemas, as of fields: there "default" is a name."""
    match schema:
        case Mapping():
            parts = cast(Schema, schema)
            yield parts
            values = _VALUES if isinstance(parts.get("type"), str) else ()
            inner: Iterable[object] = [part for name, part in parts.items() if name not in values]
        case list() | tuple():
            inner = cast(Iterable[object], schema)
        case _:
            return
    for part in inner:
        yield from parts_of(part)


def named_parts(schema: object) -> dict[object, Schema]:
    """The parts to which others refer, by their names."""
    return {part["ref"]: part for part in parts_of(schema) if "ref" in part}
