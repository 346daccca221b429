"""The arithmetic of `slipstream bench`: percentiles, arrivals, what counts as good, what the flags mean."""

from __future__ import annotations

import json
import statistics
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from config import SettingsError
from server.commands.bench import flags
from server.commands.bench.arrivals import due_times, poisson_arrivals
from server.commands.bench.distribution import Distribution, percentile
from server.commands.bench.flags import read_plan
from server.commands.bench.plan import Lengths, Load, Slos, Workload
from server.commands.bench.prompts import Prompts, WordCount, read_prompts
from server.commands.bench.record import Failure, RequestRecord
from server.commands.bench.summary import is_good, summarize


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_the_usual_ones(size: int, share: float) -> None:
    values = np.random.default_rng(size).lognormal(size=size)
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, 100 * share))


def test_a_distribution_of_nothing_is_zeros() -> None:
    assert Distribution.of([]) == Distribution(0, 0, 0, 0, 0, 0)
    assert Distribution.of([3.0, 1.0]) == Distribution(2, 2.0, 2.0, 2.8, 2.98, 3.0)


def load(**fields: object) -> Load:
    values: dict[str, object] = {
        "num_requests": None,
        "duration_s": None,
        "concurrency": None,
        "rate": 10.0,
        "num_warmups": 0,
        "max_retries": 0,
        "timeout_s": 1.0,
        "seed": 0,
    }
    return Load(**{**values, **fields})  # type: ignore[arg-type]


def test_arrivals_are_poisson_and_repeat_with_their_seed() -> None:
    times = list(islice(poisson_arrivals(50.0, seed=1), 20_000))
    assert times == list(islice(poisson_arrivals(50.0, seed=1), 20_000))
    assert times != list(islice(poisson_arrivals(50.0, seed=2), 20_000))
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert min(gaps) > 0
    # Exponential gaps: mean and deviation are both one over the rate, a share of 1/e is longer.
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.03)
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.015)


def test_arrivals_end_by_number_or_by_time() -> None:
    assert len(list(due_times(load(num_requests=7)))) == 7
    times = list(due_times(load(duration_s=30.0)))
    assert 250 < len(times) < 350
    assert times[-1] < 30.0 <= next(at for at in poisson_arrivals(10.0, 0) if at not in times)


def record(*chunk_times: float, due: float = 10.0, **fields: object) -> RequestRecord:
    """One that succeeded: sent a little after it was due, over with its last chunk."""
    made = RequestRecord(0, due, due + 0.01, chunk_times=chunk_times, num_output_tokens=len(chunk_times))
    made.ended = chunk_times[-1] if chunk_times else due + 1
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_times_count_from_when_a_request_was_due() -> None:
    one = record(10.5, 10.6, 10.9, num_output_tokens=5)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.end_to_end_s == pytest.approx(0.9)
    assert one.gaps_s == pytest.approx([0.1, 0.3])
    assert one.tpot_s == pytest.approx(0.1)  # 0.4 s for the four tokens after the first, in two chunks
    assert record(10.5).tpot_s is None
    assert record().ttft_s is None


def test_only_requests_that_succeeded_make_the_figures() -> None:
    failed = record(11.0, failure=Failure("503 queue_full", "full", 2.0), ended=None)
    other = record(failure=Failure("503 queue_full", "full", 4.0), ended=None)
    odd = record(failure=Failure("timeout", "slow"), ended=None)
    cut_off = record(10.1, ended=None)
    good = [record(10.5, 10.6, is_counted_by_server=True, num_prompt_tokens=3), record(10.7, 11.0)]
    summary = summarize([failed, *good, cut_off, odd, other], 2.0, Slos(600, None))
    assert (summary.num_requests, summary.num_succeeded, summary.num_failed, summary.num_cut_off) == (
        6,
        2,
        3,
        1,
    )
    assert (summary.output_tokens, summary.output_tokens_per_s, summary.requests_per_s) == (4, 2.0, 1.0)
    assert (summary.counted_by, summary.input_tokens, summary.cached_tokens) == ("mixed", 3, None)
    assert summary.ttft_ms.p50 == pytest.approx(600)
    assert [(each.kind, each.count, each.retry_after_s) for each in summary.errors] == [
        ("503 queue_full", 2, 3.0),
        ("timeout", 1, None),
    ]
    assert summary.goodput is not None
    assert (summary.goodput.num_good, summary.goodput.share, summary.goodput.requests_per_s) == (1, 0.2, 0.5)


