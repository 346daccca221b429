"""Prompts that ask for what stands between two texts, whichever API they came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import Engine, FillInMiddle
from server.http.errors import invalid

_SUFFIX_PARTS = 4  # one of them is for what follows where not all fits, the others for what leads in


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file, or a piece of one, that is shown before the one to be filled in."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FillIn:
    """What stands before the cursor and behind it. Text before it may be tokens already.

    With `room_for` so many tokens to come, what does not fit the context is left out: other files, from the
    first on, then what is farthest from the cursor. None: what is too long is refused.
    """

    before: str | Sequence[int]
    after: str
    files: Sequence[OtherFile] = ()
    add_special_tokens: bool = True
    room_for: int | None = None


def marks_of(engine: Engine, param: str = "suffix") -> FillInMiddle:
    """The model's tokens for it. Raises ApiError, for the field that asks, where it has none."""
    found = engine.tokenizer.fill_in_middle
    if found is None:
        raise invalid(
            f"'{param}' needs a model that fills in the middle; this one's tokenizer has no tokens for that.",
            param,
        )
    return found


async def fill_in_prompt(
    engine: Engine, asked: FillIn, *, tenant: str | None = None
) -> tuple[list[int], bool]:
    """The tokens that ask for it, and whether something was left out; tokenized in `tenant`'s turn.

    What the tokenizer puts before every text stands before all of it, unless text before is tokens already.
    """
    marks, head = marks_of(engine), list[int]()
    if isinstance(asked.before, str):
        if asked.add_special_tokens:
            head = await engine.text.encode("", tenant=tenant)
        before: Sequence[int] = await engine.text.encode(
            asked.before, add_special_tokens=False, tenant=tenant
        )
    else:
        before = asked.before
    after: Sequence[int] = await engine.text.encode(asked.after, add_special_tokens=False, tenant=tenant)
    if asked.room_for is None:
        shown = await _files_shown(engine, asked.files, marks, engine.info.max_model_len, tenant)
        return [*head, *shown, *marks.prompt(before, after)], False
    num_around = len(before) + len(after)
    room = max(1, engine.info.max_model_len - asked.room_for - len(head) - len(marks.prompt((), ())))
    before, after = _nearest(before, after, room)
    left = room - len(before) - len(after)
    shown = await _files_shown(engine, asked.files, marks, left, tenant)
    is_cut = len(before) + len(after) < num_around or len(shown) > left
    return [*head, *(shown[-left:] if left else ()), *marks.prompt(before, after)], is_cut


def _nearest(before: Sequence[int], after: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    """As much of both as there is room for, from where they meet; what one leaves the other may have."""
    most_after = min(len(after), max(room // _SUFFIX_PARTS, room - len(before)))
    most_before = room - most_after
    return before[max(0, len(before) - most_before) :], after[:most_after]


async def _files_shown(
    engine: Engine, files: Sequence[OtherFile], marks: FillInMiddle, room: int, tenant: str | None
) -> list[int]:
    """The files as the model was taught to see those of a repository, or each behind its name.

    From the last one back, until they are more than there is room for: the others are not read.
    """

    async def encode(text: str) -> list[int]:
        return await engine.text.encode(text, add_special_tokens=False, tenant=tenant)

    if not files:
        return []
    mark = [] if marks.file is None else [marks.file]
    shown = [*mark, *await encode("file\n")] if mark else await encode("\n\n")
    for file in reversed(files):
        if len(shown) > room:
            return shown
        shown = [*mark, *await encode(f"{file.name or 'file'}\n{file.text}"), *shown]
    return shown if marks.repository is None else [marks.repository, *await encode("repository\n"), *shown]
