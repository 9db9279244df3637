"""The client library: hides that the system is eventually consistent.

async with TenantsClient("http://127.0.0.1:8080") as client:
    tenant = await client.create_active(email="a@example.com", name="A", billing_address="Main Street 1")
"""

import asyncio
import time
from types import TracebackType
from typing import Any, Self
from uuid import UUID, uuid4

import httpx

from .events import Tenant

__all__ = ["Refused", "TenantFailed", "TenantsClient"]

_REPEATED = {500, 502, 503, 504}


class Refused(Exception):
    """The API does not want the request. status: of HTTP."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status


class TenantFailed(Exception):
    """The tenant does not become active; the message is the reason. tenant: as it is."""

    def __init__(self, tenant: Tenant) -> None:
        super().__init__(tenant.reason)
        self.tenant = tenant


class TenantsClient:
    """seconds: how long a call goes on, repeating requests that were not answered; then it raises `TimeoutError`."""

    def __init__(self, url: str, *, seconds: float = 30.0) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=seconds)
        self._seconds = seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def create(self, **fields: str) -> Tenant:
        """Create a tenant; fields as of `TenantFields`. It is made once, however often the request has to be repeated.
        Returns it as it was then: pending. Raises `Refused`."""
        answer = await self._request("POST", "/tenants", json=fields, headers={"Idempotency-Key": str(uuid4())})
        return Tenant.model_validate_json(answer.content)

    async def create_active(self, **fields: str) -> Tenant:
        """Create a tenant and wait until it is active. Raises `Refused`, and `TenantFailed` with the reason."""
        return await self.active((await self.create(**fields)).id)

    async def active(self, id: UUID) -> Tenant:
        """Wait until a tenant is active. Raises `Refused` and `TenantFailed`."""
        pause = 0.01
        async with asyncio.timeout(self._seconds):
            while True:
                tenant = await self.read(id)
                if tenant.status == "active":
                    return tenant
                if tenant.status == "failed":
                    raise TenantFailed(tenant)
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 1.5)

    async def read(self, id: UUID) -> Tenant:
        """One tenant. Raises `Refused`."""
        return Tenant.model_validate_json((await self._request("GET", f"/tenants/{id}")).content)

    async def modify(self, id: UUID, **fields: str) -> Tenant:
        """Replace a tenant's fields, once. Raises `Refused`."""
        answer = await self._request("PUT", f"/tenants/{id}", json=fields, headers={"Idempotency-Key": str(uuid4())})
        return Tenant.model_validate_json(answer.content)

    async def delete(self, id: UUID) -> None:
        """Delete a tenant, once: one that somebody makes again meanwhile stays. Raises `Refused`."""
        await self._request("DELETE", f"/tenants/{id}", headers={"Idempotency-Key": str(uuid4())})

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Repeat until there is an answer: every request only reads, or has a key."""
        until = time.monotonic() + self._seconds
        pause = 0.05
        while True:
            try:
                answer = await self._http.request(method, path, **options)
                if answer.status_code < 400:
                    return answer
                if answer.status_code not in _REPEATED:
                    raise Refused(answer.status_code, answer.json()["detail"])
                problem = answer.text
            except httpx.TransportError as error:
                problem = repr(error)
            if time.monotonic() + pause > until:
                raise TimeoutError(f"{method} {path}: no answer in {self._seconds} s: {problem}")
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)
