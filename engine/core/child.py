"""The core's process: `python -m engine.core.child FD`, started by `engine.core.process`.

FD is a stream socket to the front. The process exits when the socket closes, also after a crash of the front.
"""

import asyncio
import logging
import os
import select
import signal
import socket
import sys

from engine.core.frames import Frames, head
from engine.core.service import CoreService
from wire.event_loop import loop_factory
from wire.garbage import collect_as_usual

READ_BYTES = 1 << 20


class FrontSocket:
    """The socket to the front, which reads on the event loop and writes on any thread.

    A write waits until the front has room. A stalled front blocks the steps, which bounds unsent data.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self._frames = Frames()

    def send(self, frame: bytes) -> None:
        """Send a frame. Only one thread at a time may call this. Ends the process if the front has ended."""
        rest = memoryview(head(frame) + frame)
        try:
            while rest:
                try:
                    rest = rest[self._socket.send(rest) :]
                except BlockingIOError:
                    self._writable.poll()
        except ConnectionError:
            os._exit(0)

    def serve(self, service: CoreService) -> None:
        """Pass the front's frames to the service."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read, service)

    def _read(self, service: CoreService) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            # Exit without waiting for steps or threads: no receiver is left.
            os._exit(0)
        for frame in self._frames.feed(data):
            service.receive(frame)


async def serve(connection: socket.socket) -> None:
    """Serve the front until it ends."""
    front = FrontSocket(connection)
    front.serve(CoreService(front.send, collect_as_usual))
    await asyncio.Event().wait()


def main() -> None:
    """Run the core. Only the front ends it, also after a signal to the whole group of processes."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
