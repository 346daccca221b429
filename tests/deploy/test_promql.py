"""The scanner that the tests of rules and dashboards rest on."""

from tests.deploy.promql import kept_labels, label_values, metric_names


def test_names_without_functions_labels_words_and_ranges() -> None:
    expr = """
      histogram_quantile(0.95, sum by (le, phase) (rate(a_bucket{model_name=~"$model_name", x="by"}[5m])))
        / on (slo) group_left () (1 - level:b:rate5m) > 14.4 and c offset 5m or vector(0)
    """
    assert metric_names(expr) == {"a_bucket", "level:b:rate5m", "c"}
    assert metric_names('label_replace(a, "to", "$1", "from", "(.*)")') == {"a"}
    assert metric_names("sum without (mode) (a_total)") == {"a_total"}
    assert metric_names("rate(a[$__rate_interval]) / (b > 0) < 0.5") == {"a", "b"}
    assert metric_names("a == 1e-09") == {"a"}


def test_matchers_and_clauses() -> None:
    assert label_values('a{x="1", y!~"2|3"} / b{z=~".+"}') == [
        ("a", "x", "1"),
        ("a", "y", "2|3"),
        ("b", "z", ".+"),
    ]
    assert kept_labels("sum by (le, phase) (a) / on () group_left () b") == {"le", "phase"}
