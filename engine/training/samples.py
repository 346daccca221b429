"""Samples: what the target generated and, if wanted, the hidden states it drew from, in lasting shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.compute.loading.model_files import first_line
from engine.errors import StartRefused
from engine.training.written import written

_PER_SEQUENCE = ("numbers", "lengths", "first_positions", "seeds")
HOLD_OUT_EVERY = 10  # one prompt in so many is kept for the evaluation


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One generation: `hidden[i]` [hidden] drew `token_ids[i]` at `first_position` + i.

    `number` is its place in the run and decides all that is random about it. Temperature 0 is greedy.
    `hidden` is None where nobody wants it.
    """

    number: int
    first_position: int
    seed: int
    temperature: float
    token_ids: torch.Tensor  # [n] int32
    hidden: torch.Tensor | None  # [n, hidden] in the target's dtype


class SampleStore:
    """The shards in one directory, all made with the same `about`: StartRefused for others.

    `about` is whatever must agree for samples to be of one run. A shard is written whole or not at all.
    """

    def __init__(self, directory: Path, about: str) -> None:
        self._directory = directory
        self._about = about
        self._paths = sorted(directory.glob("samples-*.safetensors"))

    def read(self) -> Iterator[Sample]:
        """Every sample there is, shard by shard."""
        for shard in self.shards():
            yield from shard

    def shards(self) -> Iterator[list[Sample]]:
        """The samples of every shard, in the order in which they were written."""
        for path in self._paths:
            yield list(self._read_shard(path))

    def append(self, samples: Sequence[Sample]) -> None:
        """Write one more shard. Raises StartRefused."""
        # Behind the last one, which is not their count where a damaged one was deleted.
        number = int(self._paths[-1].stem.rpartition("-")[2]) + 1 if self._paths else 0
        path = self._directory / f"samples-{number:05d}.safetensors"
        tensors = {
            "numbers": torch.tensor([sample.number for sample in samples]),
            "lengths": torch.tensor([len(sample.token_ids) for sample in samples]),
            "first_positions": torch.tensor([sample.first_position for sample in samples]),
            "seeds": torch.tensor([sample.seed for sample in samples]),
            "temperatures": torch.tensor([sample.temperature for sample in samples], dtype=torch.float64),
            "token_ids": torch.cat([sample.token_ids for sample in samples]),
        }
        hidden = [sample.hidden for sample in samples if sample.hidden is not None]
        if hidden:
            tensors["hidden"] = torch.cat(hidden)
        half_written = path.with_suffix(".part")
        with written(path):
            self._directory.mkdir(parents=True, exist_ok=True)
            save_file(tensors, half_written, metadata={"about": self._about})
            half_written.replace(path)
        self._paths.append(path)

    def _read_shard(self, path: Path) -> Iterator[Sample]:
        try:
            with safe_open(path, framework="pt") as file:
                about = (file.metadata() or {}).get("about")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise StartRefused(f"{path} is damaged ({first_line(error)}): delete it.") from error
        if about != self._about:
            raise StartRefused(
                f"{path} was made with another model, seed or set of prompts: choose another --output, "
                "or delete the samples in this one."
            )
        lengths = tensors["lengths"].tolist()
        columns = [tensors[name].tolist() for name in _PER_SEQUENCE if name != "lengths"]
        parts = zip(
            *columns,
            tensors["temperatures"].tolist(),
            tensors["token_ids"].split(lengths),
            tensors["hidden"].split(lengths) if "hidden" in tensors else [None] * len(lengths),
            strict=True,
        )
        for number, first_position, seed, temperature, token_ids, hidden in parts:
            yield Sample(number, first_position, seed, temperature, token_ids, hidden)


class Positions:
    """Samples end to end: row i has the hidden state that drew token i. For training and evaluation.

    `ends[i]` is one past the last row of row i's own sample, and `starts` has the first row of each sample.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        """Needs at least one sample, and the hidden states of all."""
        kept = list(samples)
        self.samples = kept
        lengths = torch.tensor([len(sample.token_ids) for sample in kept])
        self.token_ids = torch.cat([sample.token_ids for sample in kept]).long()  # [rows]
        hidden = [sample.hidden for sample in kept if sample.hidden is not None]
        self.hidden = torch.cat(hidden)  # [rows, hidden]
        stops = lengths.cumsum(0)
        self.starts = stops - lengths  # [samples]
        self.ends = stops.repeat_interleave(lengths)  # [rows]

    def __len__(self) -> int:
        return len(self.token_ids)

    def later_tokens(self, rows: torch.Tensor, num_heads: int) -> torch.Tensor:
        """What each head should have guessed at `rows`: [rows, num_heads], -1 behind the sample's end."""
        places = rows[:, None] + torch.arange(1, num_heads + 1)
        found = self.token_ids[places.clamp(max=len(self) - 1)]
        return found.masked_fill(places >= self.ends[rows, None], -1)


def is_held_out(number: int, num_prompts: int) -> bool:
    """Whether a sample is for the evaluation only; so are all or none of a prompt, if there are enough."""
    place = number % num_prompts if num_prompts >= HOLD_OUT_EVERY else number
    return place % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
