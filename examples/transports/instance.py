"""One instance of the service, as a process: ``python -m examples.transports.instance A jobs`` (or ``inline``).

A service of your own needs nothing of this but ``asyncio.run(service.run())``. What is here records every run of a
handler for the proof, and ends the process when the demo dies.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import cast

from sidings import Job, Service

from .audit import Audit
from .carrier import Carrier
from .children import unless_orphaned
from .settings import Address

__all__ = ["main"]


async def main(name: str, way: str) -> None:
    """Run the service until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    async with Audit.connect(Address.from_environment().postgres, name) as audit:
        service, carrier = _jobs(audit) if way == "jobs" else _inline(audit)
        try:
            await service.run()
        finally:
            await carrier.close()


def _jobs(audit: Audit) -> tuple[Service, Carrier]:
    from .service import SendEta, carrier, send_eta, service

    handler = cast(Callable[[Job[SendEta]], Awaitable[None]], send_eta.handler)

    async def audited(job: Job[SendEta]) -> None:
        told = job.payload
        async with audit.run(told.transport_id, told.sequence, told.sent_at, job_id=job.id, attempt=job.attempt):
            await handler(job)

    send_eta.handler = audited
    return service, carrier


def _inline(audit: Audit) -> tuple[Service, Carrier]:
    from . import inline

    inline.audit = audit
    return inline.service, inline.carrier


if __name__ == "__main__":
    asyncio.run(unless_orphaned(main(*sys.argv[1:])))
