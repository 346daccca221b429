"""What the schema knows and no code honours yet: asking for it is refused, never ignored.

A feature that lands removes its line. Defaults are never refused: only what was asked for is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from config.errors import SettingsError, shown
from config.schema import Settings
from config.setting import BY_KEY, Given


@dataclass(frozen=True, slots=True)
class NotYet:
    """A refusal: `asks(value)` is True for values that need what is missing; `instead` says what there is."""

    key: str
    asks: Callable[[object], bool]
    instead: str


def exactly(*missing: object) -> Callable[[object], bool]:
    """True for those values only."""
    return lambda value: value in missing


NOT_YET = (NotYet("model.compile", exactly("on"), "use auto or off"),)


def is_missing(key: str, value: object) -> bool:
    """True when setting `key` to `value` would be refused."""
    return any(missing.key == key and missing.asks(value) for missing in NOT_YET)


def refuse_not_yet(settings: Settings, given: Mapping[str, Given]) -> None:
    """Raise SettingsError for the first given value that needs what is not there yet."""
    for missing in NOT_YET:
        if missing.key not in given:
            continue
        section, _, name = missing.key.partition(".")
        value = getattr(getattr(settings, section), name)
        if missing.asks(value):
            setting, (raw, origin) = BY_KEY[missing.key], given[missing.key]
            spelled = setting.spell(value) if isinstance(raw, bool) else raw
            raise SettingsError(
                f"{origin}: {missing.key} = {shown(spelled)} is not available yet; {missing.instead}"
            )
