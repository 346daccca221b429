"""Slipstream's engine: everything that decides or computes. The server sees only the names below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import PlannedFault, Settings
from engine.compute.embedding.records import EmbedderInfo, EncodedText
from engine.compute.lean_transformers import prepare_transformers
from engine.embeddings.metrics import EmbeddingMetrics
from engine.embeddings.service import EmbeddingRequest, EmbeddingService
from engine.embeddings.shared_thread import GAP_LIMIT_S, SharedThread
from engine.embeddings.text_reader import EmbeddingParts, TextReading
from engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    RequestRejected,
    StartRefused,
    TemplateStopped,
    UnsupportedModel,
    frames_of,
)
from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineInfo, EngineLimits, EngineParts, EngineState, Executors
from engine.loop.stream import Finish, OutputDelta, RequestStream, RequestTiming
from engine.loop.watchdog import thread_stacks
from engine.plan.admission import check_token_ids
from engine.plan.grammar import CompiledGrammar
from engine.plan.kv.prefix_cache import owned_salt
from engine.plan.metrics.batch_metrics import Activity, BatchMetrics, EngineGauges
from engine.plan.metrics.histogram import Histogram
from engine.plan.request import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    FinishReason,
    GenerationRequest,
    Priority,
    SamplingParams,
    SpeculationOptions,
)
from engine.plan.scheduling.explanation import RequestExplanation
from engine.plan.speculation.drafting_state import DrafterState, DraftingState, RequestDrafting
from engine.plan.speculation.recent_gain import FormulaTerms
from engine.plan.speculation.spec_stats import SpecStats
from engine.plan.speculation.speculation_config import DraftingChange, DraftingRules
from engine.plan.step_records import TokenLogprobs
from engine.startup.cpu_limit import usable_cores
from engine.startup.diagnosis import (
    CacheFacts,
    DeviceFacts,
    Diagnosis,
    DraftFacts,
    EmbeddingFacts,
    ModelFacts,
    StoredModel,
)
from engine.startup.host_memory import memory_bytes
from engine.startup.host_tuning import freeze_heap, freeze_imports, prepare_process
from engine.text.closed_schema import closed_schema
from engine.text.fill_in_middle import FillInMiddle
from engine.text.joined_users import joined_users
from engine.text.reply.pieces import (
    CallArguments,
    CallEnd,
    CallStart,
    CollectedCall,
    CollectedReply,
    ContentText,
    Piece,
    ReasoningText,
)
from engine.text.reply.reply_format import ReplyFormat
from engine.text.reply.reply_reader import ReplyReader
from engine.text.structured_output import Frame, StructuredOutput, StructureKind
from engine.text.tools.input_text import InputText
from engine.text.tools.single_calls import one_call_each
from engine.text.tools.tool_spec import INPUT_KEY, NO_PARAMETERS, ToolChoice, ToolRules, ToolSpec
from engine.training.training_plan import DrafterPlan, MedusaPlan, TrainingProgress

if TYPE_CHECKING:
    from engine.startup.part_factories import PartFactories


def build_engine(settings: Settings, faults: Sequence[PlannedFault] = ()) -> Engine:
    """An engine that loads what `settings` name when it is started; cheap, nothing is read before that.

    `faults` is for tests: it will go wrong in these ways.
    """

    def load(*factories: PartFactories) -> EngineParts | None:
        # Here, so that a part of the engine can be used without torch, and the listener is up while it loads.
        prepare_transformers()
        from engine.compute.embedding.source import is_embedding_model
        from engine.startup.build import load_parts

        return None if is_embedding_model(settings.model) else load_parts(settings, *factories)

    def load_embeddings() -> EmbeddingParts | None:
        prepare_transformers()
        from engine.startup.build_embeddings import load_embedding_parts

        return load_embedding_parts(settings)

    server, header = settings.server, settings.scheduler.tenant_header
    has_tenants = len(server.api_key) > 1 or server.api_key_file is not None or header is not None
    limits = EngineLimits(
        server.max_queued_requests,
        server.max_queued_tokens,
        server.watchdog_timeout,
        server.queue_timeout,
        has_tenants=has_tenants,
        tenant_weights=settings.scheduler.tenant_weights,
    )
    thread = SharedThread(GAP_LIMIT_S)
    executors = replace(Executors.threads(usable_cores()), target=thread)
    if not faults:
        engine = Engine(load, limits, executors=executors)
    else:
        from engine.faults.faulty_engine import FaultyEngine

        engine = FaultyEngine(faults, load, limits, executors)
    engine.companion = EmbeddingService(engine, load_embeddings, thread, limits)
    return engine


def train_medusa_heads(
    settings: Settings, plan: MedusaPlan, progress: TrainingProgress
) -> dict[str, Any] | None:
    """Train Medusa heads for the model that `settings` name; the report. On the calling thread.

    None when `progress` ended it before there was anything to save. Raises StartRefused.
    """
    prepare_transformers()
    from engine.training.medusa_run import train_medusa_heads as train

    return train(settings, plan, progress)


def train_drafter(settings: Settings, plan: DrafterPlan, progress: TrainingProgress) -> dict[str, Any] | None:
    """Train a drafter of one layer for the model that `settings` name; the report. On the calling thread.

    None when `progress` ended it before there was anything to save. Raises StartRefused.
    """
    prepare_transformers()
    from engine.training.eagle_run import train_drafter as train

    return train(settings, plan, progress)


def import_libraries() -> None:
    """Import what loads and runs models, and exempt that from garbage collection.

    Call once, in a process that does little else: what of other code is garbage by now stays as well.
    """
    prepare_transformers()
    import engine.startup.build
    import engine.startup.doctor  # noqa: F401 - both for what they import

    freeze_imports()


def check_start(settings: Settings) -> None:
    """Raise StartRefused, in the doctor's words, for what stops a start and shows without the weights."""
    prepare_transformers()
    from engine.startup.doctor import check_start as check

    check(settings)


