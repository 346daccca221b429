"""The sandbox renders what transformers renders, and stops what would take all time or memory."""

from __future__ import annotations

import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError

from engine.errors import InvalidRequest, StartRefused
from engine.text import template_costs, template_sandbox
from engine.text.chat_template import ChatTemplate
from engine.text.template_sandbox import MAX_TEMPLATE_CHARS, TemplateSandbox, TemplateTooCostly
from tests.support import tool_templates
from tests.unit.text.builders import CHATML, byte_level, save

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": [1, "é<"]}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": " Hello, <world> & 'others' \n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    {"role": "user", "content": "thanks"},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

EVERYTHING = """{%- set ns = namespace(last=-1, found=false) -%}
{{ bos_token }}{%- macro show(message, depth=0) %}
    {{- '  ' * depth }}[{{ message.role | upper }}] {{ message['content'] | trim | replace('o', '0') }}
{% endmacro %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if loop.index0 > 2 %}{% break %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {{- show(message, depth=loop.index) }}
    {%- for call in message.tool_calls | default([], true) %}
        {{- call.function | tojson(indent=4) ~ '\\n' ~ loop.first ~ loop.last ~ loop.length }}
        {%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | join('+') }};{% endfor %}
    {%- endfor %}
{%- endfor %}
{% generation %}  seen {{ ns.last }} of {{ messages | length }}{% endgeneration %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | map('trim') | list }}
{{ messages[::-1][0].content.split('a')[0] + messages[-1]['content'][1:3] + '%s-%03d' % ('x', 7) }}
{{ '{:>4}|{}'.format('a', 2) }} {{ dict(a=1, **{'b': 2}) }} {{ [1, 2] + [3] }} {{ 2 ** 10 }}
{{ 7 % 4 }} {{ 2 * 3 }}
{{ undefined_name is defined }} {{ tools is none }} {{ tools }} {{ documents }} {{ add_generation_prompt }}
{%- for group in messages | groupby('role') %}{{ group.grouper }}:{{ group.list | length }} {% endfor %}
{%- for entry in [[1, [2, [3]]], 4] recursive %}
    {{- loop(entry) if entry is not number and entry is not string else entry }},
{%- endfor %}
{%- filter upper %}shout{% endfilter %}{% set block %} kept{% endset %}{{ block ~ '**%s** ' % 'b' }}
{{- "100% sure 12345" }} {{ 'yes' if 'Hello' in messages[0].content else 'no' }} {{ eos_token }}
"""


@cache
def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("model"), chat_template=None)


@pytest.mark.parametrize("name", ["chatml", "everything", *tool_templates.ALL])
def test_it_renders_what_transformers_renders(directory: Path, name: str) -> None:
    template = {"chatml": CHATML, "everything": EVERYTHING, **tool_templates.ALL}[name]
    talk = TALK if name != "chatml" else [TALK[0], {"role": "assistant", "content": "x"}]
    tokenizer = reference(directory)
    ours = ChatTemplate(tokenizer, template)
    for tools in (None, [TOOL]):
        if tools and ours.tool_text is None:
            continue
        expected = tokenizer.apply_chat_template(
            talk, tools=tools, chat_template=template, add_generation_prompt=True, tokenize=False
        )
        assert ours.render(talk, tools or ()) == expected


def render(source: str, **values: object) -> str:
    sandbox = TemplateSandbox()
    return sandbox.render(sandbox.compiled(source), values)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
