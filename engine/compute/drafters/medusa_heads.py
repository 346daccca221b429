"""MedusaHeads: extra heads on a target's last hidden state, and the directory they are kept in.

Head k guesses the token k + 1 places after the one that the target draws from the same hidden state (Cai et
al., "Medusa", 2024). The directory holds two files and nothing that can run:

config.json         model_type "slipstream-medusa", num_heads, num_token_ids, tied_lm_head, the target's
                    hidden_size, vocab_size, num_hidden_layers and model_type, and the tree of drafts
model.safetensors   heads.{k}.linear.weight [hidden, hidden] and .bias [hidden]; token_ids [num_token_ids],
                    the only tokens that heads ever guess; base_sample, some of the target's own weights, to
                    know it by; and, unless tied_lm_head, heads.{k}.lm_head.weight [num_token_ids, hidden]

Heads that others publish are in another layout, which medusa_published reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from engine.compute.drafters.draft_tree import DraftTree
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.model_files import bad_weights, read_json
from engine.errors import StartRefused

MODEL_TYPE = "slipstream-medusa"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

MAX_HEADS = 32  # as many tokens as a step verifies of one request

_SAMPLE_ROWS = 16  # of the output embedding, each in full, to know a target by
# Half precision rounds by 0.4 % at most; another checkpoint of the same family differs by far more.
_SAMPLE_RTOL, _SAMPLE_ATOL = 0.01, 1e-4


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What of a target must agree with what its heads were trained for."""

    model_type: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int

    @classmethod
    def of(cls, loaded: LoadedModel) -> TargetShape:
        """The target's."""
        config = loaded.config
        return cls(
            str(config.model_type), int(config.hidden_size), loaded.vocab_size, int(config.num_hidden_layers)
        )


class MedusaHead(nn.Module):
    """Residual blocks, mostly one; `lm_head` is its own projection, None to use the target's.

    A fresh one passes the hidden state through, so that it guesses what the target drew last.
    """

    def __init__(self, hidden_size: int, num_blocks: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        self.further = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_blocks - 1))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.lm_head: nn.Linear | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state it would have the target project, of the same shape."""
        for linear in (self.linear, *self.further):
            hidden = hidden + nn.functional.silu(linear(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """Heads for one target; `token_ids` [n] are the tokens they guess, `tree` how their guesses are combined.

    The target's part is frozen and not saved: `projection` is its output embedding cut down to `token_ids`.
    """

    def __init__(
        self,
        target: LoadedModel,
        num_heads: int,
        token_ids: torch.Tensor,
        tree: DraftTree,
        num_blocks: int = 1,
    ) -> None:
        """Each head has `num_blocks` residual blocks."""
        super().__init__()
        self.shape = TargetShape.of(target)
        self.tree = tree
        self.heads = nn.ModuleList(MedusaHead(self.shape.hidden_size, num_blocks) for _ in range(num_heads))
        self.token_ids: torch.Tensor
        self.register_buffer("token_ids", token_ids.to(target.device), persistent=False)
        self.projection: nn.Linear | None = restrict_projection(target, token_ids)
        self.base_sample = sample_weights(target)
        self.to(target.device)

    @property
    def num_heads(self) -> int:
        """K."""
        return len(self.heads)

    @property
    def dtype(self) -> torch.dtype:
        """What the heads compute in; the projection keeps the target's dtype."""
        first = self.heads[0]
        assert isinstance(first, MedusaHead)
        return first.linear.weight.dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Every head's logits over `token_ids`, [rows, K, n]; `hidden` is the target's, [rows, hidden]."""
        hidden = hidden.to(self.dtype)
        changed = torch.stack([head(hidden) for head in self.heads], dim=1)  # [rows, K, hidden]
        if self.projection is not None:
            projected: torch.Tensor = self.projection(changed.to(self.projection.weight.dtype))
            return projected
        return torch.stack([self._project(k, changed[:, k]) for k in range(self.num_heads)], dim=1)

    def guess(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """One head's logits over `token_ids`, [rows, n], as `forward` has them."""
        return self._project(head, self.heads[head](hidden.to(self.dtype)))

    def give_own_projections(self) -> None:
        """Have each head project by weights of its own, which hold nothing yet, in place of the target's."""
        for head in self.heads:
            assert isinstance(head, MedusaHead)
            with torch.device("meta"):
                empty = nn.Linear(self.shape.hidden_size, len(self.token_ids), bias=False)
            head.lm_head = empty.to_empty(device=self.token_ids.device)
        self.projection = None

    def _project(self, head: int, changed: torch.Tensor) -> torch.Tensor:
        module = self.heads[head]
        assert isinstance(module, MedusaHead)
        project = module.lm_head or self.projection
        assert project is not None, "a head projects by its own weights or by the target's"
        projected: torch.Tensor = project(changed.to(project.weight.dtype))
        return projected

    def save(self, directory: Path) -> None:
        """Write the directory's two files, weights first, over what is there."""
        directory.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor for name, tensor in self.state_dict().items() if name.startswith("heads.")}
        weights |= {"token_ids": self.token_ids, "base_sample": self.base_sample}
        cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
        save_file(cpu, directory / WEIGHTS_FILE)
        text = json.dumps(self._config(), indent=1) + "\n"
        (directory / CONFIG_FILE).write_text(text, encoding="utf-8")

    def _config(self) -> dict[str, object]:
        shape = self.shape
        return {
            "model_type": MODEL_TYPE,
            "num_heads": self.num_heads,
            "num_token_ids": len(self.token_ids),
            "tied_lm_head": "heads.0.lm_head.weight" not in self.state_dict(),
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "base": {"model_type": shape.model_type, "num_hidden_layers": shape.num_hidden_layers},
            "tree": {"parents": list(self.tree.parents), "ranks": list(self.tree.ranks)},
        }


