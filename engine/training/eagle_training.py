"""Fits an EAGLE-3 layer to what a frozen target says (Li et al., 2025), with checkpoints to go on from.

The layer learns the target's own distribution, not only the token that was drawn, several steps ahead on its
own outputs. Later steps join later in the run: the first guess is what the others build on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from engine.compute.drafters.eagle_layer import EagleLayer
from engine.training.eagle_chain import TrainedChain, ahead
from engine.training.eagle_features import Example
from engine.training.fitting import FitOptions, FitResult, schedule
from engine.training.training_plan import TrainingProgress
from engine.training.written import written

BATCH_TOKENS = 1000
LEARNING_RATE = 1e-3
# The target's distribution is sharpened so, and the layer's logits are smoothed again when it is done.
TEMPERATURE = 0.8
STEP_WEIGHT = 0.8  # of each step's loss, over the one before
_STEP_JOINS = (
    0.0,
    0.35,
    0.6,
)  # part of the run from which each step is learned; the last, and all later ones
_WEIGHT_DECAY = 0.01
_BETAS = (0.9, 0.95)
_MOST_GRADIENT = 0.5  # norm
_LENGTH_JITTER = 40  # tokens; batches have texts of about one length
_CHECKPOINT_EVERY_S = 180.0
_LOSS_MEMORY = 0.95  # the shown loss is a running mean
_INIT_STD = 0.01


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a fit is kept, and `about` what must agree to go on from it."""

    path: Path
    about: str


def fit_layer(
    layer: EagleLayer,
    examples: Sequence[Example],
    num_ahead: int,
    options: FitOptions,
    progress: TrainingProgress,
    checkpoint: Checkpoint,
) -> FitResult:
    """Train the layer in place to go on for `num_ahead` tokens; its logits are then the target's.

    Goes on from the checkpoint where there is one that fits, and leaves one. Stops early, with what it has,
    when `progress` says so or the deadline is near. Equal arguments give equal layers, however often the run
    was stopped, unless a deadline cuts it. Not finished, it may be called again.
    """
    fit = _Fit(layer, examples, num_ahead, options, checkpoint)
    fit.read_checkpoint()
    began, saved = options.clock(), time.monotonic()
    first_part, stopped = fit.part, False
    shown = torch.zeros(num_ahead)
    while fit.part < 1 and not stopped:
        loss = fit.step()
        part = len(fit.losses) / fit.num_steps
        if options.deadline is not None:
            spent = (options.clock() - began) / max(1e-9, options.deadline - began)
            part = max(part, first_part + (1 - first_part) * spent)
        fit.part = part
        shown = torch.where(shown == 0, loss, shown.lerp(loss, 1 - _LOSS_MEMORY))
        progress.update("train", part, 1.0, "loss " + " ".join(f"{each:.2f}" for each in shown.tolist()))
        stopped = progress.is_stopped()
        if time.monotonic() - saved > _CHECKPOINT_EVERY_S:
            fit.write_checkpoint()
            saved = time.monotonic()
    fit.write_checkpoint()
    window = max(1, len(fit.losses) // 20)
    first, last = (_mean_losses(part) for part in (fit.losses[:window], fit.losses[-window:]))
    return FitResult(len(fit.losses), options.clock() - began, first, last, stopped)


def start_like_target(layer: EagleLayer, last_layer: nn.Module, last_norm: object, seed: int) -> None:
    """Begin as the target's last layer, where that has weights of the same name and shape.

    The highest features pass unchanged and embeddings count for little, which shortens training.
    """
    generator = torch.Generator().manual_seed(seed)
    theirs = {f"midlayer.{name}": weight.detach() for name, weight in last_layer.named_parameters()}
    theirs["midlayer.hidden_norm.weight"] = theirs.pop("midlayer.input_layernorm.weight", torch.empty(0))
    theirs["norm.weight"] = getattr(last_norm, "weight", torch.empty(0))
    width = int(layer.config.hidden_size)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * _INIT_STD)
            found = theirs.get(name)
            if found is None or found.ndim != weight.ndim:
                continue
            if found.shape == weight.shape:
                weight.copy_(found)
            elif weight.ndim == 2 and weight.shape == (len(found), 2 * width):
                weight[:, width:] += found.to(weight)
        if layer.fc.in_features == 3 * width:
            layer.fc.weight[:, -width:] += torch.eye(width, device=layer.fc.weight.device)


def fold_temperature(layer: EagleLayer) -> None:
    """Have a layer that is trained give the target's own logits and not the sharpened ones."""
    with torch.no_grad():
        layer.norm.weight *= TEMPERATURE