@pytest.mark.parametrize(
    ("slos", "good"),
    [
        (Slos(None, None), True),
        (Slos(501, None), True),
        (Slos(499, None), False),
        (Slos(None, 300), True),  # one gap of 300 in a hundred
        (Slos(None, 299), True),
        (Slos(None, 9), False),
    ],
)
def test_a_good_request_keeps_its_limits_in_99_of_100_gaps(slos: Slos, good: bool) -> None:
    times = [10.5 + 0.01 * place for place in range(100)]
    assert is_good(record(*times, times[-1] + 0.3), slos) is good


def test_an_empty_reply_is_good_only_where_no_first_token_is_asked_for() -> None:
    assert is_good(record(), Slos(None, 5))
    assert not is_good(record(), Slos(5, None))


WORKLOAD = Workload("chat", Lengths(20, 20), Lengths(8, 16), None, 0, 0.0, False, 0)


def test_bodies_repeat_by_number_and_differ_between_numbers() -> None:
    prompts = Prompts(WORKLOAD, "m", WordCount())
    assert prompts.body(3) == prompts.body(3) != prompts.body(4) != prompts.body(-4)
    body = json.loads(prompts.body(3))
    assert len(body["messages"][0]["content"].split()) == 20
    assert 8 <= body.pop("max_tokens") <= 16
    assert body.pop("messages")[0]["role"] == "user"
    assert body == {
        "model": "m",
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_lines_of_a_prompt_file_end_as_in_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes('{"prompt": "a\u2028b"}\r\n"c\x85d"\r\n'.encode("utf-8-sig"))
    assert read_prompts(path) == [{"prompt": "a\u2028b"}, {"prompt": "c\x85d"}]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{\n", "line 1: '{' is no JSON"),
        ('\n{"prompt": "a", "messages": []}', "line 2: expected an object with either prompt or messages"),
        ("[1]", "line 1: expected an object with either prompt or messages"),
        ('{"prompt": 3}', "line 1: prompt must be a text"),
        ('{"messages": []}', "line 1: messages must be objects with a role and a content"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens must be a whole number above 0"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_bad_prompt_file_is_one_line_that_says_where(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError) as raised:
        read_prompts(path)
    assert str(raised.value).removeprefix(f"flag --prompt-file: {path}").lstrip(", ") == line


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--rate", "2", "--concurrency", "3"], "--concurrency and --rate exclude each other"),
        (["--num-requests", "2", "--duration", "3"], "--num-requests and --duration exclude each other"),
        (["--rate", "0"], "flag --rate: '0' is not a number above 0 to 1e+06"),
        (["--rate", "nan"], "flag --rate: 'nan' is not a number above 0"),
        (
            ["--input-tokens", "9-3"],
            "flag --input-tokens: '9-3' is neither a whole number above 0 nor LOW-HIGH",
        ),
        (["--endpoint", "embeddings"], "flag --endpoint: invalid choice: 'embeddings'"),
        (["--concurency", "3"], "flag --concurency: unknown flag; did you mean --concurrency?"),
        (["--json", "no/such/dir/file"], "--json no/such/dir/file: there is no such directory"),
        (["--plot", "file.gif"], "--plot file.gif: expected a name that ends in .png, .svg or .pdf"),
        (["what"], "'what' is one word too many"),
    ],
)
def test_wrong_flags_are_one_line(argv: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_plan(argv)
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_a_plot_without_its_library_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flags, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="pip install matplotlib"):
        read_plan(["--plot", "file.png"])


def test_flags_become_a_plan() -> None:
    plan = read_plan([])
    assert (plan.load.num_requests, plan.load.concurrency, plan.load.rate) == (50, 8, None)
    plan = read_plan(
        ["--rate", "2.5", "--duration", "9", "--input-tokens", "3-5", "--endpoint", "completions"]
    )
    assert (plan.load.num_requests, plan.load.concurrency, plan.load.rate) == (None, None, 2.5)
    assert str(plan.workload.input_tokens) == "3-5" and str(plan.workload.output_tokens) == "64"
