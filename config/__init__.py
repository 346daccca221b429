"""Settings: one schema, one loader. Knows the standard library and pydantic, nothing else."""

from config.errors import SettingsError
from config.loader import LoadedSettings, load_settings, load_with_origins
from config.schema import (
    CacheSettings,
    LogSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SpeculationSettings,
)
from config.speculative_config import DraftTuning

__all__ = [
    "CacheSettings",
    "DraftTuning",
    "LoadedSettings",
    "LogSettings",
    "ModelSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SettingsError",
    "SpeculationSettings",
    "load_settings",
    "load_with_origins",
]
