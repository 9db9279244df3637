"""``python -m examples.tenants``: the whole system in one process, with its provider, and a story told over HTTP."""

import asyncio
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from sidings import devstack
from sidings.devstack.databases import create_database, drop_database
from sidings.devstack.topics import delete_topics

from .client import Refused, TenantFailed, TenantsClient
from .provider import Mode, serving
from .serve import run
from .settings import Settings
from .topics import make_topics

BEGAN = time.monotonic()


async def main() -> int:
    """Start everything, tell the story, stop everything; the exit code."""
    ends = await asyncio.to_thread(devstack.ensure)
    mark = secrets.token_hex(4)
    dsn = await create_database(ends.postgres, f"tenants_{mark}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with serving(Path(folder, "journal.jsonl")) as payment:
                return await _with_topics(
                    Settings(
                        postgres=dsn, kafka=ends.kafka, payment=payment, prefix=f"{mark}-", port=0, payment_seconds=1.0
                    )
                )
    finally:
        await drop_database(ends.postgres, dsn)


async def _with_topics(settings: Settings) -> int:
    try:
        await make_topics(settings)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        system = asyncio.create_task(run(settings, url.set_result))
        try:
            await asyncio.wait([system, asyncio.ensure_future(url)], return_when=asyncio.FIRST_COMPLETED)
            if system.done():
                system.result()
            telling = asyncio.create_task(story(await url, settings.payment))
            await asyncio.wait([system, telling], return_when=asyncio.FIRST_COMPLETED)
            if system.done():  # it has been asked to stop, and nobody would answer the client any more
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
                system.result()
                say("stopped")
                return 130
            return 0 if telling.result() else 1
        finally:
            system.cancel()
            await asyncio.gather(system, return_exceptions=True)
    finally:
        await delete_topics(settings.kafka, settings.topics.all())


async def story(url: str, payment: str) -> bool:
    """What a client sees; whether it is what was promised."""
    kept: list[bool] = []

    def claim(text: str, holds: bool) -> None:
        kept.append(holds)
        say(text if holds else f"BROKEN: {text}")

    say(f"the API is at {url}, its documentation at {url}/docs")
    async with TenantsClient(url) as client, httpx.AsyncClient(base_url=url) as http:
        ann = {"email": "ann@example.com", "name": "Ann", "billing_address": "Main Street 1"}
        tenant = await client.create(**ann)
        say(f"created {tenant.email}: {tenant.status}; Kafka has the event, the payment provider is being asked")
        status = (await client.active(tenant.id)).status
        claim(f"waited: {status}", status == "active")
        again = await http.post("/tenants", json=ann)
        same = again.json().get("id") == str(tenant.id)
        claim(f"the same POST again: {again.status_code}, the same tenant: {same}", same)
        try:
            await client.create(**ann | {"name": "Bob"})
            claim("another one for that address: created", False)
        except Refused as refused:
            claim(f"another one for that address: {refused}", True)
        for mode in (Mode.FAIL, Mode.TWICE, Mode.SLOW):
            await mode_of(payment, mode)
            made = await client.create_active(**ann | {"email": f"{mode}@example.com"})
            done = len([entry for entry in await journal(payment) if entry["tenant"] == str(made.id)])
            claim(f"the provider's bad day ({mode}): {made.email} is {made.status}, registered {done} time", done == 1)
        try:
            eve = await client.create_active(**ann | {"email": "eve@example.com", "payment_method": "declined"})
            claim(f"{eve.email} is {eve.status}, although the provider has declined", False)
        except TenantFailed as failed:
            claim(f"{failed.tenant.email} does not become active: {failed}", True)
        users = [{"email": f"{name}@example.com", "name": name} for name in ("carl", "dora")]
        answer = (await http.post(f"/tenants/{tenant.id}/users/import", json={"users": users})).json()
        claim(f"imported {len(answer)} users: one transaction of {len(users)} events", len(answer) == len(users))
        await client.delete(tenant.id)
        say("deleted the tenant, and its users with it")
    return all(kept)


async def mode_of(payment: str, mode: Mode) -> None:
    async with httpx.AsyncClient(base_url=payment) as http:
        await http.put(f"/mode/{mode}")


async def journal(payment: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=payment) as http:
        return (await http.get("/journal")).json()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:4.1f} s  {text}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has ignored by what it starts with `&`
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # the same orderly end
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        sys.exit(130)
