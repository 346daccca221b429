"""Expressions that the dashboards are made of, each over the models and instances chosen."""

from __future__ import annotations

from deploy.grafana.panels import Panel, Query, lines

CHOSEN = 'model_name=~"$model_name", instance=~"$instance"'
CHOSEN_MODELS = 'model_name=~"$model_name"'  # of recorded series, which know no instance
QUANTILES = (0.5, 0.9, 0.95, 0.99)


def series(name: str, labels: str = "") -> str:
    """The series of `name`, of those with `labels` where some are given."""
    return f"slipstream_{name}{{{CHOSEN}{', ' * bool(labels)}{labels}}}"


def recorded(name: str, labels: str = "") -> str:
    """A recorded series of a model."""
    return f"job_model:slipstream_{name}{{{CHOSEN_MODELS}{', ' * bool(labels)}{labels}}}"


def total(name: str, by: str = "") -> str:
    """The sum of a gauge."""
    return f"{_sum(by)}({series(name)})"


def rate(name: str, by: str = "", labels: str = "") -> str:
    """How fast a counter grows, a second."""
    return f"{_sum(by)}(rate({series(name, labels)}[$__rate_interval]))"


def ratio(part: str, whole: str, by: str = "") -> str:
    """How fast one counter grows, over how fast another does."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def share(part: str, whole: str) -> str:
    """The same of a part that is counted a moment before its whole: never above 1."""
    return f"clamp_max({ratio(part, whole)}, 1)"


def mean(histogram: str, by: str = "") -> str:
    """The mean of a histogram's observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count", by)


def quantile(share: float, histogram: str, by: str = "") -> str:
    """The value that so large a share of the observations stays under."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, {rate(histogram + '_bucket', labels)})"


def within_one(shares: str, whole: str) -> str:
    """Layers of `shares` over `whole`, or over their own sum where that is more: up to 1 together."""
    return f"{shares} / on () group_left () clamp_min(sum({shares}), scalar({whole}))"


def buckets(histogram: str) -> str:
    """How many observations fell into each bucket, for a heatmap."""
    return f"sum by (le) (increase({series(histogram + '_bucket')}[$__rate_interval]))"


def quantiles(histogram: str) -> tuple[Query, ...]:
    """The usual curves of a latency: four quantiles and the mean."""
    curves = [Query(quantile(share, histogram), f"P{100 * share:g}") for share in QUANTILES]
    return (*curves, Query(mean(histogram), "mean"))


def split(title: str, description: str, unit: str, by: tuple[str, str], empty: str = "") -> Panel:
    """How fast a counter grows, in layers `by` (counter, label); those that do not grow are left out."""
    counter, label = by
    query = Query(f"{rate(counter, label)} > 0", f"{{{{{label}}}}}")
    return lines(title, description, unit, query, stacked=True, empty=empty)


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
