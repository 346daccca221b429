"""CallGrammar: calls amid free text as rules of a Lark grammar, as llguidance reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.text.structured_output import CallForm, CallForms, CallPart, Pattern, Repeated, TextUpTo

_ANY = "(.|\\n)*"


class CallGrammar:
    """Writes the rules of one reply. `literal` makes terminals of a text, `value` rules of a form by a name.

    A call is held from its opening on. `special` are the texts of special tokens, which no text spells.
    """

    def __init__(
        self,
        calls: CallForms,
        special: Sequence[str],
        literal: Callable[[str], str],
        value: Callable[[str, CallPart], str],
    ) -> None:
        self._calls = calls
        self._special = frozenset(special)
        self._literal = literal
        self._value = value
        self._rules: list[str] = []
        self._names: dict[CallPart, str] = {}  # of the rules of parts: many calls have the same ones

    def text(self, lead: str) -> str:
        """The rules; the first is `start`. `lead` are the terminals that a reply begins with."""
        calls = self._calls
        more, last = self._of(is_last=False), self._of(is_last=True)
        bare = [form for form in calls.forms if not form.opening]
        if calls.alone:
            heads = self._heads("head", "", calls.forms)
            return self._whole(f"start: {lead} (SPACE ({heads})){{1,{calls.alone}}} SPACE")
        rest = f"{self._some('head', 'TEXT', more)} {self._last('tail', 'TEXT', last)}"
        if not bare:
            return self._whole(f"start: {lead} {rest}")
        # What the reply begins with is told from a bare call by its first lexeme.
        begins = [self._last("first_tail", "FIRST", last), self._bare(bare)]
        if more:
            begins.append(f"({self._heads('first', 'FIRST', more)}) {rest}")
        self._rules.append(f"FIRST: TEXT & ~/{calls.bare}{_ANY}/")
        return self._whole(f"start: {lead} ({' | '.join(begins)})")

    def _whole(self, start: str) -> str:
        return "\n".join((start, *self._rules, f"TEXT: /{_ANY}/", "SPACE: /[ \\n]{0,2}/"))

    def _of(self, *, is_last: bool) -> list[CallForm]:
        return [form for form in self._calls.forms if form.opening and form.is_last is is_last]

    def _bare(self, forms: Sequence[CallForm]) -> str:
        options = " | ".join(self._sequence(form.parts) for form in forms)
        return f"SPACE ({options}) SPACE"

    def _some(self, name: str, text: str, forms: Sequence[CallForm]) -> str:
        """Any number of calls and of marks that are skipped, each behind `text`."""
        marks = [mark for mark in self._calls.skipped if mark in self._special]
        options = [self._heads(name, text, forms)] if forms else []
        options += [f"{text} {self._literal(mark)}" for mark in marks]
        return f"({' | '.join(options)})*" if options else ""

    def _last(self, name: str, text: str, forms: Sequence[CallForm]) -> str:
        """The end of a reply: `text`, or behind it a call that ends it."""
        return f"({' | '.join([text, *([self._heads(name, text, forms)] if forms else [])])})"

    def _heads(self, name: str, text: str, forms: Sequence[CallForm]) -> str:
        """The calls, those of the same opening behind one head."""
        options = []
        openings = dict.fromkeys(form.opening for form in forms if form.opening)
        for index, opening in enumerate(openings):
            rule = f"{name}{index}"
            self._upto(rule, text, opening)
            bodies = [self._sequence(form.parts) for form in forms if form.opening == opening]
            options.append(f"{rule} ({' | '.join(bodies)})")
        return " | ".join(options)

    def _upto(self, rule: str, text: str, mark: str) -> None:
        """A rule of any text up to a mark, and the mark: a lexeme that ends where the mark first appears."""
        is_lazy = text != "" and mark not in self._special
        self._rules.append(f"{rule}{'[lazy]' * is_lazy}: {text} {self._literal(mark)}")

    def _sequence(self, parts: Sequence[CallPart]) -> str:
        return " ".join(map(self._part, _joined(parts)))

    def _part(self, part: CallPart) -> str:
        if isinstance(part, str):
            return self._literal(part)
        if part not in self._names:
            self._names[part] = self._named(part)
        return self._names[part]

    def _named(self, part: CallPart) -> str:
        """The name of what a part is."""
        if isinstance(part, Repeated):
            choice = " | ".join(map(self._sequence, part.options))
            name = f"value{len(self._rules)}"
            self._rules.append(f"{name}: ({choice})" + ("*" if part.most is None else f"{{0,{part.most}}}"))
            return name
        name = f"value{len(self._rules)}"
        match part:
            case Pattern(regex=regex):
                terminal = name.upper()
                self._rules.append(f"{terminal}: /{regex}/")
                return terminal
            case TextUpTo(closing=closing):
                self._upto(name, "TEXT", closing)
            case _:
                self._rules.append(self._value(name, part))
        return name


def _joined(parts: Sequence[CallPart]) -> list[CallPart]:
    """The same with texts that stand next to each other as one: a lexeme is the longest that matches."""
    found: list[CallPart] = []
    for part in parts:
        if found and isinstance(part, str) and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return found
