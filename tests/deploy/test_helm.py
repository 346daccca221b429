"""The chart as Helm renders it: objects that Kubernetes takes, and refusals that say what to change."""

from __future__ import annotations

import asyncio
import json
import sys
import tarfile
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from config import load_settings
from deploy.kubernetes.build import CHART, MANIFEST, manifest_text
from tests.deploy.chart_values import PARTS, Values, merged
from tests.deploy.helm import NAMESPACE, Object, container, objects, of_kind, render
from tests.deploy.known_metrics import PROMETHEUS, ROOT, exposed
from tests.deploy.promql import metric_names
from tests.e2e.http_server import server_url
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.helm

CRDS: dict[str, Any] = json.loads((ROOT / "tests/deploy/crd_schemas.json").read_text())
OLDEST, NEWEST = "1.25", "1.37"

REFUSALS: dict[str, tuple[Values, str]] = {
    "killed while draining": (
        {"terminationGracePeriodSeconds": 60},
        "terminationGracePeriodSeconds is 60: streams would be cut; preStopSeconds (5)"
        " + config.server.drain-timeout (60) + 10 make 75",
    ),
    "killed for a longer wait": (
        {"terminationGracePeriodSeconds": 75, "preStopSeconds": 6},
        "10 make 76",
    ),
    "one volume, two nodes": (
        {"replicaCount": 2, "persistence": {"enabled": True}},
        "persistence.accessModes is [ReadWriteOnce]: several replicas cannot share that volume",
    ),
    "one volume, autoscaled": (
        {"autoscaling": {"enabled": True}, "persistence": {"enabled": True}},
        "use ReadWriteMany",
    ),
    "KEDA blind": (
        {"autoscaling": {"enabled": True, "kind": "keda"}},
        "autoscaling.keda.prometheusAddress is empty",
    ),
    "limits crossed": (
        {"autoscaling": {"enabled": True, "minReplicas": 9}},
        "autoscaling.minReplicas (9) is above autoscaling.maxReplicas (4)",
    ),
    "no key for Prometheus": (
        {
            "config": {"server": {"protect-metrics": True}},
            "apiKeys": {"existingSecret": "clients"},
            "serviceMonitor": {"enabled": True},
        },
        "Prometheus needs a key in serviceMonitor.authorization",
    ),
    "protected by nothing": (
        {"config": {"server": {"protect-metrics": True}}},
        "apiKeys.existingSecret names no keys",
    ),
    "a flag that is none": ({"config": {"scheduler": {"max-seqs": 4}}}, "max-seqs"),
    "a value that is none": ({"config": {"scheduler": {"max-num-seqs": 0}}}, "max-num-seqs"),
    "a key in the open": ({"config": {"server": {"api-key": "secret"}}}, "api-key"),
    "scaling to nothing": ({"autoscaling": {"enabled": True, "minReplicas": 0}}, "minReplicas"),
    "a value misspelt": ({"replicas": 2}, "replicas"),
}


@pytest.fixture(autouse=True, scope="module")
def tools() -> None:
    """`make test-helm` installs them; `make test-all` does without."""
    pytest.importorskip("helm_python")
    pytest.importorskip("kubernetes_validate")


def check(each: Object, version: str) -> None:
    """Raise unless the API of that version takes the object, every key of it."""
    import kubernetes_validate

    assert each["metadata"]["namespace"] == NAMESPACE
    assert len(each["metadata"]["name"]) <= 63
    custom = CRDS.get(f"{each['apiVersion']} {each['kind']}")
    if custom is None:
        kubernetes_validate.validate(each, version, strict=True)
    else:
        assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
        Draft202012Validator(custom).validate(each["spec"])


@pytest.mark.parametrize("name", PARTS)
def test_kubernetes_takes_every_object(name: str) -> None:
    found = objects(PARTS[name])
    for each in found:
        check(each, NEWEST)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)


def test_the_oldest_kubernetes_takes_everything_at_once() -> None:
    everything = merged(PARTS["model"], PARTS["gpu"], PARTS["hpa"], PARTS["monitoring"], PARTS["closed"])
    for each in objects(everything):
        check(each, OLDEST)


