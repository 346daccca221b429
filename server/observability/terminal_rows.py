"""What a terminal shows of records that have more to say than a person reads: a request, the start, the end.

Each function makes rows; the log puts the time before the first and nothing before the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from config.units import rough_size
from engine import Activity, EngineGauges, EngineInfo, Histogram, SpecStats
from server.plain_words import counted, duration

_SHORT_ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_ENDINGS = {"length": "cut at its limit", "abort": "given up", "deadline": "out of time", "error": "failed"}
# Fewer observations than these have no such percentile worth telling: it would be that of a bucket's bounds.
_ENOUGH_FOR_HALF, _ENOUGH_FOR_99 = 10, 100


def request_row(facts: Mapping[str, Any]) -> str:
    """One ended request, from what the log knows of it."""
    route = _SHORT_ROUTES.get(facts["route"], facts["route"].removeprefix("/v1/"))
    parts = [*_tokens(facts), duration(facts["ms"] / 1000), *_speed(facts)]
    endings = str(facts.get("finish_reason", "")).split(",")
    parts += [_ENDINGS[each] for each in endings if each in _ENDINGS]
    if "error" in facts:
        parts.append(str(facts["error"]))
    return f"{route:<10}  {facts['code']}  {', '.join(parts)}"


def _tokens(facts: Mapping[str, Any]) -> Iterator[str]:
    if "prompt_tokens" in facts:
        cached = f" ({facts['cached_tokens']:,} cached)" if facts.get("cached_tokens") else ""
        out = f", {facts['completion_tokens']:,} out" if "completion_tokens" in facts else ""
        yield f"{counted(facts['prompt_tokens'], 'token')} in{cached}{out}"


def _speed(facts: Mapping[str, Any]) -> Iterator[str]:
    """When the first token came, and how fast the others."""
    if facts.get("ttft_ms") is not None:
        yield f"first after {duration(facts['ttft_ms'] / 1000)}"
    gaps, gaps_ms = facts.get("completion_tokens", 0) - facts.get("choices", 1), facts.get("generation_ms")
    if gaps > 0 and gaps_ms:
        yield f"{1000 * gaps / gaps_ms:,.0f} tokens/s"


def start_rows(name: str, url: str, info: EngineInfo, seconds: float) -> list[str]:
    """A server that is ready: what it serves, on what, how much room there is, and where."""
    device = "CPU" if info.device == "cpu" else info.device
    threads = info.compute_threads.partition(":")[0]
    computed_by = f", {counted(int(threads), 'thread')}" if threads and info.device == "cpu" else ""
    kept = f" in {info.kv_dtype}" if info.kv_dtype not in ("", info.dtype) else ""
    room = f"{info.num_kv_blocks * info.kv_block_size:,} tokens ({rough_size(info.kv_bytes)}{kept})"
    weights = "".join(f", {rough_size(size)} {form}" for form, size in info.weight_bytes.items())
    rows = [
        ("model", f"{name}, {info.dtype}{weights and '; weights: ' + weights[2:]}"),
        ("device", f"{device}{computed_by}; kernels: {info.kernels or 'transformers and torch'}"),
        ("K/V room", f"{room}, up to {info.max_model_len:,} a request"),
        ("API", f"{url}/v1"),
        ("status page", f"{url}/"),
    ]
    return [f"ready after {duration(seconds)}; Ctrl-C ends it", *_columns(rows)]


def report_rows(done: Activity, drafts: SpecStats, gauges: EngineGauges) -> list[str]:
    """What was done from the first request to the end, and what drafts gained last."""
    rate, busy_rate = (_ratio(done.generation_tokens, each) for each in (done.seconds, done.busy_s))
    rows = [
        ("tokens", f"{done.generation_tokens:,} generated, {done.prompt_tokens:,} of prompts read"),
        ("speed", f"{rate:,.1f} tokens/s, {busy_rate:,.1f} while busy"),
    ]
    if done.time_to_first_token.count:
        rows.append(("first token", f"after {spread(done.time_to_first_token)}"))
    batch = _ratio(done.num_sequences, done.num_steps)
    busy = min(1.0, _ratio(done.busy_s, done.seconds))
    rows.append(("busy", f"{busy:.0%} of the time, {batch:.1f} requests at once"))
    rows.append(("K/V in use", f"{_ratio(done.kv_s, done.busy_s):.0%} while busy"))
    if drafts.num_proposed:
        right = f"{drafts.acceptance_rate:.0%} of {drafts.num_proposed:,} were right"
        gain = f"{gauges.speculation_speedup:.2f} times the speed without"
        rows.append(("drafts", f"{right}; of late {gain}, {gauges.formula.speedup:.2f} by formula"))
    return [f"{counted(done.num_ended, 'request')} in {duration(done.seconds)}", *_columns(rows)]


def spread(seconds: Histogram) -> str:
    """The mean, and those percentiles that there are enough observations for."""
    parts = []
    if seconds.count >= _ENOUGH_FOR_HALF:
        parts.append(f"half within {duration(seconds.quantile(0.5))}")
    if seconds.count >= _ENOUGH_FOR_99:
        parts.append(f"99% within {duration(seconds.quantile(0.99))}")
    mean = duration(seconds.mean) + (" on average" if seconds.count > 1 else "")
    return f"{mean} ({', '.join(parts)})" if parts else mean


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name:<13}{text}" for name, text in rows]