def load_medusa_heads(directory: Path, target: LoadedModel) -> MedusaHeads:
    """The heads in `directory` on the target's device, in its dtype, without gradients.

    Raises StartRefused, one line, for anything missing, damaged, not finite, or made for another target.
    """
    config = _HeadsConfig(directory)
    config.check_target(TargetShape.of(target))
    weights = _read_weights(directory / WEIGHTS_FILE)
    token_ids = weights.pop("token_ids", None)
    sample = weights.pop("base_sample", None)
    if token_ids is None or sample is None:
        raise StartRefused(f"{directory / WEIGHTS_FILE} lacks token_ids or base_sample.")
    config.check_token_ids(token_ids)
    heads = MedusaHeads(target, config.num_heads, token_ids.long(), config.tree)
    _check_sample(directory, sample, heads.base_sample)
    if not config.tied_lm_head:
        heads.give_own_projections()
    check_tensors(directory / WEIGHTS_FILE, weights, heads)
    heads.load_state_dict(weights, strict=False)
    return heads.requires_grad_(False).to(target.dtype).eval()


class _HeadsConfig:
    """`config.json`, every value checked: StartRefused otherwise."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / CONFIG_FILE
        if not self._path.is_file():
            raise StartRefused(f"--medusa-heads {directory}: there is no {CONFIG_FILE} in it.")
        self._values = read_json(self._path)
        if self._values.get("model_type") != MODEL_TYPE:
            raise StartRefused(
                f"{self._path}: model_type is {self._values.get('model_type')!r}, expected {MODEL_TYPE!r} "
                "(train heads with slipstream train-medusa)."
            )
        self.num_heads = self._number(self._values, "num_heads")
        if self.num_heads > MAX_HEADS:
            raise StartRefused(f"{self._path}: num_heads is {self.num_heads}, the most is {MAX_HEADS}.")
        self.num_token_ids = self._number(self._values, "num_token_ids")
        self.tied_lm_head = self._values.get("tied_lm_head", True) is True
        self.tree = self._read_tree()

    def check_target(self, target: TargetShape) -> None:
        """Raise StartRefused unless the heads are for a model of this shape."""
        base = self._table("base")
        found = TargetShape(
            str(base.get("model_type")),
            self._number(self._values, "hidden_size"),
            self._number(self._values, "vocab_size"),
            self._number(base, "num_hidden_layers"),
        )
        for name in ("model_type", "hidden_size", "vocab_size", "num_hidden_layers"):
            theirs, ours = getattr(found, name), getattr(target, name)
            if theirs != ours:
                raise StartRefused(
                    f"{self._path}: these heads are for a model with {name} {theirs}, this one has {ours}."
                )

    def check_token_ids(self, token_ids: torch.Tensor) -> None:
        """Raise StartRefused unless they are that many different ids of the vocabulary."""
        limit = self._number(self._values, "vocab_size")
        sound = (
            token_ids.dtype in (torch.int32, torch.int64)
            and token_ids.shape == (self.num_token_ids,)
            and bool(((token_ids >= 0) & (token_ids < limit)).all())
            and len(set(token_ids.tolist())) == self.num_token_ids
        )
        if not sound:
            raise StartRefused(
                f"{self._path.parent / WEIGHTS_FILE}: token_ids must be {self.num_token_ids} different ids "
                f"below {limit}."
            )

    def _read_tree(self) -> DraftTree:
        table = self._table("tree")
        parents, ranks = table.get("parents"), table.get("ranks")
        if not (_is_ids(parents) and _is_ids(ranks)):
            raise StartRefused(f"{self._path}: tree must have the lists of numbers parents and ranks.")
        try:
            tree = DraftTree(tuple(parents), tuple(ranks))
        except ValueError as error:
            raise StartRefused(f"{self._path}: tree is none: {error}.") from error
        if max(tree.depths) >= self.num_heads or tree.width > self.num_token_ids:
            raise StartRefused(
                f"{self._path}: tree is {max(tree.depths) + 1} deep and looks at {tree.width} candidates; "
                f"there are {self.num_heads} heads and {self.num_token_ids} tokens."
            )
        return tree

    def _table(self, name: str) -> Mapping[str, Any]:
        table = self._values.get(name)
        if not isinstance(table, dict):
            raise StartRefused(f"{self._path}: {name} must be an object.")
        return table

    def _number(self, table: Mapping[str, Any], name: str) -> int:
        value = table.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise StartRefused(f"{self._path}: {name} is {value!r}, expected a whole number of 1 or more.")
        return value


def restrict_projection(target: LoadedModel, token_ids: torch.Tensor) -> nn.Linear:
    """The target's output embedding with the rows of `token_ids` only, frozen, in its dtype."""
    full = output_embedding(target)
    rows = token_ids.to(full.weight.device)
    with torch.device("meta"):
        projection = nn.Linear(full.in_features, len(rows), bias=full.bias is not None)
    projection.weight = nn.Parameter(full.weight.detach()[rows].clone(), requires_grad=False)
    if full.bias is not None:
        projection.bias = nn.Parameter(full.bias.detach()[rows].clone(), requires_grad=False)
    return projection


