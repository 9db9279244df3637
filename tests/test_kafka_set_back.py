"""Kafka is set back to a snapshot of its disks: the topic's id and its leaders' epochs come again."""

import shutil

import pytest
from sidings.devstack.topics import create_topic

from .consumer_support import Number, a_service, numbers, offset_reaches, produce, record
from .support import eventually


@pytest.mark.chaos
async def test_offsets_that_are_reset_before_anything_is_produced_pass_over_nothing(effects, own_kafka, tmp_path):
    kafka = own_kafka()
    await create_topic(kafka.bootstrap, "rides", partitions=1)

    def consuming():
        service = a_service(effects, kafka.bootstrap)
        service.consumer("rides", model=Number)(record)
        return service

    async def handled(first: int, end: int, offset: int) -> None:
        await produce(kafka.bootstrap, "rides", range(first, end))
        async with consuming():
            await eventually(offset_reaches(effects, "rides", offset))

    await handled(0, 3, 3)
    kafka.stop()
    shutil.copytree(kafka.directory, tmp_path / "snapshot")
    kafka.start()
    await handled(3, 6, 6)
    kafka.stop()
    shutil.rmtree(kafka.directory)
    shutil.copytree(tmp_path / "snapshot", kafka.directory)
    kafka.start()
    assert await consuming().reset_offsets("rides", "latest", actor="alice") == [(0, 6, 3, 0)]
    await handled(10, 16, 9)  # more than was lost: without the reset nobody could tell
    assert await numbers(effects) == [*range(6), *range(10, 16)]
