"""What the chart promises and what can be seen of it without Helm: its values, its manifest, its numbers."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, ValidationError

from config import CPU_SEATS, SettingsError, load_settings
from config.setting import BY_KEY, SETTINGS
from deploy.kubernetes.build import CHART, FOLDER, MANIFEST, SCHEMA, schema_text, sources_digest
from deploy.kubernetes.settings_schema import OF_THE_CHART
from server.http.listener import GRACE_S
from server.observability import health
from tests.deploy.known_metrics import PROMETHEUS, ROOT, exposed
from tests.deploy.pod import read_manifest, server_container
from tests.support.metrics_golden import GOLDEN

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
VALIDATOR = Draft7Validator(json.loads(SCHEMA.read_text()))
TEMPLATES = "".join(path.read_text() for path in sorted(CHART.glob("templates/**/*.*")))
KINDS = read_manifest()
POD = KINDS["Deployment"]["spec"]["template"]["spec"]
CONTAINER = server_container(KINDS)


def refusal(config: dict[str, Any]) -> str:
    """Where the schema refuses these settings; "" when it takes them."""
    try:
        VALIDATOR.validate(VALUES | {"config": config})
    except ValidationError as error:
        return ".".join(str(part) for part in error.absolute_path) or "."
    return ""


def read_by_the_server(toml: str, folder: Path) -> Any:
    """The settings that the server would have from this file and the container's environment."""
    file = folder / "slipstream.toml"
    file.write_text(toml)
    environ = {each["name"]: each["value"] for each in CONTAINER["env"]}
    return load_settings(["--config", str(file)], environ)


def test_the_schema_knows_todays_settings() -> None:
    assert SCHEMA.read_text() == schema_text(), "run make chart"
    Draft7Validator.check_schema(VALIDATOR.schema)


def test_the_manifest_is_made_of_todays_chart() -> None:
    assert f"digest is {sources_digest()}." in MANIFEST.read_text(), "run make chart"


def test_the_defaults_are_allowed_and_every_value_has_one() -> None:
    VALIDATOR.validate(VALUES)
    assert set(VALIDATOR.schema["properties"]) == set(VALUES) | {"global"}


def test_values_that_templates_ask_for_exist() -> None:
    for path in re.findall(r"\.Values\.([\w.]+)", TEMPLATES):
        value: Any = VALUES
        for name in path.split("."):
            assert name in value, path
            value = value[name]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_a_setting_is_known_unless_the_chart_or_the_image_sets_it(setting: Any) -> None:
    sections = VALIDATOR.schema["properties"]["config"]["properties"]
    own = setting.key in OF_THE_CHART or setting.section == ""
    assert (setting.word in sections.get(setting.section, {"properties": {}})["properties"]) is not own


@pytest.mark.parametrize(
    "line",
    [
        "[model]\nmodel = 'Qwen/Qwen3-0.6B'",
        "[model]\nserved-model-name = ['a', 'b']",
        "[model]\nmax-model-len = 'auto'",
        "[cache]\nkv-cache-memory = '8GiB'",
        "[scheduler]\nscheduling-policy = 'fair'",
        "[speculation]\nmin-acceptance-rate = 0",
        "[server]\ndrain-timeout = 120.5",
        "[log]\nlog-level = 'debug'",
    ],
)
def test_what_the_server_takes_the_schema_takes(line: str, tmp_path: Path) -> None:
    read_by_the_server(line, tmp_path)
    assert refusal(tomllib.loads(line)) == ""


@pytest.mark.parametrize(
    "line",
    [
        "[model]\ncompile = 'always'",
        "[cache]\nkv-block-size = 0",
        "[scheduler]\nmax-num-seqs = '64'",
        "[scheduler]\nmax-num-seqs = 1.5",
        "[scheduler]\nmax-num-seq = 64",
        "[scheduler]\nscheduling-policy = 'lifo'",
        "[speculation]\nmin-acceptance-rate = 1.1",
        "[server]\nstall-timeout = 0",
        "[server]\nstrict-params = 'perhaps'",
        "[limits]\nmax-num-seqs = 64",
    ],
)
def test_what_the_server_refuses_the_schema_refuses(line: str, tmp_path: Path) -> None:
    assert refusal(tomllib.loads(line)).startswith("config")
    if "'64'" not in line:  # a text with a number in it is read as the number
        with pytest.raises(SettingsError):
            read_by_the_server(line, tmp_path)


def test_address_device_and_keys_are_no_settings_of_the_file() -> None:
    for key in OF_THE_CHART:
        section, name = BY_KEY[key].section, BY_KEY[key].word
        assert refusal({section: {name: "x"}}) == f"config.{section}"


def test_the_manifests_settings_are_read_by_the_server(tmp_path: Path) -> None:
    [(name, text)] = KINDS["ConfigMap"]["data"].items()
    mount = next(each for each in CONTAINER["volumeMounts"] if each["name"] == "config")
    assert CONTAINER["args"] == [f"--config={mount['mountPath']}/{name}"]
    settings = read_by_the_server(text, tmp_path)
    assert settings.server.drain_timeout == VALUES["config"]["server"]["drain-timeout"]
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", CONTAINER["ports"][0]["containerPort"])
    assert settings.model.device == "cpu"


