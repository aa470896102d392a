"""Start of tracing: the environments that ask for none, and a protocol that the exporter does not speak."""

import pytest

from wire.telemetry.start import TracingError, start_tracing


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_where_no_collector_is_asked_for_there_are_no_traces(environ: dict[str, str]):
    assert start_tracing("x", environ) is None


def test_an_unknown_protocol_is_refused_by_its_variable():
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(TracingError, match=r"^OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf, got 'grpc'"):
        start_tracing("x", environ)
