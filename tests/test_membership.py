"""What the client of a group is made with, how long it is waited for, and what follows where a task of it ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError, KafkaError
from sidings import KafkaSettings
from sidings.kafka import membership

from .support import eventually

HOURS = 3600.0


async def test_a_client_leaves_no_group_for_want_of_polls_and_shares_what_it_has_had_with_no_other():
    """With Postgres away nothing is polled. And an assignor keeps in its class what its client has had: of two services
    in a process each would tell the group of the other's partitions."""
    settings = KafkaSettings(bootstrap="127.0.0.1:1", client_id="tracker-1", session_seconds=7)
    one, other = (membership.make_client(settings, "test") for _ in range(2))
    made: Any = one
    assert made._max_poll_interval_ms / 1000 > 24 * HOURS
    assert made._client._client_id == "tracker-1"
    assert made._client.session_seconds == 7
    [its], [others] = made._partition_assignment_strategy, other._partition_assignment_strategy
    assert its is not others
    assert (its.name, others.name) == ("sticky", "sticky")


@pytest.mark.parametrize("stopping", [True, False])
async def test_a_client_that_does_not_connect_is_not_waited_for(stopping):
    stop = asyncio.Event()
    kept: list[object] = []  # from Python 3.13 on a stream that nobody has is closed
    server = await asyncio.start_server(lambda *streams: kept.append(streams), "127.0.0.1", 0)  # it says nothing
    port = server.sockets[0].getsockname()[1]
    client = membership.make_client(KafkaSettings(bootstrap=f"127.0.0.1:{port}"), "test")
    if stopping:
        stop.set()
        await asyncio.wait_for(membership.connect(client, stop, HOURS), 10)
    else:
        with pytest.raises(TimeoutError, match=r"Kafka did not answer within 0\.1 s"):
            await asyncio.wait_for(membership.connect(client, stop, 0.1), 10)
    await membership.close(client)
    server.close()


@pytest.mark.parametrize("which", ["fetches", "asks"])
async def test_a_client_of_which_a_task_was_cancelled_has_to_be_made_anew(sidings_kafka, which):
    client: Any = membership.make_client(KafkaSettings(bootstrap=sidings_kafka), f"test-{which}")
    await membership.connect(client, asyncio.Event(), HOURS)
    try:
        contact = membership.Contact(client)
        contact.check()
        task = client._fetcher._fetch_task if which == "fetches" else client._client._sync_task
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(KafkaError, match="a task of the client has ended: None"):
            contact.check()
    finally:
        await membership.close(client)


async def test_who_waits_for_an_assignment_looks_after_its_contact_meanwhile(monkeypatch):
    """A cluster that is lost gives none."""
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.01)
    hanging, looks = asyncio.Event(), list[None]()
    client: Any = SimpleNamespace(getmany=lambda *_, **__: hanging.wait())
    contact: Any = SimpleNamespace(check=lambda: looks.append(None))
    watching = asyncio.create_task(membership.watch(client, contact))
    await eventually(lambda: len(looks) > 3 or watching.done())
    assert not watching.done(), "each would cost all members a rebalance"
    watching.cancel()


def forever() -> "asyncio.Task[object]":
    return asyncio.create_task(asyncio.sleep(HOURS))


@pytest.mark.parametrize("connected", [True, False])
async def test_a_client_that_is_not_closed_in_time_leaves_no_task_behind(monkeypatch, connected):
    """As one that a rebalance keeps from leaving, whose heartbeats go on, and whose fetches begin others."""
    monkeypatch.setattr(membership, "_CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(membership, "_END_SECONDS", 0.01)
    before, hanging, pending = asyncio.all_tasks(), asyncio.Event(), set[Any]()

    async def fetch() -> None:
        try:
            await hanging.wait()
        finally:
            pending.add(forever())

    async def refuse() -> None:
        raise KafkaConnectionError("closed")

    names = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task")
    client: Any = SimpleNamespace(
        stop=hanging.wait,
        _coordinator=SimpleNamespace(**{name: forever() if connected else None for name in names}),
        _fetcher=SimpleNamespace(_fetch_task=asyncio.create_task(fetch()), _pending_tasks=pending, close=hanging.wait)
        if connected
        else None,
        _client=SimpleNamespace(_sync_task=None, close=refuse),
    )
    await asyncio.sleep(0)
    await asyncio.wait_for(membership.close(client), 10)
    await eventually(lambda: asyncio.all_tasks() <= before)
