"""What the requests ask: prompts of a wanted length, made of common words or taken from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from config import SettingsError
from config.errors import shown
from server.commands.bench.plan import Workload
from server.commands.remote.address import Address
from server.commands.remote.chunks import whole_number
from server.commands.remote.failures import RemoteError
from server.commands.remote.http_client import HttpClient

# Words that nearly every vocabulary of today holds as one token with the space before them.
_WORD_TEXT: Final = (
    "the of and to in is that for it with as was on are be this by at from have or one had not but what all "
    "were when we there can an your which their said if will each about how up out them then she many some "
    "so these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where "
    "most know get through back much before go good new write our used me man too any day same right look "
    "think also around another came come work three word must because does part even place well such here "
    "take why things help put years different away again off went old number great tell men say small every "
    "found still between name should home big give air line set own under read last never us left end along "
    "while might next sound below saw something thought both few those always looked show large often "
    "together asked house world going want school important until form food keep children feet land side "
    "without boy once animals life enough took sometimes four head above kind began almost live page got "
    "earth need far hand high year mother light parts country father let night following picture being study "
    "second eyes soon times story boys since white days ever paper hard near sentence better best across "
    "during today others however sure means knew try told young miles sun ways thing whole hear example"
)
_WORDS: Final = _WORD_TEXT.split()
_PROBES: Final = (32, 160)  # words of the two texts that tell how words become tokens


class Prompts:
    """The body of every request by its number; equal workloads give equal bodies.

    `lines` are those of a prompt file, see `read_prompts`; without any, prompts are made up. `words_of` says
    how many words make one of so many tokens; see `calibrate`.
    """

    def __init__(
        self, workload: Workload, model: str, words_of: WordCount, lines: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._workload = workload
        self._model = model
        self._words_of = words_of
        self._lines = lines
        prefix = Random(f"{workload.seed}/prefix")
        self._prefix = prefix.choices(_WORDS, k=workload.shared_prefix_tokens)

    def body(self, index: int) -> bytes:
        """The JSON of request `index`, any whole number; warm-ups have negative ones."""
        workload = self._workload
        random = Random(f"{workload.seed}/{index}")
        body: dict[str, Any] = {"model": self._model, **self._prompt(index, random)}
        body.setdefault("max_tokens", workload.output_tokens.draw(random))
        body |= {"temperature": workload.temperature, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if workload.temperature > 0:
            body["seed"] = random.getrandbits(31)
        if workload.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body, separators=(",", ":")).encode()

    def _prompt(self, index: int, random: Random) -> Mapping[str, Any]:
        if not self._lines:
            num_words = self._words_of(self._workload.input_tokens.draw(random) + len(self._prefix))
            own = random.choices(_WORDS, k=max(1, num_words - len(self._prefix)))
            line: Mapping[str, Any] = {"prompt": " ".join([*self._prefix, *own])}
        else:
            line = self._lines[index % len(self._lines)]
        return shape_prompt(self._workload.endpoint, line, self._prefix if self._lines else [])


def shape_prompt(endpoint: str, line: Mapping[str, Any], prefix: Sequence[str] = ()) -> Mapping[str, Any]:
    """A line of a prompt file as the fields of a request to `endpoint`, with `prefix` before its text."""
    start = " ".join([*prefix, ""])
    limit = {"max_tokens": line["max_tokens"]} if "max_tokens" in line else {}
    if "messages" in line:
        first, *others = line["messages"]
        if prefix:
            first = {**first, "content": _prepend(start, first["content"])}
        return {"messages": [first, *others], **limit}
    text = start + line["prompt"]
    if endpoint == "chat":
        return {"messages": [{"role": "user", "content": text}], **limit}
    return {"prompt": text, **limit}


def _prepend(start: str, content: object) -> object:
    return (
        start + content if isinstance(content, str) else [{"type": "text", "text": start}, *_parts(content)]
    )


def _parts(content: object) -> list[object]:
    return content if isinstance(content, list) else []


def read_prompts(path: Path) -> list[Mapping[str, Any]]:
    """The prompts of a JSONL file, checked. Raises SettingsError."""
    where = f"flag --prompt-file: {path}"
    try:
        # Not splitlines, which cuts at characters that JSON may hold.
        lines = path.expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise SettingsError(f"{where} cannot be read ({error})") from None
    found = [
        _read_line(line, f"{where}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise SettingsError(f"{where} holds no prompt")
    return found


def _read_line(text: str, where: str) -> Mapping[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise SettingsError(f"{where}: {shown(text)} is no JSON") from None
    if isinstance(line, str):
        line = {"prompt": line}
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise SettingsError(f"{where}: expected an object with either prompt or messages")
    messages = line.get("messages")
    if "prompt" in line and not isinstance(line["prompt"], str):
        raise SettingsError(f"{where}: prompt must be a text")
    if "messages" in line and not _are_messages(messages):
        raise SettingsError(f"{where}: messages must be objects with a role and a content")
    if "max_tokens" in line and not whole_number(line["max_tokens"]):
        raise SettingsError(f"{where}: max_tokens must be a whole number above 0")
    return line


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and "role" in each and "content" in each for each in value)
    )


class WordCount:
    """How many words give a prompt of a wanted number of tokens: a straight line, by default one each.

    `is_measured` is False when the server could not be asked.
    """

    def __init__(self, tokens_per_word: float = 1.0, extra_tokens: float = 0.0, *, is_measured: bool = False):
        self._tokens_per_word = tokens_per_word
        self._extra_tokens = extra_tokens
        self.is_measured = is_measured

    def __call__(self, num_tokens: int) -> int:
        """At least one."""
        return max(1, round((num_tokens - self._extra_tokens) / self._tokens_per_word))


async def calibrate(client: HttpClient, address: Address, model: str, workload: Workload) -> WordCount:
    """What the server's /tokenize says of our words, chat template included; a guess where there is none."""
    if workload.prompt_file is not None:
        return WordCount()
    random = Random(workload.seed)
    counts = []
    for num_words in _PROBES:
        text = " ".join(random.choices(_WORDS, k=num_words))
        fields = shape_prompt(workload.endpoint, {"prompt": text})
        content = json.dumps({"model": model, **fields}).encode()
        try:
            reply = await client.fetch("POST", f"{address.root}/tokenize", content)
            found = json.loads(reply.body) if reply.status == 200 else None
        except (RemoteError, ValueError, RecursionError):
            return WordCount()
        count = whole_number(found.get("count")) if isinstance(found, dict) else None
        if count is None:
            return WordCount()
        counts.append(count)
    tokens_per_word = (counts[1] - counts[0]) / (_PROBES[1] - _PROBES[0])
    if tokens_per_word <= 0:
        return WordCount()
    return WordCount(tokens_per_word, counts[0] - _PROBES[0] * tokens_per_word, is_measured=True)
