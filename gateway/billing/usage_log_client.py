"""Client for the engines' usage logs: token counts of requests whose answers this gateway did not read to the end."""

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from aiohttp import ClientPayloadError, ClientSession, ClientTimeout

from gateway.process.outage import Outage
from wire.headers import INTERNAL_TOKEN_HEADER
from wire.http_errors import HTTP_ERRORS
from wire.responses import FinishedRequest, FinishedRequestList

log = logging.getLogger(__name__)

# Seconds that an engine may delay its response until a request has ended, and seconds that it may take beyond that.
WAIT_SECONDS = 2.0
ANSWER_SECONDS = 3.0
# Pause between two calls to an engine that is away.
AWAY_SECONDS = 0.25
# Maximum number of request ids in one call; they are part of the URL.
PAGE = 50


class UsageLogClient:
    """Client for the usage logs of our own engines. Its calls have the internal token, so no other URL may be asked."""

    def __init__(self, session: ClientSession, internal_token: str) -> None:
        self._session = session
        # Outages of the engines that do not answer, by URL.
        self._outages: dict[str, Outage] = {}
        self._headers = {INTERNAL_TOKEN_HEADER: internal_token}

    async def ask(
        self, engine_url: str, request_ids: Sequence[str], wait: float = 0.0
    ) -> dict[str, FinishedRequest] | None:
        """Return the engine's records by request id, once none of the requests runs or `wait` seconds have passed.

        Returns None if the engine does not answer.
        """
        found: dict[str, FinishedRequest] = {}
        for start in range(0, len(request_ids), PAGE):
            query = {"ids": ",".join(request_ids[start : start + PAGE]), "wait": str(wait)}
            page = await self._get(engine_url, query, wait + ANSWER_SECONDS)
            if page is None:
                return None
            found |= {each.id: each for each in page}
        return found

    async def _get(self, engine_url: str, query: dict[str, str], seconds: float) -> list[FinishedRequest] | None:
        timeout = ClientTimeout(total=seconds)
        try:
            async with self._session.get(
                f"{engine_url}/finished",
                params=query,
                headers=self._headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status == 404:
                    return []
                if response.status != 200:
                    raise ClientPayloadError(f"/finished answered {response.status}, expected 200")
                found = msgspec.json.decode(await response.read(), type=FinishedRequestList).data
        except (*HTTP_ERRORS, msgspec.DecodeError) as error:
            outage = Outage(log, f"reading the usage log of engine {engine_url}")
            self._outages.setdefault(engine_url, outage).failed(type(error).__name__)
            return None
        if engine_url in self._outages:
            self._outages.pop(engine_url).over()
        return found

    async def outcome(self, engine_url: str, request_id: str, seconds: float) -> FinishedRequest | None:
        """Return the record of a request that has ended, None if the engine has none.

        Raises TimeoutError if the engine is away or the request runs for all of `seconds`. An engine that is away is
        asked again, because one that was killed and restarted has more accurate counts than the gateway received.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (left := deadline - loop.time()) > 0:
            found = await self.ask(engine_url, [request_id], min(left, WAIT_SECONDS))
            if found is None:
                await asyncio.sleep(min(left, AWAY_SECONDS))
                continue
            record = found.get(request_id)
            if record is None or record.finish_reason is not None:
                return record
        raise TimeoutError
