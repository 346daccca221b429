import pytest

from config import TraceExport, load_trace_export

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
WANTED = TraceExport(wanted=True)
OFF = TraceExport(wanted=False)
URL = "http://collector:4318"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, OFF),
        ({ENDPOINT: ""}, OFF),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_EXPORTER": "otlp"}, OFF),
        ({ENDPOINT: URL}, WANTED),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, WANTED),
        ({ENDPOINT: URL, "OTEL_SDK_DISABLED": "True"}, OFF),
        ({ENDPOINT: URL, "OTEL_TRACES_EXPORTER": "none"}, OFF),
        ({ENDPOINT: URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, WANTED),
        (
            {
                ENDPOINT: URL,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            WANTED,
        ),
    ],
)
def test_traces_are_wanted_where_an_endpoint_is_named(environ: dict[str, str], expected: TraceExport) -> None:
    assert load_trace_export(environ) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_what_cannot_be_had_is_a_problem_by_name(name: str, value: str) -> None:
    export = load_trace_export({ENDPOINT: URL, name: value})
    assert export.wanted
    assert export.problem is not None
    assert export.problem.startswith(name)
