"""Programs that measure and examine servers, each with a small load: guidellm, aiperf and lm-eval.

They read a tokenizer from disk, that of the default model. Nothing is fetched: the hub is an address that
refuses, for some of them take "offline" as "a folder is no model".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = "test-model"  # the scripted one's
LIMIT_S = 240  # they bring torch along, in several processes
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
"""
ANSWERED = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 64, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


@pytest.fixture(scope="session")
def tokenizer(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--tokenizer"))


def run(name: str, *arguments: str, folder: Path) -> None:
    """Run a program of this environment; it must end well."""
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        pytest.skip(f"{name} is not installed")
    env = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(
        [str(program), *arguments],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_guidellm(scripted: str, tokenizer: str, tmp_path: Path) -> None:
    data = written(tmp_path / "prompts.jsonl", [{"prompt": f"Say {i}."} for i in range(4)])
    report = tmp_path / "report.json"
    run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={scripted},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=4"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", f"kind=json_file,path={data}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console",
        folder=tmp_path,
    )
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == totals["total"] > 0
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0


def test_aiperf(scripted: str, tokenizer: str, tmp_path: Path) -> None:
    run(
        "aiperf",
        "profile",
        *("--model", MODEL, "--url", scripted, "--endpoint-type", "chat", "--streaming"),
        *("--request-count", "4", "--concurrency", "2", "--tokenizer", tokenizer),
        *("--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "30"),
        *("--ui", "none", "--output-artifact-dir", str(tmp_path / "told")),
        folder=tmp_path,
    )
    told = json.loads((tmp_path / "told/profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == 4 and not told["error_summary"]
    assert told["time_to_first_token"]["avg"] > 0


def evaluate(
    tmp_path: Path, name: str, more: str, rows: list[dict[str, Any]], *arguments: str
) -> dict[str, float]:
    """What lm-eval finds in a task of these rows."""
    data = written(tmp_path / "rows.jsonl", rows)
    (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data, more=more))
    folders = ("--include_path", str(tmp_path), "--output_path", str(tmp_path / "told"))
    run("lm-eval", "run", "--tasks", name, *folders, *arguments, folder=tmp_path)
    (report,) = (tmp_path / "told").rglob("results_*.json")
    results: dict[str, float] = json.loads(report.read_text())["results"][name]
    return results


def test_lm_eval_chat(scripted: str, tmp_path: Path) -> None:
    rows = [{"question": f"What is {i}?", "answer": "The answer is 42."} for i in range(3)]
    url = f"{scripted}/v1/chat/completions"
    results = evaluate(
        tmp_path,
        "small",
        ANSWERED,
        rows,
        *("--model", "local-chat-completions", "--apply_chat_template"),
        *("--model_args", f"model={MODEL},base_url={url},tokenizer_backend=None,num_concurrent=2"),
    )
    assert results["exact_match,none"] == 1


def test_lm_eval_completions(default: str, tokenizer: str, tmp_path: Path) -> None:
    """Choices by the log-probabilities of an echoed prompt, which say what the model finds likely."""
    rows = [
        {"question": "The capital of France is", "choices": [" Paris", " potato"]},
        {"question": "One, two, three,", "choices": [" four", " sideways"]},
        {"question": "The sun rises in the", "choices": [" east", " sandwich"]},
    ]
    given = f"model=smollm2-135m-instruct,base_url={default}/v1/completions,tokenizer={tokenizer}"
    results = evaluate(
        tmp_path,
        "choice",
        CHOSEN,
        rows,
        *("--model", "local-completions"),
        *("--model_args", f"{given},tokenizer_backend=huggingface,num_concurrent=1"),
    )
    assert results["acc,none"] == 1
