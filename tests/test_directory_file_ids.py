"""A directory in SQLite whose topic is made anew while nobody runs: the records need not tell."""

from typing import Any

from sidings.devstack.topics import create_topic, delete_topics

from .consumer_support import producing
from .directory_support import COMPACTED, put, row
from .test_directory_restart import load


async def test_a_topic_that_was_made_anew_is_noticed_though_the_last_record_has_no_counterpart(
    topic: Any, sidings_kafka: str, tmp_path: Any
) -> None:
    name = await topic("terminals", config=COMPACTED)
    path = tmp_path / "terminals.db"
    await put(sidings_kafka, name, {f"T-{n}": row(f"T-{n}") for n in range(3)})
    assert await load(name, sidings_kafka, path) == ({"T-0": "a", "T-1": "a", "T-2": "a"}, 3, 0)
    await delete_topics(sidings_kafka, [name])
    await create_topic(sidings_kafka, name, partitions=1, config=COMPACTED)
    async with producing(sidings_kafka, transactional_id=name) as producer:
        for terminals in (("T-1", "T-3"), ("T-4",)):  # offsets 0 and 1, the marker at 2, 3, the marker at 4
            async with producer.transaction():
                for terminal in terminals:
                    await producer.send_and_wait(name, row(terminal, "b"), key=terminal.encode(), partition=0)
    assert (await load(name, sidings_kafka, path))[0] == {"T-1": "b", "T-3": "b", "T-4": "b"}
