"""A core's process whose steps fail for a request with the cache salt `die`, and take long for one with `slow`.

Started as `python -m testing.broken_core FD`.
"""

import time
from typing import Any
from unittest.mock import patch

from engine.core.child import main
from engine.execution.runner import Runner
from engine.scheduling.plan import Plan
from testing.engine import SLOW, SLOW_STEP_S

plain_forward = Runner.forward


class Panic(BaseException):
    """A BaseException, like pyo3's PanicException."""


def forward(self: Runner, plan: Plan) -> Any:
    salts = {request.cache_salt for request in plan}
    if "die" in salts:
        raise Panic("private words")
    if SLOW["cache_salt"] in salts:
        time.sleep(SLOW_STEP_S)
    return plain_forward(self, plan)


if __name__ == "__main__":
    with patch.object(Runner, "forward", forward):
        main()
