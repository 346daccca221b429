"""Encoder: the transformer of an embedding model or cross-encoder, run without padding where it can be.

A pass is made of pieces of about ten milliseconds, after each of which it gives way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.compute.embedding.attention import ATTENTION_NAME, BATCH_KEYWORD, UNIT_FLOP
from engine.compute.embedding.packed_product import Product, product_of
from engine.compute.embedding.records import EncodedText
from engine.compute.embedding.texts import GiveWay, TextBatch

log = logging.getLogger("slipstream.model")

_PADDED_TOKENS = 2048  # of one call of a model that needs padding
_ALIKE = {torch.float32: 0.99999, torch.bfloat16: 0.999, torch.float16: 0.9999}  # the least cosine
_SAMPLE_LENGTHS = (5, 17, 17, 6)


def never_give_way() -> None:
    """For a pass that nothing waits for."""


class Encoder:
    """Hidden states or scores of texts. Not to be used by two threads at once.

    `pads` is set once the model has been seen to answer otherwise for a row of several texts: it is then
    given texts of about one length side by side, as its own classes expect.
    """

    def __init__(self, model: Any, *, is_classifier: bool) -> None:
        self._model = model
        self._head = _HEADS.get(type(model).__name__) if is_classifier else None
        self._is_classifier = is_classifier
        self._takes_types = _takes_types(model)
        self._first_position = _first_position(model)
        self._padding = _padding(model)
        self._give_way: GiveWay = never_give_way
        self._has_interface = model.config._attn_implementation == ATTENTION_NAME
        self.pads = not self._has_interface or (is_classifier and self._head is None)
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = partial(self._linear, module, product_of(module))  # type: ignore[method-assign]

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self._model.device
        return device

    def batch(self, texts: Sequence[EncodedText], give_way: GiveWay = never_give_way) -> TextBatch:
        """The texts as a row, for `run`."""
        return TextBatch.of(texts, self.device, give_way)

    @torch.inference_mode()
    def run(self, batch: TextBatch) -> Tensor:
        """Hidden states [num_tokens, width], or a classifier's logits [num_texts, labels]; float32."""
        self._give_way = batch.give_way
        try:
            return (self._run_padded(batch) if self.pads else self._run_row(batch)).float()
        finally:
            self._give_way = never_give_way

    def _run_row(self, batch: TextBatch) -> Tensor:
        base = self._model.base_model if self._is_classifier else self._model
        types = {}
        if self._takes_types and batch.type_ids is not None:
            types = {"token_type_ids": batch.type_ids[None]}
        found = base(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None] + self._first_position,
            **types,
            **{BATCH_KEYWORD: batch},
        )
        hidden: Tensor = found.last_hidden_state[0]
        return hidden if self._head is None else self._head(self._model, hidden, batch)

    def _run_padded(self, batch: TextBatch) -> Tensor:
        """The same through the model's own masks, texts of about one length at a time."""
        lengths = batch.lengths.tolist()
        token_ids = torch.split(batch.token_ids, lengths)
        types = None if batch.type_ids is None else torch.split(batch.type_ids, lengths)
        rows = []
        self._attend_by("sdpa")
        try:
            for part in _parts(lengths, alone=self._is_classifier and self._padding is None):
                given = {"input_ids": _pad(token_ids[part], self._padding or 0)}
                places = torch.arange(given["input_ids"].shape[1], device=self.device)
                given["attention_mask"] = (places[None] < batch.lengths[part][:, None]).long()
                if self._takes_types and types is not None:
                    given["token_type_ids"] = _pad(types[part])
                found = self._model(**given)
                if self._is_classifier:
                    rows.append(found.logits)
                else:
                    rows += [row[:length] for row, length in zip(found[0], lengths[part], strict=True)]
        finally:
            self._attend_by(ATTENTION_NAME)
        return torch.cat(rows)

    def _attend_by(self, name: str) -> None:
        """Change what the model attends with, where it lets others do that."""
        if self._has_interface:
            self._model.set_attn_implementation(name)

    def _linear(self, module: nn.Linear, product: Product, x: Tensor) -> Tensor:
        """What the module computes, in pieces that take no longer than a turn should."""
        rows = x.reshape(-1, module.in_features)
        step = max(16, int(UNIT_FLOP / (2 * module.in_features * module.out_features)))
        shape = (*x.shape[:-1], module.out_features)
        if len(rows) <= step:
            y = product(rows)
            self._give_way()
            return y.view(shape)
        y = x.new_empty(len(rows), module.out_features)
        for first in range(0, len(rows), step):
            y[first : first + step] = product(rows[first : first + step])
            self._give_way()
        return y.view(shape)

    def check(self, vocab_size: int, max_tokens: int) -> None:
        """Compare a row of several texts with the model's own answer, and pad from then on if unlike."""
        if self.pads:
            return
        window = getattr(self._model.config, "sliding_window", None)
        longer = (int(window) + 9,) if isinstance(window, int) and window < max_tokens - 9 else ()
        texts = list(_samples(vocab_size, [min(n, max_tokens) for n in (*_SAMPLE_LENGTHS, *longer)]))
        batch = self.batch(texts)
        self.pads = True
        own = self.run(batch)
        self.pads = False
        try:
            found = self.run(batch)
            least = torch.nn.functional.cosine_similarity(found, own, dim=-1).min().item()
            if self._is_classifier:  # a cosine of single numbers tells nothing
                least = 1 - float((found - own).abs().max() / own.abs().max().clamp(min=1e-3))
        except Exception as error:  # a model's classes raise what they like for what they do not foresee
            log.info("%s is given padded texts: %s", type(self._model).__name__, error)
            self.pads = True
            return
        if not least >= _ALIKE[self._model.dtype]:
            log.info("%s is given padded texts: it mixes those of a row", type(self._model).__name__)
            self.pads = True


