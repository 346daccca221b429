"""MtpLayout: where models keep a module that predicts one token more, beside the layers that are served.

Such a module (multi-token prediction: DeepSeek-V3, 2024) is one more decoder layer of the model's own kind.
At position i it takes the target's hidden state there and the embedding of the token at i + 1, each normed,
through one projection, and guesses the token at i + 2 with the model's own head. transformers leaves its
weights in the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from engine.compute.loading.model_files import gguf_of, tensor_names


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """How a family names the parts of its first module, all behind `prefix`, and what it goes on from.

    In `prefix` {n} is the number of the target's layers. `layer` is what the decoder layer's tensors begin
    with, behind the prefix. `embedding` and `head` are names of copies that it may have of the target's. With
    `hidden_first` the projection takes the hidden state before the embedding. The hidden state is the one
    behind the target's last norm, or, unless `reads_normed`, the one before it.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    layer: str = ""
    embedding: str = "embed_tokens"
    head: str = "shared_head.head"
    hidden_first: bool = False
    reads_normed: bool = True

    def begins(self, num_layers: int) -> str:
        """What the module's tensors begin with in a target of so many layers."""
        return self.prefix.format(n=num_layers)


_BEHIND_THE_LAYERS = MtpLayout("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = MtpLayout(
    "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0.", head="lm_head"
)
_MIMO = MtpLayout(
    "model.mtp_layers.0.",
    *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    hidden_first=True,
    reads_normed=False,
)
# By what the models are computed as, which for MiMo is Qwen2; learnt from the families' own code.
LAYOUTS: dict[str, MtpLayout] = {
    "deepseek_v3": _BEHIND_THE_LAYERS,
    "glm4_moe": _BEHIND_THE_LAYERS,
    "glm4_moe_lite": _BEHIND_THE_LAYERS,
    "qwen2": _MIMO,
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_next": _QWEN,
}


def layout_of(config: PreTrainedConfig, names: Iterable[str]) -> MtpLayout | None:
    """The layout of the module among tensors of these names; None without one that can be used."""
    layout = LAYOUTS.get(str(config.model_type))
    if layout is None:
        return None
    projection = f"{layout.begins(int(config.num_hidden_layers))}{layout.projection}.weight"
    return layout if any(name == projection for name in names) else None


def find_mtp(directory: Path, config: PreTrainedConfig) -> MtpLayout | None:
    """The layout of the module in the model's own files; None where there is none. Raises StartRefused."""
    if str(config.model_type) not in LAYOUTS or gguf_of(directory) is not None:
        return None
    return layout_of(config, tensor_names(directory))
