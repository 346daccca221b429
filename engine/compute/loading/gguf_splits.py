"""How texts are split before a vocabulary merges them, by the rule that a GGUF file names.

Texts that are split otherwise than in a vocabulary's training become other tokens, numbers above all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, decoders
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Punctuation, Sequence, Split
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.errors import UnsupportedModel

# Learned with every digit on its own. Without the split "a  1" would merge its spaces differently, too.
_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
)
# Split as others are that transformers knows.
_LIKE: Mapping[str, str] = {
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), "qwen2"),
    **dict.fromkeys(("glm4", "chatglm-bpe"), "llama3"),
}
# One behind the other, each within the pieces of those before it.
_STEPS: Mapping[str, tuple[str, ...]] = {
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}"),
}
# As GPT-2's, which is how transformers splits where it knows nothing better. `default` says nothing.
_AS_GPT2 = frozenset(
    {
        *("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat"),
        *("roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
        *("a.x-4.0", "mellum", "modern-bert", "exaone4"),
    }
)


def split_by_rule(tokenizer: Any, rule: str) -> None:
    """Have a byte-level tokenizer of transformers' making split by `rule`.

    Raises UnsupportedModel for a rule that is not known: its texts would become other tokens.
    """
    as_gpt2 = ByteLevel(add_prefix_space=False)
    if rule in _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), as_gpt2])
    elif rule == "falcon":
        threes = Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
        tokenizer.pre_tokenizer = Sequence([Punctuation("contiguous"), as_gpt2, Digits(), threes])
    elif rule in _LIKE or rule in _STEPS:
        steps = _STEPS.get(rule) or (GGUF_PRE_TOKENIZER_SPLITS[_LIKE[rule]],)
        splits = [Split(Regex(step), behavior="isolated") for step in steps]
        tokenizer.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    elif rule not in _AS_GPT2 and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        raise UnsupportedModel(f"The GGUF file's texts are split by the rule {rule!r}, which is not known.")


def begin_without_space(tokenizer: Any) -> None:
    """Have a sentencepiece tokenizer put no space before a text, and take none away where it decodes one.

    Those of Gemma's and Phi-3's files have a way of their own.
    """
    if isinstance(tokenizer.pre_tokenizer, Metaspace):
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps)
