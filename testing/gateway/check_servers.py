"""Process that forks the checks of uploads, kept for the next gateway of a test process: its start takes 0.1 s."""

import socket
import subprocess
from typing import ClassVar

from gateway.api.uploads.checking import CheckClient


class KeptCheckClient(CheckClient):
    """A client whose process outlives it, if no check runs. spare: the process and its control socket."""

    spare: ClassVar[tuple[subprocess.Popen[bytes], socket.socket] | None] = None
    _num_running = 0

    async def run(self, job: bytes, seconds: float) -> tuple[int, bytes]:
        self._num_running += 1
        try:
            return await super().run(job, seconds)
        finally:
            self._num_running -= 1

    def close(self) -> None:
        process, control = self._process, self._control
        is_idle = process is not None and process.poll() is None and self._num_running == 0
        if is_idle and control is not None and KeptCheckClient.spare is None:
            assert process is not None
            KeptCheckClient.spare = process, control
            self._process = self._control = None
        super().close()

    def _start(self) -> None:
        spare, KeptCheckClient.spare = KeptCheckClient.spare, None
        if spare is None:
            super()._start()
            return
        self._process, self._control = spare
        if self._process.poll() is not None:
            super().close()
            super()._start()


def end_spare() -> None:
    """End the process that no gateway uses."""
    spare, KeptCheckClient.spare = KeptCheckClient.spare, None
    if spare is not None:
        process, control = spare
        control.close()
        process.kill()
        process.wait()
