"""SpeculativeDecoder: the requests that are drafted for, the drafts that each step verifies, and the results.

It owns the tapes and the statistics, and calls neither drafters nor threads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.plan.request import Request, RequestStatus, SpeculationOptions
from engine.plan.speculation.acceptance import Acceptance
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.draft_tape import (
    DraftedSequence,
    DraftedToken,
    DraftTape,
    DraftView,
    NewFeatures,
    TapeOutcome,
    accepted_drafts,
    num_levels,
    stated_chances,
)
from engine.plan.speculation.drafter import Drafter, DraftRequest
from engine.plan.speculation.drafter_link import DrafterLink
from engine.plan.speculation.drafting_state import RequestDrafting, why_not_drafted
from engine.plan.speculation.length_policy import Candidate, LengthPolicy, StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.policy_choice import PolicyChoice
from engine.plan.speculation.recent_gain import RecentGain
from engine.plan.speculation.spec_stats import SpecStats
from engine.plan.speculation.speculation_config import DraftingChange, DraftingRules, SpeculationConfig
from engine.plan.step_records import FeatureRows, ScheduledRequest


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter and the longest draft it makes; `unasked` if it also drafts where no method is named.

    One that reads features wants those that enter `feature_layers`, or what the head reads where none are
    named, of as many as `feature_window` positions. One that runs ahead may keep `max_num_lanes` other
    outcomes of a verification in mind.
    """

    drafter: Drafter
    max_tokens: int
    unasked: bool = True
    feature_layers: tuple[int, ...] = ()
    feature_window: int = 1
    max_num_lanes: int = 0


_KNOWN_ROUNDS = 32  # with fewer, it is unknown what drafts bring
_HARDLY_S = 1e-9  # that one more draft of a request adds to a micro-step