GROWING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = GROWTH %}{% endfor %}"
BOMBS = {
    "loops that write nothing": NESTED.replace("BODY", ""),
    "loops that write": NESTED.replace("BODY", "x"),
    "loops that write much": NESTED.replace("BODY", "{{ 'x' * 100000 }}"),
    "an inner loop that passes all over": NESTED.replace("99999) %}BODY", "99999) if false %}"),
    "doubling": GROWING.replace("GROWTH", "ns.x ~ ns.x"),
    "adding": GROWING.replace("GROWTH", "ns.x + ns.x"),
    "lists": GROWING.replace("'ab'", "[1]").replace("GROWTH", "ns.x + ns.x"),
    "replacing": GROWING.replace("GROWTH", "ns.x | replace('a', 'aaaa')"),
    "replacing by a method": GROWING.replace("GROWTH", "ns.x.replace('a', 'aaaa')"),
    "joining": GROWING.replace("GROWTH", "[ns.x, ns.x] | join"),
    "kept blocks": "{% set x = 'a' * 9999 %}{% for i in range(9999) %}{% set x %}{{ x }}{{ x }}{% endset %}"
    "{{ x }}{% endfor %}",
    "a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "repeating": "{{ 'x' * 10 ** 10 }}",
    "repeating from the left": "{{ 10 ** 10 * 'x' }}",
    "a long list": "{{ [0] * 10 ** 9 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "powers of powers": GROWING.replace("'ab'", "9").replace("GROWTH", "ns.x * ns.x"),
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a wide format by a filter": "{{ '%999999999d' | format(1) }}",
    "a wide format by a method": "{{ '{:999999999}'.format(1) }}",
    "a format of given width": "{{ '%*d' % (999999999, 1) }}",
    "padding": "{{ 'x'.ljust(10 ** 9) }}",
    "centering": "{{ 'x' | center(10 ** 9) }}",
    "indenting": "{{ {'a': 1} | tojson(indent=10 ** 9) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    started = time.monotonic()
    with pytest.raises(TemplateTooCostly):
        render(BOMBS[name])
    assert time.monotonic() - started < 5


# Each makes some two million characters or more of 4000; `x` is a text, `l` a list, `d` holds both.
AMPLIFIERS = {
    "*": "{{ (x * 600) | length }}",
    "* from the left": "{{ (600 * x) | length }}",
    "* of a list": "{{ (l * 60000) | length }}",
    "+": GROWING.replace("'ab'", "x").replace("GROWTH", "ns.x + ns.x"),
    "+ of lists": GROWING.replace("'ab'", "l").replace("GROWTH", "ns.x + ns.x"),
    "~": "{{ (" + "x ~ " * 600 + "x) | length }}",
    "~ of a list": "{{ (600 * [x]) ~ '' }}",
    "%": "{{ (('%s' * 600) % ((x,) * 600)) | length }}",
    "% of one name": "{{ ('%(x)s' * 600 % d) | length }}",
    "% of a width": "{{ ('%9999d' * 300 % ((1,) * 300)) | length }}",
    "format": "{{ ('%(x)s' * 600) | format(x=x) | length }}",
    "format of values": "{{ ('%s' * 600) | format(*([x] * 600)) | length }}",
    ".format": "{{ ('{0}' * 600).format(x) | length }}",
    ".format by name": "{{ ('{x}' * 600).format(x=x) | length }}",
    ".format of a part": "{{ ('{d[x]}' * 600).format(d=d) | length }}",
    ".format_map": "{{ ('{x}' * 600).format_map(d) | length }}",
    "join": "{{ ([x] * 600) | join | length }}",
    "join with": "{{ ('a' * 600) | join(x) | length }}",
    "join of an attribute": "{{ ([d] * 600) | join(attribute='x') | length }}",
    "join of a map": "{{ range(600) | map('replace', '', x) | join | length }}",
    "join of what is given": "{{ range(600) | map(attribute='a', default=x) | join | length }}",
    ".join": "{{ x.join(['a'] * 600) | length }}",
    ".join of texts": "{{ ''.join([x] * 600) | length }}",
    ".join of a map": "{{ ''.join(([x] * 600) | map('trim')) | length }}",
    "replace": "{{ ('a' * 600) | replace('a', x) | length }}",
    "replace nothing": "{{ ('b' * 600) | replace('', x) | length }}",
    ".replace": "{{ ('a' * 600).replace('a', x) | length }}",
    "indent": "{{ ('\n' * 600) | indent(4000, blank=true) | length }}",
    "indent by a text": "{{ ('\r' * 600) | indent(x, blank=true) | length }}",
    "tojson with an indent": "{{ ([1] * 600) | tojson(indent=4000) | length }}",
    "tojson with separators": "{{ ([1] * 600) | tojson(separators=(x, x)) | length }}",
    "tojson of the same": "{{ ([x] * 600) | tojson | length }}",
    "center": "{{ 'x' | center(2000000) | length }}",
    ".center": "{{ 'x'.center(1000000) | length }}",
    ".ljust": "{{ 'x'.ljust(1000000) | length }}",
    ".rjust": "{{ 'x'.rjust(1000000) | length }}",
    ".zfill": "{{ 'x'.zfill(1000000) | length }}",
    ".expandtabs": "{{ ('\t' * 600).expandtabs(4000) | length }}",
    ".translate": "{{ ('a' * 600).translate({97: x}) | length }}",
    ".split": "{{ (' a' * 4000).split(' ') | length }}",
    ".splitlines": "{{ ('\n' * 4000).splitlines() | length }}",
    "list of characters": "{{ ('\u2603' * 4000) | list | length }}",
    "batch": "{{ [1] | batch(900000, 0) | list | length }}",
    "slice": "{{ [1] | slice(900000) | list | length }}",
    "wordwrap": "{{ ('a' * 600) | wordwrap(1, wrapstring=x) | length }}",
    "sum of lists": "{{ ([l] * 600) | sum(start=[]) | length }}",
    "string": "{{ ([x] * 600) | string | length }}",
    "upper": "{{ ([x] * 600) | upper | length }}",
    "trim": "{{ ([x] * 600) | trim | length }}",
    "escape": "{{ ('<' * 4000) | escape | length }}",
    "urlencode": "{{ ('\u2603' * 4000) | urlencode | length }}",
    "pprint": "{{ ([x] * 600) | pprint | length }}",
    "writing": "{{ [x] * 600 }}",
    "writing a namespace": "{% set ns = namespace(x=[x] * 600) %}{{ ns }}",
    "writing what a dictionary has": "{{ dict(a=[x] * 600).values() }}",
    "nested lists": GROWING.replace("'ab'", "[1]").replace("GROWTH", "[ns.x, ns.x]") + "{{ ns.x }}",
    "sort": "{% set y = 'a' * 4001 %}{{ ([x ~ 'b', y ~ 'b'] * 300) | sort | length }}",
    "comparing": "{{ ([x ~ 'b'] * 600) == ([x ~ 'b'] * 600) }}",
    "looking for": "{{ (x ~ 'b') in ([x ~ 'c'] * 600) }}",
    "selecting": "{{ [1] | select('in', [x ~ 'c'] * 600) | list }}",
    "slices": "{% set ns = namespace(x=[]) %}"
    "{% for i in range(9999) %}{% set ns.x = ns.x + [x[1:]] %}{% endfor %}",
    "keeping": "{% set ns = namespace(x=[]) %}"
    "{% for i in range(9999) %}{% set ns.x = ns.x + [x ~ i] %}{% endfor %}",
    "a large number": "{{ ('f' * 4000) | int(base=16) }}",
    "rounding": "{{ 1.5 | round(1000000, 'ceil') }}",
}


@pytest.mark.parametrize("name", AMPLIFIERS)
def test_what_is_too_much_is_refused_before_it_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (template_sandbox, template_costs):
        monkeypatch.setattr(module, "MAX_CHARS", 20_000)
    monkeypatch.setattr(template_sandbox, "MAX_MADE_CHARS", 500_000)
    monkeypatch.setattr(template_sandbox, "MAX_ITEMS", 2_000)
    sandbox = TemplateSandbox()
    compiled = sandbox.compiled(AMPLIFIERS[name])
    x = "a" * 4000
    tracemalloc.start()
    try:
        with pytest.raises(TemplateTooCostly):
            sandbox.render(compiled, {"x": x, "l": list(range(40)), "d": {"x": x}})
        assert tracemalloc.get_traced_memory()[1] < 1_500_000
    finally:
        tracemalloc.stop()


def test_long_conversations_are_far_from_any_limit() -> None:
    talk = [TALK[0] | {"content": "word " * 100} for _ in range(2000)]
    gathering = (
        "{% set ns = namespace(all=[], text='') %}{% for message in messages %}"
        "{% set ns.all = ns.all + [message] %}{% if message not in messages[:3] %}{% endif %}"
        "{% if loop.index < 200 %}{% set ns.text = ns.text ~ message.content %}{% endif %}{% endfor %}"
        "{{ ns.text }}{{ ns.all | length }}{{ messages | tojson(indent=2) | length > 1000000 }}"
        "{{ messages | map(attribute='content') | join('\n') | upper | replace('W', 'ww') | indent(4) }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    )
    assert render(gathering, messages=talk).endswith("2000")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).mro() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ dict.__globals__.os }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum.__globals__.os }}",
        "{{ tick.__func__ }}{{ messages.__class__ }}",
    ],
)
def test_nothing_gets_out(template: str) -> None:
    with pytest.raises((SecurityError, TemplateError, TypeError)):
        render(template, messages=[{"role": "user"}])


