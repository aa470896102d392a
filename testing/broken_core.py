"""A core's process whose steps fail for a request with the cache salt `die`: `python -m testing.broken_core FD`."""

from typing import Any

from engine.core.child import main
from engine.execution.runner import Runner
from engine.scheduling.plan import Plan

plain_forward = Runner.forward


class Panic(BaseException):
    """A BaseException, like pyo3's PanicException."""


def forward(self: Runner, plan: Plan) -> Any:
    if any(request.cache_salt == "die" for request in plan):
        raise Panic("private words")
    return plain_forward(self, plan)


if __name__ == "__main__":
    Runner.forward = forward  # type: ignore[method-assign]
    main()
