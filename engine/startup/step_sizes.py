"""StepSizes: the seats, the tokens of a step and of a K/V block, as given or as the device allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from transformers import PreTrainedConfig

from config import CPU_BLOCK_SIZE, CPU_SEATS, CPU_TOKENS, Settings
from config.units import rough_size
from engine.compute.attention.kv_tensors import bytes_per_block
from engine.compute.drafters.draft_loader import TargetRoom
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.outline import weight_bytes
from engine.compute.recurrent.slot_states import LEAST_KEPT_ROWS, state_bytes
from engine.errors import StartRefused
from engine.startup.build_speculation import foreseen_draft_tokens

_GPU_BLOCK: Final = 64
_GPU_SEATS: Final = (32, 48, 64, 96, 128, 192, 256)
_FEW_SEATS: Final = (1, 2, 4, 8, 16, 24)  # where the states of more do not fit
_GPU_TOKENS: Final = (2048, 4096, 8192)
_WORK_SHARE: Final = 32  # one part in so many of a GPU's memory is what a step's tokens may be computed in
_SENSIBLE_LEN: Final = 1024  # tokens of a sequence, prompt and output together
_LOGITS_BYTES: Final = 512 << 20  # of a step's logits, as the model gives them
_LEAST_ROWS: Final = 2  # of logits for each seat: its last token's, and a draft's


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a start runs with. `origins` says of each setting that made one where its value comes from.

    A setting that is given always wins. What is not given is on a CPU what its documentation says. On a GPU:

    - K/V blocks have 64 tokens. Tables are a quarter as long as with 16, and kernels read longer runs of
      memory; what is left empty of a last block, 32 tokens on average, is little beside a GPU's K/V.
    - A step has up to 8,192 tokens, halved until what they are computed in, by the model's widths, is no more
      than a thirty-second of the device's memory. Fewer than 2,048 would leave the device idle between steps,
      more than 8,192 make no prompt faster. Running streams do not wait for it: the scheduler gives prompts
      less of the budget beside them.
    - Seats are as many sequences of 1,024 tokens, or of the model's context if that is less, as the memory
      behind weights and work space holds K/V and states of, from 32 to 256, in sizes that steps are recorded
      for. The weights are also those of drafters and of an embedding model, and what drafters keep of as many
      sequences leaves less. More would be preempted before they end; beyond 256 a step grows as much as its
      sequences do. Each seat of a recurrent model has its state from the start: where memory is short of
      these in the end, there are fewer seats.
    - Rows of logits are as many as 512 MiB hold, or two for each seat if that is more; on a CPU, too, and no
      setting says otherwise. Each draft that is verified has one: a row for each token of a step would take
      gigabytes. A pass over more than some hundreds is bound by arithmetic, so that drafts hardly pay there.
      Of a vocabulary of 128,256 tokens in bfloat16 these are 2,092 rows, of 49,152 tokens 5,461.

    By the whole of the device's memory, not by what is free: the same flags make the same sizes each start.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_block_size: int
    max_logits_rows: int
    origins: Mapping[str, str] = field(default_factory=dict)

    def rows_with(self, num_drafts: int) -> int:
        """The most rows of logits that a step has where each sequence has so many drafts."""
        wanted = self.max_num_seqs * (1 + num_drafts)
        return min(wanted, self.max_num_batched_tokens, self.max_logits_rows)

    def with_fewer_tokens(self) -> StepSizes | None:
        """The same with half the tokens; None where these were given, or are as few as a GPU's step has."""
        name, num_tokens = "max_num_batched_tokens", self.max_num_batched_tokens // 2
        if self.origins.get(name) == "given" or num_tokens < _GPU_TOKENS[0]:
            return None
        reason = f"derived: {self.max_num_batched_tokens} find no memory to be computed in"
        origins = {**self.origins, name: reason}
        return replace(self, max_num_batched_tokens=num_tokens, origins=origins)

    def with_fewer_seats(self) -> StepSizes | None:
        """The same with the next fewer seats; None where they were not derived, or there is one."""
        name = "max_num_seqs"
        fewer = [count for count in (*_FEW_SEATS, *_GPU_SEATS) if count < self.max_num_seqs]
        if not self.origins.get(name, "").startswith("derived") or not fewer:
            return None
        reason = "derived: the states of more find no memory"
        return replace(self, max_num_seqs=fewer[-1], origins={**self.origins, name: reason})


