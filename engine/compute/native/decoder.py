"""NativeDecoder: all layers of a model between its embedding and its head in one call of a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext, PagedRows
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.native.families import is_whole
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.layer_form import LayerForm, heads_record
from engine.compute.native.modules import NativeLinear, NativeNorm
from engine.compute.native.places import is_unhooked
from engine.compute.native.records import INDEX, POINTER, Decoder, DecoderLayer, DecoderStep
from engine.compute.native.rotation_table import RotationTable, kind_of_layer, rotation_tables
from engine.compute.native.scratch import kept_numbers
from engine.compute.runner.layer_taps import tap

_SIZES = (1.0, 100.0)  # of what is given to a head to see what comes behind it


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a model's head reads of its base model's output; transformers' own is slow to make."""

    last_hidden_state: torch.Tensor  # [1, N, hidden]
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    router_logits: None = None
    shared_kv_states: None = None


class NativeDecoder(nn.Module):
    """Stands in for a base model whose layers consist of our modules, and gives the same bits.

    `plain` is that model: it runs the steps whose attention is not all the kernel's, and keeps the weights.
    `kv` is what each of its layers attends to. `tapped_layers` and `tapped` are as in Tappable.
    """

    def __init__(self, kernels: NativeKernels, plain: Any, kv: Sequence[LayerKv]) -> None:
        super().__init__()
        self.plain = plain
        self.tapped_layers: tuple[int, ...] = ()
        self.tapped: torch.Tensor | None = None
        self.embed_tokens = plain.embed_tokens  # where transformers looks for it
        self._multiplier: float = getattr(plain, "embedding_multiplier", 1.0)
        self._kernels = kernels
        tables = rotation_tables(plain.rotary_emb, plain.norm.weight)
        self._angles = DecoderAngles(list(tables.values()))
        self._layers = (DecoderLayer * len(plain.layers))(
            *(self._record(index, layer_kv.num_kv_heads, tables) for index, layer_kv in enumerate(kv))
        )
        self._hidden = plain.norm.weight.numel()
        self._decoder = Decoder(self._layers, plain.norm.weights.record, len(plain.layers), self._hidden)
        if self._reads_embedding():
            self._decoder.embedding = self.embed_tokens.weight.data_ptr()
            self._decoder.num_tokens = self.embed_tokens.num_embeddings
            self._decoder.multiplier = self._multiplier
        self._led_to: tuple[NativeLinear, ...] = ()  # its head, which is no part of it
        self._most_heads = max(layer.form.heads for layer in self._layers)
        self._largest = max(range(len(self._layers)), key=lambda index: self._layers[index].form.dim)
        self._scratch = torch.empty(0, dtype=plain.norm.weight.dtype)
        self._pages: tuple[Any, Any, Any] = None, None, None  # the last step's KvTensors, and where they lie

    def _reads_embedding(self) -> bool:
        """Whether the kernel can look up tokens: in a plain table, where layers get nothing else of them."""
        table: Any = self.embed_tokens
        is_plain = type(table) is nn.Embedding and table.max_norm is None and is_unhooked(table)
        brings_more = getattr(self.plain, "hidden_size_per_layer_input", 0)
        return is_plain and not brings_more and table.weight.dtype is self._kernels.dtype

    def lead_to(self, head: nn.Module) -> None:
        """Compute `logits` as well: the model does nothing behind this but call `head` on the rows wanted."""
        if isinstance(head, NativeLinear):
            self._led_to, self._decoder.head = (head,), head.weights.record

    @staticmethod
    def fits(base: Any) -> bool:
        """True for a base model whose every layer can be computed so."""
        if not (is_whole(base, "Model") and is_unhooked(base) and _norm_is_ours(base)):
            return False
        layers = base.layers
        if len(layers) != base.config.num_hidden_layers:
            return False
        if not all(is_unhooked(part) for layer in layers for part in layer.modules()):
            return False
        if not all(LayerForm.of(layer) for layer in layers):
            return False
        return [layer.self_attn.call.layer for layer in layers] == list(range(len(layers)))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        """As `plain`'s, for one packed row [1, N] and the keyword `slipstream_context`."""
        context: AttentionContext = options[CONTEXT_KEYWORD]
        if context.native_rows is None:
            return self._compute_plainly(input_ids=input_ids, position_ids=position_ids, **options)
        token_ids = input_ids[0].contiguous()
        embedded, layer_inputs = self._embed(token_ids)
        hidden = self._scratch.new_empty(1, len(token_ids), self._hidden) if embedded is None else embedded
        step = DecoderStep(hidden.data_ptr(), token_ids.data_ptr(), layer_inputs=_address(layer_inputs))
        self._decode(step, position_ids[0].contiguous(), context, context.native_rows)
        return DecoderOutput(hidden)

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Those of `rows` [R], in order (None: of all), [R, vocab], in one call; all int64.

        None where the head has to be called by itself: for steps whose attention is not all the kernel's, and
        where this or the head is watched.
        """
        native_rows = context.native_rows
        if native_rows is None or not self._led_to or not all(map(is_unhooked, (self, *self._led_to))):
            return None
        num_rows = len(token_ids) if rows is None else len(rows)
        logits = self._scratch.new_empty(num_rows, self._led_to[0].out_features)
        embedded, layer_inputs = self._embed(token_ids)
        step = DecoderStep(_address(embedded), token_ids.data_ptr(), layer_inputs=_address(layer_inputs))
        step.rows, step.num_rows, step.logits = _address(rows), num_rows, logits.data_ptr()
        self._decode(step, positions, context, native_rows)
        return logits

    def _embed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The tokens embedded, [1, N, hidden]; None where the kernel does it.

        And what Gemma 4 brings for each layer alone, [1, N, layers, width]; None for all else.
        """
        if self._decoder.embedding:
            return None, None
        input_ids = token_ids[None]
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        hidden = hidden if self._multiplier == 1 else hidden * self._multiplier
        if not getattr(self.plain, "hidden_size_per_layer_input", 0):
            return hidden, None
        of_tokens = self.plain.get_per_layer_inputs(input_ids)
        return hidden, self.plain.project_per_layer_inputs(hidden, of_tokens).contiguous()

    def _record(self, index: int, kv_heads: int, tables: Mapping[str | None, RotationTable]) -> DecoderLayer:
        layer, kind = self.plain.layers[index], kind_of_layer(self.plain, index, tables)
        form = LayerForm.of(layer)
        assert form is not None, "only what fits is asked for"
        heads = heads_record(layer, tables[kind].width)
        return form.record(layer, heads, kv_heads, list(tables).index(kind))

    def _compute_plainly(self, **options: Any) -> Any:
        if not self.tapped_layers:
            return self.plain(**options)
        output, self.tapped = tap(self.plain, self.tapped_layers, lambda: self.plain(**options))
        return output

    def _decode(
        self, step: DecoderStep, positions: torch.Tensor, context: AttentionContext, rows: PagedRows
    ) -> None:
        """Carry out a step whose own tensors are filled in; one that brings no `hidden` gets room for it."""
        n, kv = len(positions), context.kv
        if self._pages[0] is not kv:
            self._pages = kv, _addresses(kv.keys), _addresses(kv.values)
        scratch = self._scratch_for(n)
        step.scratch = scratch.data_ptr()
        if step.hidden is None:
            step.hidden = scratch.data_ptr() + (scratch.numel() - n * self._hidden) * scratch.itemsize
        step.cos, step.sin, step.places = self._angles.at(positions, context.longest)
        _, step.keys, step.values = self._pages
        attention = self._kernels.attention_record(rows, kv.keys[self._largest], self._most_heads)
        step.slots, step.attention, step.n = context.slots.data_ptr(), ctypes.pointer(attention), n
        if self.tapped_layers:
            taps = (INDEX * len(self.tapped_layers))(*self.tapped_layers)
            self.tapped = self._scratch.new_empty(n, len(taps) * self._hidden)
            step.taps, step.tapped = ctypes.addressof(taps), self.tapped.data_ptr()
            step.num_taps = len(taps)
        self._kernels.decode(self._decoder, step)

    def _scratch_for(self, num_tokens: int) -> torch.Tensor:
        """Memory for so many tokens; kept, since touching fresh pages costs more than a small step."""
        needed = num_tokens * (self._kernels.decoder_scratch(self._decoder) + self._hidden)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(kept_numbers(needed), dtype=self._scratch.dtype)
        return self._scratch


