"""The window of a stateless partition: what may start, and how far the partition is done."""

import random
from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st
from sidings.kafka.partition import Item, Partition
from sidings.kafka.stateless_partition import StatelessPartition
from sidings.kafka.stateless_window import Window

PARTITION = Partition(TopicPartition("t", 0))


def an_item(offset: int, key: bytes | None) -> Item:
    record: Any = SimpleNamespace(offset=offset, key=key, value=b"x" * (offset % 3) or None, headers=())
    return Item(PARTITION, record, None, None)


KEYS = st.sampled_from([None, b"", b"a", b"b"])


@given(st.lists(st.tuples(KEYS, st.integers(1, 3)), max_size=30), st.integers(1, 4), st.integers(0, 2**32))
def test_keys_run_in_order_and_the_first_unfinished_offset_is_never_passed(messages, concurrency, seed) -> None:
    """Offsets with gaps arrive in batches of any size, and what runs finishes in any order."""
    offset, items, chance = 0, [], random.Random(seed)
    for key, step in messages:
        offset += step
        items.append(an_item(offset, key))
    window, running, unread, unfinished = Window(), [], list(items), list(items)
    started: dict[bytes | None, list[int]] = {}
    while unfinished:
        can_start = len(running) < concurrency and window.startable > 0
        assert unread or can_start or running, "messages wait, and none may start"
        step = chance.choice(["read"] * bool(unread) + ["start"] * can_start + ["finish"] * bool(running))
        if step == "read":
            size = chance.randint(1, len(unread))
            window.add(unread[:size])
            del unread[:size]
        elif step == "start":
            item = window.start()
            assert item is not None
            key = item.record.key
            assert key is None or key not in [other.record.key for other in running], "two of one key at once"
            running.append(item)
            started.setdefault(key, []).append(item.record.offset)
        else:
            item = running.pop(chance.randrange(len(running)))
            window.finish(item)
            unfinished.remove(item)
        read = unfinished[: len(unfinished) - len(unread)]
        assert window.first_unfinished == (read[0].record.offset if read else None)
        assert window.size == sum(item.record.offset % 3 + len(item.record.key or b"") for item in read)
    assert len(window) == 0
    assert window.start() is None
    for key in started.keys() - {None}:
        assert started[key] == [item.record.offset for item in items if item.record.key == key]


def test_another_key_goes_on_while_the_first_does_not_end() -> None:
    window = Window()
    window.add([an_item(0, b"slow"), an_item(1, b"slow"), an_item(2, b"quick"), an_item(7, None)])
    assert [window.start().record.offset for _ in range(3)] == [0, 2, 7]  # type: ignore[union-attr]
    assert window.start() is None


def test_what_is_read_and_not_under_way_yet_is_unfinished_too() -> None:
    """A commit may fall between a poll and what takes its messages up; `end` is behind them by then."""
    partition = StatelessPartition(TopicPartition("t", 0))
    partition.place(5)
    partition.look()
    assert partition.next_offset == 5
    partition.items.extend([an_item(7, b"a"), an_item(8, b"b")])
    partition.end = 10
    partition.look()
    assert partition.next_offset == 7
    partition.take_up()
    partition.look()
    assert partition.next_offset == 7
    first, second = partition.window.start(), partition.window.start()
    assert first is not None
    assert second is not None
    partition.window.finish(second)
    partition.look()
    assert partition.next_offset == 7
    partition.window.finish(first)
    partition.look()
    assert partition.next_offset == 10, "behind the gap at the end"
