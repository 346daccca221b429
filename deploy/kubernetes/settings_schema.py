"""The server's settings as JSON schema, so that the chart refuses what the server would refuse."""

from __future__ import annotations

from typing import Any

from annotated_types import Ge, Gt, Le, Lt

from config.setting import SECTIONS, SETTINGS, Setting

# What the chart sets itself: the address, the device by the values of `gpu`, keys from a Secret.
OF_THE_CHART = ("server.host", "server.port", "server.api_key", "server.api_key_file", "model.device")

_BOUNDS = {
    Ge: ("minimum", "ge"),
    Gt: ("exclusiveMinimum", "gt"),
    Le: ("maximum", "le"),
    Lt: ("exclusiveMaximum", "lt"),
}


def config_schema() -> dict[str, Any]:
    """The schema of the value `config`: one object a section, its keys in kebab-case as in the TOML file."""
    sections = {section: _closed(_settings_of(section)) for section in SECTIONS}
    return _closed(sections) | {"description": "settings of the server, as in its TOML file"}


def _settings_of(section: str) -> dict[str, Any]:
    return {
        setting.word: _schema_of(setting) | {"description": setting.field.description}
        for setting in SETTINGS
        if setting.section == section and setting.key not in OF_THE_CHART
    }


def _schema_of(setting: Setting) -> dict[str, Any]:
    if setting.choices:
        return {"enum": list(setting.choices)}
    if setting.is_switch:
        return {"type": "boolean"}
    if setting.is_repeatable:
        return {"type": ["array", "string"], "items": {"type": "string"}, "minLength": 1}
    if setting.shape.size:
        return {"type": ["integer", "string"], **_bounds(setting)}
    if not setting.shape.numeric:
        return {"type": "string", "minLength": 1}
    number: dict[str, Any] = {"type": _number_type(setting), **_bounds(setting)}
    return {"anyOf": [number, {"const": "auto"}]} if setting.shape.auto else number


def _number_type(setting: Setting) -> str:
    return "integer" if setting.shape.metavar == "N" else "number"


def _bounds(setting: Setting) -> dict[str, float]:
    return {
        word: getattr(mark, attribute)
        for mark in setting.field.metadata
        for kind, (word, attribute) in _BOUNDS.items()
        if isinstance(mark, kind)
    }


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}
