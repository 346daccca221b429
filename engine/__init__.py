"""Slipstream's engine: everything that decides or computes. The server sees only the names below."""

from config import Settings
from engine.batch_metrics import BatchMetrics, EngineGauges, Histogram
from engine.engine import Engine
from engine.engine_parts import EngineInfo, EngineState
from engine.errors import (
    ContextLengthExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    RequestRejected,
    StartRefused,
    UnsupportedModel,
)
from engine.outputs import TokenLogprobs
from engine.request import FinishReason, GenerationRequest, Priority, SamplingParams
from engine.stream import Finish, OutputDelta, RequestStream, RequestTiming


def build_engine(settings: Settings) -> Engine:
    """An engine that loads what `settings` name when it is started; cheap, nothing is read before that."""
    # Here, so that importing a part of the engine does not import torch and transformers.
    from engine.build import build_engine as build

    return build(settings)


__all__ = [
    "BatchMetrics",
    "ContextLengthExceeded",
    "Engine",
    "EngineDead",
    "EngineError",
    "EngineGauges",
    "EngineInfo",
    "EngineState",
    "Finish",
    "FinishReason",
    "GenerationRequest",
    "Histogram",
    "InvalidRequest",
    "OutputDelta",
    "Overloaded",
    "Priority",
    "RequestFailed",
    "RequestRejected",
    "RequestStream",
    "RequestTiming",
    "SamplingParams",
    "StartRefused",
    "TokenLogprobs",
    "UnsupportedModel",
    "build_engine",
]
