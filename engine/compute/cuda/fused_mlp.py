"""What comes behind a layer's attention: its MLP or mixture, and what is beside these."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from engine.compute.cuda.expert_layout import FEW_ROWS, rows_of_each_way
from engine.compute.cuda.fused_experts import FusedExperts
from engine.compute.cuda.fused_norms import (
    Beside,
    ExpertAnswers,
    FusedNorm,
    RowNorm,
    Sum,
    is_norm,
    norm,
    sum_and_norm,
)
from engine.compute.cuda.fused_products import (
    OF_ROWS,
    Products,
    Projection,
    can_be_joined,
    gate_apart,
    is_projection,
    joined,
)
from engine.compute.cuda.fused_router import FusedScaledRouter, with_shared
from engine.compute.native.families import family_of, is_read_mixture, is_whole
from engine.compute.native.layer_form import BESIDE
from engine.compute.native.modules import activation_of, mlp_names

_NORMS_BESIDE = tuple(name for name in BESIDE if name.endswith(("_1", "_2")))
_ANY = 0.5  # what a product may be multiplied with, so that this is compared, too


class Mlp(Protocol):
    """What comes behind a layer's second norm; one of `_MLPS`."""

    @property
    def linears(self) -> tuple[Projection, ...]:
        """Those whose products are computed by `Products`."""
        ...

    def computed(self, normed: torch.Tensor, products: Products) -> torch.Tensor | ExpertAnswers:
        """What it makes of rows [N, hidden], at least one."""
        ...

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """What each of these products makes of one row [1, hidden], given the same whosever they are."""
        ...


class JoinedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up being one projection."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        names = mlp_names(mlp)
        activation = None if names is None else activation_of(getattr(mlp, names.activation))
        assert names is not None and activation is not None, "only MLPs that fit are asked for"
        self.gate_up = joined([getattr(mlp, name) for name in names.first])
        self.down = getattr(mlp, names.last)
        self.activation = activation

    @property
    def linears(self) -> tuple[Projection, ...]:
        """See Mlp."""
        return self.gate_up, self.down

    @staticmethod
    def fits(mlp: Any, dtype: torch.dtype) -> bool:
        """True for an MLP that can be computed; its output is still to be compared."""
        return is_whole(mlp, "MLP") and JoinedMlp.can_join(mlp, dtype)

    @staticmethod
    def can_join(mlp: Any, dtype: torch.dtype) -> bool:
        """True for what has the parts of one, whatever it does with them."""
        names = mlp_names(mlp)
        if names is None or not names.is_gated or activation_of(getattr(mlp, names.activation)) is None:
            return False
        first, down = [getattr(mlp, name) for name in names.first], getattr(mlp, names.last)
        return (
            all(is_projection(linear, dtype) for linear in (*first, down))
            and can_be_joined(first)
            and down.bias is None  # it is added to in place
        )

    def computed(self, normed: torch.Tensor, products: Products) -> torch.Tensor:
        """See Mlp."""
        return products.project(products.gate(normed, self.gate_up, self.activation), self.down)

    def added(
        self, normed: torch.Tensor, total: torch.Tensor, products: Products, multiplier: float
    ) -> torch.Tensor:
        """`multiplier` times the same, and `total`, which it may write over; not 1 of plain weights alone."""
        gated = products.gate(normed, self.gate_up, self.activation)
        return products.add(gated, self.down, total, multiplier)

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """See Mlp."""
        gated = OF_ROWS.gate(row, self.gate_up, self.activation)
        return (
            products.gate(row, self.gate_up, self.activation),
            products.project(gated, self.down),
            products.add(gated, self.down, row.clone(), _ANY),
        )


class RoutedMixture(nn.Module):
    """A router with fused experts and nothing else, whose answers are left to be summed by what adds them."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        self.router: Any = getattr(mixture, "gate", None) or mixture.router
        self.experts: FusedExperts = mixture.experts

    @property
    def linears(self) -> tuple[Projection, ...]:
        """See Mlp."""
        return ()

    @staticmethod
    def fits(mixture: Any, dtype: torch.dtype) -> bool:
        """True for a mixture whose code was read, and whose experts are fused."""
        names = {name for name, _ in mixture.named_children()}
        return (
            is_read_mixture(mixture)
            and names in ({"gate", "experts"}, {"router", "experts"})
            and type(mixture.experts) is FusedExperts
        )

    def computed(self, normed: torch.Tensor, products: Products) -> ExpertAnswers:
        """See Mlp."""
        _, shares, chosen = self.router(normed)
        return self.experts.answered(normed, chosen, shares)

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """See Mlp."""
        return ()


class CalledMixture(nn.Module):
    """A router with its experts and whatever expert all rows share, called as the module that they are."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        self.mixture = mixture

    @property
    def linears(self) -> tuple[Projection, ...]:
        """See Mlp."""
        return ()

    @staticmethod
    def fits(mixture: Any, dtype: torch.dtype) -> bool:
        """True for a mixture whose code was read."""
        return is_read_mixture(mixture)

    def computed(self, normed: torch.Tensor, products: Products) -> torch.Tensor:
        """See Mlp."""
        answer = self.mixture(normed[None])
        rows: torch.Tensor = answer[0] if isinstance(answer, tuple) else answer  # gpt-oss tells shares, too
        return rows[0]

    def answers(self, row: torch.Tensor, products: Products) -> tuple[torch.Tensor, ...]:
        """See Mlp."""
        return ()


_MLPS = (JoinedMlp, RoutedMixture, CalledMixture)


