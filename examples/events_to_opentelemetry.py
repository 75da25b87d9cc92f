"""Send a run's events to OpenTelemetry: a span for each round, with its events.

    pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
    OTEL_EXPORTER_OTLP_ENDPOINT=http://collector.example:4318 python events_to_opentelemetry.py redis.example:6379 night

It needs no torch, and runs beside the job, anywhere: it ends with the run.
"""

from __future__ import annotations

import sys

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

import redelastic
from redelastic.monitoring.sentences import event_document

SIMPLE = (str, int, float, bool)  # what an attribute may be


def forward(run: redelastic.Run, exporter: SpanExporter) -> None:
    """Send all events of a run, from its first one on, until it is closed."""
    provider = TracerProvider(resource=Resource.create({"service.name": "redelastic", "redelastic.run": run.id}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("redelastic")
    span: trace.Span = trace.INVALID_SPAN
    for event in run.follow("0"):
        at = round(event.time * 1e9)
        fields = {f"redelastic.{name}": v for name, v in event_document(event).items() if isinstance(v, SIMPLE)}
        if event.event == "completed":
            span.end(at)
            span = tracer.start_span(f"round {event.epoch}", start_time=at, attributes=fields)
        else:
            span.add_event(event.event, fields, at)
        if event.event in ("closed", "stopped"):
            span.end(at)
            break
    provider.shutdown()


if __name__ == "__main__":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    with redelastic.Run(*sys.argv[1:3]) as followed:
        forward(followed, OTLPSpanExporter())