@pytest.mark.parametrize("nested", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 3000])
def test_what_cannot_be_compiled_stops_the_start(directory: Path, nested: str) -> None:
    with pytest.raises(StartRefused, match=r"the chat template (cannot be compiled|is broken)") as refused:
        ChatTemplate(reference(directory), nested)
    assert "\n" not in str(refused.value)


def test_a_huge_template_stops_the_start(directory: Path) -> None:
    with pytest.raises(StartRefused, match=f"the limit is {MAX_TEMPLATE_CHARS}"):
        ChatTemplate(reference(directory), "{{ 'a' }}" * 50_000)


def test_a_bomb_stops_the_start_or_the_one_request_that_sets_it_off(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    bomb = NESTED.replace("BODY", "x")
    with pytest.raises(StartRefused, match=r"more than 0\.1 seconds"):
        ChatTemplate(reference(directory), bomb)
    template = ChatTemplate(
        reference(directory), "{% if messages | length > 1 %}" + bomb + "{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(InvalidRequest, match="stopped by its sandbox"):
        template.render(TALK)
    assert template.render([{"role": "user", "content": "fine"}]) == "fine"


def test_threads_have_their_time_each(directory: Path) -> None:
    template = ChatTemplate(reference(directory), EVERYTHING)
    expected = template.render(TALK)
    with ThreadPoolExecutor(4) as executor:
        assert set(executor.map(lambda _: template.render(TALK), range(40))) == {expected}
