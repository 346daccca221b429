"""Settings: one schema, one loader. Knows the standard library and pydantic, nothing else."""

from config.errors import SettingsError
from config.fault_plan import FaultPoint, GivenFaults, PlannedFault
from config.loader import LoadedSettings, load_fault_plan, load_settings, load_trace_export, load_with_origins
from config.schema import (
    CPU_BLOCK_SIZE,
    CPU_SEATS,
    CPU_TOKENS,
    CacheSettings,
    LogSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SpeculationSettings,
)
from config.speculative_config import DraftTuning
from config.trace_export import TraceExport

__all__ = [
    "CPU_BLOCK_SIZE",
    "CPU_SEATS",
    "CPU_TOKENS",
    "CacheSettings",
    "DraftTuning",
    "FaultPoint",
    "GivenFaults",
    "LoadedSettings",
    "LogSettings",
    "ModelSettings",
    "PlannedFault",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SettingsError",
    "SpeculationSettings",
    "TraceExport",
    "load_fault_plan",
    "load_settings",
    "load_trace_export",
    "load_with_origins",
]
