"""`make model-matrix`: every causal class of transformers, served and compared; writes tests/model_matrix.md.

Each class has a process of its own, so that none can spoil another. With names as arguments only these are
judged, and of the page only their rows are written anew.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from tests.matrix.reduced import causal_classes
from tests.matrix.served import Row, judge
from tests.support.native import compiled_home

PAGE = Path(__file__).resolve().parents[1] / "model_matrix.md"
MAX_S = 120.0
_ORDER = ("served exactly with kernels", "served exactly", "refused", "wrong", "failed", "not made")
# That encode or hear, which their refusal does not say.
_OTHERS = ("Moshi", "MossTranscribe", "Musicgen", "ProphetNet", "TrOCR", "Whisper", "XLNet")
_HEAD = """# Which models are served exactly

Written by `make model-matrix`: a tiny random model of every causal class of transformers {version}, served by
the engine in float32 (prompts in chunks of 16 tokens, four requests in a batch, a prefix cache, drafts of the
n-gram drafter), with every greedy token and its log-probability compared with the model's own forward pass,
within {tolerance}. "With kernels" are the classes of which compiled kernels computed some or all, those of
float32 on the machine that this ran on. A refused class is refused at the start, with the
reason given; of one that is not made there is no configuration that is small enough, so nothing is said.

{counts}
{decoders}

"""


def main(names: Sequence[str]) -> int:
    """The exit status: 1 if anything is served wrong."""
    rows = []
    compiled_home(torch.float32)  # for the processes of all classes
    for config_class, model_class in causal_classes():
        if names and not {model_class.__name__, config_class.__name__} & set(names):
            continue
        row = _apart(config_class, model_class)
        print(f"{row.model:<42} {row.result:<28} {row.reason}", flush=True)
        rows.append(row)
    anew = {(row.model, row.config) for row in rows}
    kept = [row for row in _rows(PAGE.read_text()) if (row.model, row.config) not in anew] if names else []
    PAGE.write_text(_page(kept + rows))
    return int(any(row.result in ("wrong", "failed") for row in rows))


def _apart(config_class: type[PreTrainedConfig], model_class: type) -> Row:
    """The class's row, from a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_tell, args=(theirs, config_class, model_class))
    process.start()
    theirs.close()
    try:
        row: Row = ours.recv() if ours.poll(MAX_S) else _without(config_class, model_class, "took too long")
    except EOFError:
        row = _without(config_class, model_class, "its process ended")
    process.kill()
    process.join()
    return row


def _without(config_class: type, model_class: type, reason: str) -> Row:
    return Row(model_class.__name__, config_class.__name__, "failed", reason)


def _tell(connection: Connection, config_class: type[PreTrainedConfig], model_class: type) -> None:
    connection.send(judge(config_class, model_class))


def _rows(page: str) -> list[Row]:
    """What a page says."""
    found = []
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| class "):
            model, config, result, reason = (
                cell.strip() for cell in line[1:-1].replace("\\|", "\0").split("|")
            )
            found.append(Row(model, config, result, reason.replace("\0", "|")))
    return found


def _is_decoder(row: Row) -> bool:
    """True for a class that only decodes text: none that encodes, and none of audio or music."""
    return not (row.model.startswith(_OTHERS) or row.reason.startswith("it is an encoder"))


def _page(rows: Sequence[Row]) -> str:
    from tests.matrix.served import TOLERANCE

    counts = Counter(row.result for row in rows)
    told = ", ".join(f"{counts[result]} {result}" for result in _ORDER if counts[result])
    decoders = [row for row in rows if _is_decoder(row)]
    exact = sum(row.result.startswith("served exactly") for row in decoders)
    text = _HEAD.format(
        version=transformers.__version__,
        tolerance=TOLERANCE,
        counts=f"{len(rows)}: {told}.",
        decoders=f"Decoder-only classes, which leaves out encoders, encoder-decoders, audio and music: "
        f"{len(decoders)}, of which {exact} are served exactly ({exact / len(decoders):.0%}).",
    )
    lines = ["| class | configuration | | reason |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (_ORDER.index(row.result), row.model, row.config)):
        reason = row.reason.replace("|", "\\|")
        lines.append(f"| {row.model} | {row.config} | {row.result} | {reason} |")
    return text + "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
