"""Norms of rows in one launch each, with the sum before them."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import triton
from torch import nn

from engine.compute.cuda.layer_kernels import gated_norm_kernel, norm_kernel
from engine.compute.native.families import is_whole
from engine.compute.native.records import NormKind

_NARROW = 1024  # columns up to which four warps norm a row as fast as eight


class RowNorm(Protocol):
    """What the kernels read of a norm."""

    @property
    def weight(self) -> torch.Tensor:
        """By which a row that is normed is multiplied, [width]."""
        ...

    @property
    def variance_epsilon(self) -> float:
        """What is added to the mean square."""
        ...

    @property
    def is_centred(self) -> bool:
        """Whether a row's mean is taken off first."""
        ...


class FusedNorm(nn.Module):
    """A norm without a bias in one launch, of the kind that `original` is. Numbers are rounded once."""

    num_given: ClassVar[int] = 1

    def __init__(self, original: Any, kind: NormKind) -> None:
        super().__init__()
        weight = original.weight.detach()
        self.weight = frozen(1.0 + weight.float() if kind is NormKind.ONE_MORE else weight)
        self.variance_epsilon = eps_of(original)
        self.is_centred = kind is NormKind.CENTRED

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        return norm(hidden_states.contiguous().flatten(0, -2), self).view(hidden_states.shape)


class FusedGatedNorm(nn.Module):
    """A norm of each group of a row, and a gate, in one launch.

    Delta nets norm before they gate, as their `activation` says; Mamba 2 gates first.
    """

    num_given: ClassVar[int] = 2

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight = frozen(original.weight.detach())
        self.variance_epsilon = eps_of(original)
        activation = getattr(original, "activation", None)
        self._gates_first = activation is None
        self._by_sigmoid = activation == "sigmoid"
        self._group: int = getattr(original, "group_size", None) or len(self.weight)

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[..., width], both, to the same in the first one's dtype."""
        rows, gates = hidden_states.contiguous().flatten(0, -2), gate.flatten(0, -2)
        gates = gates if gates.stride(-1) == 1 else gates.contiguous()
        normed = torch.empty_like(rows)
        count, width = rows.shape
        gated_norm_kernel[(count, width // self._group)](
            rows,
            gates,
            self.weight,
            normed,
            self.variance_epsilon,
            STRIDE=gates.stride(0),
            WIDTH=width,
            GROUP=self._group,
            PADDED=triton.next_power_of_2(self._group),
            GATES_FIRST=self._gates_first,
            BY_SIGMOID=self._by_sigmoid,
        )
        return normed.view(hidden_states.shape)


class ExpertAnswers(NamedTuple):
    """What experts answer to rows, not yet summed by these rows' shares."""

    answers: torch.Tensor  # [rows, each, width]
    chosen: torch.Tensor  # [rows, each]; a number that none of `num_experts` has is left out
    shares: torch.Tensor  # [rows, each]
    num_experts: int
    num_shared: int = 0  # of `each` the last, whom all rows go through


class Beside(NamedTuple):
    """Rows [rows, width] that are normed and added to others, and what norms that sum.

    No rows are what those experts answer whom all rows go through.
    """

    rows: torch.Tensor | None
    by: RowNorm
    norm_of_both: RowNorm


class Sum(NamedTuple):
    """`rows` + `multiplier` * `added`, both [rows, width], that sum times `factor`; not yet computed.

    What is added may be what experts answer, who are summed first. It is normed before, where there is a norm
    for it; then come rows `beside`, if there are any.
    """

    rows: torch.Tensor
    added: torch.Tensor | ExpertAnswers
    norm_of_added: RowNorm | None = None
    multiplier: float = 1.0
    factor: float = 1.0
    beside: Beside | None = None

    def computed(self, next_norm: RowNorm | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What it is, and the norm of that where one is given."""
        return (_sum(self), None) if next_norm is None else sum_and_norm(self, next_norm)


def norm(rows: torch.Tensor, by: RowNorm) -> torch.Tensor:
    """The norm of [rows, width]."""
    normed = torch.empty_like(rows)
    _launch(rows, None, by, (rows, normed))
    return normed


def add(
    rows: torch.Tensor,
    added: torch.Tensor,
    norm_of_added: RowNorm | None = None,
    multiplier: float = 1.0,
    factor: float = 1.0,
) -> torch.Tensor:
    """`rows` + `multiplier` * `added`, both [rows, width]; what is added is normed before, if so asked.

    That sum is multiplied with `factor`.
    """
    return _sum(Sum(rows, added, norm_of_added, multiplier, factor))


def add_and_norm(
    rows: torch.Tensor,
    added: torch.Tensor,
    by: RowNorm,
    norm_of_added: RowNorm | None = None,
    multiplier: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `add` gives, and its norm."""
    return sum_and_norm(Sum(rows, added, norm_of_added, multiplier), by)


def sum_and_norm(of: Sum, by: RowNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum, and its norm."""
    total, normed = torch.empty_like(of.rows), torch.empty_like(of.rows)
    _launch(of.rows, of, by, (total, normed))
    return total, normed


def _sum(of: Sum) -> torch.Tensor:
    total = torch.empty_like(of.rows)
    _launch(of.rows, of, None, (total, of.rows))
    return total


def eps_of(module: Any) -> Any:
    """What a norm of transformers adds to the mean square; None for what is none."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def is_norm(norm: Any, dtype: torch.dtype) -> bool:
    """True for one of rows that the kernels take, with weights alone."""
    if not is_whole(norm, "Norm") or getattr(norm, "bias", None) is not None:
        return False
    weight = getattr(norm, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 1 and weight.dtype is dtype


def frozen(weight: torch.Tensor) -> nn.Parameter:
    """A weight of a module that nobody trains."""
    return nn.Parameter(weight, requires_grad=False)


def _launch(
    rows: torch.Tensor, of: Sum | None, by: RowNorm | None, results: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Of rows, or of a sum with them, that and its norm, each where there is one, to the two results.

    Only this norm may be centred.
    """
    norm_of_added, beside = (None, None) if of is None else (of.norm_of_added, of.beside)
    norms = norm_of_added, *((None, None) if beside is None else beside[1:]), by
    added: torch.Tensor | ExpertAnswers = rows if of is None else of.added
    of_experts = added if isinstance(added, ExpertAnswers) else ExpertAnswers(added, rows, rows, 0)
    rows_beside = None if beside is None else beside.rows
    is_beside = beside is not None and rows_beside is None
    count, width = rows.shape
    norm_kernel[(count,)](
        rows,
        *of_experts[:3],
        rows if rows_beside is None else rows_beside,
        *(rows if each is None else each.weight for each in norms),
        *results,
        1.0 if of is None else of.multiplier,
        1.0 if of is None else of.factor,
        *(0.0 if each is None else each.variance_epsilon for each in norms),
        HAS_ADDED=of is not None,
        NORMS_ADDED=norm_of_added is not None,
        HAS_BESIDE=beside is not None,
        HAS_NORM=by is not None,
        IS_CENTRED=by is not None and by.is_centred,
        COUNT=of_experts.num_experts,
        EACH=added.answers.shape[1] if isinstance(added, ExpertAnswers) else 0,
        EACH_BESIDE=of_experts.num_shared if is_beside else 0,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=warps_for(width),
    )


def warps_for(width: int) -> int:
    """How many groups of 32 threads norm a row of so many columns."""
    return 8 if width > _NARROW else 4