@dataclass(frozen=True, slots=True)
class MemoryBeside:
    """About what lies on a device beside a model's own, in bytes.

    `drafts` are the weights of all drafters, `embeddings` those of an embedding model and what it computes
    in. `kept` says of each drafter what it keeps beside a model with such room: K/V, and its recorded steps.
    """

    drafts: int = 0
    embeddings: int = 0
    kept: tuple[Callable[[TargetRoom], int], ...] = ()

    @property
    def total(self) -> int:
        """All but what depends on the model's room."""
        return self.drafts + self.embeddings

    def kept_bytes(self, room: TargetRoom) -> int:
        """What all drafters keep beside a model with such room."""
        return sum(each(room) for each in self.kept)


NOTHING_BESIDE: Final = MemoryBeside()


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes of a device's memory, in bytes, and what others take `beside` it."""

    weights: int
    kv_of_token: int  # in all layers
    state_of_seq: int  # of a recurrent model, with the rows of drafts; else 0
    work_of_token: int  # what a step computes it in, by the widths of the model
    logits_of_row: int  # as the model gives them and as numbers of 32 bits, twice, to draw from
    max_model_len: int
    beside: MemoryBeside = NOTHING_BESIDE
    given_of_row: int = 0  # logits as the model gives them
    most_drafts: int = 0  # of a sequence in a step, each with a row of these

    @classmethod
    def of(cls, settings: Settings, loaded: LoadedModel, beside: MemoryBeside = NOTHING_BESIDE) -> ModelNeeds:
        """Those of a model or its outline."""
        most_drafts = foreseen_draft_tokens(settings)
        num_kept = max(LEAST_KEPT_ROWS, most_drafts)
        width = loaded.dtype.itemsize
        return cls(
            weights=weight_bytes(loaded.model),
            kv_of_token=bytes_per_block(loaded.layers, 1, loaded.kv_dtype),
            state_of_seq=state_bytes(loaded.states, loaded.dtype, 1, num_kept),
            work_of_token=numbers_of_token(loaded.config) * width,
            logits_of_row=loaded.vocab_size * (width + 8),
            max_model_len=loaded.max_model_len,
            beside=beside,
            given_of_row=loaded.vocab_size * width,
            most_drafts=most_drafts,
        )

    def work(self, sizes: StepSizes) -> int:
        """About what the largest step takes beside weights, K/V and states, before it can be measured.

        Where many drafts are verified, the logits of all rows are there once the layers are through.
        """
        of_logits = sizes.rows_with(self.most_drafts) * self.given_of_row
        given = max(sizes.max_num_batched_tokens * self.work_of_token, of_logits)
        return given + sizes.max_num_seqs * self.logits_of_row


def step_sizes(settings: Settings, needs: ModelNeeds, gpu_bytes: int | None) -> StepSizes:
    """The sizes for a device with `gpu_bytes` of memory; None is a CPU.

    Raises StartRefused where a part of a step that was given is larger than what was derived.
    """
    sizes = _on_cpu(settings, needs) if gpu_bytes is None else _on_gpu(settings, needs, gpu_bytes)
    scheduler = settings.scheduler
    _refuse_above("--max-prefill-tokens", scheduler.max_prefill_tokens, sizes, "max_num_batched_tokens")
    _refuse_above("--max-decode-seqs", scheduler.max_decode_seqs, sizes, "max_num_seqs")
    return sizes


def _on_cpu(settings: Settings, needs: ModelNeeds) -> StepSizes:
    return _with_given(settings, needs, (CPU_SEATS, CPU_TOKENS, CPU_BLOCK_SIZE), {})


