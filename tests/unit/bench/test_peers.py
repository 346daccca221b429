"""Peers: how they are named, whose turn it is, and that one that fails costs nobody else a figure."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from config import Settings
from tests.bench.burst_lines import answer_bursts
from tests.bench.command import plan, read_arguments
from tests.bench.contenders import OURS, OURS_DRAFTING, Comparison, Contender
from tests.bench.context import BenchContext
from tests.bench.load import WrongOutput
from tests.bench.peer import Peer, RunningServer
from tests.bench.peers import bars, ratios, ratios_section, require_ours, run_peers
from tests.bench.streams import BenchmarkFailed, BurstFigures, StreamRecord
from tests.bench.workloads import Prompt, Workload

NAMES = "W1", "W2", "W3", "W4 cold", "W4 warm", "REP"


def test_a_peer_is_a_url_a_server_to_start_or_a_worker() -> None:
    running = Peer.parse("vllm=http://127.0.0.1:8123")
    assert (running.is_running, running.serves_http) == (True, True)
    assert running.address == RunningServer("127.0.0.1", 8123)
    started = Peer.parse("llama=env A='b c' server -m {model}/x.gguf --port {port}")
    assert (started.is_running, started.serves_http) == (False, True)
    words = ["env", "A=b c", "server", "-m", "/models/m/x.gguf", "--port", "81"]
    assert started.command(Path("/models/m"), 81) == words
    assert not Peer.parse("other=python -m worker {model}").serves_http


@pytest.mark.parametrize("text", ["vllm", "=http://a:1", "vllm=", "vllm=http://a", "vllm=env 'open"])
def test_what_names_no_peer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Peer.parse(text)


@pytest.mark.parametrize("argv", [["peers"], ["host", "--peer", "a=b {port}"], ["peers", "--peer", "a"]])
def test_peers_and_their_flag_go_together(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_arguments(argv)
    assert "--peer" in capsys.readouterr().err


def test_peers_are_measured_only_when_they_are_asked_for() -> None:
    assert run_peers not in plan([])
    assert plan(["peers"]) == [run_peers]
    assert read_arguments(["peers", "--peer", "a=b {port}"]).peer == [Peer("a", "b {port}")]


class Scripted:
    """A side that answers as it is told, and writes down when."""

    def __init__(self, name: str, turns: list[str], fails_at: str = "", rate: int = 10) -> None:
        self.name, self._turns, self._fails_at, self._rate = name, turns, fails_at, rate

    def burst(self, workload: Workload) -> list[StreamRecord]:
        self._turns.append(f"{self.name} {workload.name}")
        num_tokens = workload.max_tokens - (workload.name == self._fails_at)
        time = workload.max_tokens / self._rate
        return [StreamRecord(0.0, (time / 2, time), 1, num_tokens) for _ in workload.prompts]


def context(runs: int) -> BenchContext:
    made = BenchContext(Settings(), (), runs, lambda text: None)
    made.__dict__["words"] = None
    return made


def made(name: str) -> Workload:
    return Workload(name, "title", (Prompt("a", (1,)),), 4)


def compare(*sides: Scripted, names: tuple[str, ...] = NAMES, runs: int = 2) -> Comparison:
    comparison = Comparison()
    makers = [lambda words, seed, name=name: made(name) for name in names]
    comparison.run(context(runs), [Contender(side, None) for side in sides], makers)
    return comparison


def test_everybody_gets_a_turn_at_each_workload_and_another_begins_each_run() -> None:
    turns: list[str] = []
    compare(Scripted("a", turns), Scripted("b", turns), names=("W1", "W2"))
    assert turns == ["a W1", "b W1", "a W2", "b W2", "b W1", "a W1", "b W2", "a W2"]


def test_who_fails_is_named_and_takes_no_further_part() -> None:
    turns: list[str] = []
    comparison = compare(
        Scripted("a", turns), Scripted("b", turns, fails_at="W2"), names=("W1", "W2", "W3"), runs=1
    )
    assert [turn for turn in turns if turn.startswith("b")] == ["b W1", "b W2"]
    assert comparison.failures.keys() == {"b"}
    assert "asked for" in comparison.failures["b"]
    assert comparison.figures["a"].keys() == {"W1", "W2", "W3"}


def test_a_contender_is_held_still_before_and_after_its_turn() -> None:
    events: list[str] = []

    class Held:
        def resume(self) -> None:
            events.append("on")

        def pause(self) -> None:
            events.append("off")

    contender = Contender(Scripted("a", events), Held())  # type: ignore[arg-type]
    contender.burst(made("W1"))
    with pytest.raises(WrongOutput):
        Contender(Scripted("a", events, fails_at="W1"), Held()).burst(made("W1"))  # type: ignore[arg-type]
    assert events == ["on", "a W1", "off"] * 2


def full(**more: int) -> Comparison:
    sides = {OURS: 40, OURS_DRAFTING: 240, **more}
    return compare(*(Scripted(name, [], rate=rate) for name, rate in sides.items()))


def test_ratios_are_ours_over_theirs_and_drafts_count_where_text_repeats() -> None:
    comparison = full(vllm=20)
    cases = {(m.case, m.quantity): m.median for m in ratios_section(comparison).measurements}
    assert cases["W2, slipstream / vllm", "output rate"] == pytest.approx(2)
    assert cases["W1, slipstream / vllm", "decode rate"] == pytest.approx(2)
    assert cases["W1, slipstream / vllm", "TTFT, theirs / ours"] == pytest.approx(2)
    assert cases["REP, slipstream, drafting / vllm", "decode rate"] == pytest.approx(12)


def test_bars_are_held_against_vllm_only_where_it_was_there() -> None:
    with_vllm = {bar.name: bar for bar in bars(full(vllm=20))}
    without = {bar.name for bar in bars(full(other=20))}
    assert with_vllm["W1 over vLLM's CPU build"].met
    assert with_vllm["repeated passage, drafting over not"].measured == pytest.approx(6)
    assert without == {name for name in with_vllm if "vLLM" not in name}


def test_a_run_that_one_side_did_not_finish_has_no_ratio() -> None:
    comparison = compare(Scripted("a", []), Scripted("b", [], fails_at="W2"), names=("W1", "W2"))
    assert len(ratios(comparison, "a", "b", "W1", lambda run: run.output_tokens_per_s)) == 1
    assert ratios(comparison, "a", "b", "W2", lambda run: run.output_tokens_per_s) == ()


def test_our_own_failure_is_one_of_the_benchmark() -> None:
    comparison = full()
    require_ours(comparison)
    comparison.failures[OURS] = "W1: no"
    with pytest.raises(BenchmarkFailed, match="W1: no"):
        require_ours(comparison)


def test_a_workers_lines_are_records_or_say_what_went_wrong() -> None:
    def run(prompts: list[list[int]], max_tokens: int) -> list[StreamRecord]:
        return [StreamRecord(0.0, (1.0,), len(prompt), 6 // max_tokens) for prompt in prompts]

    answers = io.StringIO()
    lines = [json.dumps({"prompts": [[1, 2]], "max_tokens": number}) for number in (3, 0)]
    answer_bursts(run, lines, answers)
    good, bad = map(json.loads, answers.getvalue().splitlines())
    record = StreamRecord.from_json(good["records"][0])
    assert replace(record, num_cached_tokens=0) == StreamRecord(0.0, (1.0,), 2, 2)
    assert BurstFigures.of([record]).output_tokens_per_s == 2
    assert "ZeroDivisionError" in bad["error"]
