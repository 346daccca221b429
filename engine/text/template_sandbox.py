"""TemplateSandbox: Jinja as chat templates use it, with a limit on the time and on the text of one rendering.

A template comes with the model and is code that somebody else has written. Jinja's sandbox keeps it from what
it must not touch; this one also keeps it from taking all time and memory. What an operation makes is counted
before it is made.
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
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.template_costs import FILTERS, MAX_CHARS, OF_LISTS, Cost, cost_of_method, percent, weigh

MAX_SECONDS = 3.0  # a hundred times what the longest conversation takes
MAX_MADE_CHARS = 1 << 28  # of all texts of one rendering together, and of lists
MAX_ITEMS = 1 << 20  # of any list
MAX_TEMPLATE_CHARS = 1 << 18
_MAX_COUNT = 1 << 20  # of any argument: a width, an indent, a number of repetitions
_MAX_BITS = 4096
_COMPARING = (
    *("in", "==", "eq", "equalto", "!=", "ne"),
    *(">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"),
)
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

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        """`{{ a }}`."""
        super()._output_child_pre(node, frame, finalize)
        self.write("environment.shown(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")
        super()._output_child_post(node, frame, finalize)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """`a == b`, of lists that may be long."""
        self.write("(environment.compared(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.write(f" {operators[operand.op]} environment.compared(")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """`a[b]` and `a[b:c]`."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        self.visit(node.node, frame)
        for part in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            self.visit(part or nodes.Const(None), frame)
        self.write(")")

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
    intercepted_binops = frozenset({"+", "*", "**", "%", "/", "//"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
        )
        self._rendering = threading.local()
        self.filters["tojson"] = _to_json
        self.filters = {name: self._watched(name, each) for name, each in self.filters.items()}
        tests: dict[str, Any] = {**self.tests}
        self.tests.update((name, self._comparing(tests[name])) for name in _COMPARING)
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
        self._rendering.num_made = 0
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
        self._make(num_chars)
        return "".join(kept)

    def join(self, parts: Iterable[object]) -> str:
        """The texts of `parts` in one."""
        return self.concat(str(self.shown(part)) for part in parts)

    def shown(self, value: Any) -> Any:
        """A value that is about to be made text."""
        if not isinstance(value, str):
            self._make(weigh(value))
        return value

    def compared(self, value: Any) -> Any:
        """A value that is about to be compared, which may take reading all of it."""
        if isinstance(value, list | tuple | dict):
            self.tick()
            _check_chars(weigh(value))
        return value

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Part of a text or a list."""
        if isinstance(value, str | list | tuple):
            self._make(len(value))
        return value[start:stop:step]

    def _make(self, num_chars: int) -> None:
        """Count what is going to be made. Raises TemplateTooCostly for too much, at a time or in all."""
        _check_chars(num_chars)
        made = getattr(self._rendering, "num_made", 0) + num_chars
        self._rendering.num_made = made
        if made > MAX_MADE_CHARS:
            raise TemplateTooCostly(f"it makes texts of more than {MAX_MADE_CHARS} characters in all")

    def _listed(self, value: Any) -> Any:
        """A list of what can be gone through only once; whatever has a length as it is."""
        if hasattr(value, "__len__") or not hasattr(value, "__iter__"):
            return value
        found: list[Any] = []
        for each in value:
            found.append(each)
            if len(found) % 1024 == 0:
                self.tick()
                _check_items(len(found))
        return found

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in a template."""
        self.tick()
        method = getattr(obj, "__wrapped__", obj)  # by the sandbox, which watches what formats reach
        owner = getattr(method, "__self__", None)
        _check_counts((*args, *kwargs.values()))
        if owner is not None:
            args = self._check_method(owner, method.__name__, args, kwargs)
        return _checked(super().call(context, obj, *args, **kwargs))

    def _check_method(
        self, owner: object, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments as the method is to have them."""
        if isinstance(owner, str) and name.startswith("format"):
            _check_format(_WIDE_BRACES, owner)
        if isinstance(owner, str) and name == "join":
            args = tuple(map(self._listed, args))
        cost = cost_of_method(owner, name)
        if cost is not None:
            self._make_by(cost, (owner, *args), kwargs)
        return args

    def _make_by(self, cost: Cost, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with suppress(TypeError, AttributeError, ValueError):  # the call itself says what is wrong with them
            self._make(cost(*args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator in a template."""
        if isinstance(left, int) and isinstance(right, int):
            _check_numbers(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(_WIDE_PERCENT, left)
            self._make_by(percent, (left, right), {})
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, type(left)):
            self._make_sequence(left, len(left) + len(right))
        elif operator == "*":
            self._make_product(left, right)
        return super().call_binop(context, operator, left, right)

    def _make_product(self, left: Any, right: Any) -> None:
        """Of a number and what is to be repeated, on either side."""
        value, count = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(value, str | bytes | list | tuple) and isinstance(count, int):
            self._make_sequence(value, len(value) * max(0, count))

    def _make_sequence(self, kind: Any, length: int) -> None:
        if isinstance(kind, list | tuple):
            _check_items(length)
            length *= 2
        self._make(length)

    # How code is generated.

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            tick = nodes.EnvironmentAttribute("tick", lineno=loop.lineno)
            call = nodes.Call(tick, [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(call, lineno=loop.lineno))
        return tree.set_environment(self)  # type: ignore[return-value]

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is counted as a step, and so is what it makes, before it does."""
        cost = FILTERS.get(name)
        first = 1 if hasattr(call, "jinja_pass_arg") else 0  # before that, what the sandbox gives

        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            _check_counts((*args, *kwargs.values()))
            if name == "format":
                _check_format(_WIDE_PERCENT, str(args[0]))
            if name in OF_LISTS and len(args) > first:
                args = (*args[:first], self._listed(args[first]), *args[first + 1 :])
            if cost is not None:
                self._make_by(cost, args[first:], kwargs)
            return _checked(call(*args, **kwargs))

        return watched

    def _comparing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A test that compares."""

        def comparing(*args: Any) -> Any:
            return call(*map(self.compared, args))

        return comparing


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


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise TemplateTooCostly(f"it makes a list of more than {MAX_ITEMS} items")


def _check_numbers(operator: str, left: int, right: int) -> None:
    if operator == "**":
        _check_bits(left.bit_length() * abs(right))
    else:
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(count: int) -> None:
    if count > _MAX_BITS:
        raise TemplateTooCostly(f"it computes a number of more than {_MAX_BITS} bits")
