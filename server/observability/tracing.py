"""RequestTracer: one OpenTelemetry span a request that a model works on, with its phases below it.

Spans are made when a request has ended, from the times the engine keeps anyway: a running one costs nothing.
Imported only where traces are exported.
"""

from __future__ import annotations

import logging
from threading import Thread

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from server.api.generation import Accepted, Choice
from server.api.openai.protocol import GenerationBody
from server.api.usage import num_cached_tokens, one_a_prompt
from server.observability.ended_request import EndedRequest
from server.observability.health import server_version

log = logging.getLogger("slipstream.server")

CLOSE_S = 2.0  # what a slow collector may add to the end of the process
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
}
_NS = 1_000_000_000

# The attributes of OpenTelemetry's conventions for generative models; what has none there is `slipstream.`.
Attributes = dict[str, AttributeValue]


class RequestTracer:
    """Makes spans of ended requests and hands them to `processor`. Event-loop thread only.

    `model` is the served name of requests that give none.
    """

    def __init__(self, model: str, processor: SpanProcessor) -> None:
        self._model = model
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("slipstream", server_version())

    @classmethod
    def exporting(cls, model: str) -> RequestTracer:
        """To where the OTEL_EXPORTER_OTLP_* variables say, in batches, from a thread of its own."""
        return cls(model, BatchSpanProcessor(OTLPSpanExporter()))

    def record(self, ended: EndedRequest) -> str:
        """See `Tracer` in request_log. A caller's `traceparent` is the parent, and decides on sampling."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in ended.headers}
        started_ns = ended.ended_ns - round(ended.seconds * _NS)
        operation = _OPERATIONS.get(ended.route, ended.route)
        accepted, texts = ended.accepted, ended.exchange.texts
        asked_model = None if accepted is None else accepted.body.model
        model = texts.model if texts is not None else asked_model or self._model
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=propagate.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=started_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "slipstream",
                "gen_ai.response.model": model,
                "http.request.method": "POST",
                "http.route": ended.route,
                "http.response.status_code": ended.status,
                "slipstream.request.id": ended.exchange.request_id,
            },
        )
        if span.is_recording():
            self._describe(span, ended)
            if accepted is not None:
                self._describe_generation(span, accepted, started_ns)
            if texts is not None:
                span.set_attribute("gen_ai.usage.input_tokens", texts.num_tokens)
                span.set_attribute("slipstream.texts", texts.num_texts)
        span.end(ended.ended_ns)
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Export what is left, for a bounded time. Call once."""
        thread = Thread(target=self._provider.shutdown, name="slipstream-traces", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _describe(self, span: Span, ended: EndedRequest) -> None:
        if ended.exchange.tenant is not None:
            span.set_attribute("slipstream.tenant", ended.exchange.tenant)
        fault = ended.fault
        if fault is not None:
            span.set_attribute("error.type", fault)
        if ended.is_failure:
            span.set_status(StatusCode.ERROR, fault)
        if ended.accepted is not None:
            span.set_attribute("gen_ai.response.finish_reasons", ended.finish_reasons)

    def _describe_generation(self, span: Span, accepted: Accepted, started_ns: int) -> None:
        choices = accepted.generation.choices
        span.set_attributes(asked(accepted.body))
        span.set_attributes(
            {
                "gen_ai.response.id": accepted.reply_id,
                "gen_ai.usage.input_tokens": sum(
                    len(choice.prompt.token_ids) for choice in one_a_prompt(choices)
                ),
                "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in choices),
                "gen_ai.usage.cache_read.input_tokens": num_cached_tokens(one_a_prompt(choices)),
            }
        )
        submitted_ns = started_ns + round(accepted.prepared_s * _NS)
        for choice in choices:
            self._add_phases(span, choice, started_ns, submitted_ns)

    def _add_phases(self, span: Span, choice: Choice, started_ns: int, submitted_ns: int) -> None:
        """The spans of one choice: queue, prefill and decode, as far as it came.

        The engine's times count from the arrival; the queue begins with the submission.
        """
        finish = choice.finish
        if finish is None:
            return
        timing = finish.timing
        index: Attributes = {"slipstream.choice.index": choice.index}
        run_ns = started_ns + round(timing.queue_s * _NS)
        self._add_phase(span, "queue", submitted_ns, run_ns, index)
        if timing.time_to_first_token_s is not None:
            first_ns = started_ns + round(timing.time_to_first_token_s * _NS)
            self._add_phase(span, "prefill", run_ns, first_ns, index)
            last_ns = first_ns + round(timing.generation_s * _NS)
            self._add_phase(span, "decode", first_ns, last_ns, index | decoded(choice))
        for seconds, mode in timing.preemptions:
            at_ns = started_ns + round(seconds * _NS)
            span.add_event("preempted", {**index, "slipstream.preemption.mode": mode}, at_ns)

    def _add_phase(self, parent: Span, name: str, from_ns: int, to_ns: int, attributes: Attributes) -> None:
        context = set_span_in_context(parent)
        child = self._tracer.start_span(name, context=context, start_time=from_ns, attributes=attributes)
        child.end(max(from_ns, to_ns))


def _resource() -> Resource:
    """The service; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win, as everywhere."""
    given = Resource.create()
    ours = {SERVICE_VERSION: server_version(), **given.attributes}
    if str(ours[SERVICE_NAME]).startswith("unknown_service"):
        ours[SERVICE_NAME] = "slipstream"
    return Resource(ours, given.schema_url)


def asked(body: GenerationBody) -> Attributes:
    """The parameters a request came with: numbers only, since words may be the client's own text."""
    parameters = {
        "max_tokens": body.tokens_asked,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "choice.count": body.n,
        "stream": body.stream,
        "model": body.model,
    }
    return {f"gen_ai.request.{name}": value for name, value in parameters.items() if value is not None}


def decoded(choice: Choice) -> Attributes:
    """What a choice's decoding came to, and what speculation did for it."""
    finish = choice.finish
    assert finish is not None
    attributes: Attributes = {"gen_ai.usage.output_tokens": finish.num_output_tokens}
    stats = finish.speculation
    if stats is not None and stats.num_rounds:
        attributes |= {
            "slipstream.speculation.rounds": stats.num_rounds,
            "slipstream.speculation.draft_tokens": stats.num_proposed,
            "slipstream.speculation.accepted_tokens": stats.num_accepted,
            "slipstream.speculation.methods": sorted(method for method, n in stats.proposed.items() if n),
        }
    return attributes
