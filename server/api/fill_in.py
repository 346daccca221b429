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
            head = await engine.encode("", tenant=tenant)
        before: Sequence[int] = await engine.encode(asked.before, add_special_tokens=False, tenant=tenant)
    else:
        before = asked.before
    after: Sequence[int] = await engine.encode(asked.after, add_special_tokens=False, tenant=tenant)
    shown = await _files_shown(engine, asked.files, marks, tenant)
    num_all = len(before) + len(after) + len(shown)
    if asked.room_for is not None:
        room = max(1, engine.info.max_model_len - asked.room_for - len(head) - len(marks.prompt((), ())))
        before, after = _nearest(before, after, room)
        left = room - len(before) - len(after)
        shown = shown[-left:] if left else []
    is_cut = len(before) + len(after) + len(shown) < num_all
    return [*head, *shown, *marks.prompt(before, after)], is_cut


def _nearest(before: Sequence[int], after: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    """As much of both as there is room for, from where they meet; what one leaves the other may have."""
    most_after = min(len(after), max(room // _SUFFIX_PARTS, room - len(before)))
    most_before = room - most_after
    return before[max(0, len(before) - most_before) :], after[:most_after]


async def _files_shown(
    engine: Engine, files: Sequence[OtherFile], marks: FillInMiddle, tenant: str | None
) -> list[int]:
    """The files as the model was taught to see those of a repository, or each behind its name."""
    if not files:
        return []

    async def encode(text: str) -> list[int]:
        return await engine.encode(text, add_special_tokens=False, tenant=tenant)

    shown = [] if marks.repository is None else [marks.repository, *await encode("repository\n")]
    for file in files:
        shown += [] if marks.file is None else [marks.file]
        shown += await encode(f"{file.name or 'file'}\n{file.text}")
    if marks.file is not None:
        shown += [marks.file, *await encode("file\n")]
    elif shown:
        shown += await encode("\n\n")
    return shown