def _samples(vocab_size: int, lengths: Sequence[int]) -> Iterator[EncodedText]:
    """Texts of made-up tokens, the same ones each time."""
    made = torch.Generator().manual_seed(1)
    for length in lengths:
        ids = torch.randint(vocab_size // 2, vocab_size, (length,), generator=made)
        yield EncodedText(ids.tolist())


def _parts(lengths: Sequence[int], *, alone: bool) -> Iterator[slice]:
    """Texts that are padded to the longest of them, in slices of at most _PADDED_TOKENS or one text.

    With `alone` each text is a slice of its own.
    """
    first = 0
    for last in range(1, len(lengths) + 1):
        if alone or last == len(lengths) or lengths[last] * (last + 1 - first) > _PADDED_TOKENS:
            yield slice(first, last)
            first = last


def _pad(rows: Sequence[Tensor], value: int = 0) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def _padding(model: Any) -> int | None:
    """The id that a decoder's classifier finds the end of a text by; None where it knows none."""
    config = model.config.get_text_config()
    found = getattr(config, "pad_token_id", None)
    return found if isinstance(found, int) and 0 <= found < config.vocab_size else None


def _takes_types(model: Any) -> bool:
    return int(getattr(model.config, "type_vocab_size", 0) or 0) > 1


def _first_position(model: Any) -> int:
    """RoBERTa's kin count positions from behind the padding token's id."""
    embeddings: Any = getattr(model.base_model, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1
    return 0


def _bert_scores(model: Any, hidden: Tensor, batch: TextBatch) -> Tensor:
    scores: Tensor = model.classifier(model.base_model.pooler(hidden[batch.starts][:, None]))
    return scores


def _roberta_scores(model: Any, hidden: Tensor, batch: TextBatch) -> Tensor:
    scores: Tensor = model.classifier(hidden[batch.starts][:, None])
    return scores


# How a classifier of this class scores a text by the hidden states of a row; others are given padded texts.
_HEADS: Mapping[str, Callable[[Any, Tensor, TextBatch], Tensor]] = {
    "BertForSequenceClassification": _bert_scores,
    "CamembertForSequenceClassification": _roberta_scores,
    "RobertaForSequenceClassification": _roberta_scores,
    "XLMRobertaForSequenceClassification": _roberta_scores,
}