class DecoderAngles:
    """Where the cosines and sines of a step's tokens lie, by the tables of its layers."""

    def __init__(self, tables: Sequence[RotationTable]) -> None:
        self._tables = tables
        self._are_static = all(table.is_static for table in tables)
        self._whole: tuple[Any, Any] = None, None  # addresses of the tables
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []  # kept while the step reads them

    def at(self, positions: torch.Tensor, longest: int) -> tuple[Any, Any, int | None]:
        """Addresses of each table's cosines and sines, and of the rows for int64 `positions` [N] there.

        No position reaches `longest`. No rows where the tables have a row for each token.
        """
        if not self._are_static:
            self._given = [table.rows(positions) for table in self._tables]
            return (*_pairs(self._given), None)
        if any([table.reach(longest) for table in self._tables]):
            self._whole = _pairs([table.whole for table in self._tables])
        return (*self._whole, positions.data_ptr())


def _pairs(angles: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, Any]:
    return _addresses([cos for cos, _ in angles]), _addresses([sin for _, sin in angles])


@torch.inference_mode()
def gives_head_alone(model: Any) -> bool:
    """Whether a model only calls its base model, and its head on the rows that are wanted of what that gives.

    Found out by asking it, with a base model that gives known numbers, small ones and such as would show a
    limit or a factor behind the head.
    """
    head, name, base = model.get_output_embeddings(), model.base_model_prefix, model.base_model
    if head is None or base is model or not is_unhooked(model):
        return False
    numbers = torch.Generator().manual_seed(0)
    token_ids, positions = torch.tensor([[3, 1, 2]]), torch.tensor([[7, 5, 9]])
    known = _KnownOutput()
    model.set_submodule(name, known)
    try:
        for size in _SIZES:
            given = size * torch.randn(1, 3, head.in_features, generator=numbers)
            known.hidden = given.to(head.weight.dtype)
            rows = torch.tensor([2, 0])
            found = model(token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows).logits
            is_told = known.told[0] is token_ids and known.told[1] is positions
            if not (is_told and torch.equal(found, head(known.hidden[:, rows]))):
                return False
    except (AttributeError, TypeError, RuntimeError):  # it takes no rows, or wants more of its base model
        return False
    finally:
        model.set_submodule(name, base)
    return True


class _KnownOutput(nn.Module):
    """Stands in for a base model, gives `hidden`, and notes the tokens and positions that it was `told`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)
        self.told: tuple[Any, Any] = None, None

    def forward(self, input_ids: Any = None, position_ids: Any = None, **_: Any) -> DecoderOutput:
        self.told = input_ids, position_ids
        return DecoderOutput(self.hidden)


def _norm_is_ours(base: Any) -> bool:
    return type(getattr(base, "norm", None)) is NativeNorm


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