def diagnose(settings: Settings) -> Diagnosis:
    """What a start with `settings` would use, and what would stop it; no weights are loaded."""
    prepare_transformers()
    from engine.startup.doctor import diagnose as examine

    return examine(settings)


def list_models(home: Path) -> tuple[list[StoredModel], list[str]]:
    """The models on this machine, and what of the Hugging Face cache cannot be read. No network is used."""
    from engine.startup.stored_models import list_models as look

    return look(home)


def pull_model(name: str, revision: str | None) -> Path:
    """Fetch what `serve` reads of a Hugging Face repo; its directory or GGUF file. Raises StartRefused."""
    from engine.compute.loading.model_source import pull_model as pull

    return pull(name, revision)


__all__ = [
    "INPUT_KEY",
    "MAX_PRIORITY",
    "MIN_PRIORITY",
    "NO_PARAMETERS",
    "Activity",
    "BatchMetrics",
    "CacheFacts",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "CollectedCall",
    "CollectedReply",
    "CompiledGrammar",
    "ContentText",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "DeviceFacts",
    "Diagnosis",
    "DraftFacts",
    "DrafterPlan",
    "DrafterState",
    "DraftingChange",
    "DraftingRules",
    "DraftingState",
    "EmbedderInfo",
    "EmbeddingFacts",
    "EmbeddingMetrics",
    "EmbeddingRequest",
    "EmbeddingService",
    "EncodedText",
    "Engine",
    "EngineDead",
    "EngineError",
    "EngineGauges",
    "EngineInfo",
    "EngineState",
    "FillInMiddle",
    "Finish",
    "FinishReason",
    "FormulaTerms",
    "Frame",
    "GenerationRequest",
    "Histogram",
    "InputText",
    "InvalidRequest",
    "MedusaPlan",
    "ModelFacts",
    "OutputDelta",
    "Overloaded",
    "Piece",
    "Priority",
    "ReasoningText",
    "ReplyFormat",
    "ReplyReader",
    "RequestDrafting",
    "RequestExplanation",
    "RequestFailed",
    "RequestRejected",
    "RequestStream",
    "RequestTiming",
    "SamplingParams",
    "SpecStats",
    "SpeculationOptions",
    "StartRefused",
    "StoredModel",
    "StructureKind",
    "StructuredOutput",
    "TemplateStopped",
    "TextReading",
    "TokenLogprobs",
    "ToolChoice",
    "ToolRules",
    "ToolSpec",
    "TrainingProgress",
    "UnsupportedModel",
    "build_engine",
    "check_start",
    "check_token_ids",
    "closed_schema",
    "diagnose",
    "frames_of",
    "freeze_heap",
    "import_libraries",
    "joined_users",
    "list_models",
    "memory_bytes",
    "one_call_each",
    "owned_salt",
    "prepare_process",
    "pull_model",
    "thread_stacks",
    "train_drafter",
    "train_medusa_heads",
    "usable_cores",
]
