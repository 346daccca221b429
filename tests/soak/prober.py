"""Asks for a server's health as an orchestrator does: a process of its own, a new connection each time.

One line of JSON on stdin, `{"host", "port", "seconds"}`, is answered by one: `taken_ms` of every probe, and
`bad`: the second and the status of those that were not answered with 200, 0 where there was no answer.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from typing import Any

EVERY_S = 0.1
TIMEOUT_S = 10.0


def probe(host: str, port: int) -> int:
    """The status of /health, 0 for none."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def probes(host: str, port: int, seconds: float) -> dict[str, Any]:
    """Ten a second for so long."""
    taken_ms: list[float] = []
    bad: list[tuple[float, int]] = []
    began = time.perf_counter()
    due = began
    while due < began + seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        sent = time.perf_counter()
        status = probe(host, port)
        taken_ms.append(1e3 * (time.perf_counter() - sent))
        if status != 200:
            bad.append((sent - began, status))
        due = max(due + EVERY_S, time.perf_counter())
    return {"taken_ms": taken_ms, "bad": bad}


def main() -> None:
    """Answer until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(probes(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