def output_embedding(target: LoadedModel) -> nn.Linear:
    """What the target turns its last hidden state into logits with. Raises StartRefused if it is unusual."""
    found = target.model.get_output_embeddings()
    if not isinstance(found, nn.Linear) or found.in_features != target.config.hidden_size:
        raise StartRefused(
            f"{type(target.model).__name__} has no plain output embedding, which Medusa heads need."
        )
    return found


def sample_weights(target: LoadedModel) -> torch.Tensor:
    """Rows of the output embedding and of the last weights, float32 on the CPU, to know a model by."""
    rows = torch.linspace(0, target.vocab_size - 1, _SAMPLE_ROWS).long()
    parts = [output_embedding(target).weight.detach()[rows.to(target.device)].flatten()]
    matrices = [weight for weight in target.model.parameters() if weight.ndim == 2]
    parts += [weight.detach()[0] for weight in matrices[-_SAMPLE_ROWS:]]
    return torch.cat([part.float().cpu() for part in parts])


def is_same_sample(theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """True if two samples are of one model, in whatever number format."""
    return theirs.shape == ours.shape and torch.allclose(
        theirs.float(), ours, rtol=_SAMPLE_RTOL, atol=_SAMPLE_ATOL
    )


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise StartRefused(f"--medusa-heads {path.parent}: there is no {WEIGHTS_FILE} in it.")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise bad_weights(path, error) from error


def _check_sample(directory: Path, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    if not is_same_sample(theirs, ours):
        raise StartRefused(f"{directory}: these heads were trained for another model of the same shape.")


def check_tensors(path: Path, weights: Mapping[str, torch.Tensor], heads: MedusaHeads) -> None:
    """Raise StartRefused unless `weights` are exactly the heads' own, finite and of the right shape."""
    expected = {
        name: tensor.shape for name, tensor in heads.state_dict().items() if name.startswith("heads.")
    }
    if missing := sorted(expected.keys() ^ weights.keys()):
        is_missing = missing[0] in expected
        raise StartRefused(f"{path}: {missing[0]} is {'missing' if is_missing else 'not known'}.")
    for name, tensor in weights.items():
        if tensor.shape != expected[name]:
            raise StartRefused(f"{path}: {name} is {list(tensor.shape)}, expected {list(expected[name])}.")
        if not bool(tensor.isfinite().all()):
            raise StartRefused(f"{path}: {name} holds NaN or infinity.")


def _is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)