class SpeculativeDecoder:
    """Drafts come in by the `links`, go out by `choose`, and are judged by `commit`.

    There is one link for each source, in the same order, the most trusted first. A request takes part from
    `open` to `close`, except while it is preempted (`pause`). With `can_rewind` False nothing is drafted, and
    the steps that might have had drafts are counted.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        sources: Sequence[DraftSource],
        policy: LengthPolicy,
        costs: PassCosts,
        *,
        can_rewind: bool = True,
    ) -> None:
        self.config = config
        self.rules = DraftingRules(config.max_draft_tokens, config.length_policy)
        self.costs = costs
        self.stats = SpecStats()
        self.gain = RecentGain()
        self.is_crowded_out = False  # prompts left the last step no room for drafts: nor will they the next
        self._policy = PolicyChoice(config, policy, costs)
        self.links = tuple(DrafterLink(source.drafter, self._policy, self.stats) for source in sources)
        reader = next((link for link in self.links if link.drafter.reads_features), None)
        for link in self.links:
            link.rival = None if link.drafter.reads_features else reader
        self.sources = tuple(sources)
        self._feature_window = max((source.feature_window for source in sources), default=1)
        self._can_rewind = can_rewind
        self._sequences: dict[str, DraftedSequence] = {}  # those that have not ended
        self._active: dict[str, DraftedSequence] = {}  # those that are running
        self._changed: dict[str, Request] = {}  # that are to be drafted for in another way

    @classmethod
    def without_drafters(cls) -> SpeculativeDecoder:
        """One that does nothing, at next to no cost."""
        config = SpeculationConfig(vocab_size=0, max_draft_tokens=0)
        costs = PassCosts()
        return cls(config, (), make_length_policy(config, costs), costs)

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a request gets a step, as rounds went; with half of all drafts while few are known."""
        if self.why_off is not None:
            return 1.0
        if self.stats.num_rounds < _KNOWN_ROUNDS:
            return 1.0 + self.rules.num_tokens / 2
        return max(1.0, self.stats.num_committed / self.stats.num_rounds)

    @property
    def why_never(self) -> str | None:
        """Why nothing can be drafted, whatever the rules, in a sentence; None where something can."""
        if not self.sources:
            return "No drafter is loaded: --speculative-method is none."
        if not self._can_rewind:
            return "The model's state cannot go back behind a wrong draft."
        return None

    @property
    def why_off(self) -> str | None:
        """Why nothing is drafted for anyone now; None where something may be."""
        return self.why_never or (None if self.rules.enabled else "Drafting was turned off for all requests.")

    def drafting_of(self, request: Request) -> RequestDrafting:
        """How a live request is drafted for, as far as it is not up to the schedule."""
        sequence = self._sequences.get(request.request_id)
        is_active = request.request_id in self._active
        why_off = self.why_off or why_not_drafted(request, sequence, is_active=is_active)
        views = {} if sequence is None else sequence.views
        return RequestDrafting(
            methods=tuple(self.sources[index].drafter.method for index in views),
            drafter=None if sequence is None else sequence.tape.method or None,
            num_tokens=max(self._meant(request.speculation).values(), default=0),
            length=0 if why_off else max((view.limit for view in views.values()), default=0),
            length_policy=request.speculation.length_policy or self.rules.length_policy,
            why_off=why_off,
        )

    # Requests come and go.

    def open(self, request: Request) -> None:
        """A request runs, for the first time or again after `pause`."""
        if not (self.sources and request.speculation.enabled):
            return
        request_id = request.request_id
        sequence = self._sequences.get(request_id)
        if sequence is None:
            sequence = self._sequences[request_id] = self._make(request)
            request.spec_stats = request.spec_stats or SpecStats()
        self._active[request_id] = sequence
        for index, view in sequence.views.items():
            self.links[index].add(sequence, view)

    def _make(self, request: Request) -> DraftedSequence:
        options = request.speculation
        about = DraftRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            prediction=options.prediction,
        )
        features = NewFeatures(self._feature_window)
        return DraftedSequence(request, about, DraftTape(), self._make_views(options), features)

    def _make_views(self, options: SpeculationOptions) -> dict[int, DraftView]:
        views: dict[int, DraftView] = {}
        for index, max_tokens in self._meant(options).items():
            acceptance = Acceptance(self.links[index].prior)
            self._policy.choose(acceptance, options.length_policy)
            views[index] = DraftView(acceptance, max_tokens, self._policy.wanted(acceptance, max_tokens))
        return views

    def _meant(self, options: SpeculationOptions) -> dict[int, int]:
        """The sources that may draft where this is asked for, by their places, and the longest drafts."""
        if not (self._can_rewind and self.rules.enabled and options.enabled):
            return {}
        method = None if options.method == "auto" else options.method
        longest = min(self.rules.num_tokens, options.num_tokens or self.rules.num_tokens)
        return {
            index: min(source.max_tokens, longest)
            for index, source in enumerate(self.sources)
            if (source.unasked if method is None else method == source.drafter.method)
        }

    def retune(self, request: Request) -> None:
        """What a request wants of drafting has changed, which holds from the next `begin_step` on."""
        self._changed[request.request_id] = request

    def change_rules(self, change: DraftingChange) -> None:
        """Other rules hold for all requests, from the next `begin_step` on."""
        self.rules = self.rules.changed(change)
        self._changed |= {name: sequence.request for name, sequence in self._sequences.items()}

    def _apply_changes(self) -> None:
        """No drafts are being verified now, so that none can be dropped that is judged later."""
        changed, self._changed = self._changed, {}
        self._policy.name = self.rules.length_policy
        for request in changed.values():
            sequence = self._sequences.get(request.request_id)
            if sequence is not None and not sequence.is_given_up:
                self._apply(sequence)
            if request.status is RequestStatus.RUNNING and request.request_id not in self._active:
                self.open(request)

    def _apply(self, sequence: DraftedSequence) -> None:
        """Keep what was learnt of the request where the same drafters go on."""
        options = sequence.request.speculation
        meant = self._meant(options)
        if meant.keys() != sequence.views.keys():
            self.pause(sequence.request.request_id)
            sequence.views = self._make_views(options)
            return
        for index, view in sequence.views.items():
            view.max_tokens = meant[index]
            self._policy.choose(view.acceptance, options.length_policy)
        self._set_limits(sequence)

    def pause(self, request_id: str) -> None:
        """A request runs no more: its drafts, and what drafters hold of it, are dropped."""
        sequence = self._active.pop(request_id, None)
        if sequence is None:
            return
        sequence.tape.withdraw()  # its answer counts as cancelled
        self.stats.note_dropped("cancelled", max(0, len(sequence.tape) - sequence.num_in_flight))
        sequence.tape.drop_drafts()
        sequence.num_in_flight = 0
        sequence.features.clear()
        for index in sequence.views:
            self.links[index].remove(request_id)

    def give_up(self, request_id: str) -> None:
        """Draft for this request no more."""
        self.pause(request_id)
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.views, sequence.is_given_up = {}, True

    def close(self, request_id: str) -> None:
        """A request has ended; unknown ones are passed over."""
        self.pause(request_id)
        self._sequences.pop(request_id, None)
        self._changed.pop(request_id, None)

    # Before a step.

    def begin_step(
        self,
        awaited: Collection[DrafterLink],
        *,
        ahead: Collection[DrafterLink] | None = None,
        keeps_lanes: bool = False,
        not_asked: Collection[DrafterLink] = (),
    ) -> None:
        """A step is to be prepared that waits for these drafters, while those `not_asked` do nothing.

        Where drafting runs ahead of verification, by those `ahead`, drafts are chains: a tree cannot be gone
        on with. With `keeps_lanes` it does so for more than one outcome.
        """
        self.gain.begin_step()
        self._apply_changes()
        for link, source in zip(self.links, self.sources, strict=True):
            link.begin_step(
                is_awaited=link in awaited,
                runs_ahead=link in (ahead or ()),
                may_branch=ahead is None,
                is_asked=link not in not_asked,
            )
            link.max_num_lanes = source.max_num_lanes if keeps_lanes else 0

    def choose(
        self, decodes: Sequence[Request], load: StepLoad
    ) -> list[tuple[Request, tuple[DraftedToken, ...]]]:
        """The drafts to verify in this step, for those of `decodes` that get any."""
        self.is_crowded_out = load.num_prefill_tokens > 0 and load.max_draft_tokens == 0
        if not self._active:
            return []
        sequences, candidates = [], []
        for request in decodes:
            sequence = self._active.get(request.request_id)
            if sequence is None:
                continue
            if not self._can_rewind:
                self.stats.num_fallbacks += 1
                continue
            author = sequence.author
            if author is None or not sequence.tape.drafted:
                continue
            room = min(author.max_tokens, request.max_num_tokens - len(request.token_ids) - 1)
            num_available = sequence.num_offered(room)
            if num_available > 0:
                sequences.append(sequence)
                stated = stated_chances(sequence.tape.drafted[:num_available])
                chances = author.acceptance.expect(sequence.draft_kind, stated) if stated else []
                candidates.append(Candidate(author.acceptance, num_available, sequence.tape.is_tree, chances))
        if not self._can_rewind:
            return []
        chosen = []
        lengths = self._policy.lengths(candidates, load)
        for sequence, length in zip(sequences, lengths, strict=True):
            num_drafts = sequence.num_in_flight = sequence.num_verified(length)
            if num_drafts:
                chosen.append((sequence.request, tuple(sequence.tape.drafted[:num_drafts])))
        return chosen

    def expects_drafts(self, requests: Sequence[Request]) -> bool:
        """True if the next step may verify drafts of these: some are there, or are made or waited for."""
        if not self._active:
            return False
        found = (self._active.get(request.request_id) for request in requests)
        if any(sequence is not None and sequence.tape.drafted for sequence in found):
            return True
        return any(link.may_draft(requests) for link in self.links)

    # After a step.

    def commit(self, request: Request, drafted: Sequence[DraftedToken], num_tokens: int) -> None:
        """A step that verified `drafted` has committed `num_tokens`; call it before the request is closed.

        What was still to be read of them is on the tape by now.
        """
        sequence = self._active.get(request.request_id)
        if sequence is None or num_tokens == 0:
            return
        if sequence.tape.drafted:
            tokens = request.token_ids[-num_tokens:]
            verified = sequence.tape.drafted[: len(drafted)]
            sequence.num_in_flight = len(verified)  # there may not have been room for all that were chosen
            if verified:
                self._judge(sequence, verified, tokens)
            self._commit_tape(sequence, tokens)
        self._set_limits(sequence)

    def _set_limits(self, sequence: DraftedSequence) -> None:
        for index, view in sequence.views.items():
            link = self.links[index]
            if link.is_due(view):
                draft_s = _HARDLY_S if link.has_price else 0.0
                view.limit = self._policy.wanted(view.acceptance, view.max_tokens, draft_s)
            else:
                view.limit = 0

    def _judge(
        self, sequence: DraftedSequence, drafted: Sequence[DraftedToken], tokens: Sequence[int]
    ) -> None:
        """Count one round."""
        author, request = sequence.author, sequence.request
        assert author is not None and request.spec_stats is not None
        accepted = accepted_drafts(drafted, tokens)
        is_cut = len(tokens) == len(accepted)
        self.gain.observe_round(len(drafted), num_levels(drafted), len(accepted), is_cut=is_cut)
        stated = [] if is_cut else stated_chances(drafted)
        if stated:
            author.acceptance.learn(sequence.draft_kind, stated, accepted)
        if drafted[0].parent is None:
            num_judged = len(accepted) if is_cut else len(drafted)
            self._policy.observe(author.acceptance, num_judged, len(accepted))
        else:
            self._policy.observe_tree(author.acceptance, len(drafted), accepted)
        if accepted:
            author.num_vain = 0
        for stats in (self.stats, request.spec_stats):
            stats.observe_round(sequence.tape.method, len(drafted), len(accepted), len(tokens))

    def _commit_tape(self, sequence: DraftedSequence, tokens: Sequence[int]) -> None:
        tape = sequence.tape
        num_ahead, is_tree = len(tape) - sequence.num_in_flight, tape.is_tree
        first = len(sequence.request.token_ids) - len(tokens)
        outcome, num_right = tape.commit(tokens, first)
        sequence.num_in_flight = 0
        if outcome in (TapeOutcome.MISS, TapeOutcome.LANE):
            for view in sequence.views.values():
                view.unsync(first + num_right)
        if (num_ahead > 0 and not is_tree) or outcome is TapeOutcome.LANE:  # nothing is drafted past a tree
            is_good = outcome in (TapeOutcome.HIT, TapeOutcome.LANE)
            self.stats.run_ahead[outcome.value if is_good else "miss"] += 1
        if num_ahead > 0 and outcome is not TapeOutcome.HIT:
            self.stats.note_dropped("stale", num_ahead)

    def keep_features(self, scheduled: ScheduledRequest, rows: FeatureRows) -> None:
        """Keep what the target left of a request in a committed step, for drafters that read it."""
        sequence = self._active.get(scheduled.request_id)
        if sequence is None or not any(self.links[i].drafter.reads_features for i in sequence.views):
            return
        position = scheduled.first_position + scheduled.num_tokens
        if scheduled.samples:  # drafts may have been refused
            position = len(sequence.request.token_ids) - 1
        sequence.features.add(position, rows, scheduled.num_tokens)

    def observe_pass(
        self, num_seqs: int, num_tokens: int, num_drafts: int, pass_s: float, step_s: float
    ) -> None:
        """A step without prefill took `pass_s` on the device and `step_s` in all."""
        self.costs.observe(num_seqs, num_tokens, step_s)
        if num_drafts:
            self.stats.verify_s += pass_s

    def observe_pace(self, num_seqs: int, num_committed: int, seconds: float) -> None:
        """A step, drafting included, gave so many sequences so many tokens."""
        plain_s = self.costs.seconds(num_seqs, num_seqs)
        self.gain.observe_step(num_seqs, num_committed, seconds, plain_s)
