"""TemplateSandbox: Jinja as chat templates use it, with a limit on the time and on the text of one rendering.

A template comes with the model and is code that somebody else has written. Jinja's sandbox keeps it from what
it must not touch; this one also keeps it from taking all time and memory.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 3.0  # a hundred times what the longest conversation takes
MAX_CHARS = 1 << 24  # of any text, twice what a body may have by default
MAX_TEMPLATE_CHARS = 1 << 18
_MAX_COUNT = 1 << 20  # of any argument: a width, an indent, a number of repetitions
_MAX_BITS = 4096
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}:]*:[^{}]*\d{5}")


class TemplateTooCostly(SecurityError):
    """A template that was stopped for the time or the memory it takes."""


class _GenerationTag(Extension):
    """`{% generation %}`, which marks in some templates what the assistant wrote: shows what is in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Scope:
        """The statements in between."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Generator(CodeGenerator):
    """Joins texts through the sandbox, which knows how long they may be."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`."""
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders; any thread may do so at any time. What costs too much is a TemplateTooCostly."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
        )
        self._rendering = threading.local()
        self.filters["tojson"] = _to_json
        self.filters = {name: self._watched(each) for name, each in self.filters.items()}
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise, strftime_now=_now, dict=_make_dict)

    def compiled(self, source: str) -> Template:
        """The template in `source`. Raises TemplateError."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateTooCostly(f"it has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}")
        return self.from_string(source)

    def render(self, template: Template, values: Mapping[str, object]) -> str:
        """What `template` makes of `values`. Raises TemplateError, and whatever its expressions raise."""
        self._rendering.deadline = time.monotonic() + MAX_SECONDS
        return self.concat(template.root_render_func(template.new_context(dict(values))))

    # What generated code calls.

    def tick(self) -> str:
        """Called in every round of every loop."""
        if time.monotonic() > getattr(self._rendering, "deadline", float("inf")):
            raise TemplateTooCostly(f"it takes more than {MAX_SECONDS:g} seconds")
        return ""

    def concat(self, parts: Iterable[str]) -> str:
        """One text of what a template, a macro or a block has written."""
        kept, num_chars = [], 0
        for part in parts:
            num_chars += len(part)
            _check_chars(num_chars)
            kept.append(part)
        return "".join(kept)

    def join(self, parts: Iterable[object]) -> str:
        """The texts of `parts` in one."""
        return self.concat(map(str, parts))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in a template."""
        self.tick()
        method = getattr(obj, "__wrapped__", obj)  # by the sandbox, which watches what formats reach
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and method.__name__.startswith("format"):
            _check_format(_WIDE_BRACES, owner)
        _check_counts((*args, *kwargs.values()))
        return _checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator in a template."""
        if operator == "%" and isinstance(left, str):
            _check_format(_WIDE_PERCENT, left)
        elif operator == "+" and isinstance(left, str | list | tuple) and type(left) is type(right):
            _check_chars(len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)

    # How code is generated.

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            tick = nodes.EnvironmentAttribute("tick", lineno=loop.lineno)
            call = nodes.Call(tick, [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(call, lineno=loop.lineno))
        return tree.set_environment(self)  # type: ignore[return-value]

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is counted as a step and may neither take nor give what is too large."""

        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            _check_counts((*args, *kwargs.values()))
            if call.__name__ == "do_format":
                _check_format(_WIDE_PERCENT, str(args[0]))
            return _checked(call(*args, **kwargs))

        return watched


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    """How a template refuses a conversation."""
    raise TemplateError(message)


def _now(layout: str) -> str:
    """The local time, for templates that tell the model the date."""
    return datetime.now().strftime(layout)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The function, for the class has more than a template needs."""
    return dict(*args, **kwargs)


def _checked(result: Any) -> Any:
    if isinstance(result, str):
        _check_chars(len(result))
    return result


def _check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise TemplateTooCostly(f"it makes a text of more than {MAX_CHARS} characters")


def _check_counts(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_COUNT:
            raise TemplateTooCostly(f"it asks for more than {_MAX_COUNT} of something")


def _check_format(wide: re.Pattern[str], layout: str) -> None:
    if wide.search(layout):
        raise TemplateTooCostly("it asks for a text of enormous width")


def _check_product(left: Any, right: Any) -> None:
    """Of numbers, or of a number and what is to be repeated."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    with suppress(TypeError):  # no product, or one of fractions
        _check_chars(len(left) * right if isinstance(right, int) else left * len(right))


def _check_bits(count: int) -> None:
    if count > _MAX_BITS:
        raise TemplateTooCostly(f"it computes a number of more than {_MAX_BITS} bits")
