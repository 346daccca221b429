"""What goes wrong, whether promises are kept, and the process. Reads recorded series, cheap over weeks."""

from __future__ import annotations

from deploy.grafana.panels import Board, Panel, Query, Row, bars, lines, stat
from deploy.grafana.queries import CHOSEN_MODELS, rate, recorded, series, split

RARE = (("green", None), ("orange", 0.005), ("red", 0.01))
REFUSED = (("green", None), ("orange", 0.01), ("red", 0.05))
JOB = 'job="slipstream", instance=~"$instance"'
BUDGET = "slo_burn"
NO_RULES = "or Prometheus has not loaded deploy/prometheus/rules."


def _at_a_glance() -> tuple[Panel, ...]:
    return (
        stat("Servers up", "Servers that answer scrapes.", "short", 'sum(up{job="slipstream"})'),
        stat(
            "Alerts",
            "Alerts that fire now.",
            "short",
            'count(ALERTS{alertname=~"Slipstream.+", alertstate="firing"}) or vector(0)',
            (("green", None), ("red", 1)),
        ),
        stat(
            "Step age",
            "Age of the running step, the oldest; 0 when idle. The watchdog ends the process at 60 s.",
            "s",
            f"max({series('engine_heartbeat_age_seconds')})",
            (("green", None), ("orange", 5), ("red", 20)),
        ),
        stat("Failed", "Requests with a fault of ours.", "percentunit", _worst("errors:ratio_rate5m"), RARE),
        stat("Refused", "For want of room.", "percentunit", _worst("refused:ratio_rate5m"), REFUSED),
        stat(
            "Deadlines missed",
            "Late, or refused as such.",
            "percentunit",
            _worst("deadline_missed:ratio_rate5m"),
            REFUSED,
        ),
        stat(
            "Least budget left",
            "Of the promise kept worst, over three days: 1 is untouched, 0 is used up.",
            "percentunit",
            f"clamp_min(1 - max({recorded(BUDGET + ':rate3d')}), 0)",
            (("red", None), ("orange", 0.1), ("green", 0.5)),
        ),
        stat("Requests", "Requests that ended.", "reqps", f"sum({recorded('requests:rate5m')})"),
    )


def _promises() -> tuple[Panel, ...]:
    return (
        lines(
            "Burn rate",
            "Bad events over those allowed, of the worst model, over an hour and of late. At 1 the budget "
            "lasts as long as promised; at 14.4 a month's is gone in two days, and somebody is called. In a "
            "server's first minutes the two are the same.",
            "short",
            Query(f"max by (slo) ({recorded(BUDGET + ':rate1h')})", "{{slo}}, 1 h"),
            Query(f"max by (slo) ({recorded(BUDGET + ':rate5m')})", "{{slo}}, 5 min"),
            steps=(("green", None), ("orange", 1), ("red", 14.4)),
            lines=True,
            width=16,
        ),
        bars(
            "Budget left, 3 days",
            "What is left of the bad events allowed in three days, of the worst model.",
            "percentunit",
            Query(
                f"clamp_min(1 - max by (slo) ({recorded(BUDGET + ':rate3d')}), 0)", "{{slo}}", instant=True
            ),
            steps=(("red", None), ("orange", 0.1), ("green", 0.5)),
            top=1.0,
        ),
        _long_view(
            "First token", "time_to_first_token_seconds", "From arrival to the first token; promised: 2.5 s."
        ),
        _long_view("Next token", "inter_token_latency_seconds", "Between two tokens; promised: 0.2 s."),
        _long_view(
            "Whole request", "e2e_request_latency_seconds", "From arrival to the end, queue included."
        ),
    )


def _faults() -> tuple[Panel, ...]:
    badly = rate("requests_total", "finish_reason", 'finish_reason=~"error|deadline|abort"')
    errors = rate("http_requests_total", "route, code", 'code=~"[45].."')
    return (
        split(
            "HTTP answers by code",
            "Answers to all routes; 503 tells clients to come back, 500 is ours.",
            "reqps",
            ("http_requests_total", "code"),
        ),
        lines(
            "HTTP errors by route",
            "Answers of 400 and above.",
            "reqps",
            Query(f"{errors} > 0", "{{route}} {{code}}"),
            empty="No answer of 400 or above in this time.",
        ),
        lines(
            "Requests that ended badly",
            "An error of ours, a deadline, or an abort.",
            "reqps",
            Query(f"{badly} > 0", "{{finish_reason}}"),
            empty="Every request ended as asked in this time.",
        ),
        split(
            "Faults by stage",
            "Caught by the engine; each ends a request at most, unless three whole batches in a row fail.",
            "ops",
            ("engine_errors_total", "stage"),
            "The engine caught no fault in this time.",
        ),
        split(
            "Failed passes by who is to blame",
            "Forward passes that fail with one request, which ends alone, or with any, which ends a batch.",
            "ops",
            ("forward_faults_total", "blamed"),
            "No forward pass failed in this time.",
        ),
        split(
            "Aborts by reason",
            "A client that left or cancelled, a drain, a client that reads nothing, a place in a full queue "
            "given up to who has fewer.",
            "reqps",
            ("request_aborts_total", "reason"),
            "No request was aborted in this time.",
        ),
        split(
            "Refused by reason",
            "Answered with 503 or 504 before any work.",
            "reqps",
            ("requests_rejected_total", "reason"),
            "No request was refused in this time.",
        ),
    )


