"""An aiohttp application on a free port of this machine, for doubles of third-party servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serving(app: web.Application, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve the application and yield its URL. A client's disconnection cancels its request's handler."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
