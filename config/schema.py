"""Every setting of the server: one frozen model, one section a record, one description a field.

The descriptions are the help texts, the types and bounds are the checks, the names are the flags, the
environment variables and the TOML keys. Values the model or the machine decides are None here and derived
by the engine; nothing is ever written back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from config.errors import SettingsError
from config.reply_parsers import ReasoningParser, ToolCallParser
from config.speculative_config import DraftTuning, is_json_object, read_speculative_config
from config.value_types import (
    Device,
    Directory,
    DirectoryOrNone,
    FileOrNone,
    HeaderNameOrNone,
    HostNames,
    Number,
    Origins,
    Seconds,
    Secrets,
    Shape,
    Size,
    Text,
    TextOrNone,
    Texts,
    Weights,
    Whole,
    WholeOrAuto,
    lower_case,
)

# What auto is on a CPU: sequences at once, tokens of a step, tokens of a K/V block.
CPU_SEATS, CPU_TOKENS, CPU_BLOCK_SIZE = 64, 2048, 16

Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(lower_case)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(lower_case)]
CpuKernels = Annotated[
    Literal["auto", "amx", "bf16", "vnni", "avx512", "v3", "neon"], BeforeValidator(lower_case)
]
Quantization = Annotated[Literal["none", "int8", "int4"], BeforeValidator(lower_case)]
KvDtype = Annotated[Literal["auto", "int8", "fp8"], BeforeValidator(lower_case)]
Policy = Annotated[
    Literal["fcfs", "sjf", "priority", "deadline", "orca", "fair"], BeforeValidator(lower_case)
]
Preemption = Annotated[Literal["auto", "recompute", "swap"], BeforeValidator(lower_case)]
SpeculativeMethod = Annotated[
    Literal["none", "ngram", "suffix", "draft-model", "medusa", "heads", "mtp", "auto"],
    BeforeValidator(lower_case),
]
DraftDevice = Annotated[Literal["auto", "cpu"], BeforeValidator(lower_case)]
SpeculationSchedule = Annotated[Literal["async", "sync", "auto"], BeforeValidator(lower_case)]
DraftVerification = Annotated[Literal["match", "rejection", "block"], BeforeValidator(lower_case)]
DraftLengthPolicy = Annotated[Literal["fixed", "threshold", "goodput"], BeforeValidator(lower_case)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower_case)]
LogFormat = Annotated[Literal["auto", "text", "json"], BeforeValidator(lower_case)]


def keep_speculative_config(value: object, info: ValidationInfo) -> object:
    """Pass a JSON object on as its text. Raises ValueError when it is anything else or cannot be honoured."""
    if isinstance(value, str):
        if not is_json_object(value):
            raise ValueError("not an object")
        try:
            read_speculative_config(value, info.data.get("speculative_method"))
        except SettingsError as error:
            raise ValueError(str(error)) from None
    return value


JsonObjectOrNone = Annotated[
    str | None, BeforeValidator(keep_speculative_config), Shape("JSON", "a JSON object")
]


class Section(BaseModel):
    """What all sections share: frozen, no unknown names, no input echoed in error texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _refuse_above(section: Section, name: str, limit_name: str) -> None:
    """Raise when a part is larger than the whole; None is the whole, or a whole that the device decides."""
    value, limit = getattr(section, name), getattr(section, limit_name)
    if value is not None and limit is not None and value > limit:
        raise PydanticCustomError(
            "above_limit",
            "at most {limit_flag} ({limit})",
            {"name": name, "value": value, "limit_flag": limit_name.replace("_", "-"), "limit": limit},
        )


def _refuse_without(section: Section, name: str, value: str, needed: str) -> None:
    """Raise when `name` is `value` while `needed`, which that cannot do without, is not given."""
    if getattr(section, name) == value and getattr(section, needed) is None:
        flag = needed.replace("_", "-")
        raise PydanticCustomError("needs", "--{flag} beside it", {"name": name, "value": value, "flag": flag})


def _name_of(model: str) -> str:
    """A model's name in the API: its own, without what only a path needs."""
    name = model.removeprefix("./").rstrip("/")
    name = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    return name or model