def _long_term() -> tuple[Panel, ...]:
    return (
        lines(
            "Tokens",
            "Of five minutes each.",
            "count:tok/s",
            Query(f"sum({recorded('prompt_tokens:rate5m')})", "prompt"),
            Query(f"sum({recorded('generation_tokens:rate5m')})", "generation"),
        ),
        lines(
            "Cache and drafts",
            "Share of the prompt tokens found in the cache, and of the drafts that were right.",
            "percentunit",
            Query(recorded("prefix_cache_hits:ratio_rate5m"), "prefix hits, {{model_name}}"),
            Query(recorded("draft_acceptance:ratio_rate5m"), "drafts accepted, {{model_name}}"),
            top=1.0,
        ),
        lines(
            "Queue and preemptions",
            "Seconds in the queue, and preemptions for each request that ended.",
            "short",
            Query(recorded("request_queue_time_seconds:p50_rate5m"), "queue P50, s, {{model_name}}"),
            Query(recorded("request_queue_time_seconds:p95_rate5m"), "queue P95, s, {{model_name}}"),
            Query(recorded("preemptions:per_request_rate5m"), "preemptions, {{model_name}}"),
        ),
    )


def _process() -> tuple[Panel, ...]:
    return (
        lines(
            "Memory",
            "Resident memory of the server, K/V on a CPU and model included.",
            "bytes",
            Query(f"process_resident_memory_bytes{{{JOB}}}", "{{instance}}"),
        ),
        lines(
            "CPU",
            "Cores in use.",
            "short",
            Query(f"rate(process_cpu_seconds_total{{{JOB}}}[$__rate_interval])", "{{instance}}"),
        ),
        lines(
            "Up and restarts",
            "Hours since the start; it falls to 0 at each restart.",
            "h",
            Query(f"(time() - process_start_time_seconds{{{JOB}}}) / 3600", "{{instance}}"),
        ),
        lines(
            "File descriptors",
            "Open, over the most allowed.",
            "percentunit",
            Query(f"process_open_fds{{{JOB}}} / process_max_fds{{{JOB}}}", "{{instance}}"),
        ),
        lines(
            "Step age",
            "Age of the running step, 0 when idle. A line that climbs is an engine that hangs.",
            "s",
            Query(series("engine_heartbeat_age_seconds"), "{{instance}}"),
        ),
        lines(
            "Unknown request fields",
            "Fields that clients send and nobody knows; the log names each once.",
            "ops",
            Query(f"{rate('ignored_parameters_total', 'instance')} > 0", "{{instance}}"),
            empty="Every field was known in this time.",
        ),
    )


def _worst(name: str) -> str:
    return f"max(job_model:slipstream_{name}{{{CHOSEN_MODELS}}})"


def _long_view(title: str, histogram: str, description: str) -> Panel:
    return lines(
        title,
        description,
        "s",
        Query(recorded(f"{histogram}:p50_rate5m"), "P50, {{model_name}}"),
        Query(recorded(f"{histogram}:p95_rate5m"), "P95, {{model_name}}"),
    )


ERRORS = Board(
    "slipstream-errors",
    "Slipstream / Errors and SLO",
    "What goes wrong, whether promises are kept, and the process itself. Needs the recording rules.",
    (
        Row("At a glance", _at_a_glance(), "none yet"),
        Row("Promises", _promises(), f"No request in five minutes, {NO_RULES}"),
        Row("Faults", _faults(), "No server has been scraped in this time."),
        Row("Long term", _long_term(), f"Nothing in five minutes, {NO_RULES}"),
        Row("Process", _process(), "No server has been scraped by a job named slipstream in this time."),
    ),
)