def test_a_pod_has_time_to_drain_before_it_is_killed() -> None:
    drain_s = VALUES["config"]["server"]["drain-timeout"]
    wait_s = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    # After the drain: the step in flight, the last events to their readers, the listener.
    assert POD["terminationGracePeriodSeconds"] >= wait_s + drain_s + 4 * GRACE_S
    readiness = VALUES["probes"]["readiness"]
    assert readiness["periodSeconds"] > readiness["timeoutSeconds"]


def test_templates_fall_back_on_the_servers_own_defaults() -> None:
    falls_back = re.findall(r'dig "(\w+)" "([\w-]+)" (\d+|true|false) \.Values\.config', TEMPLATES)
    assert len(falls_back) >= 3
    for section, name, value in falls_back:
        default = BY_KEY[f"{section}.{name.replace('-', '_')}"].field.default
        assert json.loads(value) == (CPU_SEATS if name == "max-num-seqs" else default)


def test_a_start_may_take_as_long_as_promised() -> None:
    probe = CONTAINER["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= VALUES["startupSeconds"]
    assert KINDS["Deployment"]["spec"]["progressDeadlineSeconds"] > VALUES["startupSeconds"]


def test_probes_ask_what_the_server_answers() -> None:
    asked = {
        name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    }
    paths = {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    assert asked == paths
    assert set(paths.values()) <= {getattr(route, "path", "") for route in health.router.routes}


def test_the_container_is_confined_as_the_image_allows() -> None:
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^USER (\S+)", dockerfile, re.MULTILINE)[-1] == "1000:0"  # a number: it can be checked
    writable = {each["mountPath"] for each in CONTAINER["volumeMounts"] if not each.get("readOnly")}
    assert writable == {"/tmp", *re.findall(r"^VOLUME (\S+)", dockerfile, re.MULTILINE)}
    assert re.findall(r"^EXPOSE (\d+)", dockerfile, re.MULTILINE) == [
        str(CONTAINER["ports"][0]["containerPort"])
    ]


def test_the_service_finds_the_pods_by_a_port_with_a_name() -> None:
    labels = KINDS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        KINDS["Service"]["spec"]["selector"],
        KINDS["Deployment"]["spec"]["selector"]["matchLabels"],
        KINDS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert KINDS["Service"]["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"] == "http"


def test_rules_and_dashboards_are_the_originals() -> None:
    assert (CHART / "files/rules").resolve() == PROMETHEUS / "rules"
    assert (CHART / "files/dashboards").resolve() == ROOT / "deploy/grafana/dashboards"
    names = {path.stem for path in (CHART / "files/rules").iterdir()}
    assert names == set(VALUES["prometheusRule"]["files"])
    allowed = VALIDATOR.schema["properties"]["prometheusRule"]["properties"]["files"]["items"]["enum"]
    assert names == set(allowed)


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None and chart["appVersion"] == project[1]


def test_autoscalers_read_metrics_that_exist() -> None:
    scaled_by = re.findall(r"metric: (\w+)", (CHART / "templates/_scaling.tpl").read_text())
    assert len(scaled_by) == 3
    assert set(scaled_by) <= exposed().keys()


@pytest.mark.parametrize("page", ["README.md", "gateway.md"])
def test_pages_name_metrics_and_values_that_exist(page: str) -> None:
    text = (FOLDER / page).read_text()
    assert set(re.findall(r"\bslipstream_\w+", text)) <= exposed().keys()
    for path in re.findall(r"--set(?:-string)? '?([\w.-]+)=", text):
        value: Any = VALUES
        for name in path.split("."):
            assert name in value, path
            if name == "config":
                break
            value = value[name]


def test_the_pages_example_is_allowed() -> None:
    [example] = re.findall(
        r"<<'YAML'\n(.*?)^YAML$", (FOLDER / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    VALIDATOR.validate(VALUES | yaml.safe_load(example))


def test_the_gateways_picker_reads_gauges_that_exist() -> None:
    [found] = _each(_gateway_examples(), "engineConfigs")
    [engine] = found
    assert engine["name"] == "slipstream"
    gauges = {engine[f"{what}Spec"] for what in ("queuedRequests", "runningRequests", "kvUsage", "cacheInfo")}
    kinds = {line.split(" ")[0]: line.split(" ")[1] for line in GOLDEN.read_text().splitlines()[1:]}
    assert {kinds[name] for name in gauges} == {"gauge"}
    assert {"block_size", "num_gpu_blocks"} <= exposed()[engine["cacheInfoSpec"]].labels


def test_the_gateways_pool_finds_the_charts_pods() -> None:
    examples = _gateway_examples()
    [pool] = [each for each in examples if each.get("kind") == "InferencePool"]
    labels = KINDS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": CONTAINER["ports"][0]["containerPort"]}]
    [route] = [each for each in examples if each.get("kind") == "HTTPRoute"]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


def _gateway_examples() -> list[dict[str, Any]]:
    """What stands in gateway.md as YAML, and the YAML that stands in it as text."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (FOLDER / "gateway.md").read_text(), re.MULTILINE | re.DOTALL)
    return [each for block in blocks for each in yaml.safe_load_all(block)]


def _each(value: Any, key: str) -> list[Any]:
    """Every value that stands under `key`, however deep; texts with several lines are read as YAML."""
    if isinstance(value, str) and "\n" in value:
        value = yaml.safe_load(value)
    if isinstance(value, list):
        return [found for part in value for found in _each(part, key)]
    if not isinstance(value, dict):
        return []
    here = [value[key]] if key in value else []
    return here + [found for part in value.values() for found in _each(part, key)]
