"""Settings: one schema, one loader. Knows the standard library and pydantic, nothing else."""

from config.errors import SettingsError
from config.schema import (
    CacheSettings,
    LogSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SpeculationSettings,
)

__all__ = [
    "CacheSettings",
    "LogSettings",
    "ModelSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SettingsError",
    "SpeculationSettings",
]
