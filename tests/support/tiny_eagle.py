"""EAGLE-3 drafters for tiny models, random or trained for a moment, and a plain pass to compare with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from engine.compute.drafters.eagle_layer import ARCHITECTURE, CONFIG_FILE, WEIGHTS_FILE
from engine.compute.drafters.medusa_heads import TargetShape, sample_weights
from engine.compute.loading.loader import LoadedModel

WINDOW = 16
HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 32, 96
EPS = 1e-5
THETA = 10_000.0


class TinyEagle:
    """Tensors by their names in the original layout; `token_ids` are the tokens it knows, None for all.

    With `hidden` other than the target's it has an embedding and a head of its own.
    """

    def __init__(
        self,
        target: LoadedModel,
        *,
        hidden: int | None = None,
        token_ids: torch.Tensor | None = None,
        layers: tuple[int, int, int] = (0, 1, 1),
        seed: int = 0,
    ) -> None:
        self.target, self.layers = target, layers
        self.hidden = hidden or int(target.config.hidden_size)
        self.token_ids = torch.arange(target.vocab_size) if token_ids is None else token_ids
        draw = torch.Generator().manual_seed(seed)

        def made(*shape: int, scale: float = 1.0) -> torch.Tensor:
            made: torch.Tensor = torch.randn(shape, generator=draw) * (scale / shape[-1] ** 0.5)
            return made

        size = self.hidden
        self.tensors = {
            "fc.weight": made(size, 3 * target.config.hidden_size, scale=0.3),
            "midlayer.self_attn.q_proj.weight": made(HEADS * DIM, 2 * size, scale=3),
            "midlayer.self_attn.k_proj.weight": made(KV_HEADS * DIM, 2 * size, scale=3),
            "midlayer.self_attn.v_proj.weight": made(KV_HEADS * DIM, 2 * size),
            "midlayer.self_attn.o_proj.weight": made(size, HEADS * DIM),
            "midlayer.mlp.gate_proj.weight": made(WIDTH, size),
            "midlayer.mlp.up_proj.weight": made(WIDTH, size),
            "midlayer.mlp.down_proj.weight": made(size, WIDTH, scale=2),
            **{
                f"{name}.weight": 1 + 0.3 * torch.randn(size, generator=draw)
                for name in (
                    *(f"midlayer.{part}" for part in ("hidden_norm", "input_layernorm")),
                    *("midlayer.post_attention_layernorm", "norm"),
                )
            },
        }
        if token_ids is not None or hidden is not None:
            self.tensors["lm_head.weight"] = made(len(self.token_ids), size, scale=6)
        if hidden is not None:
            self.tensors["embed_tokens.weight"] = made(target.vocab_size, size, scale=5)

    def save(self, directory: Path, layout: str = "ours") -> Path:
        """As a directory in the `original` layout, in that of `speculators`, or `ours`."""
        directory.mkdir(parents=True)
        layer: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": WIDTH,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "sliding_window": WINDOW,
        }
        config = {
            **layer,
            "architectures": [ARCHITECTURE],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers)},
        }
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        if len(self.token_ids) < self.target.vocab_size:
            tensors["d2t"] = self.token_ids - torch.arange(len(self.token_ids))
        if layout == "speculators":
            tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
            config = {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": layer,
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
            }
        if layout == "ours":
            tensors["base_sample"] = sample_weights(self.target)
            target = asdict(TargetShape.of(self.target))
            config["slipstream"] = {"target": target, "feature_layers": self.layers, "window": WINDOW}
        (directory / CONFIG_FILE).write_text(json.dumps(config))
        save_file(tensors, directory / WEIGHTS_FILE)
        return directory

    def forward(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The layer's output [n, hidden] at positions 0 to n - 1 from what goes in there, all at once."""
        tensors, count = self.tensors, len(hidden)
        own = tensors.get("embed_tokens.weight")
        embedded = self.target.model.get_input_embeddings()(token_ids) if own is None else own[token_ids]
        both = torch.cat(
            [self._norm(embedded, "midlayer.input_layernorm"), self._norm(hidden, "midlayer.hidden_norm")], -1
        )
        query, key, value = (
            (both @ tensors[f"midlayer.self_attn.{name}_proj.weight"].T).view(count, -1, DIM).transpose(0, 1)
            for name in "qkv"
        )
        places = torch.arange(count)
        angles = places[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        query, key = _turned(query, angles), _turned(key, angles)
        seen = (places <= places[:, None]) & (places > places[:, None] - WINDOW)
        group = HEADS // KV_HEADS
        key, value = (part.repeat_interleave(group, dim=0) for part in (key, value))
        scores = (query @ key.transpose(1, 2) / DIM**0.5).masked_fill(~seen, -torch.inf)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
        hidden = hidden + attended @ tensors["midlayer.self_attn.o_proj.weight"].T
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (normed @ tensors[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + (F.silu(gate) * up) @ tensors["midlayer.mlp.down_proj.weight"].T

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Over `token_ids`."""
        head = self.tensors.get("lm_head.weight")
        if head is None:
            head = self.target.model.get_output_embeddings().weight[self.token_ids]
        return self._norm(out, "norm") @ head.T

    @torch.inference_mode()
    def chain(self, features: torch.Tensor, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """The likeliest drafts behind `token_ids`, from the `features` of all but the last, each anew."""
        hidden = features @ self.tensors["fc.weight"].T
        known = list(token_ids)
        for _ in range(num_drafts):
            out = self.forward(hidden, torch.tensor(known[1:]))
            known.append(int(self.token_ids[self.logits(out[-1]).argmax()]))
            hidden = torch.cat([hidden, out[-1:]])
        return known[len(token_ids) :]

    def fit(self, samples: Sequence[tuple[torch.Tensor, torch.Tensor]], num_epochs: int) -> None:
        """Learn from features [n, 3 * hidden] and tokens [n + 2], two drafts deep."""
        weights = [tensor.requires_grad_() for tensor in self.tensors.values()]
        adam = torch.optim.Adam(weights, lr=2e-3)
        place = torch.full((self.target.vocab_size,), -100)
        place[self.token_ids] = torch.arange(len(self.token_ids))
        for _ in range(num_epochs):
            for features, tokens in samples:
                first = self.forward(features @ self.tensors["fc.weight"].T, tokens[1:-1])
                second = self.forward(first[:-1], tokens[2:-1])
                loss = F.cross_entropy(self.logits(first), place[tokens[2:]])
                loss = loss + F.cross_entropy(self.logits(second), place[tokens[3:]])
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (self.hidden,), self.tensors[f"{name}.weight"], EPS)


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
