"""RayOptions: the arguments of the Serve application, checked before anything is started. Knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf

from config import CPU_SEATS, PlannedFault, Settings, SettingsError, load_fault_plan, load_settings

SPARE_CALLS = 64  # beside requests: scrapes, health, cancels
_SERVES_OWN = ("host", "port")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """What the cluster is asked for, and the settings every replica runs with.

    `replicas` is the number of engines, and the least of them when `max_replicas` allows more (0: the same);
    `fronts` is the number of the light processes that read requests and pick an engine. `cpus` and `gpus` are
    one engine's share of a machine.
    """

    replicas: int = 2
    max_replicas: int = 0
    fronts: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    settings: Settings = field(default_factory=Settings)
    faults: tuple[PlannedFault, ...] = ()  # for tests

    @property
    def scales(self) -> bool:
        """True when the number of engines follows the load."""
        return self.max_replicas > self.replicas

    @property
    def seats(self) -> int:
        """What an engine runs at once: `max-num-seqs`; without it a CPU's, which a GPU's may be more than."""
        return self.settings.scheduler.max_num_seqs or CPU_SEATS

    @property
    def max_ongoing_requests(self) -> int:
        """More than an engine takes, so that it is the engine that refuses, with its own Retry-After."""
        most = self.seats + self.settings.server.max_queued_requests
        return most + SPARE_CALLS

    @property
    def max_unassigned_requests(self) -> int:
        """What a front holds while no engine is there to take it: as much as all of them would."""
        return self.max_ongoing_requests * max(self.replicas, self.max_replicas)

    @property
    def spill_requests(self) -> int:
        """How many requests more than the emptiest engine one may hold and still be preferred."""
        return max(1, self.seats // 4)


def read_options(args: Mapping[str, object], environ: Mapping[str, str] | None = None) -> RayOptions:
    """The options in `args`: names of `RayOptions`, and any flag of `slipstream serve` without its dashes.

    Words are joined by - or _. Switches are true or false, repeatable flags take a list. The environment
    (None: this process's) and a `config` file count as for `slipstream serve`. Raises SettingsError.
    """
    own: dict[str, float] = {}
    argv: list[str] = []
    for given, value in args.items():
        name = given.replace("-", "_")
        if name in _SERVES_OWN:
            raise SettingsError(f"argument {given}: the address is Ray Serve's own, under http_options")
        if name in _KINDS:
            own[name] = _number(name, value)
        else:
            argv += _flags(given.replace("_", "-"), value)
    faults = load_fault_plan(environ).faults
    options = RayOptions(**own, settings=load_settings(argv, environ), faults=faults)  # type: ignore[arg-type]
    if 0 < options.max_replicas < options.replicas:
        raise SettingsError(
            f"argument max_replicas = {options.max_replicas} is not allowed; "
            f"expected 0 or at least replicas, {options.replicas}"
        )
    return options


def _number(name: str, value: object) -> float:
    """`value` as the field `name` counts it. Raises SettingsError."""
    kind = _KINDS[name]
    try:
        number = kind(str(value))
    except ValueError:
        number = -1
    if not _LEAST.get(name, 0) <= number < inf:  # not a number is below nothing
        allowed = f"a number from {_LEAST.get(name, 0)}" + (" without a fraction" if kind is int else "")
        raise SettingsError(f"argument {name} = {value!r} is not allowed; expected {allowed}")
    return number


def _flags(word: str, value: object) -> list[str]:
    """The command line words that mean `word` = `value`."""
    match str(value).lower() if isinstance(value, bool | str) else value:
        case "true":
            return [f"--{word}"]
        case "false":
            return [f"--no-{word}"]
        case list() | tuple() as values:
            return [f"--{word}={each}" for each in values]
    return [f"--{word}={value}"]


_KINDS: dict[str, type[int] | type[float]] = {
    each.name: float if each.type == "float" else int
    for each in fields(RayOptions)
    if each.type in ("int", "float")
}
_LEAST = {"replicas": 1, "fronts": 1}
