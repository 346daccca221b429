"""DraftTask: a micro-step of a drafter that is out, and what a step expects of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from engine.plan.speculation.drafter import DraftJob, DraftResult, TellingDrafter, UnreadChains
from engine.plan.speculation.drafter_link import CircuitBreaker, DrafterLink


@dataclass(slots=True, eq=False)
class DrafterEntry:
    """A drafter, and whether it is fit to be asked. It is not quick after a step waited for it in vain.

    Its last micro-step took `seconds`.
    """

    link: DrafterLink
    breaker: CircuitBreaker
    is_quick: bool = True
    seconds: float = 0.0
    tells: bool = field(
        init=False
    )  # of what is on its way; asked once, as it takes longer than other questions

    def __post_init__(self) -> None:
        self.tells = isinstance(self.link.drafter, TellingDrafter)


@dataclass(slots=True)
class DraftTask:
    """A micro-step that is out since `started`; its result is an exception if it failed.

    It may have `told` of drafts that are on their way.
    """

    entry: DrafterEntry
    jobs: list[DraftJob]
    future: asyncio.Future[DraftResult | Exception]
    started: float
    told: asyncio.Future[UnreadChains] | None = None
    is_hanging: bool = False


@dataclass(slots=True)
class ExpectedDrafts:
    """A micro-step whose drafts a step verifies before they are read.

    The step began to wait for them at `begun`, was told of them at `told`, and was launched at `launched`.
    """

    task: DraftTask
    begun: float
    told: float
    launched: float | None = None

    def waited_s(self, now: float, pass_s: float) -> float:
        """How much later the step began for them, which is over now and took `pass_s` of the device.

        It was decided meanwhile, which is none of it.
        """
        if self.launched is None:
            return 0.0
        return max(0.0, now - pass_s - self.begun - (self.launched - self.told))
