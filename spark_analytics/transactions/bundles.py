"""Items travel to the operator in bundles: it is called for a bundle's key, and that is what costs, not the items.

Transactions share a key with others, a bucket's. Each call of the operator, each row that it takes in and each of its
answers costs more than what is done with an item.
"""

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from zlib import crc32

from .decoding import Item
from .messages import text_of

__all__ = ["BUCKETS", "Bundle", "bundles", "items_of"]

BUCKETS = 128  # a checkpoint holds it: with another number, open transactions would be sought where they are not
CHARACTERS = 1_000_000  # of a bundle, about


class Bundle(NamedTuple):
    """Items that go to the same call of the operator. key: the kind of them, and a bucket, or a snapshot's root.
    items: as JSON."""

    key: str
    items: str


def bundles(items: Iterable[Item]) -> Iterator[Bundle]:
    """Bundles with all of these items; those of a key stand in their order."""
    open: dict[str, list[Item]] = {}
    characters: dict[str, int] = {}
    for item in items:
        key = f"{item.kind}/{item.id if item.kind == 'snapshot' else crc32(item.id.encode()) % BUCKETS}"
        open.setdefault(key, []).append(item)
        characters[key] = characters.get(key, 0) + len(item.row or "")
        if characters[key] > CHARACTERS:
            yield Bundle(key, text_of(open.pop(key)))
            del characters[key]
    for key, of_it in open.items():
        yield Bundle(key, text_of(of_it))


def items_of(bundle: str) -> Iterator[Item]:
    """The items that were packed into it."""
    return (Item(*values) for values in json.loads(bundle))
