"""What an operation of a template will make, known before it is done, in characters or what costs as much.

Every function returns an upper bound, but for escapes, which may make ten characters of one. A filter or a
method without an entry makes nothing that is larger than what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.utils import Namespace

MAX_CHARS = 1 << 24  # of any text, twice what a body may have by default
TOO_MUCH = MAX_CHARS + 1
_ITEM_CHARS = 2  # an item of a list takes eight bytes, and is a text of its own with quotes and a comma
_FORMATTED_CHARS = 10_000  # the widest that a layout may make a number
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_MAX_PRECISION = 1000
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView)

Cost = Callable[..., int]


def weigh(value: object) -> int:
    """The characters that `value` has as text; at least TOO_MUCH, without looking further, for too many.

    What is in it twice counts twice: it would be written twice.
    """
    if isinstance(value, str):
        return len(value)
    total = 0
    pending: list[object] = [value]
    while pending and total <= MAX_CHARS:
        each = pending.pop()
        total += _own_chars(each)
        if total <= MAX_CHARS:
            pending += _parts(each)
    return total


def _own_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value) + _ITEM_CHARS
    if isinstance(value, bytes | bytearray):
        return 4 * len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + _ITEM_CHARS
    if isinstance(value, Mapping | ItemsView | list | tuple | set | frozenset | KeysView | ValuesView):
        return _ITEM_CHARS * (len(value) + 1)
    return 32


def _parts(value: object) -> Sequence[object]:
    if isinstance(value, Namespace):
        return (object.__getattribute__(value, "_Namespace__attrs"),)
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, ItemsView):
        return [each for pair in value for each in pair]
    return list(value) if isinstance(value, _CONTAINERS) else ()


def num_items(value: object) -> int:
    """How many items a list of `value` has."""
    return len(value) if hasattr(value, "__len__") else 0


# Filters: called with what the template gives, the value first.


def times(factor: int) -> Cost:
    """As many characters as the value's text, so many times; the slower, the more times."""
    return lambda value, /, *_, **__: factor * weigh(value)


def _join(value: Any, d: Any = "", attribute: Any = None) -> int:
    return weigh(value) + num_items(value) * weigh(d)


def _replace(value: Any, old: Any, new: Any, count: Any = None) -> int:
    if not isinstance(value, str) or not isinstance(old, str):
        return weigh(value) * (1 + weigh(new))
    return len(value) + value.count(old) * weigh(new)


def _indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> int:
    return weigh(value) + _num_lines(value) * (1 + (width if isinstance(width, int) else weigh(width)))


def _num_lines(value: Any) -> int:
    return 1 + sum(value.count(end) for end in _LINE_ENDS) if isinstance(value, str) else weigh(value)


def _wordwrap(value: Any, width: Any = 79, *args: Any, wrapstring: Any = None, **_: Any) -> int:
    between = wrapstring if len(args) < 2 else args[1]
    num_lines = weigh(value) // max(1, width) + _num_lines(value)
    return 32 * weigh(value) + int(num_lines) * weigh(between or "\n")


def _sum(value: Any, attribute: Any = None, start: Any = 0) -> int:
    """Lists are added one by one, each time into a new one."""
    total = weigh(value) + weigh(start)
    return total if isinstance(start, int | float) else total * (1 + num_items(value))


def _sort(value: Any, /, *_: Any, **__: Any) -> int:
    """Each comparison may read all of two texts."""
    return weigh(value) * num_items(value).bit_length()


def _list(value: Any, /, *_: Any, **__: Any) -> int:
    """A character of a text becomes a text."""
    return num_items(value) * (32 if isinstance(value, str) else _ITEM_CHARS)


def _batch(value: Any, /, *args: Any, **kwargs: Any) -> int:
    """And what the last one is filled up with."""
    numbers = (each for each in (*args, *kwargs.values()) if isinstance(each, int))
    return _list(value) + _ITEM_CHARS * sum(map(abs, numbers))


def _round(value: Any, precision: Any = 0, method: str = "common") -> int:
    return TOO_MUCH if abs(precision) > _MAX_PRECISION else 32