def test_the_checks_can_say_no() -> None:
    import kubernetes_validate

    found = objects(PARTS["keda"])
    deployment, scaled = of_kind(found, "Deployment"), of_kind(found, "ScaledObject")
    deployment["spec"]["template"]["spec"]["gracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment, NEWEST)
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 8  # KEDA takes texts only
    with pytest.raises(Exception, match="is not of type 'string'"):
        check(scaled, NEWEST)


@pytest.mark.parametrize(("first", "second"), list(combinations(PARTS, 2)), ids="-".join)
def test_parts_do_not_spoil_each_other(first: str, second: str) -> None:
    if {first, second} >= {"cache", "hpa"} or {first, second} >= {"cache", "keda"}:
        pytest.skip("refused: several replicas, one volume")
    kinds = [each["kind"] for each in objects(merged(PARTS[first], PARTS[second]))]
    assert kinds.count("Deployment") == kinds.count("Service") == 1


@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_go_wrong_is_refused_with_a_reason(name: str) -> None:
    from helm_python import HelmError

    values, reason = REFUSALS[name]
    with pytest.raises(HelmError) as caught:
        render(values)
    assert reason in str(caught.value)


@pytest.mark.parametrize("values", [{}, PARTS["closed"], PARTS["gpu"]], ids=["defaults", "closed", "gpu"])
def test_lint_has_nothing_to_say(values: Values) -> None:
    from helm_python import lint

    report = lint(CHART, values, strict=True, with_subcharts=False, namespace=NAMESPACE)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


def test_the_plain_manifest_is_what_the_chart_makes() -> None:
    assert MANIFEST.read_text() == manifest_text(), "run make chart"


def test_settings_reach_the_server(tmp_path: Path) -> None:
    [text] = of_kind(objects(PARTS["model"]), "ConfigMap")["data"].values()
    assert tomllib.loads(text) == PARTS["model"]["config"]
    (tmp_path / "slipstream.toml").write_text(text)
    settings = load_settings(["--config", str(tmp_path / "slipstream.toml")], {})
    assert settings.model.served_names == ("qwen", "chat")
    assert settings.server.max_queued_tokens == 5_000_000
    assert settings.cache.kv_cache_memory == 512 * 2**20


def test_texts_that_need_escaping_reach_the_server(tmp_path: Path) -> None:
    hard = 'a "quoted" \\ name <é>\n= 1'
    [text] = of_kind(objects({"config": {"model": {"served-model-name": hard}}}), "ConfigMap")[
        "data"
    ].values()
    assert tomllib.loads(text)["model"]["served-model-name"] == hard


def test_new_settings_start_new_pods() -> None:
    def mark(values: Values) -> str:
        pod = of_kind(objects(values), "Deployment")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["slipstream/config"])

    assert mark(PARTS["model"]) != mark({}) == mark(PARTS["monitoring"])


def test_keys_come_as_a_file_and_never_as_words() -> None:
    found = objects(PARTS["keys"])
    assert "--api-key-file=/etc/slipstream/keys/keys.txt" in container(found)["args"]
    assert {"name": "keys", "mountPath": "/etc/slipstream/keys", "readOnly": True} in container(found)[
        "volumeMounts"
    ]
    volumes = of_kind(found, "Deployment")["spec"]["template"]["spec"]["volumes"]
    secret = {"secretName": "clients", "defaultMode": 0o440}  # for the group: the user may be any
    assert {"name": "keys", "secret": secret} in volumes
    assert not any("key" in argument for argument in container(objects({}))["args"])


@pytest.mark.parametrize(("drain", "grace"), [(60, 75), (0, 15), (7.2, 23), (600, 615)])
def test_the_grace_period_follows_the_drain(drain: float, grace: int) -> None:
    pod = of_kind(objects({"config": {"server": {"drain-timeout": drain}}}), "Deployment")["spec"][
        "template"
    ]["spec"]
    assert pod["terminationGracePeriodSeconds"] == grace


