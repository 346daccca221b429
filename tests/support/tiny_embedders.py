"""Tiny embedding models of random weights, saved as sentence-transformers lays them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    "river",
    "long",
    "short",
    "nile",
    "is",
    "the",
    "wet",
    "a",
    "of",
    "stone",
    "##s",
    "##er",
    "query",
    ":",
)
MAX_TOKENS = 64
_WIDTH = 32
_VOCAB = len(SPECIAL) + len(WORDS) + 26

MEAN = {"pooling_mode_mean_tokens": True}
_SIZES: Mapping[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": _WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
_DECODER: Mapping[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_WINDOWED = ["sliding_attention", "full_attention"]


def make_model(kind: str, num_labels: int = 1) -> Any:
    """A model of random weights that differ enough for every mistake to show."""
    torch.manual_seed(7)
    made = _MAKERS[kind](num_labels)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return made.eval()


def _bert(**more: Any) -> BertConfig:
    return BertConfig(**_SIZES, max_position_embeddings=128, **more)


def _roberta(**more: Any) -> XLMRobertaConfig:
    return XLMRobertaConfig(
        **{**_SIZES, "pad_token_id": 1}, max_position_embeddings=130, type_vocab_size=1, **more
    )


_MAKERS: Mapping[str, Any] = {
    "bert": lambda _: BertModel(_bert()),
    "bert-pairs": lambda n: BertForSequenceClassification(_bert(num_labels=n)),
    "xlm-roberta": lambda _: XLMRobertaModel(_roberta()),
    "xlm-roberta-pairs": lambda n: XLMRobertaForSequenceClassification(_roberta(num_labels=n)),
    "nomic": lambda _: NomicBertModel(NomicBertConfig(**_SIZES, head_dim=8, max_position_embeddings=128)),
    "modernbert": lambda _: ModernBertModel(
        ModernBertConfig(
            **_SIZES, max_position_embeddings=128, local_attention=16, global_attn_every_n_layers=2
        )
    ),
    "qwen3": lambda _: Qwen3Model(Qwen3Config(**_DECODER)),
    # A decoder's classifier reads the last token that is not padding, whose id is not zero for most.
    "qwen3-pairs": lambda n: Qwen3ForSequenceClassification(
        Qwen3Config(**{**_DECODER, "pad_token_id": 4}, num_labels=n)
    ),
    "qwen3-unpadded-pairs": lambda n: Qwen3ForSequenceClassification(
        Qwen3Config(**{**_DECODER, "pad_token_id": None}, num_labels=n)
    ),
    "gemma3": lambda _: Gemma3TextModel(
        Gemma3TextConfig(
            **_DECODER, use_bidirectional_attention=True, sliding_window=16, layer_types=_WINDOWED
        )
    ),
    "mpnet": lambda _: MPNetModel(MPNetConfig(**{**_SIZES, "pad_token_id": 1}, max_position_embeddings=130)),
}
KINDS = tuple(kind for kind in _MAKERS if not kind.endswith("pairs"))
PAIR_KINDS = tuple(kind for kind in _MAKERS if kind.endswith("pairs"))


def make_tokenizer(kind: str = "bert") -> PreTrainedTokenizerFast:
    """BERT's kind: words and letters, [CLS] before, [SEP] behind, types for pairs where `kind` has them."""
    types = ["token_type_ids"] if kind.startswith("bert") else []
    letters = [chr(ord("a") + i) for i in range(26) if chr(ord("a") + i) not in WORDS]
    letters += [f"##{chr(ord('a') + i)}" for i in range(26 - len(letters))]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *WORDS, *letters))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", *types, "attention_mask"],
        model_max_length=MAX_TOKENS,
    )


def save_embedder(
    directory: Path,
    kind: str = "bert",
    *,
    pooling: Mapping[str, object] = MEAN,
    heads: Sequence[str] = ("Normalize",),
    prompts: Mapping[str, object] | None = None,
) -> Path:
    """A whole model in `directory`, which is given back; `heads` are modules behind the pooling."""
    directory.mkdir(parents=True, exist_ok=True)
    make_model(kind).save_pretrained(directory)
    make_tokenizer(kind).save_pretrained(directory)
    _write(directory / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    _write(directory / "config_sentence_transformers.json", dict(prompts or {}))
    names = ["Transformer", "Pooling", *heads]
    paths = [f"{i}_{name}" if i else "" for i, name in enumerate(names)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    _write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": _WIDTH, **pooling})
    for name, path in zip(names[2:], paths[2:], strict=True):
        if name == "Dense":
            _save_dense(directory / path)
    return directory


def save_cross_encoder(directory: Path, kind: str = "xlm-roberta-pairs", *, num_labels: int = 1) -> Path:
    """A model that scores pairs of texts, in `directory`, which is given back."""
    make_model(kind, num_labels).save_pretrained(directory)
    make_tokenizer(kind).save_pretrained(directory)
    return directory


def _save_dense(directory: Path) -> None:
    from safetensors.torch import save_file

    directory.mkdir()
    config = {"in_features": _WIDTH, "out_features": 16, "bias": True}
    _write(directory / "config.json", {**config, "activation_function": "torch.nn.modules.activation.Tanh"})
    torch.manual_seed(3)
    weights = {"linear.weight": torch.randn(16, _WIDTH) / 4, "linear.bias": torch.randn(16)}
    save_file(weights, directory / "model.safetensors")


def _write(path: Path, value: Mapping[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dict(value)))
