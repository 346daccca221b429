"""A real Prometheus with the rules and the scrape configuration of `deploy/prometheus`, only faster."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from deploy.grafana.prometheus_api import PrometheusApi
from tests.deploy.known_metrics import PROMETHEUS

PATIENCE_S = 20.0


def write_configuration(directory: Path, urls: Sequence[str]) -> Path:
    """A copy of `deploy/prometheus` that looks at `urls` every second; the configuration's path."""
    folder = Path(shutil.copytree(PROMETHEUS, directory / "prometheus"))
    targets = [{"targets": [urlsplit(url).netloc for url in urls]}]
    (folder / "targets" / "slipstream.yml").write_text(yaml.safe_dump(targets), encoding="utf-8")
    path = folder / "prometheus.yml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] == "slipstream"]
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@asynccontextmanager
async def prometheus(directory: Path, urls: Sequence[str]) -> AsyncIterator[PrometheusApi]:
    """Prometheus over `urls`, once it has scraped all of them; its data and log go to `directory`."""
    config = write_configuration(directory, urls)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (directory / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={address}",
            stdout=log,
            stderr=log,
        )
    try:
        api = PrometheusApi(f"http://{address}")
        await gives_something(api, f'sum(up{{job="slipstream"}}) == {len(urls)}')
        yield api
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def gives_something(api: PrometheusApi, expr: str) -> None:
    """Return once `expr` has a value. Prometheus cannot say when, so it is asked again and again.

    Raises AssertionError when that takes long, or when Prometheus does not come up.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            if await asyncio.to_thread(api.at, expr, time.time()):
                return
        except OSError:
            pass  # it does not listen yet, or is still reading its data
        assert time.monotonic() < end, f"{expr} gave nothing within {PATIENCE_S} s"
        await asyncio.sleep(0.1)
