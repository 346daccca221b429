"""Flags over environment over file over defaults, checked once: the way to `Settings`.

The only place that looks at the process environment. Every failure is a SettingsError of one line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from config.environment import is_service_link, read_environment
from config.errors import SettingsError, shown
from config.fault_plan import GivenFaults, read_fault_plan
from config.flags import read_flags
from config.schema import Settings
from config.setting import BY_KEY, SETTINGS, Given
from config.speculative_config import is_json_object, read_speculative_config
from config.toml_file import read_toml
from config.trace_export import TraceExport, read_trace_export

_JSON_KEY = "speculation.speculative_config"
_OWN_ERRORS = frozenset({"above_limit", "needs"})  # of a whole section: they name the setting themselves


class LoadedSettings(NamedTuple):
    """Settings, and for every dotted key where its value came from: "flag --port", "default", ..."""

    settings: Settings
    origins: Mapping[str, str]


def load_settings(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    """The settings `argv` (what follows `slipstream serve`) and `environ` (None: this process's) ask for.

    Raises SettingsError.
    """
    return load_with_origins(argv, environ).settings


def load_fault_plan(environ: Mapping[str, str] | None = None) -> GivenFaults:
    """The faults that `environ` (None: this process's) asks for, none unless it allows them.

    Raises SettingsError.
    """
    return read_fault_plan(os.environ if environ is None else environ)


def load_trace_export(environ: Mapping[str, str] | None = None) -> TraceExport:
    """Whether `environ` (None: this process's) asks for traces. Never raises."""
    return read_trace_export(os.environ if environ is None else environ)


def load_with_origins(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> LoadedSettings:
    """As `load_settings`, with the origin of every value."""
    flags = read_flags(argv)
    from_file = read_toml(flags.config_file) if flags.config_file is not None else {}
    from_environment = read_environment(os.environ if environ is None else environ)
    given = _spread_json({**from_file, **from_environment, **flags.given})
    settings = _validate(given)
    origins = {setting.key: "default" for setting in SETTINGS}
    return LoadedSettings(settings, origins | {key: origin for key, (_, origin) in given.items()})


def _spread_json(given: Mapping[str, Given]) -> dict[str, Given]:
    """`given` and what the JSON of --speculative-config asks for beside it.

    Raises SettingsError for a key that cannot be honoured, and for a setting given with another value.
    """
    found = dict(given)
    text, origin = given.get(_JSON_KEY, Given(None, ""))
    if not isinstance(text, str) or not is_json_object(text):
        return found  # not given, or the schema says what is wrong with it
    method = given.get("speculation.speculative_method")
    try:
        asked = read_speculative_config(text, None if method is None else method.value).settings
    except SettingsError as error:
        raise SettingsError(f"{origin}: {_JSON_KEY}: {error}") from None
    for name, (value, key, raw) in asked.items():
        dotted = f"speculation.{name}"
        beside = given.get(dotted)
        if beside is None:
            found[dotted] = Given(value, f"{origin} ({key})")
        elif not _agree(dotted, beside.value, value):
            raise SettingsError(
                f"{beside.origin}: {dotted} = {shown(beside.value)} disagrees with {key} = {shown(raw)} "
                f"of {origin}; give only one of them"
            )
    return found


def _agree(key: str, *values: object) -> bool:
    """True when all `values` of a setting mean the same, or when one is wrong, which is said elsewhere."""
    reader = TypeAdapter(BY_KEY[key].field.rebuild_annotation())
    try:
        first, *others = [reader.validate_python(value) for value in values]
    except ValidationError:
        return True
    return all(other == first for other in others)


def _validate(given: Mapping[str, Given]) -> Settings:
    nested: dict[str, object] = {}
    for key, (value, _) in given.items():
        section, _, name = key.rpartition(".")
        if section:
            table = nested.setdefault(section, {})
            assert isinstance(table, dict)
            table[name] = value
        else:
            nested[name] = value
    try:
        return Settings.model_validate(nested)
    except ValidationError as error:
        # `from None`: the original would carry the input along, keys included.
        raise SettingsError(_line(error.errors(include_url=False)[0], given)) from None


def _line(error: ErrorDetails, given: Mapping[str, Given]) -> str:
    """The one line for a pydantic error: where, what, and what is allowed."""
    place = [str(part) for part in error["loc"][:2]]
    context = error.get("ctx", {})
    if error["type"] in _OWN_ERRORS:
        place.append(context["name"])
    key = ".".join(place) if ".".join(place) in BY_KEY else place[0]
    setting = BY_KEY[key]
    value, origin = given.get(key, Given(setting.field.default, "default"))
    what = f"{key} (not shown)" if setting.shape.secret else f"{key} = {shown(_offender(value, error))}"
    allowed = error["msg"] if error["type"] in _OWN_ERRORS else setting.allowed
    return f"{origin}: {what} is not allowed; expected {allowed}{_port_hint(key, value)}"


def _offender(value: object, error: ErrorDetails) -> object:
    """The one wrong element of a repeatable setting, or the whole value."""
    index = error["loc"][2] if len(error["loc"]) > 2 else None
    return value[index] if isinstance(value, tuple) and isinstance(index, int) else value


def _port_hint(key: str, value: object) -> str:
    if key != "server.port" or not is_service_link(value):
        return ""
    return (
        " (Kubernetes sets this for a service called slipstream: use another name or "
        "enableServiceLinks: false, or give --port)"
    )
