"""Who waits, who runs, in which batches, and how fairly."""

from __future__ import annotations

from deploy.grafana.panels import Board, Panel, Query, Row, heatmap, lines, stat
from deploy.grafana.queries import (
    buckets,
    mean,
    quantile,
    quantiles,
    rate,
    ratio,
    series,
    split,
    total,
    within_one,
)

REFUSED = rate("requests_rejected_total")
RARE = (("green", None), ("orange", 0.01), ("red", 0.05))


def _at_a_glance() -> tuple[Panel, ...]:
    return (
        stat("Running", "Requests that hold K/V blocks now.", "short", total("num_requests_running")),
        stat("Waiting", "Requests in the queue now.", "short", total("num_requests_waiting")),
        stat(
            "Queue time, P95",
            "From arrival to the first scheduled step.",
            "s",
            quantile(0.95, "request_queue_time_seconds"),
            (("green", None), ("orange", 2), ("red", 10)),
        ),
        stat("Tokens a step", "Mean tokens computed in a step.", "short", mean("step_batched_tokens")),
        stat("Steps", "Steps a second.", "ops", rate("step_batched_tokens_count")),
        stat(
            "Preemptions a request",
            "Each costs a prefill or a swap again.",
            "short",
            ratio("preemptions_total", "requests_total"),
            (("green", None), ("orange", 0.1), ("red", 0.5)),
        ),
        stat(
            "Refused",
            "Requests refused before any work, over all that asked.",
            "percentunit",
            f"{REFUSED} / ({REFUSED} + {rate('requests_total')})",
            RARE,
        ),
        stat(
            "Deadlines missed",
            "Over all requests, refused ones and those without a deadline included.",
            "percentunit",
            f"{rate('deadline_missed_total')} / ({rate('requests_total')} + {REFUSED})",
            RARE,
        ),
    )


def _queue() -> tuple[Panel, ...]:
    return (
        lines(
            "Requests by state",
            "Running, waiting, and preempted with their K/V in host memory.",
            "short",
            Query(total("num_requests_running"), "running"),
            Query(total("num_requests_waiting"), "waiting"),
            Query(total("num_requests_swapped"), "swapped"),
            stacked=True,
        ),
        lines(
            "Queue time",
            "From arrival to the first scheduled step, of requests that got there.",
            "s",
            *quantiles("request_queue_time_seconds"),
        ),
        heatmap(
            "Queue time, all of it",
            "How many requests waited how long.",
            "s",
            buckets("request_queue_time_seconds"),
        ),
        split(
            "Refused by reason",
            "Before any work: a full queue, too long in it, a hopeless deadline, loading, draining.",
            "reqps",
            ("requests_rejected_total", "reason"),
            "No request was refused in this time.",
        ),
        lines(
            "Deadlines missed",
            "Requests ended by their deadline, or refused because they could not meet it.",
            "reqps",
            Query(f"{rate('deadline_missed_total', 'model_name')} > 0", "{{model_name}}"),
            empty="No deadline was missed in this time.",
        ),
        lines(
            "Tenants' shares",
            "Of the tokens of the last minute, by tenant. With --scheduling-policy fair, those who all "
            "ask for more than they get come out equal.",
            "percentunit",
            Query(within_one(f"sum by (tenant) ({series('tenant_share_ratio')})", "vector(1)"), "{{tenant}}"),
            stacked=True,
            top=1.0,
        ),
    )


def _steps() -> tuple[Panel, ...]:
    return (
        lines(
            "Step time by phase",
            "P50 and P95 of steps that only prefill, only decode, or do both.",
            "s",
            Query(quantile(0.5, "step_duration_seconds", "phase"), "{{phase}} P50"),
            Query(quantile(0.95, "step_duration_seconds", "phase"), "{{phase}} P95"),
        ),
        split(
            "Steps by phase",
            "How often steps of each kind run.",
            "ops",
            ("step_duration_seconds_count", "phase"),
        ),
        heatmap("Batch size", "Tokens computed in a step.", "short", buckets("step_batched_tokens")),
        lines(
            "Time in steps",
            "Share of the time that the device is given work, by phase. At 1 the server can do no more.",
            "percentunit",
            Query(
                within_one(
                    rate("step_duration_seconds_sum", "phase"), f"count({series('num_requests_running')})"
                ),
                "{{phase}}",
            ),
            stacked=True,
            top=1.0,
        ),
        split(
            "Preemptions by mode",
            "Running requests that gave their K/V back, to be recomputed or swapped in again.",
            "ops",
            ("preemptions_total", "mode"),
            "No request was preempted in this time.",
        ),
        lines(
            "Preemptions of one request",
            "How often the requests that ended had been preempted.",
            "short",
            Query(f"{quantile(0.95, 'request_preemptions')} > 0", "P95"),
            Query(f"{mean('request_preemptions')} > 0", "mean"),
            empty="No request that ended had been preempted.",
        ),
    )


def _background() -> tuple[Panel, ...]:
    return (
        lines(
            "Batch lines",
            "Lines of open batches that run in seats nobody else needs, and that wait for one.",
            "short",
            Query(f"{total('batch_lines_running')} > 0", "running"),
            Query(f"{total('batch_lines_waiting')} > 0", "waiting"),
            empty="No batch was open in this time.",
        ),
        split(
            "Batch lines that ended",
            "Answered, failed, or left over by a batch that was cancelled or whose window ended.",
            "ops",
            ("batch_lines_total", "status"),
            "No line of a batch ended in this time.",
        ),
        lines(
            "Vectors and scores",
            "Texts embedded or scored, in pieces between the steps, and requests that wait for that.",
            "short",
            Query(f"{rate('embedding_texts_total')} > 0", "texts a second"),
            Query(f"{total('num_embedding_requests_waiting')} > 0", "requests waiting"),
            empty="No text was embedded or scored in this time.",
        ),
    )


SCHEDULING = Board(
    "slipstream-scheduling",
    "Slipstream / Scheduling and fairness",
    "Who waits, who runs, in which batches, and how fairly.",
    (
        Row("At a glance", _at_a_glance(), "none yet"),
        Row("Queue", _queue(), "No request came in this time."),
        Row("Steps", _steps(), "No step ran in this time."),
        Row("In the background", _background(), "Nothing ran in the background in this time."),
    ),
)
