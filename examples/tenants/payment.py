"""The client of the payment provider's API. Nothing of Sidings is in it."""

from dataclasses import dataclass
from uuid import UUID

import httpx

from .events import TenantEvent

__all__ = ["Declined", "Payment", "PaymentError", "Registered"]


class PaymentError(Exception):
    """The provider could not be reached, did not answer in time, or answered nonsense: it may have done what was asked,
    so ask again with the same key."""


@dataclass(frozen=True)
class Registered:
    """The provider has a customer."""

    customer: str


@dataclass(frozen=True)
class Declined:
    """The provider does not want this customer, and will not change its mind."""

    reason: str


class Payment:
    """`await payment.register(key, event)`. seconds: how long a call may take.

    A connection serves one call only: a provider that answers twice would else answer the next question with the last
    answer.
    """

    def __init__(self, url: str, seconds: float) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=seconds, limits=limits)

    async def register(self, key: UUID, event: TenantEvent) -> Registered | Declined:
        """Make a customer of a tenant, or bring what the provider knows of it up to date. Repeated with the same key it
        does nothing more, and returns the same. Raises `PaymentError`."""
        fields = event.model_dump(mode="json", include={"id", "email", "name", "billing_address", "payment_method"})
        answer = await self._call("POST", "/registrations", key, 201, 402, json=fields)
        said = answer.json()
        if said.get("key") != str(key):
            raise PaymentError(f"the provider answered another question: {said}")
        return Registered(said["customer"]) if answer.status_code == 201 else Declined(said["reason"])

    async def close_account(self, key: UUID, tenant: UUID) -> None:
        """Delete a tenant's customer, if there is one. Repeated with the same key, however late, it does nothing more,
        for a tenant that was made again has the same id. Raises `PaymentError`."""
        await self._call("DELETE", f"/customers/{tenant}", key, 204)

    async def _call(self, method: str, path: str, key: UUID, *right: int, json: object = None) -> httpx.Response:
        """right: the statuses that are an answer."""
        try:
            answer = await self._http.request(method, path, headers={"Idempotency-Key": str(key)}, json=json)
        except httpx.HTTPError as error:
            raise PaymentError(f"{method} {path}: {error!r}") from error
        if answer.status_code not in right:
            raise PaymentError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
