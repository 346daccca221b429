"""The command line as a source of settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from config.errors import SettingsError, closest, did_you_mean, plain, shown
from config.setting import SETTINGS, Given, Setting

CONFIG_FLAG = "--config"


@dataclass(slots=True)
class Flags:
    """What a command line asks for: settings by key, and the file of --config."""

    given: dict[str, Given] = field(default_factory=dict)
    config_file: Path | None = None


def read_flags(argv: Sequence[str]) -> Flags:
    """Settings from `[MODEL] [--flag value | --flag=value | --switch | --no-switch]...`, in any order.

    Values stay text; the last of a repeated flag counts, repeatable ones collect. Raises SettingsError
    for an unknown flag, a missing value and a second MODEL.
    """
    flags = Flags()
    words = iter(argv)
    for word in words:
        if word.startswith("-") and word != "-":
            _read_flag(flags, word, words)
        elif "model.model" in flags.given:
            first = flags.given["model.model"]
            raise SettingsError(
                f"argument MODEL: {shown(word)} is one model too many; "
                f"{first.origin} already names {shown(first.value)}"
            )
        else:
            flags.given["model.model"] = Given(word, "argument MODEL")
    return flags


def takes_value(name: str) -> bool:
    """Whether the next word after the flag `name` is its value; False for a switch and an unknown flag."""
    return name in _VALUED or name == CONFIG_FLAG


def _read_flag(flags: Flags, word: str, rest: Iterator[str]) -> None:
    """Add the flag `word`, with its value taken from behind = or from `rest`."""
    name, equals, inline = word.partition("=")
    if name in _SWITCHES:
        if equals:
            raise SettingsError(f"flag {name}: takes no value, got {shown(inline)}")
        setting, value = _SWITCHES[name]
        flags.given[setting.key] = Given(value, f"flag {name}")
        return
    if name not in _VALUED and name != CONFIG_FLAG:
        near = closest(name, [CONFIG_FLAG, *_VALUED, *_SWITCHES])
        raise SettingsError(
            f"flag {plain(name)}: unknown flag{did_you_mean(near)} (see slipstream serve --help)"
        )
    setting_or_file = _VALUED.get(name)
    text = inline if equals else _next_value(name, rest, setting_or_file)
    if setting_or_file is None:
        flags.config_file = Path(text)
    else:
        _put(flags, setting_or_file, text)


def _put(flags: Flags, setting: Setting, text: str) -> None:
    before = flags.given.get(setting.key)
    if before is not None and before.origin == "argument MODEL":
        raise SettingsError(
            f"flag {setting.flag}: {shown(text)} is one model too many; "
            f"argument MODEL already names {shown(before.value)}"
        )
    collected = before.value if before is not None and isinstance(before.value, tuple) else ()
    value = (*collected, text) if setting.is_repeatable else text
    flags.given[setting.key] = Given(value, f"flag {setting.flag}")


def _next_value(name: str, rest: Iterator[str], setting: Setting | None) -> str:
    text = next(rest, None)
    if text is None or text.startswith("--"):
        allowed = "the path of a TOML file" if setting is None else setting.allowed
        raise SettingsError(f"flag {name}: needs a value; expected {allowed}")
    return text


_VALUED = {setting.flag: setting for setting in SETTINGS if setting.flag and not setting.is_switch}
_SWITCHES = {
    prefix + setting.word: (setting, value)
    for setting in SETTINGS
    if setting.flag and setting.is_switch
    for prefix, value in (("--", True), ("--no-", False))
}
