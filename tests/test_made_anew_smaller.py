"""A topic is deleted and made anew with fewer partitions: keys move, as when it grows, and stay behind what waits."""

import pytest
from sidings.kafka import partition_for

from .consumer_support import TWICE_AND_PARK, Number, a_service, made_anew, numbers, produce, record
from .support import eventually, fetch, value

OLD, NEW = 3, 2
# Of a partition that is gone, and of one that is there still; both are in the other one now.
PLACES = {f"k{n}": tuple(partition_for(f"k{n}".encode(), count) for count in (OLD, NEW)) for n in range(99)}
GONE, KEPT = (next(key for key, places in PLACES.items() if places == (was, 1)) for was in (2, 0))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("sidings.kafka.placing._REFUSED_SECONDS", 0.1)
    monkeypatch.setattr("sidings.kafka.topic_ids._LOOK_SECONDS", 0.1)


@pytest.mark.parametrize("running", [True, False])
async def test_messages_stay_behind_the_parked_ones_of_their_key(effects, topic, sidings_kafka, running):
    name = await topic(partitions=OLD)

    def consuming():
        service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 0.5})

        async def refuse(message, tx):
            if message.value.n == 1:
                raise RuntimeError("not yet")
            await record(message, tx)

        service.consumer(name, model=Number, retry=TWICE_AND_PARK)(refuse)
        return service

    async def send(number, partitions, *keys):
        for key in keys:
            await produce(sidings_kafka, name, [number], key=key, partition=partition_for(key.encode(), partitions))

    parked = f"SELECT count(*) FROM sidings.job WHERE type = 'message:{name}'"
    await send(1, OLD, GONE, KEPT)
    service = consuming()
    async with service:
        await eventually(lambda: value(effects, f"SELECT ({parked}) = 2"))
        if running:
            await made_anew(sidings_kafka, name, NEW)
            await eventually(lambda: any("another topic of this name" in problem for problem in service.problems()))
            await service.reset_offsets(name, "earliest", actor="alice")
            await send(2, NEW, GONE, KEPT, "other")
            await eventually(lambda: numbers(effects, "key = 'other'"))
            await eventually(lambda: value(effects, f"SELECT ({parked}) >= 4"))
    if not running:
        await made_anew(sidings_kafka, name, NEW)
        await send(2, NEW, GONE, KEPT, "other")
        await consuming().reset_offsets(name, "earliest", actor="alice")
        async with consuming():
            await eventually(lambda: numbers(effects, "key = 'other'"))
            await eventually(lambda: value(effects, f"SELECT ({parked}) >= 4"))
    where = await fetch(effects, f"""SELECT "group", origin FROM sidings.job WHERE type = 'message:{name}'""")
    assert sorted(tuple(row) for row in where) == sorted([(GONE, f"{name}/2"), (KEPT, f"{name}/0")] * 2)
    assert await numbers(effects, "key <> 'other'") == []