class ModelSettings(Section):
    """What is served and how it is loaded."""

    model: Text = Field(
        "smollm2-135m-instruct",
        description="Hugging Face repo id, directory, .gguf file or the built-in name",
    )
    served_model_name: Texts = Field(
        (), description="name(s) in the API; repeatable; none = MODEL, less ./ before it and .gguf behind"
    )
    dtype: Dtype = Field("auto", description="number format of weights and K/V")
    device: Device = Field("auto", description="where the model runs; cuda:N = that one of several GPUs")
    max_model_len: WholeOrAuto = Field(
        None, ge=1, description="most tokens of prompt and output together; auto = the model's own"
    )
    revision: TextOrNone = Field(None, description="branch, tag or commit of the Hugging Face repo")
    chat_template: FileOrNone = Field(None, description="Jinja chat template in place of the model's own")
    compile: Switch = Field(
        "auto", description="kernels compiled for this CPU; auto = where that is possible"
    )
    cpu_kernels: CpuKernels = Field(
        "auto", description="instructions of the kernels; auto = the fastest here"
    )
    quantization: Quantization = Field(
        "none", description="weights as compiled kernels read them: int8 in 1/2 the memory, int4 1/3"
    )

    embedding_model: TextOrNone = Field(
        None,
        description="Hugging Face repo id or directory of an embedding model or reranker served beside MODEL",
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names under which the API knows the model; the first one is shown in replies.

        Unless they are given it is MODEL without what only a path needs: ./ before it, / or .gguf behind.
        """
        return self.served_model_name or (_name_of(self.model),)

    @property
    def embedding_name(self) -> str | None:
        """The name under which the API knows the embedding model beside MODEL; None without one."""
        return None if self.embedding_model is None else _name_of(self.embedding_model)

    @model_validator(mode="after")
    def _kernels_for_integers(self) -> Self:
        if self.quantization != "none" and self.compile == "off":
            given = {"name": "quantization", "value": self.quantization}
            raise PydanticCustomError("needs", "--compile auto or on beside it", given)
        return self


class CacheSettings(Section):
    """The paged K/V cache."""

    kv_block_size: WholeOrAuto = Field(
        None, ge=1, le=1024, description="tokens in one K/V block; auto = 16, or 64 on a GPU"
    )
    num_kv_blocks: WholeOrAuto = Field(
        None, ge=1, description="K/V blocks, whatever they take; auto = what the memory holds"
    )
    kv_cache_memory: Size = Field(2**30, ge=1, description="memory for K/V on a CPU")
    gpu_memory_utilization: Number = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory for weights, K/V and work space"
    )
    kv_cache_dtype: KvDtype = Field(
        "auto", description="how K/V is kept; auto = as computed; int8, fp8 (GPU) = half the memory"
    )
    swap_space: Size = Field(2**30, ge=0, description="host memory for preempted K/V and states; 0 = none")
    prefix_caching: bool = Field(True, description="keep and reuse the K/V of shared prefixes")
    prefix_cache_dir: DirectoryOrNone = Field(
        None,
        description="directory that keeps K/V of prefixes on disk, for this user alone",
    )
    prefix_cache_disk: Size = Field(
        10 * 2**30, ge=1, description="most bytes in prefix-cache-dir; what was of no use for longest goes"
    )
    share_prefix_cache: bool = Field(
        False, description="keys find each other's prefixes, and so what others have asked"
    )

    @model_validator(mode="after")
    def _caching_before_keeping(self) -> Self:
        if self.prefix_cache_dir is not None and not self.prefix_caching:
            given = {
                "name": "prefix_cache_dir",
                "value": str(self.prefix_cache_dir),
                "flag": "prefix-caching",
            }
            raise PydanticCustomError("needs", "--{flag} beside it", given)
        return self


class SchedulerSettings(Section):
    """Who runs in a step and how much of it."""

    max_num_seqs: WholeOrAuto = Field(
        None,
        ge=1,
        le=2**16,
        description="most sequences running at once; auto = 64 on a CPU, up to 256 as a GPU's memory holds",
    )
    max_num_batched_tokens: WholeOrAuto = Field(
        None,
        ge=1,
        le=2**20,
        description="most tokens in one step; auto = 2048 on a CPU, up to 8192 by a GPU's memory",
    )
    max_prefill_tokens: WholeOrAuto = Field(
        None,
        ge=1,
        description="most prompt tokens in one step; auto = the budget, less beside running streams",
    )
    max_decode_seqs: WholeOrAuto = Field(
        None, ge=1, description="most sequences decoding in one step; auto = max-num-seqs"
    )
    scheduling_policy: Policy = Field("priority", description="who goes first")
    preemption: Preemption = Field("auto", description="how a running sequence gives its K/V back")
    priority_aging_seconds: Seconds = Field(
        30.0,
        ge=0,
        description="wait worth a step of priority, beyond +-10 less; 113 of it outrank anybody; 0 = off",
    )
    tenant_weight: Weights = Field(
        (), description="a tenant's share, 1 by default, under its name in the key file; repeatable"
    )
    tenant_header: HeaderNameOrNone = Field(
        None,
        description="header in which a trusted gateway names the tenant; a client's own is believed, too",
    )

    read_next_turn: bool = Field(
        True, description="while idle, compute what a chat's next prompt will begin with"
    )

    @property
    def tenant_weights(self) -> dict[str, float]:
        """The weights given, by tenant; the last one of a name counts."""
        return {
            name: float(weight) for name, _, weight in (each.rpartition("=") for each in self.tenant_weight)
        }

    @model_validator(mode="after")
    def _within_the_step(self) -> Self:
        _refuse_above(self, "max_prefill_tokens", "max_num_batched_tokens")
        _refuse_above(self, "max_decode_seqs", "max_num_seqs")
        return self


class SpeculationSettings(Section):
    """Drafting tokens ahead of the target.

    `load_settings` has spread `speculative_config` over the fields above it; what none of them holds is in
    `tuning`.
    """

    speculative_method: SpeculativeMethod = Field("auto", description="who drafts; auto = all at hand")
    draft_model: TextOrNone = Field(None, description="a smaller model with the same vocabulary")
    draft_device: DraftDevice = Field(
        "auto", description="where the draft model runs; auto = with the model; cpu = beside one on a GPU"
    )
    medusa_heads: DirectoryOrNone = Field(
        None, description="directory of Medusa heads, trained here or published"
    )
    draft_heads: DirectoryOrNone = Field(
        None, description="directory of an EAGLE-3 drafter; auto = the default model's own"
    )
    num_speculative_tokens: WholeOrAuto = Field(
        None,
        ge=1,
        le=32,
        description="longest draft; auto = up to 32 model-free, 4 for models, 6 for heads and MTP",
    )
    speculation_schedule: SpeculationSchedule = Field(
        "auto", description="whether the target waits for drafts; auto = as measured"
    )
    draft_lanes: WholeOrAuto = Field(
        None,
        ge=0,
        le=8,
        description="other outcomes a draft model drafts for running ahead; auto = 4 if measured to pay",
    )
    draft_verification: DraftVerification = Field("match", description="how drafts are accepted")
    draft_length_policy: DraftLengthPolicy = Field("goodput", description="how the draft length is chosen")
    min_acceptance_rate: Number = Field(
        0.3, ge=0, le=1, description="drafting stops below this acceptance; 0 = never"
    )
    draft_shrink_rate: Number = Field(
        0.5, ge=0, le=1, description="below this acceptance the policy threshold shortens drafts; 0 = never"
    )
    speculative_config: JsonObjectOrNone = Field(
        None, description="the settings above in one JSON object with vLLM's keys"
    )

    @property
    def tuning(self) -> DraftTuning:
        """How n-grams are looked up, which only `speculative_config` can say."""
        return read_speculative_config(self.speculative_config or "{}", self.speculative_method).tuning

    @model_validator(mode="after")
    def _drafter_is_given(self) -> Self:
        _refuse_without(self, "speculative_method", "draft-model", "draft_model")
        _refuse_without(self, "speculative_method", "medusa", "medusa_heads")
        return self

    @model_validator(mode="after")
    def _lanes_can_be_kept(self) -> Self:
        flag = None
        if self.speculation_schedule == "sync":
            flag = "speculation-schedule async"
        elif self.draft_verification != "match":
            flag = "draft-verification match"
        if self.draft_lanes and flag is not None:
            about = {"name": "draft_lanes", "value": str(self.draft_lanes), "flag": flag}
            raise PydanticCustomError("needs", "--{flag} beside it", about)
        return self


class ServerSettings(Section):
    """The HTTP side: address, keys, limits and times."""

    host: Text = Field("127.0.0.1", description="address to listen on")
    port: Whole = Field(8000, ge=0, le=65535, description="port to listen on; 0 = any free one")
    api_key: Secrets = Field(
        (),
        description="key a client must send; repeatable; none = open to all; ps shows it, not a key file",
    )
    api_key_file: FileOrNone = Field(
        None, description="file with KEY or NAME = KEY in each line, added to the keys; # comments"
    )
    max_queued_requests: Whole = Field(256, ge=1, description="requests that may wait")
    max_queued_tokens: Whole = Field(1_000_000, ge=1, description="prompt tokens that may wait")
    queue_timeout: Seconds = Field(0.0, ge=0, description="longest wait in the queue; 0 = no limit")
    request_timeout: Seconds = Field(0.0, ge=0, description="longest life of a request; 0 = no limit")
    stall_timeout: Seconds = Field(60.0, gt=0, description="a client that reads nothing this long is dropped")
    read_timeout: Seconds = Field(30.0, gt=0, description="time for a request's headers and body to arrive")
    max_body_bytes: Size = Field(8 * 2**20, ge=1, description="largest request body")
    max_header_bytes: Size = Field(2**16, ge=1024, description="largest request header")
    max_connections: Whole = Field(2048, ge=1, description="open connections")
    max_n: Whole = Field(128, ge=1, description="most choices a request may ask for")
    max_logprobs: Whole = Field(20, ge=0, description="most log-probabilities a token may carry")
    drain_timeout: Seconds = Field(8.0, ge=0, description="time running requests get to finish on shutdown")
    watchdog_timeout: Seconds = Field(60.0, gt=0, description="a step that takes longer counts as hung")
    strict_params: bool = Field(False, description="refuse unknown request fields instead of ignoring them")
    sse_keepalive_seconds: Seconds = Field(
        10.0, gt=0, description="a silent stream gets a comment this often"
    )
    per_request_metrics: bool = Field(True, description="send each request's times with its usage")
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="how the model marks its reasoning; auto = as its template shows; none = not at all",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto", description="how the model writes tool calls; auto = as its template shows"
    )
    ollama_api: bool = Field(False, description="answer Ollama's clients, too: /api/chat and its other paths")
    protect_metrics: bool = Field(False, description="ask for a key on /metrics too")
    max_stored_responses: Whole = Field(
        1000, ge=0, description="responses kept in memory for /v1/responses/{id}; 0 = none"
    )
    state_dir: DirectoryOrNone = Field(
        None, description="directory for files and batches, of one server; none = state in SLIPSTREAM_HOME"
    )
    max_file_size: Size = Field(200 * 2**20, ge=1, description="largest file that /v1/files takes")
    cors_origin: Origins = Field(
        (), description="pages of this origin may use the server; repeatable; * = any; none = its own only"
    )
    allowed_host: HostNames = Field(
        (),
        description="Host to answer beside loopback names; repeatable; * = any, as where host is public",
    )


class LogSettings(Section):
    """What is logged, and how; always to stderr."""

    log_level: LogLevel = Field("info", description="least severe level that is logged")
    log_format: LogFormat = Field(
        "auto", description="auto = short rows on a terminal, else JSON; text = a line of values"
    )


class Settings(BaseSettings):
    """All settings. `Settings()` is the defaults: only `load_settings` looks at flags, environment or files.

    `home` holds what the server keeps between runs, converted models above all.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    home: Directory = Field(
        Path("~/.cache/slipstream"), validate_default=True, description="directory for converted models"
    )
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take nothing from the process by itself: what the loader merged is the only source."""
        return (init_settings,)
