"""One setting seen from the outside: its names in every source, and what it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from config.schema import Settings
from config.units import format_size
from config.value_types import Shape

ENV_PREFIX: Final = "SLIPSTREAM_"
FLAT_ENV_NAMES: Final = frozenset({"host", "port", "api_key", "model"})
_NO_SHAPE = Shape("VALUE", "a value")


class Given(NamedTuple):
    """A value as some source gave it, unchecked, and where that was ("flag --port")."""

    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of the schema with its names; `section` is "" for a field of the root."""

    section: str
    name: str
    field: FieldInfo

    @property
    def key(self) -> str:
        """The dotted name: server.port."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def word(self) -> str:
        """The kebab-case name, as in TOML: max-num-seqs."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str | None:
        """The command line flag; None for a field of the root, which has none."""
        return f"--{self.word}" if self.section else None

    @property
    def env_names(self) -> tuple[str, ...]:
        """The environment variables that set it; an earlier one wins."""
        if not self.section:
            return (f"{ENV_PREFIX}{self.name.upper()}",)
        full = f"{ENV_PREFIX}{self.section.upper()}__{self.name.upper()}"
        return (full, f"{ENV_PREFIX}{self.name.upper()}") if self.name in FLAT_ENV_NAMES else (full,)

    @property
    def shape(self) -> Shape:
        """How its kind of value is shown."""
        return next((mark for mark in self.field.metadata if isinstance(mark, Shape)), _NO_SHAPE)

    @property
    def is_switch(self) -> bool:
        """True when the flag takes no value and has a --no- twin."""
        return self.field.annotation is bool

    @property
    def is_repeatable(self) -> bool:
        """True when it holds any number of values."""
        return get_origin(self.field.annotation) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it accepts; empty when it is no choice between words."""
        annotation = self.field.annotation
        return get_args(annotation) if get_origin(annotation) is Literal else ()

    @property
    def words(self) -> tuple[str, ...]:
        """What to offer a person: its choices, or the usual ones where it accepts others, too."""
        return self.choices or self.shape.words

    @property
    def allowed(self) -> str:
        """What it accepts, in words that end an error line."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.is_switch:
            return "true or false"
        text = self.shape.allowed + (self._bounds() if self.shape.numeric else "")
        return f"{text}, or auto" if self.shape.auto else text

    def spell(self, value: object) -> str:
        """`value` of this setting as a person would write it; "" for what is not set."""
        if isinstance(value, bool):
            return "on" if value else "off"
        if self.shape.size and isinstance(value, int):
            return format_size(value)
        if value is None or value == ():
            return "auto" if self.shape.auto else ""
        return str(value).removesuffix(".0") if isinstance(value, float) else str(value)

    def _bounds(self) -> str:
        low = high = ""
        for mark in self.field.metadata:
            if isinstance(mark, Ge):
                low = f"{mark.ge}"
            elif isinstance(mark, Gt):
                low = f"more than {mark.gt}"
            elif isinstance(mark, Le):
                high = f"{mark.le}"
            elif isinstance(mark, Lt):
                high = f"less than {mark.lt}"
        if not high:
            return f", {low}" if low.startswith("more") else f", {low} or more"
        return f", {low} and at most {high}" if low.startswith("more") else f" from {low} to {high}"


def _settings_of(model: type[BaseModel], section: str = "") -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _settings_of(field.annotation, name)
        else:
            yield Setting(section, name, field)


SETTINGS: Final = tuple(_settings_of(Settings))
BY_KEY: Final = MappingProxyType({setting.key: setting for setting in SETTINGS})
SECTIONS: Final = tuple(dict.fromkeys(setting.section for setting in SETTINGS if setting.section))
