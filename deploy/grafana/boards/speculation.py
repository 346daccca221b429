"""Whether drafting pays, which drafter brings it, and where drafts are lost."""

from __future__ import annotations

from deploy.grafana.panels import Board, Panel, Query, Row, bars, lines, stat
from deploy.grafana.queries import CHOSEN, mean, quantile, rate, ratio, series, share, split

DRAFTED = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
DROPPED = "spec_decode_draft_tokens_dropped_total"
ROUNDS = "spec_decode_num_drafts_total"
RUN_AHEAD = "spec_decode_run_ahead_total"
HIT = 'result="hit"'
DECODE = 'phase="decode"'
NO_DRAFTS = "No drafts were verified in this time: no request, drafting is off, or it does not pay."
PAYS = (("red", None), ("orange", 0.95), ("green", 1.0))


def _at_a_glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Speed by drafts",
            "Tokens in a step's time, over those without drafts; of late, as the controller measures it.",
            "short",
            f"avg({series('speculation_speedup_ratio')})",
            PAYS,
        ),
        stat(
            "Accepted",
            "Share of the verified drafts that was right.",
            "percentunit",
            ratio(ACCEPTED, DRAFTED),
        ),
        stat(
            "Tokens a round",
            "Tokens from one verification: the accepted drafts and the target's own.",
            "short",
            f"1 + {ratio(ACCEPTED, ROUNDS)}",
        ),
        stat(
            "Draft length",
            "Drafted tokens verified a round, of late.",
            "short",
            f"avg({series('speculation_draft_length')})",
        ),
        stat(
            "Output from drafts",
            "Share of the generated tokens that a drafter had guessed.",
            "percentunit",
            share(ACCEPTED, "generation_tokens_total"),
        ),
        stat(
            "Never verified",
            "Share of the drafted tokens that were dropped before the target saw them.",
            "percentunit",
            f"{rate(DROPPED)} / ({rate(DROPPED)} + {rate(DRAFTED)})",
        ),
        stat(
            "Run-ahead hits",
            "Share of the rounds in which the drafter had guessed what came after its draft too.",
            "percentunit",
            f"{rate(RUN_AHEAD, labels=HIT)} / {rate(RUN_AHEAD)}",
        ),
        stat("Rounds", "Verifications a second.", "ops", rate(ROUNDS)),
    )


def _gain() -> tuple[Panel, ...]:
    position = "spec_decode_num_accepted_tokens_per_pos_total"
    return (
        lines(
            "Speed by drafts",
            "Tokens in a step's time over those without drafts. Below 1 drafting costs more than it brings; "
            "the controller then shortens drafts down to none. Other work on the machine makes it read low. "
            "By the formula it is what acceptance, length and cost of drafts promise if verifying is free.",
            "short",
            Query(series("speculation_speedup_ratio"), "{{instance}}"),
            Query(series("speculation_theoretical_speedup_ratio"), "{{instance}} by the formula"),
            steps=PAYS,
            lines=True,
        ),
        lines(
            "Acceptance by method",
            "Share of the verified drafts of each drafter that was right.",
            "percentunit",
            Query(ratio(ACCEPTED, DRAFTED, "method"), "{{method}}"),
            top=1.0,
        ),
        lines(
            "Tokens a round",
            "What a verification brings, the target's own token included, beside what it verifies.",
            "short",
            Query(f"1 + {ratio(ACCEPTED, ROUNDS)}", "brought"),
            Query(f"1 + {ratio(DRAFTED, ROUNDS)}", "verified"),
        ),
        split(
            "Drafted tokens by method",
            "Drafted tokens that the target verified.",
            "count:tok/s",
            (DRAFTED, "method"),
        ),
        split(
            "Accepted tokens by method",
            "Drafted tokens that were right: time saved.",
            "count:tok/s",
            (ACCEPTED, "method"),
        ),
        bars(
            "Acceptance by position",
            "Share of the rounds that accepted the draft at each place, over the whole time shown. It falls "
            "with each place, as one counts only if all before it were right.",
            "percentunit",
            Query(
                f"sort_desc(sum by (position) (increase(slipstream_{position}{{{CHOSEN}}}[$__range]))"
                f" / on () group_left () sum(increase({series(ROUNDS)}[$__range])) > 0)",
                "{{position}}",
                instant=True,
            ),
            top=1.0,
        ),
    )


def _cost() -> tuple[Panel, ...]:
    return (
        split(
            "Dropped drafts",
            "Drafted in vain: stale (the text went another way), late, cancelled, or a drafter's error.",
            "count:tok/s",
            (DROPPED, "reason"),
        ),
        split(
            "Run-ahead",
            "Rounds after which the drafter had already gone on in the right way (hit), or not (miss).",
            "ops",
            (RUN_AHEAD, "result"),
        ),
        lines(
            "One micro-step of a drafter",
            "Time to draft once, beside the target's work.",
            "s",
            Query(quantile(0.5, "draft_duration_seconds"), "P50"),
            Query(quantile(0.95, "draft_duration_seconds"), "P95"),
            Query(mean("draft_duration_seconds"), "mean"),
        ),
        lines(
            "Steps with and without drafts",
            "Mean time of a step that verifies drafts, beside that of any decoding step.",
            "s",
            Query(mean("verify_duration_seconds"), "verifying"),
            Query(
                f"{rate('step_duration_seconds_sum', labels=DECODE)}"
                f" / {rate('step_duration_seconds_count', labels=DECODE)}",
                "decoding",
            ),
        ),
        lines(
            "Decodes that cannot be drafted for",
            "Steps of models that cannot be rewound, which go one token at a time.",
            "ops",
            Query(f"{rate('spec_decode_n1_fallbacks_total', 'model_name')} > 0", "{{model_name}}"),
            empty="Every model that ran can be drafted for.",
        ),
        lines(
            "Generated tokens by source",
            "Guessed by a drafter, or the target's own.",
            "count:tok/s",
            Query(rate(ACCEPTED), "drafted"),
            Query(f"{rate('generation_tokens_total')} - {rate(ACCEPTED)}", "target"),
            stacked=True,
        ),
    )


SPECULATION = Board(
    "slipstream-speculation",
    "Slipstream / Speculation",
    "Whether drafting pays, which drafter brings it, and where drafts are lost. Text is the same either way.",
    (
        Row("At a glance", _at_a_glance(), "no drafts"),
        Row("Gain", _gain(), NO_DRAFTS),
        Row("Cost", _cost(), NO_DRAFTS),
    ),
)
