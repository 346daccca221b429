"""Rules ask for what servers expose, every alert is explained, and each is shown to fire and to be quiet."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.dashboards import all_expressions
from tests.deploy.known_metrics import PROMETHEUS, ROOT, Series, exposed, recorded, rules
from tests.deploy.promql import label_values, metric_names

FILES = ("recording.yml", "vllm_aliases.yml", "alerts.yml")
CASES = ROOT / "tests" / "deploy" / "prometheus"

# What vLLM's own dashboard and the older ones made after it ask for.
VLLM_HISTOGRAMS = (
    *("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("time_per_output_token_seconds", "request_time_per_output_token_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_max_num_generation_tokens", "iteration_tokens_total"),
)
VLLM_OTHERS = (
    *("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc"),
    *("gpu_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total", "cache_config_info"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
)


@pytest.fixture(scope="module")
def known() -> dict[str, Series]:
    return exposed()


@pytest.mark.parametrize("file_name", FILES)
def test_rules_ask_only_for_what_exists(file_name: str, known: dict[str, Series]) -> None:
    for rule in rules(file_name):
        unknown = metric_names(rule["expr"]) - known.keys() - recorded()
        assert not unknown, f"{rule.get('record') or rule['alert']} asks for {unknown}"


@pytest.mark.parametrize("file_name", FILES)
def test_rules_choose_by_labels_that_exist(file_name: str, known: dict[str, Series]) -> None:
    for rule in rules(file_name):
        for metric, label, value in label_values(rule["expr"]):
            if metric in known:
                assert label in known[metric].labels, (metric, label)
            if label == "le":  # a bound written in another way finds nothing
                assert value in known[metric].bounds, (metric, value)


def test_every_recorded_series_is_read_by_somebody() -> None:
    texts = [rule["expr"] for name in ("recording.yml", "alerts.yml") for rule in rules(name)]
    read = set().union(*(metric_names(text) for text in (*texts, *all_expressions())))
    assert {rule["record"] for rule in rules("recording.yml")} - read == set()


def test_names_of_vllm_that_dashboards_ask_for_are_recorded() -> None:
    wanted = {f"vllm:{name}" for name in VLLM_OTHERS}
    wanted |= {f"vllm:{name}_{part}" for name in VLLM_HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert wanted - recorded() == set()
    assert all(rule["labels"]["engine"] == "0" for rule in rules("vllm_aliases.yml"))


def test_each_promise_has_an_objective_its_good_events_and_all_events() -> None:
    parts: dict[str, set[str]] = {}
    for rule in rules("recording.yml"):
        if "slo" in rule.get("labels", {}):
            parts.setdefault(rule["labels"]["slo"], set()).add(rule["record"].rpartition("slo:")[2])
    assert set(parts) == {"first_token", "inter_token", "requests"}
    assert all(names == {"objective", "good:total", "events:total"} for names in parts.values())


def test_alerts_say_how_bad_it_is_and_what_to_do() -> None:
    readme = (PROMETHEUS / "README.md").read_text(encoding="utf-8")
    names = [rule["alert"] for rule in rules("alerts.yml")]
    assert len(set(names)) == len(names)
    assert re.findall(r"^### (\w+)$", readme, re.MULTILINE) == names
    for rule in rules("alerts.yml"):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert len(rule["annotations"]["summary"]) < 100 < len(rule["annotations"]["description"])


def test_each_alert_is_shown_to_fire_and_a_healthy_server_to_be_quiet() -> None:
    fired: set[str] = set()
    for path in CASES.glob("*.yml"):
        for case in _cases(path.name):
            for check in case["promql_expr_test"]:
                for sample in check.get("exp_samples", ()):
                    fired |= set(re.findall(r'ALERTS\{alertname="(\w+)"', sample["labels"]))
    assert fired == {rule["alert"] for rule in rules("alerts.yml")}
    healthy = _cases("healthy.yml")
    assert len(healthy) == 2
    for case in healthy:
        assert all(
            check["expr"] == "ALERTS" and "exp_samples" not in check for check in case["promql_expr_test"]
        )
        fed = set().union(*(metric_names(each["series"]) for each in case["input_series"]))
        asked = set().union(*(metric_names(rule["expr"]) for rule in rules("alerts.yml")))
        assert {name for name in asked if not name.startswith("job_model:")} <= fed


def test_the_job_that_alerts_look_for_is_scraped() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert list(PROMETHEUS.glob(config["rule_files"][0])) and len(config["rule_files"]) == 1
    targets = [path for path in PROMETHEUS.glob(jobs["slipstream"]["file_sd_configs"][0]["files"][0])]
    assert [yaml.safe_load(path.read_text(encoding="utf-8")) for path in targets] == [
        [{"targets": ["slipstream:8000"]}]
    ]
    looked_for = {
        value
        for rule in rules("alerts.yml")
        for _, label, value in label_values(rule["expr"])
        if label == "job"
    }
    assert looked_for == {"slipstream"}


def _cases(file_name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = yaml.safe_load((CASES / file_name).read_text(encoding="utf-8"))["tests"]
    return cases