def _int(value: Any, default: Any = 0, base: Any = 10) -> int:
    """Beyond this, arithmetic takes time; in base 10 Python refuses as much."""
    return TOO_MUCH if base != 10 and weigh(value) > _MAX_PRECISION else 32


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> int:
    width = indent if isinstance(indent, int) else weigh(indent or "")
    between = sum(map(weigh, separators or ()))
    chars = weigh(value)
    if chars > MAX_CHARS:
        return chars
    count, depth = _shape(value)
    return chars * (6 if ensure_ascii else 1) + count * (between + 1 + width * (depth + 1))


def _shape(value: Any) -> tuple[int, int]:
    """How many values there are in `value`, which is not too large, and how deep they go."""
    count = depth = 0
    pending = [(value, 1)]
    while pending:
        each, level = pending.pop()
        count, depth = count + 1, max(depth, level)
        pending += [(part, level + 1) for part in _parts(each)]
    return count, depth


def percent(layout: Any, /, *args: Any, **kwargs: Any) -> int:
    """`layout % args`; any of them may be named again and again."""
    return weigh(layout) + int(layout.count("%")) * _widest(args, kwargs)


def _braces(layout: str, /, *args: Any, **kwargs: Any) -> int:
    return len(layout) + layout.count("{") * _widest(args, kwargs)


def _widest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return _FORMATTED_CHARS + max(map(weigh, (*args, *kwargs.values())), default=0)


FILTERS: Mapping[str, Cost] = {
    "batch": _batch,
    "capitalize": times(3),
    "center": lambda value, width=80: weigh(value) + width,
    "dictsort": _sort,
    "e": times(6),
    "escape": times(6),
    "forceescape": times(6),
    "format": percent,
    "groupby": _sort,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "list": _list,
    "lower": times(3),
    "max": _sort,
    "min": _sort,
    "pprint": times(32),
    "replace": _replace,
    "reverse": _list,
    "round": _round,
    "slice": _batch,
    "sort": _sort,
    "string": times(1),
    "striptags": times(8),
    "sum": _sum,
    "title": times(8),
    "tojson": _tojson,
    "trim": times(1),
    "truncate": times(1),
    "unique": _sort,
    "upper": times(3),
    "urlencode": times(12),
    "urlize": times(32),
    "wordcount": times(8),
    "wordwrap": _wordwrap,
    "xmlattr": times(8),
}
# These go through their value more than once, or all of it at a time: they are given a list of it.
OF_LISTS = frozenset(
    {"batch", "groupby", "join", "list", "max", "min", "slice", "sort", "sum", "unique", "xmlattr"}
)


# Methods: called with their owner first.


def _padded(owner: Any, width: Any = 0, *_: Any) -> int:
    return len(owner) + int(width)


def _split(owner: Any, sep: Any = None, *_: Any, **__: Any) -> int:
    return len(owner) + 32 * (1 + (len(owner) // 2 if sep is None else owner.count(sep)))


def _translate(owner: Any, table: Any = None, *_: Any) -> int:
    longest = max(map(weigh, table.values()), default=1) if isinstance(table, Mapping) else 4
    return len(owner) * max(4, longest)


TEXT_METHODS: Mapping[str, Cost] = {
    "center": _padded,
    "encode": lambda owner, *_, **__: 4 * len(owner),
    "expandtabs": lambda owner, tabsize=8: len(owner) + owner.count("\t") * tabsize,
    "format": _braces,
    "format_map": lambda owner, mapping: _braces(owner, mapping),
    "join": lambda owner, parts: _join(parts, owner),
    "ljust": _padded,
    "replace": lambda owner, old, new, *_: _replace(owner, old, new),
    "rjust": _padded,
    "rsplit": _split,
    "split": _split,
    "splitlines": lambda owner, *_, **__: len(owner) + 32 * _num_lines(owner),
    "translate": _translate,
    "zfill": _padded,
}
_OTHER_TEXT_METHOD = times(3)
LIST_METHODS: Mapping[str, Cost] = {
    "copy": _list,
    "count": times(1),
    "index": times(1),
}


def cost_of_method(owner: object, name: str) -> Cost | None:
    """Of a method of this value; None if it makes nothing large."""
    if isinstance(owner, str | bytes | bytearray):
        return TEXT_METHODS.get(name, _OTHER_TEXT_METHOD)
    return LIST_METHODS.get(name) if isinstance(owner, list | tuple | dict) else None