def test_a_gpu_brings_its_image_its_device_and_its_limit() -> None:
    one = container(objects(PARTS["gpu"]))
    assert one["image"] == "slipstream:0.1.0-cuda"
    assert one["resources"]["limits"] == {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": "1"}
    assert {"name": "SLIPSTREAM_MODEL__DEVICE", "value": "cuda"} in one["env"]
    assert "nvidia.com/gpu" not in container(objects({}))["resources"]["limits"]


def test_a_default_can_be_taken_away() -> None:
    pod = of_kind(objects({"podSecurityContext": {"fsGroup": None}}), "Deployment")["spec"]["template"][
        "spec"
    ]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert "fsGroup" not in pod["securityContext"]


def test_a_volume_of_one_node_is_never_wanted_by_two_pods() -> None:
    found = objects(PARTS["cache"])
    assert of_kind(found, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    claim = of_kind(found, "PersistentVolumeClaim")
    volumes = of_kind(found, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} in volumes
    shared = objects(PARTS["shared cache"])
    assert not any(each["kind"] == "PersistentVolumeClaim" for each in shared)
    assert of_kind(shared, "Deployment")["spec"]["strategy"]["type"] == "RollingUpdate"


def test_both_autoscalers_compare_the_same() -> None:
    config = {"config": {"scheduler": {"max-num-seqs": 10}}}
    hpa = of_kind(objects(merged(PARTS["hpa"], config)), "HorizontalPodAutoscaler")["spec"]["metrics"]
    asked = {each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"] for each in hpa}
    assert asked == {
        "slipstream_num_requests_running": "7000m",
        "slipstream_num_requests_waiting": "8000m",
        "slipstream_kv_cache_usage_ratio": "850m",
    }
    keda = of_kind(objects(merged(PARTS["keda"], config)), "ScaledObject")["spec"]["triggers"]
    thresholds = {}
    for each in keda:
        [metric] = metric_names(each["metadata"]["query"])
        assert '{namespace="models",service="slipstream"}' in each["metadata"]["query"]
        thresholds[metric] = float(each["metadata"]["threshold"]) * 1000
    assert thresholds == {name: float(value.removesuffix("m")) for name, value in asked.items()}
    assert thresholds.keys() <= exposed().keys()
    for values in (PARTS["hpa"], PARTS["keda"]):
        assert "replicas" not in of_kind(objects(values), "Deployment")["spec"]


def test_rules_dashboards_and_the_job_reach_the_operator_as_they_are() -> None:
    found = objects(PARTS["monitoring"])
    rules = [each["spec"] for each in found if each["kind"] == "PrometheusRule"]
    files = sorted((PROMETHEUS / "rules").iterdir())
    assert sorted(rules, key=str) == sorted((yaml.safe_load(path.read_text()) for path in files), key=str)
    boards = {
        name: text
        for each in found
        if each["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
        for name, text in each["data"].items()
    }
    folder = ROOT / "deploy/grafana/dashboards"
    assert boards == {f"slipstream-{path.name}": path.read_text() for path in folder.iterdir()}
    monitor = of_kind(found, "ServiceMonitor")["spec"]
    service = of_kind(found, "Service")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert {"targetLabel": "job", "replacement": "slipstream"} in monitor["endpoints"][0]["relabelings"]


def test_long_names_of_releases_fit_and_stay_apart() -> None:
    found = objects(merged(PARTS["monitoring"], PARTS["cache"]), release="a" * 53)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)
    assert max(len(name) for _, name in names) <= 63


def test_a_packaged_chart_has_the_rules_and_dashboards_in_it(tmp_path: Path) -> None:
    from helm_python import package

    with tarfile.open(package(CHART, destination=tmp_path)) as archive:
        for path in (PROMETHEUS / "rules", ROOT / "deploy/grafana/dashboards"):
            for file in path.iterdir():
                member = archive.extractfile(f"slipstream/files/{path.name}/{file.name}")
                assert member is not None and member.read() == file.read_bytes()


def test_notes_tell_who_is_let_in() -> None:
    def notes(values: Values) -> str:
        return next(text for path, text in render(values).items() if path.endswith("NOTES.txt"))

    assert "No key is asked for" in notes({})
    assert "No key" not in notes(PARTS["keys"]) and "$KEY" in notes(PARTS["keys"])
    assert "see to it that the pods are scraped" in notes(PARTS["hpa"])


async def test_the_test_pods_script_asks_with_the_first_key(tmp_path: Path) -> None:
    [one] = of_kind(objects(PARTS["keys"]), "Pod")["spec"]["containers"]
    assert {each["name"]: each["value"] for each in one["env"]} == {
        "URL": "http://slipstream:8000/v1/completions",
        "KEY_FILE": "/etc/slipstream/keys/keys.txt",
    }
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nfirst = one\nsecond\n")
    async with server_url(FakeEngine(), api_key_file=keys) as url:
        for key_file, code in ((str(keys), 0), ("", 1)):
            environ = {"URL": f"{url}/v1/completions", "KEY_FILE": key_file}
            run = await asyncio.create_subprocess_exec(
                *(sys.executable, *one["command"][1:], *one["args"]),
                env=environ,
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await asyncio.wait_for(run.communicate(), 30)
            assert run.returncode == code, errors


def test_the_test_pod_is_none_of_the_servers() -> None:
    found = objects(PARTS["keys"])
    pod = of_kind(found, "Pod")
    selector = of_kind(found, "Service")["spec"]["selector"]
    assert not selector.items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
