"""Acceptance: how likely the target accepts the drafts of one request, by place or by what the drafter says.

Estimates forget exponentially and start from what the method did for all requests (a Beta prior).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import neg

from engine.plan.speculation.calibration import Calibration
from engine.plan.speculation.isotonic import never_decreasing
from engine.plan.speculation.spec_stats import RecentRatio
from engine.plan.speculation.speculation_config import LengthPolicyName

_KEEP = 0.5 ** (1 / 32)  # half of an observation's weight is gone 32 observations later
_METHOD_KEEP = 0.5 ** (1 / 1024)
_ROUND_KEEP = 0.5 ** (1 / 8)
_METHOD_SURPLUS_KEEP = 0.5 ** (1 / 128)  # a round
_KNOWN_ROUNDS = 32.0  # with fewer, it is unknown what a drafter's rounds are worth
_PRIOR_ROUNDS = 8.0  # that others' rounds count for beside a request's own
_PRIOR_WEIGHT = 4.0  # observations that the prior counts for
_FIRST_GUESS = 0.75  # of an unknown method: high, so that it is tried
_CARRY = 0.7  # of how far the place before differs from its prior
_STRIDE = 8  # places that `reach` looks at together: a tree's are worked out anew each time
_REFRESH = 64  # observations, after which a method's rates are computed again

Kind = tuple[str, bool]  # of drafts: the method, and whether the request samples


@dataclass(slots=True)
class _Tally:
    """Accepted and judged drafts by place, with forgetting."""

    keep: float
    accepted: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)

    def add(self, outcomes: Sequence[float]) -> None:
        """Count one draft at each of the first places, accepted or with that chance of it."""
        keep, accepted, judged = self.keep, self.accepted, self.judged
        missing = [0.0] * (len(outcomes) - len(judged))
        accepted += missing
        judged += missing
        for place, is_accepted in enumerate(outcomes):
            judged[place] = keep * judged[place] + 1
            accepted[place] = keep * accepted[place] + is_accepted

    def fade(self, first: int) -> None:
        """Forget a little of the places from `first` on, or bad luck there would keep them untried."""
        self.judged[first:] = [self.keep * weight for weight in self.judged[first:]]
        self.accepted[first:] = [self.keep * weight for weight in self.accepted[first:]]

    def rate(self, place: int, belief: float) -> float:
        """Accepted over judged, with `belief` as a few more observations."""
        if place >= len(self.judged):
            return belief
        return (self.accepted[place] + _PRIOR_WEIGHT * belief) / (self.judged[place] + _PRIOR_WEIGHT)


class MethodPrior:
    """What one drafter did for all requests; the estimates of a new request start from it.

    `is_free` says that its drafts cost nothing to make.
    """

    def __init__(self, *, is_free: bool = False) -> None:
        self.is_free = is_free
        self.is_tree = False
        self.surplus = RecentRatio(_METHOD_SURPLUS_KEEP)
        self._calibrations: dict[Kind, Calibration] = {}
        self._chain = _Tally(_METHOD_KEEP)
        self._tree = _Tally(_METHOD_KEEP)
        self._rates: list[float] = []
        self._num_unseen = 0  # observations that are not in the rates yet

    def calibration(self, kind: Kind) -> Calibration:
        """What the chances of such drafts are worth."""
        return self._calibrations.setdefault(kind, Calibration())

    def observe(self, outcomes: Sequence[float], *, is_tree: bool) -> None:
        """Learn which of the first drafts, or tree nodes, of one round were accepted."""
        (self._tree if is_tree else self._chain).add(outcomes)
        self._num_unseen += len(outcomes)
        if self._num_unseen >= _REFRESH or is_tree != self.is_tree:
            self.is_tree = is_tree
            self._rates.clear()

    def rates(self, count: int) -> list[float]:
        """The chances of at least `count` first places: of a draft after accepted ones, or of a node."""
        rates = self._rates
        if not rates:
            self._num_unseen = 0
        while len(rates) < count:
            place = len(rates)
            if self.is_tree:
                rates.append(self._tree.rate(place, _FIRST_GUESS / (place + 1)))
            else:
                rates.append(self._chain.rate(place, rates[-1] if rates else _FIRST_GUESS))
        return rates


@dataclass(slots=True)
class Pacing:
    """What a length policy remembers of one request; only the policies read and write it."""

    length: int = 0
    num_refused: int = 0  # steps in a row in which no draft was worth verifying
    refused_price: float = 0.0  # tokens that a draft had to bring at the last refusal
    num_waited: int = 0  # steps without drafts since the last ones
    is_probing: bool = False
    probe_length: int = 1
    is_off: bool = False
    most_taken: int | None = None  # how many drafts were worth verifying when there were more
    policy: LengthPolicyName | None = None  # the request's own; None is the server's


class Acceptance:
    """One request's chances with one method.

    `num_rounds` and `num_proposed` never forget. `rate` is the chance of a draft after accepted ones,
    whatever its place. `round_rate` is the share of the proposed drafts that the last rounds accepted; it
    sinks as drafts get longer. Once it `is_told` chances by the drafter, places say how likely drafts are
    there that come at all, and not those that were found worth verifying.
    """

    def __init__(self, prior: MethodPrior) -> None:
        self.num_rounds = 0
        self.num_proposed = 0
        self.is_told = False
        self.pacing = Pacing()
        self._prior = prior
        self._told = RecentRatio(_KEEP)  # drafts that came, of those expected
        self._surplus = RecentRatio(_KEEP)  # tokens by rounds
        self._chain = _Tally(_KEEP)
        self._tree = _Tally(_KEEP)
        self._is_tree = prior.is_tree
        self._accepted = self._judged = 0.0  # with forgetting, by draft
        self._rounds = RecentRatio(_ROUND_KEEP)
        self._survival: list[float] = []  # of the first places, until the next observation
        self._last_rate = 0.0

    @property
    def rate(self) -> float:
        """The chance of the next draft, a little nearer to the method's than observed."""
        belief = self._prior.rates(1)[0]
        return (self._accepted + _PRIOR_WEIGHT * belief) / (self._judged + _PRIOR_WEIGHT)

    @property
    def round_rate(self) -> float:
        """Accepted over proposed in the last rounds; 0 before the first."""
        return self._rounds.ratio

    @property
    def is_free(self) -> bool:
        """True if drafts cost nothing to make."""
        return self._prior.is_free

    def believe(self, kind: Kind, stated: Sequence[float]) -> list[float]:
        """What the drafter's word on some drafts is worth for this request."""
        odds = (self._told.part + _PRIOR_WEIGHT) / (self._told.whole + _PRIOR_WEIGHT)
        found = self._prior.calibration(kind).read(stated)
        return [odds * chance / (1.0 + (odds - 1.0) * chance) for chance in found]

    def expect(self, kind: Kind, stated: Sequence[float]) -> list[float]:
        """As `believe`, of drafts that are there to be verified."""
        chances = self.believe(kind, stated)
        self.is_told = self._is_tree = True
        self._tree.add(chances)
        self._prior.observe(chances, is_tree=True)
        self._survival.clear()
        return chances

    def learn(self, kind: Kind, stated: Sequence[float], accepted: Sequence[int]) -> None:
        """Drafts `stated` to be so likely were verified; `accepted` are the indices of those that came."""
        path = frozenset(accepted)
        came = [node in path for node in range(len(stated))]
        calibration = self._prior.calibration(kind)
        self._told.observe(len(path), sum(calibration.read(stated)))
        calibration.observe(stated, came)

    def least_stated(self, kind: Kind, chance: float) -> float:
        """The least chance that the drafter must state of a draft for it to be worth this one."""
        return self._prior.calibration(kind).least_stated(chance)

    def note_surplus(self, num_tokens: float) -> None:
        """The drafts of a round were worth so many tokens beyond what verifying them costs."""
        for surplus in (self._surplus, self._prior.surplus):
            surplus.observe(num_tokens, 1.0)

    @property
    def surplus(self) -> float | None:
        """What a round of drafts is worth beyond its price, in tokens; None while few rounds are known."""
        own, usual = self._surplus, self._prior.surplus
        if usual.whole < _KNOWN_ROUNDS:
            return None
        return (own.part + _PRIOR_ROUNDS * usual.ratio) / (own.whole + _PRIOR_ROUNDS)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Learn from one verified chain. Drafts after the first rejected one were not judged."""
        if num_proposed == 0:
            return
        num_judged = min(num_proposed, num_accepted + 1)
        if not self.is_told:
            outcomes = [True] * num_accepted + [False] * (num_judged - num_accepted)
            self._chain.add(outcomes)
            self._chain.fade(len(outcomes))
            self._prior.observe(outcomes, is_tree=False)
        self._count(num_proposed, num_judged, num_accepted, is_tree=False)

    def observe_tree(self, num_proposed: int, accepted: Sequence[int]) -> None:
        """Learn from one verified tree of so many drafts; `accepted` are the indices of the accepted path."""
        if num_proposed == 0:
            return
        if not self.is_told:
            path = frozenset(accepted)
            outcomes = [node in path for node in range(num_proposed)]
            self._tree.add(outcomes)
            self._prior.observe(outcomes, is_tree=True)
        self._count(num_proposed, len(accepted) + 1, len(accepted), is_tree=True)

    def _count(self, num_proposed: int, num_judged: int, num_accepted: int, *, is_tree: bool) -> None:
        self.num_rounds += 1
        self.num_proposed += num_proposed
        kept = _KEEP**num_judged
        self._judged = kept * self._judged + num_judged
        self._accepted = kept * self._accepted + num_accepted
        self._rounds.observe(num_accepted, num_proposed)
        self._is_tree = is_tree or self.is_told
        self._survival.clear()

    def survival(self, count: int) -> list[float]:
        """The chance of each of the first `count` drafts to be committed; never increasing.

        A tree's chances are evened out where a later node has the better one, which keeps their sums.
        """
        if len(self._survival) < count:
            if self._is_tree:
                beliefs = self._prior.rates(count)
                chances = (self._tree.rate(node, beliefs[node]) for node in range(count))
                self._survival = [-negated for negated in never_decreasing((-c, 1.0) for c in chances)]
            else:
                self._extend_chain(count)
        return self._survival[:count]

    def reach(self, least: float, limit: int) -> int:
        """How many leading drafts, up to `limit`, have a chance of `least` or more to be committed."""
        survival = self._survival
        while len(survival) < limit and (not survival or survival[-1] >= least):
            self.survival(min(limit, len(survival) + _STRIDE))
            survival = self._survival
        return min(limit, bisect_right(survival, -least, key=neg))

    def _extend_chain(self, count: int) -> None:
        survival, rate = self._survival, self._last_rate
        beliefs = self._prior.rates(count)
        for place in range(len(survival), count):
            belief = beliefs[place]
            if place:
                belief = min(1.0, max(0.0, belief + _CARRY * (rate - beliefs[place - 1])))
            rate = self._chain.rate(place, belief)
            survival.append(survival[-1] * rate if place else rate)
        self._last_rate = rate