def mlp_class_of(
    mlp: Any, dtype: torch.dtype
) -> type[JoinedMlp] | type[RoutedMixture] | type[CalledMixture] | None:
    """What computes an MLP, or what stands in its place; None where nothing does."""
    return next((each for each in _MLPS if each.fits(mlp, dtype)), None)


class LayerInput(nn.Module):
    """What Gemma 4's layers make of what a step brings for each alone, in four launches."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        family, activation = family_of(layer), activation_of(layer.act_fn)
        assert family is not None and activation is not None, "only layers that fit are asked for"
        self.gate = layer.per_layer_input_gate
        self.projection = layer.per_layer_projection
        self.norm = FusedNorm(layer.post_per_layer_input_norm, family.norm)
        self.activation = activation

    @staticmethod
    def fits(layer: Any, dtype: torch.dtype) -> bool:
        """True for a layer whose parts for it can be computed."""
        linears = layer.per_layer_input_gate, layer.per_layer_projection
        return (
            activation_of(layer.act_fn) is not None
            and all(is_projection(linear, dtype) for linear in linears)
            and is_norm(layer.post_per_layer_input_norm, dtype)
        )

    def sum_with(self, rows: torch.Tensor, brought: torch.Tensor, factor: float) -> Sum:
        """`rows` [N, hidden] and what comes of `brought` [N, width] and them, times `factor`."""
        gated = gate_apart(self.gate(rows), brought, self.activation)
        return Sum(rows, self.projection(gated), self.norm, factor=factor)


class GivenBeside(NamedTuple):
    """What experts beside an MLP are given, and what chooses them, both [N, hidden]."""

    rows: torch.Tensor
    scaled: torch.Tensor


class Attended(NamedTuple):
    """What attention leaves to the rest of a layer, all [N, hidden]."""

    normed: torch.Tensor  # what the MLP is given
    total: torch.Tensor  # what its answer is added to
    beside: GivenBeside | None = None  # what experts beside it are given, where that is known already


class ExpertsBeside(nn.Module):
    """What a layer's experts add to its MLP's answer, both normed.

    Router and experts are called as they are, unless both are fused. Then they take two launches each and
    none before them, and of few rows the MLP is some more of the experts.
    """

    def __init__(self, layer: Any, mlp: Mlp) -> None:
        super().__init__()
        family = family_of(layer)
        assert family is not None, "only layers that fit are asked for"
        self.router, self.experts = layer.router, layer.experts
        self.before = FusedNorm(layer.pre_feedforward_layernorm_2, family.norm)
        self.of_mlp = FusedNorm(layer.post_feedforward_layernorm_1, family.norm)
        self.of_experts = FusedNorm(layer.post_feedforward_layernorm_2, family.norm)
        self.are_fused = isinstance(self.router, FusedScaledRouter) and type(self.experts) is FusedExperts
        # No parts of their own: their weights are those of the parts above, and the MLP's.
        self._of_few: tuple[FusedScaledRouter, FusedExperts] | None = None
        if self.are_fused and isinstance(mlp, JoinedMlp):
            together = self.experts.with_shared(mlp.gate_up, mlp.down, mlp.activation)
            if together is not None:
                self._of_few = with_shared(self.router, together.shape.num_shared), together

    @staticmethod
    def are_of(layer: Any) -> bool:
        """True for a layer that has them."""
        return all(hasattr(layer, name) for name in BESIDE)

    @staticmethod
    def fits(layer: Any, dtype: torch.dtype) -> bool:
        """True for those that can be computed; the layer's answer is still to be compared."""
        return all(is_norm(getattr(layer, name), dtype) for name in _NORMS_BESIDE)

    @property
    def fewest_rows(self) -> tuple[int, ...]:
        """The fewest rows that are computed in each way there is."""
        if self._of_few is None:
            return ()
        router, experts = self._of_few
        return rows_of_each_way(router.choice, experts.shape)

    def middle(self, of: Sum, by: RowNorm) -> Attended:
        """A sum and its norm, with what is given here, where that comes in the same launch."""
        if not self.are_fused or of.norm_of_added is None:
            total, normed = sum_and_norm(of, by)
            return Attended(normed, total)
        total, normed, rows, scaled = self.router.sum_and_scaled(of, by, self.before)
        return Attended(normed, total, GivenBeside(rows, scaled))

    def given(self, total: torch.Tensor) -> GivenBeside:
        """What `middle` gives of a sum, in launches of its own, where both are fused."""
        return GivenBeside(norm(total, self.before), self.router.scaled(total))

    def sum_with(
        self,
        total: torch.Tensor,
        mlp: Mlp,
        normed: torch.Tensor,
        products: Products,
        norm_of_both: RowNorm,
        given: GivenBeside | None = None,
    ) -> Sum:
        """`total` [N, hidden] and what both make of it; `normed` is what the MLP is given."""
        if self.are_fused and given is None:
            given = self.given(total)
        if given is not None and self._of_few is not None and len(total) <= FEW_ROWS:
            router, experts = self._of_few
            _, shares, chosen = router.chosen_for(given.scaled)
            added = experts.answered(given.rows, chosen, shares, normed)
            return Sum(total, added, self.of_experts, beside=Beside(None, self.of_mlp, norm_of_both))
        answer = mlp.computed(normed, products)
        assert isinstance(answer, torch.Tensor), "experts are beside an MLP"
        if given is not None:
            _, shares, chosen = self.router.chosen_for(given.scaled)
            added = self.experts.answered(given.rows, chosen, shares)
        else:
            _, shares, chosen = self.router(total)
            added = self.experts(norm(total, self.before), chosen, shares)
        return Sum(total, added, self.of_experts, beside=Beside(answer, self.of_mlp, norm_of_both))
