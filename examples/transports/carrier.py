"""The client of the carrier's API: an ordinary aiohttp session, nothing of Sidings in it."""

from datetime import datetime

import aiohttp

__all__ = ["Carrier", "CarrierError"]


class CarrierError(Exception):
    """The carrier refused the call, or could not be reached."""


class Carrier:
    """`await carrier.send_eta("lorry-0042", eta)`; the session is made at the first call."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def send_eta(self, transport_id: str, eta: datetime) -> None:
        """Tell the carrier when its transport will arrive. Raises `CarrierError`. Waits as long as the carrier does:
        the job's timeout ends it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        url = f"{self._url}/transports/{transport_id}/eta"
        try:
            async with self._session.post(url, json={"eta": eta.isoformat()}) as answer:
                if answer.status >= 400:
                    raise CarrierError(f"{answer.status}: {await answer.text()}")
        except aiohttp.ClientError as error:
            raise CarrierError(str(error)) from error

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()
