"""Prompts that the target writes itself: what it was taught to answer, in the words that it knows.

After Xu et al., "Magpie: alignment data synthesis from scratch by prompting aligned LLMs with nothing"
(2024): a chat model that is given the opening of a user's turn and nothing else goes on with a question.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from engine.compute.loading.model_files import first_line
from engine.errors import StartRefused
from engine.text.tokenizer import Tokenizer
from engine.training.sample_generator import SampleGenerator
from engine.training.written import written

OWN_PROMPTS_FILE = "own_prompts.json"
LONGEST_PROMPT = 80  # tokens; one that is not ended by then is no question
_SHORTEST_PROMPT = 12  # characters
_MOST_TRIES = 8  # samples for each prompt that is wanted; a model that repeats itself gives fewer prompts
_PLACE = "\N{BLACK SQUARE}"  # where a user's words stand in what the template makes


def opening_of(tokenizer: Tokenizer) -> list[int] | None:
    """What the template puts in front of a user's words; None where they stand nowhere, or nothing does."""
    if not tokenizer.has_chat_template:
        return None
    text = tokenizer.render_chat_text([{"role": "user", "content": _PLACE}])
    before, found, _ = text.partition(_PLACE)
    return tokenizer.encode(before, add_special_tokens=False) or None if found else None


def write_prompts(
    generator: SampleGenerator,
    tokenizer: Tokenizer,
    stop_token_ids: Collection[int],
    num_prompts: int,
    is_over: Callable[[], bool],
) -> Iterator[str]:
    """Up to so many prompts, no two alike; fewer where the model has no more to ask, or `is_over` says so.

    `generator` goes on from the opening of a user's turn.
    """
    seen: set[str] = set()
    num_samples = 0
    for finished in generator.steps({0}):  # the first may be greedy, and greedy ones are all alike
        for sample in finished:
            num_samples += 1
            *words, last = sample.token_ids.tolist()
            text = tokenizer.decode(words, skip_special_tokens=True).strip()
            if last in stop_token_ids and len(text) >= _SHORTEST_PROMPT and text not in seen:
                seen.add(text)
                yield text
            if len(seen) >= num_prompts or num_samples >= _MOST_TRIES * num_prompts:
                return
        if is_over():  # also where no prompt comes of it
            return


def read_own_prompts(directory: Path) -> list[str] | None:
    """Those that an earlier run left; None where there are none. Raises StartRefused."""
    path = directory / OWN_PROMPTS_FILE
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StartRefused(
            f"{path} is damaged ({first_line(error)}), and the samples there answer what was in it: "
            "choose another --output, or delete both."
        ) from error
    return [str(text) for text in texts]


def keep_own_prompts(directory: Path, texts: Sequence[str]) -> None:
    """Leave them for later runs, all or none. Raises StartRefused."""
    part = directory / f"{OWN_PROMPTS_FILE}.part"
    with written(directory / OWN_PROMPTS_FILE):
        directory.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(list(texts), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, directory / OWN_PROMPTS_FILE)
