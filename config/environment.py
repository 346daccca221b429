"""The environment as a source of settings; which environment is the caller's choice."""

from __future__ import annotations

import re
from collections.abc import Mapping

from config.errors import SettingsError, closest, did_you_mean, plain
from config.setting import ENV_PREFIX, SETTINGS, Given, Setting

FAULT_SWITCH = f"{ENV_PREFIX}ALLOW_FAULTS"
FAULT_PLAN = f"{ENV_PREFIX}FAULT_PLAN"

# What Kubernetes puts into a pod's environment for a service whose name starts with ours.
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_PORT = re.compile(rf"{ENV_PREFIX}\w+_PORT")


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Settings from SLIPSTREAM_<SECTION>__<NAME> and the few flat names; repeatable ones split at commas.

    A key may hold commas, so what sets keys is one key; more of them go into a key file. Raises SettingsError
    for any other name with our prefix, except the links Kubernetes makes up.
    """
    _refuse_unknown(environ)
    given = {}
    for setting in SETTINGS:
        for name in setting.env_names:
            if name in environ:
                given[setting.key] = Given(_read_value(setting, environ[name]), f"env {name}")
                break
    return given


def _read_value(setting: Setting, text: str) -> object:
    if not setting.is_repeatable:
        return text
    parts = [text] if setting.shape.secret else text.split(",")
    return tuple(part.strip() for part in parts)


def is_service_link(value: object) -> bool:
    """True for tcp://10.0.0.1:80, which no setting of ours looks like."""
    return isinstance(value, str) and re.match(r"(tcp|udp|sctp)://", value) is not None


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = {name for setting in SETTINGS for name in setting.env_names} | {FAULT_SWITCH, FAULT_PLAN}
    for name, value in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in known or _SERVICE_LINK.fullmatch(name):
            continue
        if _LINK_PORT.fullmatch(name) and is_service_link(value):
            continue
        raise SettingsError(f"env {plain(name)}: unknown setting{did_you_mean(closest(name, sorted(known)))}")
