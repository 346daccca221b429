"""The TOML file: read as a source of settings, written as an account of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from config.errors import SettingsError, closest, did_you_mean, plain
from config.schema import Settings
from config.setting import BY_KEY, SECTIONS, SETTINGS, Given, Setting


def read_toml(path: Path) -> dict[str, Given]:
    """Settings from `path`: one table a section, keys in kebab-case or snake_case.

    Raises SettingsError for a file that cannot be read and for any key that is no setting.
    """
    origin = f"file {plain(str(path))}"
    given: dict[str, Given] = {}
    for name, value in _parse(path, origin).items():
        if isinstance(value, dict):
            for key, inner in _table(name, value, origin).items():
                _put(given, origin, f"{name}.{key}", inner)
        else:
            _put(given, origin, name, value)
    return given


def format_toml(settings: Settings, origins: Mapping[str, str], *, with_origins: bool = False) -> str:
    """`settings` as a TOML file that reads back as the same, save for secrets, which are counted, not shown.

    A default stands in a comment, as `# port = 8000`. `with_origins` adds to each line where it came from.
    """
    blocks = []
    for section in ("", *SECTIONS):
        table = getattr(settings, section) if section else settings
        lines = [f"[{section}]"] if section else []
        for setting in SETTINGS:
            if setting.section == section:
                origin = origins[setting.key]
                line = _format_line(setting, getattr(table, setting.name), origin == "default")
                lines.append(f"{line:<46} # {plain(origin)}" if with_origins else line)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _parse(path: Path, origin: str) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{origin}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{origin}: not valid TOML (not UTF-8)") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{origin}: not valid TOML ({plain(str(error))})") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"{origin}: a number is too long, or tables or arrays are nested too deep"
        ) from error


def _table(name: str, table: dict[str, object], origin: str) -> dict[str, object]:
    if name not in SECTIONS:
        near = closest(name, SECTIONS)
        raise SettingsError(f"{origin}: unknown table [{plain(name)}]{did_you_mean(near and f'[{near}]')}")
    return table


def _put(given: dict[str, Given], origin: str, dotted: str, value: object) -> None:
    """Add one value; a single text is accepted where several may stand."""
    key = dotted.replace("-", "_")
    if key not in BY_KEY:
        name = key.rpartition(".")[2]
        near = closest(name, _KEY_OF_NAME)  # the right name in the wrong table included
        raise SettingsError(
            f"{origin}: unknown key {plain(dotted)}{did_you_mean(near and _KEY_OF_NAME[near])}"
        )
    if key in given:
        raise SettingsError(f"{origin}: {key} is given twice, in kebab-case and in snake_case")
    if BY_KEY[key].is_repeatable:
        value = tuple(value) if isinstance(value, list) else (value,)
    given[key] = Given(value, origin)


def _format_line(setting: Setting, value: object, is_default: bool) -> str:
    """One `key = value`; in a comment for a default, for what is not set and for what must stay secret."""
    if setting.shape.secret and value:
        return f"# {setting.word}: {len(value) if isinstance(value, tuple) else 1} set, not shown"
    text = _format_value(setting, value)
    line = f"{setting.word} is not set" if text is None else f"{setting.word} = {text}"
    return f"# {line}" if is_default or text is None else line


def _format_value(setting: Setting, value: object) -> str | None:
    """The value in TOML; None when nothing is set."""
    if isinstance(value, tuple):
        return f"[{', '.join(_quote(str(part)) for part in value)}]" if value else None
    if value is None and not setting.shape.auto:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and not setting.shape.size:
        return setting.spell(value)
    return _quote(setting.spell(value))


def _quote(text: str) -> str:
    """A TOML basic string: JSON's, save that TOML wants DEL escaped as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_KEY_OF_NAME = {setting.name: setting.key for setting in SETTINGS}
