"""The page of metrics: every name there is, what can become a label, and what writing it costs."""

from __future__ import annotations

import time
from statistics import median

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine import EngineState
from engine.plan.metrics.tenant_shares import MAX_SHOWN, TenantShares
from server.observability.metrics import MetricsPage
from tests.e2e.http_server import MODEL
from tests.support.fake_engine import FakeEngine
from tests.support.metrics_golden import GOLDEN, make_context, make_page, of_today

LIMIT_S = 0.05  # ten times what is asked for: another process may have the core
_CONTRACT = {
    "gauge": """
        num_requests_running num_requests_waiting num_requests_swapped kv_cache_usage_ratio kv_cache_blocks
        engine_heartbeat_age_seconds speculation_draft_length speculation_acceptance_ratio
        speculation_speedup_ratio speculation_theoretical_speedup_ratio
        speculation_enabled num_embedding_requests_waiting tenant_share_ratio build_info
        cache_config_info batch_lines_running batch_lines_waiting weight_bytes""",
    "counter": """
        requests requests_rejected request_aborts preemptions prompt_tokens prompt_tokens_cached
        generation_tokens prefix_cache_queries prefix_cache_hits spec_decode_num_drafts
        spec_decode_num_draft_tokens spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
        spec_decode_draft_tokens_dropped spec_decode_run_ahead spec_decode_n1_fallbacks engine_errors
        deadline_missed http_requests ignored_parameters embedding_texts embedding_tokens batch_lines
        prefix_cache_disk_read_blocks prefix_cache_disk_written_blocks forward_faults
        next_turn_tokens""",
    "histogram": """
        time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
        request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
        step_duration_seconds step_batched_tokens draft_duration_seconds verify_duration_seconds
        request_prompt_tokens request_generation_tokens request_preemptions
        embedding_request_latency_seconds embedding_batch_duration_seconds embedding_batch_tokens""",
}


class CrowdedEngine(FakeEngine):
    """Two hundred tenants have had their share."""

    def tenant_shares(self) -> dict[str, float]:
        shares = TenantShares(lambda: 0.0)
        for number in range(200):
            shares.count(f"{number:016x}", number + 1)
        return shares.shares()


def samples_of(page: MetricsPage) -> list[tuple[str, dict[str, str], float]]:
    """Every sample, as the library reads it."""
    text = page.render(openmetrics=False).decode()
    families = text_string_to_metric_families(text)
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def test_weights_are_counted_by_format() -> None:
    found = [sample for sample in samples_of(make_page()) if sample[0] == "slipstream_weight_bytes"]
    assert [(labels["format"], value) for _, labels, value in found] == [("Q4_K", 3 << 20), ("F32", 1 << 20)]


def test_names_types_labels_and_bounds_stay_as_they_are() -> None:
    assert of_today() == GOLDEN.read_text(encoding="utf-8"), (
        "dashboards, alerts and scripts are written against these names: if the change is meant, "
        "write the file anew with `python -m tests.support.metrics_golden` and say so in the changes"
    )


def test_all_that_was_promised_is_there_and_nothing_else() -> None:
    text = make_page().render(openmetrics=False).decode()
    found = {
        (family.name, family.type)
        for family in text_string_to_metric_families(text)
        if not family.name.startswith("process_")
    }
    assert found == {(f"slipstream_{name}", kind) for kind in _CONTRACT for name in _CONTRACT[kind].split()}


@pytest.mark.parametrize("state", [EngineState.READY, EngineState.LOADING])
def test_every_family_has_help_and_begins_at_zero(state: EngineState) -> None:
    engine = FakeEngine(state=state)
    text = make_page(engine).render(openmetrics=False).decode()
    for family in text_string_to_metric_families(text):
        if family.name.startswith("process_"):
            continue
        assert family.documentation
        is_known = state is EngineState.READY or family.name not in (
            "slipstream_cache_config_info",
            "slipstream_weight_bytes",
        )
        assert bool(family.samples) is is_known, family.name
        assert all(sample.labels["model_name"] == MODEL for sample in family.samples)
        assert not any(sample.name.endswith("_created") for sample in family.samples)
        if family.type != "gauge":
            assert {sample.value for sample in family.samples} == {0}, family.name


@pytest.mark.parametrize("engine", [FakeEngine(), CrowdedEngine()])
def test_both_formats_say_the_same_to_the_library_s_own_parsers(engine: FakeEngine) -> None:
    page = make_page(engine)
    openmetrics = page.render(openmetrics=True).decode()
    read = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse_openmetrics(openmetrics)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if not family.name.startswith("process_")
    }
    assert read == {
        (name, *sorted(labels.items())): value
        for name, labels, value in samples_of(page)
        if not name.startswith("process_")
    }
    assert openmetrics.endswith("\n# EOF\n")


def test_a_crowd_of_tenants_is_a_few_names_and_the_rest() -> None:
    shares = [
        (labels["tenant"], value)
        for name, labels, value in samples_of(make_page(CrowdedEngine()))
        if name == "slipstream_tenant_share_ratio"
    ]
    assert len(shares) == MAX_SHOWN + 1
    assert dict(shares)["other"] > max(value for name, value in shares if name != "other")
    assert sum(value for _, value in shares) == pytest.approx(1.0)


def test_what_is_counted_shows_at_the_next_scrape() -> None:
    engine = FakeEngine()
    context = make_context(engine)
    page = MetricsPage(context)
    before = {(name, *labels.items()): value for name, labels, value in samples_of(page)}
    engine.metrics.engine_errors["somewhere new"] += 2
    engine.metrics.time_to_first_token.observe(0.003, times=2)
    context.http.requests["/v1/completions", 200] += 1
    changed = {
        (name, labels.get("stage") or labels.get("route") or labels.get("le")): value
        for name, labels, value in samples_of(page)
        if not name.startswith("process_") and before.get((name, *labels.items())) != value
    }
    bucket = "slipstream_time_to_first_token_seconds_bucket"
    assert changed.pop(("slipstream_engine_errors_total", "somewhere new")) == 2
    assert changed.pop(("slipstream_http_requests_total", "/v1/completions")) == 1
    assert changed.pop(("slipstream_time_to_first_token_seconds_sum", None)) == 0.006
    assert changed.pop(("slipstream_time_to_first_token_seconds_count", None)) == 2
    assert (bucket, "0.0025") not in changed
    assert {changed.pop((bucket, le)) for le in ("0.005", "640.0", "+Inf")} == {2}
    assert {name for name, _ in changed} == {bucket}


@pytest.mark.parametrize("openmetrics", [False, True])
@pytest.mark.parametrize("engine", [FakeEngine(), CrowdedEngine()])
def test_a_scrape_takes_little_of_the_event_loop(engine: FakeEngine, openmetrics: bool) -> None:
    page = make_page(engine)
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        page.render(openmetrics=openmetrics)
        seconds.append(time.perf_counter() - started)
    assert median(seconds) < LIMIT_S
