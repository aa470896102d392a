"""Start of tracing. Active only if the environment names a collector; otherwise the SDK is not imported."""

import os
from collections.abc import Mapping

from wire.telemetry.spans import Tracing

COLLECTOR = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TracingError(ValueError):
    """A tracing setting in the environment is wrong or not supported. field: the variable."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def start_tracing(service: str, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Start tracing, or return None if the environment names no collector.

    service: name if OTEL_SERVICE_NAME is not set. The SDK reads the other standard variables itself:
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_... . Raises TracingError.
    """
    named = next((name for name in COLLECTOR if environ.get(name)), None)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if named is None or is_off:
        return None
    for name in PROTOCOL:
        if environ.get(name, "http/protobuf") != "http/protobuf":
            raise TracingError(name, f"expected http/protobuf, got {environ[name]!r}")
    try:
        from wire.telemetry.otlp import OtlpTracing
    except ModuleNotFoundError as error:
        raise TracingError(
            named, f"{error.name} is not installed; in Loraplex's checkout: pip install -e '.[otel]'"
        ) from error
    return OtlpTracing(service)
