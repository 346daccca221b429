"""Small tokenizers of every kind the engine meets, trained or written out in the test process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from engine.text.grammar_compiler import GrammarCompiler
from engine.text.token_bytes import TokenBytes
from engine.text.tokenizer import Tokenizer

BOS, EOS, IM_START, IM_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [BOS, EOS, IM_START, IM_END]
CHATML = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role: ' + message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "hello world, this is a small test of a small tokenizer",
    "the world says hello; the tokenizer says nothing at all",
    "你好世界 привет мир naïve café ñandú",
    "🦀 🙂 👩‍👩‍👧 e\u0301 a\u0308",
]
SENTENCEPIECE_WORDS = [
    "▁",
    "▁▁",
    "▁hello",
    "▁world",
    "▁a",
    "a",
    "b",
    "c",
    "lo",
    "▁你",
    "好",
    "é",
    "e",
    "\u0301",
]


@cache
def byte_level() -> tokenizers.Tokenizer:
    """A GPT-2-style BPE over bytes, with special and with ordinary added tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, id_of(backend, BOS))]
    )
    return backend


def _unigram(decoder: Any) -> tokenizers.Tokenizer:
    """A SentencePiece-style Unigram with a token for each byte."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    pieces += [(word, -2.0 - index / 10) for index, word in enumerate(SENTENCEPIECE_WORDS)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens(SPECIAL_TOKENS)
    return backend


@cache
def llama_style() -> tokenizers.Tokenizer:
    """Byte fallback, and one leading space that belongs to the tokenizer and not to the text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend = _unigram(decoders.Sequence(steps))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


@cache
def gemma_style() -> tokenizers.Tokenizer:
    """Byte fallback without the leading space."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend = _unigram(decoders.Sequence(steps))
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


@cache
def metaspace() -> tokenizers.Tokenizer:
    """The Metaspace decoder of T5 and XGLM, which cannot decode bytes."""
    backend = _unigram(decoders.Metaspace())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


@cache
def word_level() -> tokenizers.Tokenizer:
    """Whole words and no decoder at all: tokens are joined with spaces."""
    words = {word: index for index, word in enumerate([*SPECIAL_TOKENS, "<unk>", "red", "green", "blue"])}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL_TOKENS)
    return backend


BACKENDS = {
    "byte_level": byte_level,
    "llama": llama_style,
    "gemma": gemma_style,
    "metaspace": metaspace,
    "word_level": word_level,
}


def id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    token_id = backend.token_to_id(token)
    assert token_id is not None, token
    return token_id


def save(backend: tokenizers.Tokenizer, directory: Path, chat_template: str | None = CHATML) -> Path:
    """Write the tokenizer files of a model into `directory` and return it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


@cache
def load(kind: str) -> Tokenizer:
    """The engine's tokenizer of one kind in `BACKENDS`; shared, since nothing writes to it."""
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer(save(BACKENDS[kind](), Path(directory)))


class ByteTokens:
    """A vocabulary of the 256 bytes, as a GrammarCompiler reads it."""

    special_tokens: Mapping[str, int] = MappingProxyType({})

    def table(self, skip_special_tokens: bool) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)]


def byte_compiler() -> GrammarCompiler:
    """Compiles for the 256 bytes."""
    return GrammarCompiler(cast(TokenBytes, ByteTokens()), 256, frozenset())