class _Fit:
    """A layer on its way: the optimizer, the order of batches, and how far it is."""

    def __init__(
        self,
        layer: EagleLayer,
        examples: Sequence[Example],
        num_ahead: int,
        options: FitOptions,
        checkpoint: Checkpoint,
    ) -> None:
        self._layer = layer
        self._examples = examples
        self._num_ahead = num_ahead
        self._seed = options.seed
        self._checkpoint = checkpoint
        self._optimizer = torch.optim.AdamW(
            layer.parameters(), lr=LEARNING_RATE, betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )
        self._epochs: list[list[list[int]]] = []
        for epoch in range(options.num_epochs):
            lengths = [len(example.token_ids) for example in examples]
            self._epochs.append(batches(lengths, random.Random(f"{options.seed} {epoch}")))
        self._order = [batch for epoch in self._epochs for batch in epoch]
        self.num_steps = len(self._order)
        self.losses: list[torch.Tensor] = []  # [num_ahead] each; NaN for steps that were not learned then
        self.part = 0.0  # of the run that is behind

    def step(self) -> torch.Tensor:
        """Learn the next batch; the divergence from the target at each step ahead, 0 where it learns none."""
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(self.part)
        num_ahead = min(self._num_ahead, _num_learned(self.part, self._num_ahead))
        batch = Batch([self._examples[index] for index in self._order[len(self.losses)]])
        self._optimizer.zero_grad(set_to_none=True)
        loss, shown = losses(self._layer, batch, num_ahead)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._layer.parameters(), _MOST_GRADIENT)
        self._optimizer.step()
        self.losses.append(nn.functional.pad(shown, (0, self._num_ahead - num_ahead), value=torch.nan))
        return self.losses[-1].nan_to_num()

    def write_checkpoint(self) -> None:
        """Keep the weights, the optimizer's averages, and how far the run is; whole or not at all."""
        tensors = {"losses": torch.stack(self.losses)} if self.losses else {}
        tensors["part"] = torch.tensor(self.part, dtype=torch.float64)
        for name, weight in self._layer.named_parameters():
            tensors[f"weight {name}"] = weight.detach()
            for average, value in self._optimizer.state[weight].items():
                tensors[f"{average} {name}"] = value
        path = self._checkpoint.path
        half_written = path.with_suffix(".part")
        with written(path):
            save_file(tensors, half_written, metadata={"about": self._checkpoint.about})
            half_written.replace(path)

    def read_checkpoint(self) -> None:
        """Go on from what is kept, if it is there and of this run."""
        try:
            with safe_open(self._checkpoint.path, framework="pt") as file:
                if (file.metadata() or {}).get("about") != self._checkpoint.about:
                    return
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return
        if "losses" not in tensors:
            return
        self.losses = list(tensors["losses"])
        self.part = float(tensors["part"])
        with torch.no_grad():
            for name, weight in self._layer.named_parameters():
                weight.copy_(tensors[f"weight {name}"])
                self._optimizer.state[weight] = {
                    average: tensors[f"{average} {name}"].clone()
                    for average in ("step", "exp_avg", "exp_avg_sq")
                }


def batches(lengths: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Every index once, those of about one length together: as many as BATCH_TOKENS hold when padded."""
    keys = [length + rng.random() * _LENGTH_JITTER for length in lengths]
    found: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=keys.__getitem__):
        longest = max(longest, lengths[index])
        if not found or (len(found[-1]) + 1) * longest > BATCH_TOKENS:
            found.append([])
            longest = lengths[index]
        found[-1].append(index)
    rng.shuffle(found)
    return found


class Batch:
    """Examples side by side, as long as the longest: what the layer reads, and what teaches it."""

    def __init__(self, examples: Sequence[Example]) -> None:
        longest = max(len(example.token_ids) for example in examples)
        width = examples[0].features.shape[1]
        self.token_ids = torch.zeros(len(examples), longest, dtype=torch.long)
        features = torch.zeros(len(examples), longest, width, dtype=examples[0].features.dtype)
        # Whether what the head reads at a position draws a token of the answer.
        self.teaches = torch.zeros(len(examples), longest, dtype=torch.bool)
        for row, example in enumerate(examples):
            length = len(example.token_ids)
            self.token_ids[row, :length] = example.token_ids
            features[row, : length - 1] = example.features
            self.teaches[row, example.sample.first_position - 1 : length - 1] = True
        self._features = features

    def features(self, layer: EagleLayer) -> torch.Tensor:
        """What the layer reads of the target at every position: [rows, positions, layers * hidden]."""
        return self._features[..., : layer.fc.in_features]

    def taught(self, layer: EagleLayer) -> torch.Tensor:
        """What the target's head reads where it draws a token of an answer: [places, hidden]."""
        return self._features[..., layer.fc.in_features :][self.teaches]


def losses(layer: EagleLayer, batch: Batch, num_ahead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a batch, and the divergence from the target's distribution at each step ahead."""
    device = layer.token_ids.device
    with torch.no_grad():
        logits = layer.projection(batch.taught(layer).to(device)).float()
        targets = (logits / TEMPERATURE).softmax(-1).to(torch.bfloat16)  # [places, n]
        entropy = torch.special.entr(targets.float()).sum(-1)
    place = torch.full(batch.teaches.shape, -1)
    place[batch.teaches] = torch.arange(len(targets))
    total, shown = torch.zeros((), device=device), []
    with torch.autocast(device.type, torch.bfloat16):
        chain = TrainedChain(layer, batch.features(layer).to(device), batch.token_ids.to(device))
        for step in range(num_ahead):
            output = chain.step()
            teacher = ahead(place + 1, step + 1) - 1  # [rows, positions] -1 where nothing teaches
            is_taught = teacher >= 0
            if not is_taught.any():
                shown.append(0.0)
                continue
            chosen = teacher[is_taught].to(device)
            guessed = layer.logits(output[is_taught.to(device)]).float().log_softmax(-1)
            loss = -(targets[chosen] * guessed).sum(-1)
            total = total + STEP_WEIGHT**step * loss.mean()
            shown.append(float((loss.detach() - entropy[chosen]).mean()))
    return total, torch.tensor(shown)


def _num_learned(part: float, num_ahead: int) -> int:
    joined = sum(part >= begin for begin in _STEP_JOINS)
    return joined if joined < len(_STEP_JOINS) else num_ahead


def _mean_losses(found: Sequence[torch.Tensor]) -> tuple[float, ...]:
    return tuple(torch.stack(list(found)).nanmean(0).nan_to_num().tolist()) if found else ()
