"""promtool finds nothing to say, and a real Prometheus makes data of every rule and every panel."""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from deploy.grafana.prometheus_api import Curve, PrometheusApi
from tests.deploy.dashboards import NAMES, expressions, filled_in, load
from tests.deploy.known_metrics import PROMETHEUS, ROOT, RULES, recorded, rules
from tests.deploy.prometheus_process import gives_something, prometheus
from tests.e2e.wire import ask
from tests.support.scenario import MODEL, scenario

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="no Prometheus is installed (Debian: prometheus)",
    ),
]

# Seen only by a scrape at the right moment; and what is left of a budget after such a play.
MAY_BE_ZERO = ("num_requests_swapped", "num_requests_waiting", "heartbeat_age", "ALERTS", "slo_burn:rate3d")

# As vLLM's own dashboard writes them.
VLLM = (
    "histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{$M}[15s])))",
    "rate(vllm:e2e_request_latency_seconds_sum{$M}[15s])"
    " / rate(vllm:e2e_request_latency_seconds_count{$M}[15s])",
    "rate(vllm:prompt_tokens_total{$M}[15s])",
    "rate(vllm:generation_tokens_total{$M}[15s])",
    "histogram_quantile(0.5, sum by(le) (rate(vllm:time_per_output_token_seconds_bucket{$M}[15s])))",
    "vllm:num_requests_running{$M} + vllm:num_requests_waiting{$M}",
    "vllm:kv_cache_usage_perc{$M}",
    "sum by(le) (increase(vllm:request_prompt_tokens_bucket{$M}[15s]))",
    "sum by(finished_reason) (increase(vllm:request_success_total{$M}[15s]))",
    "rate(vllm:request_max_num_generation_tokens_sum{$M}[15s])",
)


def _promtool(*arguments: str | Path, page: bytes = b"") -> None:
    done = subprocess.run(["promtool", *arguments], input=page, capture_output=True, cwd=ROOT, check=False)
    assert (done.returncode, b"FAILED" in done.stdout + done.stderr) == (0, False), done.stdout + done.stderr


def test_promtool_takes_the_configuration_and_the_rules() -> None:
    _promtool("check", "rules", *sorted(RULES.glob("*.yml")))
    _promtool("check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "deploy" / "prometheus").glob("*.yml")), ids=str)
def test_rules_do_what_their_tests_say(path: Path) -> None:
    _promtool("test", "rules", path)


async def test_a_real_prometheus_makes_data_of_every_rule_and_panel(tmp_path: Path) -> None:
    start = time.time()
    async with scenario(tmp_path) as show, prometheus(tmp_path, show.urls) as api:
        await show.keep_busy(3)
        await show.play()
        for url in show.urls:
            _promtool("check", "metrics", page=(await ask(url, "GET", "/metrics")).body)
        await _scraped_and_evaluated(api)
        await asyncio.to_thread(_everything_is_seen, api, start, time.time())


async def _scraped_and_evaluated(api: PrometheusApi) -> None:
    """Return once rules have been evaluated over a scrape that was made after this call."""
    await gives_something(api, f'min(timestamp(up{{job="slipstream"}})) > {time.time()}')
    await gives_something(api, f"timestamp(job_model:slipstream_requests:rate5m) > {time.time() + 1}")


def _everything_is_seen(api: PrometheusApi, start: float, end: float) -> None:
    boards = [(name, *pair) for name in NAMES for pair in expressions(load(name))]
    asked = [(f"{name}: {title}", filled_in(expr)) for name, title, expr in boards]
    asked += [("rule", name) for name in sorted(recorded())]
    asked += [("vLLM's dashboard", expr.replace("$M", f'model_name="{MODEL}"')) for expr in VLLM]
    blind = [each for each in asked if not _is_data(each[1], api.over_time(each[1], start, end, 1.0))]
    assert not blind, f"{len(blind)} of {len(asked)}: {blind}"

    groups = api.ask("rules")["groups"]
    loaded = [rule for group in groups for rule in group["rules"]]
    assert len(loaded) == sum(len(rules(path.name)) for path in RULES.iterdir())
    assert [(rule["name"], rule.get("lastError")) for rule in loaded if rule["health"] != "ok"] == []
    alerts = api.ask("alerts")["alerts"]
    assert "SlipstreamPreemptionStorm" in {alert["labels"]["alertname"] for alert in alerts}
    assert "error expanding" not in str(alerts)


def _is_data(expr: str, curves: list[Curve]) -> bool:
    """Whether there is a number at one moment at least, and not only 0 where the play is to give more."""
    values = [value for curve in curves for _, value in curve.points if math.isfinite(value)]
    return any(values) or (bool(values) and any(part in expr for part in MAY_BE_ZERO))