def _on_gpu(settings: Settings, needs: ModelNeeds, gpu_bytes: int) -> StepSizes:
    limit = gpu_bytes // _WORK_SHARE
    fitting = (count for count in reversed(_GPU_TOKENS) if count * needs.work_of_token <= limit)
    num_tokens = settings.scheduler.max_num_batched_tokens or next(fitting, _GPU_TOKENS[0])
    block_size = settings.cache.kv_block_size or _GPU_BLOCK
    length = min(_SENSIBLE_LEN, needs.max_model_len)
    room = _kv_bytes(settings, needs, gpu_bytes - num_tokens * needs.work_of_token, block_size)

    def count_held(seats: int) -> int:
        """How many sequences there is memory for, with so many seats."""
        kept = _kept_bytes(settings, needs, TargetRoom(seats, block_size, room - seats * needs.state_of_seq))
        return max(0, room - kept) // max(1, length * needs.kv_of_token + needs.state_of_seq)

    seats = next((count for count in reversed(_GPU_SEATS) if count <= count_held(count)), _GPU_SEATS[0])
    held = count_held(seats)
    whole = f"derived: {rough_size(gpu_bytes)} of GPU memory"
    reasons = {
        "max_num_seqs": f"{whole}, K/V for {held:,} sequences of {length:,} tokens",
        "max_num_batched_tokens": f"{whole}, {rough_size(num_tokens * needs.work_of_token)} to compute in",
        "kv_block_size": "derived: a GPU",
    }
    return _with_given(settings, needs, (seats, num_tokens, block_size), reasons)


def _kv_bytes(settings: Settings, needs: ModelNeeds, gpu_bytes: int, block_size: int) -> int:
    """About what K/V and states get of a GPU with `gpu_bytes` beside work space, drafters' among them.

    What is given is the model's alone.
    """
    cache = settings.cache
    if cache.num_kv_blocks is not None and needs.kv_of_token:
        return cache.num_kv_blocks * block_size * needs.kv_of_token
    if "kv_cache_memory" in cache.model_fields_set:
        return cache.kv_cache_memory
    return max(0, int(gpu_bytes * cache.gpu_memory_utilization) - needs.weights - needs.beside.total)


def is_kv_given(settings: Settings) -> bool:
    """Whether a setting says how much K/V there is, so that what drafters keep is not taken from it."""
    cache = settings.cache
    return cache.num_kv_blocks is not None or "kv_cache_memory" in cache.model_fields_set


def _kept_bytes(settings: Settings, needs: ModelNeeds, room: TargetRoom) -> int:
    """What drafters take of the memory for K/V."""
    return 0 if is_kv_given(settings) else needs.beside.kept_bytes(room)


def _with_given(
    settings: Settings, needs: ModelNeeds, derived: tuple[int, int, int], reasons: Mapping[str, str]
) -> StepSizes:
    """The sizes that are given, in place of the `derived` seats, tokens and block size."""
    given = {
        "max_num_seqs": settings.scheduler.max_num_seqs,
        "max_num_batched_tokens": settings.scheduler.max_num_batched_tokens,
        "kv_block_size": settings.cache.kv_block_size,
    }
    seats, num_tokens, block_size = (value or own for value, own in zip(given.values(), derived, strict=True))
    return StepSizes(
        max_num_seqs=seats,
        max_num_batched_tokens=num_tokens,
        kv_block_size=block_size,
        max_logits_rows=max(_LEAST_ROWS * seats, _LOGITS_BYTES // max(1, needs.given_of_row)),
        origins={
            name: reasons.get(name, "default") if value is None else "given" for name, value in given.items()
        },
    )


def _refuse_above(flag: str, value: int | None, sizes: StepSizes, name: str) -> None:
    limit = getattr(sizes, name)
    if value is not None and value > limit:
        word = name.replace("_", "-")
        raise StartRefused(f"{flag} {value}: at most --{word}, here {limit}. Lower it, or give both.")


def numbers_of_token(config: PreTrainedConfig) -> int:
    """About how many numbers of a token are there at once: rows of the hidden width, three of the MLP's."""
    hidden = _largest(config, "hidden_size")
    inner = _largest(config, "intermediate_size") or 4 * hidden
    experts = _largest(config, "moe_intermediate_size") * _largest(config, "num_experts_per_tok")
    return 8 * hidden + 3 * max(inner, experts)


def _largest(config: PreTrainedConfig, name: str) -> int:
    """A size of the layers, of which some models have a list with one for each; 0 if it is not there."""
    value = getattr(config, name, None) or 0
    return max(map(int, value)) if isinstance(value, (list, tuple)) else int(value)
