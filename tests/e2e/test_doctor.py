"""`slipstream doctor` as a command: text, JSON, exit codes, ports and keys."""

from __future__ import annotations

import json
import platform
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from server.commands import cli
from tests.support.tiny_embedders import save_embedder
from tests.support.tiny_models import save_tiny_model

OTHER = "v3" if platform.machine() in ("arm64", "aarch64") else "neon"  # kernels of another kind of CPU
SMALL = ("--kv-cache-memory", "1MiB", "--swap-space", "64KiB", "--port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(autouse=True)
def _logs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.observability.logs.configure_logging", lambda log: None)
    monkeypatch.setattr("engine.prepare_process", lambda: None)


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = cli.main(["doctor", *argv])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


class EmptyGpu:
    """A gauge of 24 GiB that are free."""

    def free_and_total(self) -> tuple[int, int]:
        return 24 << 30, 24 << 30


def test_sizes_that_a_gpu_makes_are_said_with_the_reason(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.doctor.gauge_of", lambda device: EmptyGpu())
    _, out = doctor(capsys, model, "--port", "0", "--compile", "off", "--max-num-seqs", "4")
    text = " ".join(out.split())
    assert "up to 4 shorter ones (--max-num-seqs)" in text
    assert "up to 8,192 tokens (--max-num-batched-tokens, derived: 24.00 GiB of GPU memory" in text


def test_a_start_that_would_work_is_code_0(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = doctor(capsys, model, *SMALL, "--compile", "off")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "source a directory" in lines
    assert any(re.fullmatch(r"class LlamaForCausalLM, .* parameters", line) for line in lines)
    assert any(re.fullmatch(r"K/V 1 MiB by --kv-cache-memory: .*", line) for line in lines)
    assert "a step up to 2,048 tokens (--max-num-batched-tokens)" in lines
    assert "address 127.0.0.1, any free port" in lines
    assert "compiled not used: --compile off" in lines
    assert lines[-1] == "serve would start, as far as can be told without loading the model."
    assert max(map(len, out.splitlines())) <= 80


def test_weights_that_cannot_be_integers_stop_a_start(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = doctor(capsys, model, *SMALL, "--quantization", "int8", "--json", "--cpu-kernels", OTHER)
    found = json.loads(out)
    (problem,) = found["problems"]
    assert code == 1
    assert problem.startswith(
        f"--quantization int8: no compiled kernels: --cpu-kernels {OTHER}: this CPU has "
    )
    assert problem.endswith(". Leave it out to do without.")
    assert found["model"]["quantized"] is None


def test_json_holds_the_same(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = doctor(capsys, "--json", model, *SMALL)
    found: dict[str, Any] = json.loads(out)
    assert code == 0 and found["ok"] is True and found["problems"] == []
    assert set(found) == {
        *("ok", "problems", "warnings", "machine", "device", "model", "cache", "drafts", "server", "loaded"),
        "embeddings",
    }
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert found["cache"]["kv_bytes"] <= 2**20
    assert found["loaded"] is None
    assert {"slipstream", "torch", "transformers", "python"} <= set(found["machine"]["versions"])


def test_an_embedding_model_is_loaded_for_real_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", str(save_embedder(tmp_path)), "--load", "--json"]) == 0
    loaded = json.loads(capsys.readouterr().out)["loaded"]
    assert loaded["load_s"] > 0 and loaded["tokens_per_s"] is None


def test_all_that_stops_a_start_is_told_at_once_with_code_1(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ("--port", port, "--num-kv-blocks", "2", "--api-key-file", str(keys))
        code, out = doctor(capsys, model, *flags)
        assert code == 1
        text = " ".join(out.split())
        assert f"Problem: --port {port}: already in use on 127.0.0.1." in text
        assert "Problem: The KV cache is too small for one sequence of max-model-len" in text
        assert "holds no key, so nobody could be let in." in text
        assert text.endswith("serve would not start: 3 problems to solve first.")
        code, out = doctor(capsys, model, *flags, "--json")
        assert code == 1 and len(json.loads(out)["problems"]) == 3 and json.loads(out)["ok"] is False


def test_a_server_open_to_all_is_a_warning(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    warning = "--host 0.0.0.0 lets other machines in, and no --api-key keeps them out."
    _, out = doctor(capsys, model, *SMALL, "--host", "0.0.0.0", "--json")
    assert json.loads(out)["warnings"] == [warning]
    _, out = doctor(capsys, model, *SMALL, "--host", "0.0.0.0", "--api-key", "s3cret", "--json")
    assert json.loads(out)["warnings"] == [] and "s3cret" not in out


def test_more_memory_than_there_is_is_a_problem(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = doctor(capsys, model, *SMALL, "--kv-cache-memory", "900TiB")
    assert code == 1
    assert re.search(
        r"this machine has [\d.]+ GiB of memory: lower --kv-cache-memory\.", " ".join(out.split())
    )


def test_load_starts_the_engine_for_a_moment(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = doctor(capsys, model, *SMALL, "--load", "--json")
    found = json.loads(out)
    assert code == 0 and found["problems"] == []
    assert found["loaded"]["num_kv_blocks"] == found["cache"]["num_kv_blocks"]
    assert found["loaded"]["load_s"] > 0 and found["loaded"]["tokens_per_s"] > 0
