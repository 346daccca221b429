"""Who drafts, when, and under what pressure: the cells in which speculation must not change a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.repetitive_world import KINDS, Family, World, with_wishes
from tests.support.speculated import Run, by_turns, differences, engine_of, is_cut, run


@dataclass(frozen=True)
class Source:
    """A drafter: its name in the statistics, and the flags that choose it; those that name a directory of
    a world stand for it."""

    method: str
    flags: tuple[str, ...]

    def flags_in(self, world: World) -> list[str]:
        """With the world's directories in them."""
        return [str(getattr(world, flag)) if hasattr(world, flag) else flag for flag in self.flags]


_DRAFT_MODEL = ("--speculative-method", "draft-model", "--num-speculative-tokens", "4", "--draft-model")
_LOOKUP = '{"prompt_lookup_min": 1, "prompt_lookup_max": 5}'
SOURCES = {
    "n-gram": Source("ngram", ("--speculative-method", "ngram", "--speculative-config", _LOOKUP)),
    "suffix": Source("suffix", ("--speculative-method", "suffix", "--num-speculative-tokens", "5")),
    "draft model": Source("draft_model", (*_DRAFT_MODEL, "near")),
    "itself": Source("draft_model", (*_DRAFT_MODEL, "target")),
    "Medusa": Source("medusa", ("--speculative-method", "medusa", "--medusa-heads", "medusa_heads")),
    "EAGLE": Source("heads", ("--speculative-method", "heads", "--draft-heads", "eagle_heads")),
}


@dataclass(frozen=True)
class Setting:
    """How many run at once and what they have to put up with; `in_turns` instead of in threads."""

    flags: tuple[str, ...]
    concurrency: int
    in_turns: bool = False


_CROWD = ("--max-num-seqs", "32")
_TIGHT = (*_CROWD, "--num-kv-blocks", "40", "--preemption")
SETTINGS = {
    "alone": Setting(("--max-num-seqs", "1"), 1, in_turns=True),
    "crowd": Setting(_CROWD, 40),
    "no prefix cache": Setting((*_CROWD, "--no-prefix-caching"), 40, in_turns=True),
    "chunks": Setting(("--max-num-seqs", "6", "--max-num-batched-tokens", "16"), 9, in_turns=True),
    "recompute": Setting((*_TIGHT, "recompute"), 40, in_turns=True),
    "swap": Setting((*_TIGHT, "swap"), 40, in_turns=True),
    "swap, threads": Setting((*_TIGHT, "swap"), 40),
}
# A tree from the pass before is for the pass that has begun, unless it is waited for.
NEVER_IN_TIME = (("Medusa", "async"),)
# Whatever is drafted is verified, whether or not it pays.
ALWAYS = ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0")


@dataclass
class Tally:
    """What a drafter's runs came to; `counts` are by kind of request and what is counted."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def add(self, method: str, expected: Run, found: Run) -> None:
        """Compare one run and count it."""
        self.differences += differences(expected, found)
        for name, spoken in found.spoken.items():
            kind = found.kinds[name]
            self.counts[kind, "requests"] += 1
            self.counts[kind, "tokens"] += len(spoken.token_ids)
            self.counts[kind, "cancelled"] += is_cut(spoken)
            self.counts[kind, "preempted"] += len(spoken.finish.timing.preemptions) > 0
            self.counts[kind, "cached"] += spoken.finish.num_cached_tokens > 0
            stats = spoken.finish.speculation
            if stats is not None:
                self.counts[kind, "accepted"] += stats.accepted[method]
                self.counts[kind, "rejected"] += stats.proposed[method] - stats.accepted[method]

    def total(self, what: str) -> int:
        """Over all kinds."""
        return sum(self.counts[kind, what] for kind in KINDS)

    def assert_drafted(self, source: str, *, in_each: int = 0, in_all: int = 0) -> None:
        """So many drafts were right and so many wrong, or all this shows nothing.

        The target itself is never wrong.
        """
        for kind in KINDS:
            assert self.counts[kind, "accepted"] >= in_each, kind
            assert self.counts[kind, "rejected"] >= in_each or source == "itself", kind
        assert self.total("accepted") >= in_all
        if source == "itself":
            assert self.total("rejected") <= 0.01 * self.total("accepted")
        else:
            assert self.total("rejected") >= in_all

    def lines(self) -> list[str]:
        """The figures as a table."""
        columns = ("requests", "tokens", "cancelled", "preempted", "cached", "accepted", "rejected")
        lines = [" " * 8 + "".join(f"{column:>10}" for column in columns)]
        for kind in KINDS:
            lines.append(f"{kind:8}" + "".join(f"{self.counts[kind, column]:>10}" for column in columns))
        return [*lines, f"{len(self.differences)} requests differ"]


async def speak_plainly(target: Path, families: Sequence[Family]) -> Run:
    """What everyone says without speculation, heard out, 32 at a time."""
    async with engine_of(target, "--speculative-method", "none", *_CROWD) as engine:
        return await run(engine, families, 40, cuts=False)


async def speak_drafted(
    target: Path, flags: Sequence[str], setting: Setting, families: Sequence[Family], expected: Run
) -> Run:
    """What they say with speculation, some with wishes for it and some cut short."""
    executors = by_turns(len(families)) if setting.in_turns else None
    async with engine_of(target, *flags, *setting.flags, executors=executors) as engine:
        wishful = with_wishes(families, expected.token_ids, engine.info.draft_methods)
        return await run(engine, wishful, setting.concurrency)
