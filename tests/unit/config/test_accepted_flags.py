"""No value that a setting may have is refused for want of code."""

import pytest

from config import load_settings


@pytest.mark.parametrize(
    "argv",
    [
        *(f"--compile={word}" for word in ("auto", "on", "off")),
        *(f"--quantization={word}" for word in ("none", "int8", "int4")),
        *(f"--kv-cache-dtype={word}" for word in ("auto", "int8", "fp8")),
        "--swap-space=0",
        "--swap-space=2GiB",
        "--prefix-caching",
        "--no-prefix-caching",
        "--no-read-next-turn",
        "--prefix-cache-dir=x",
        "--prefix-cache-disk=1GiB",
        "--share-prefix-cache",
        *(f"--scheduling-policy={name}" for name in ("fcfs", "sjf", "priority", "deadline", "orca", "fair")),
        *(f"--preemption={name}" for name in ("auto", "recompute", "swap")),
        *(f"--speculative-method={name}" for name in ("none", "ngram", "suffix", "auto")),
        *(f"--speculation-schedule={name}" for name in ("async", "sync", "auto")),
        *(f"--draft-device={name}" for name in ("auto", "cpu")),
        *(f"--draft-lanes={count}" for count in ("auto", 0, 8)),
        *(f"--draft-verification={name}" for name in ("match", "rejection", "block")),
        *(f"--draft-length-policy={name}" for name in ("fixed", "threshold", "goodput")),
        *(f"--num-speculative-tokens={count}" for count in ("auto", 1, 32)),
        *(f"--min-acceptance-rate={rate}" for rate in (0, 0.5, 1)),
        *(f"--draft-shrink-rate={rate}" for rate in (0, 0.5, 1)),
        "--draft-model=x",
        "--embedding-model=x",
        "--medusa-heads=x",
        "--draft-heads=x",
        "--speculative-config={}",
        "--queue-timeout=0",
        "--queue-timeout=2.5",
        "--request-timeout=60",
        "--stall-timeout=5",
        "--read-timeout=5",
        "--max-connections=9",
        "--max-header-bytes=65536",
        "--no-protect-metrics",
    ],
)
def test_asking_for_what_is_there_is_fine(argv: str) -> None:
    load_settings([argv], {})
