from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest, StartRefused, TemplateStopped
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.support import tool_templates
from tests.unit.text.builders import CHATML, byte_level, load, save

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model without a chat template of its own."""
    return save(byte_level(), tmp_path, chat_template=None)


def test_roles_alternate_and_the_reply_comes_next() -> None:
    text = load("byte_level").render_chat_text(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "world"},
            {"role": "user", "content": "again"},
        ]
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nworld<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_a_template_says_so(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(HELLO)


def test_a_template_that_refuses_the_messages_says_why() -> None:
    with pytest.raises(InvalidRequest, match="refused these messages: Unknown role: wizard") as caught:
        load("byte_level").render_chat([{"role": "wizard", "content": "hello"}])
    assert caught.value.param == "messages"


def test_the_reason_is_one_bounded_line() -> None:
    with pytest.raises(InvalidRequest) as caught:
        load("byte_level").render_chat([{"role": "x\n" * 10_000, "content": "hello"}])
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "messages",
    [[], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "hello"}]],
)
def test_incomplete_messages_never_escape_as_another_error(
    directory: Path, messages: list[dict[str, object]]
) -> None:
    strict = "{{ messages[0]['role'] + messages[0]['content'] }}"
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        Tokenizer(directory, strict).render_chat(messages)
    assert caught.value.param == "messages"


def test_content_the_template_cannot_join_is_refused(directory: Path) -> None:
    tokenizer = Tokenizer(directory, "{{ 'user: ' + messages[0]['content'] }}")
    with pytest.raises(InvalidRequest, match=r"cannot render these messages \(TypeError\)"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])


def test_messages_are_data_and_never_template_code(directory: Path) -> None:
    tokenizer = Tokenizer(directory, "{{ messages[0].content }}")
    hostile = "{{ 7 * 7 }}{% for x in range(10) %}x{% endfor %}"
    assert tokenizer.render_chat_text([{"role": "user", "content": hostile}]) == hostile


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__bases__[0].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_hostile_template_stops_the_start(directory: Path, template: str) -> None:
    with pytest.raises(StartRefused, match="what its sandbox forbids") as caught:
        Tokenizer(directory, template)
    assert "\n" not in str(caught.value)


def test_a_template_hostile_to_some_messages_only_is_stopped_there(directory: Path) -> None:
    tokenizer = Tokenizer(directory, "{% if messages | length > 1 %}{{ ''.__class__.__mro__ }}{% endif %}ok")
    assert tokenizer.render_chat_text(HELLO) == "ok"
    with pytest.raises(TemplateStopped, match="stopped by its sandbox"):
        tokenizer.render_chat_text(HELLO * 2)


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ messages[0].content", "{{ messages | no_such_filter }}"]
)
def test_a_broken_template_stops_the_start(directory: Path, template: str) -> None:
    with pytest.raises(StartRefused, match="broken at line 1"):
        Tokenizer(directory, template)


def test_a_template_that_refuses_the_probe_still_serves_others(directory: Path) -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}ok"
    tokenizer = Tokenizer(directory, template)
    assert tokenizer.render_chat_text([{"role": "system", "content": "x"}]) == "ok"


# As SmolVLM's and LLaVA's read content: of a string they show nothing, or fail.
_OF_PARTS = {
    "smolvlm": (
        "{% for message in messages %}{{ message['role'] | capitalize }}"
        "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}"
        "{% endfor %}<end_of_utterance>{% endfor %}"
    ),
    "llava": (
        "{% for message in messages %}{{ message['role'] | capitalize }}: "
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ content['text'] }}{% endfor %}<end_of_utterance>{% endfor %}"
    ),
    "strict": (
        "{% for message in messages %}{{ message['role'] | capitalize }}: "
        "{{ message['content'][0]['text'] + '<end_of_utterance>' }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("family", _OF_PARTS)
def test_a_template_that_reads_only_parts_is_given_texts_as_parts(directory: Path, family: str) -> None:
    tokenizer = Tokenizer(directory, _OF_PARTS[family])
    messages = [*HELLO, {"role": "assistant", "content": "world"}]
    text = "User: hello<end_of_utterance>Assistant: world<end_of_utterance>"
    assert tokenizer.render_chat_text(messages) == text
    assert "You may call" in tokenizer.render_chat_text(messages, [TOOL])


def test_a_template_that_reads_parts_and_texts_is_given_texts(directory: Path) -> None:
    both = (
        "{% for m in messages %}"
        "{{ m.content if m.content is string else m.content[0].text ~ '!' }}{% endfor %}"
    )
    assert Tokenizer(directory, both).render_chat_text(HELLO) == "hello"


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    """Several named templates: the default one; none of that name is as good as no template."""
    save(byte_level(), tmp_path, chat_template=CHATML)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer(tmp_path).render_chat_text(HELLO).startswith("<|im_start|>user")
    (tmp_path / "chat_template.jinja").unlink()
    assert not Tokenizer(tmp_path).has_chat_template


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("family", tool_templates.ALL)
def test_a_template_that_reads_tools_shows_them(directory: Path, family: str) -> None:
    template = tool_templates.ALL[family]
    tokenizer = Tokenizer(directory, template)
    assert tokenizer.tool_template == template
    assert '"name": "add"' in tokenizer.render_chat_text(HELLO, [TOOL])
    assert '"name": "add"' not in tokenizer.render_chat_text(HELLO)


CALLED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "Hm.",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
]


def test_a_template_that_joins_arguments_to_text_gets_them_as_text(directory: Path) -> None:
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}{{ tools }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = Tokenizer(directory, template)
    assert tokenizer.render_chat_text(messages) == 'f{"city": "Köln"}None'


def called(*numbers: int) -> dict[str, Any]:
    calls = [
        {"id": f"id{n}", "type": "function", "function": {"name": "add", "arguments": {"a": n}}}
        for n in numbers
    ]
    return {"role": "assistant", "content": "Hm.", "tool_calls": calls}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id{number}", "content": f"is {number}"}


def test_a_template_that_takes_one_call_a_message_sees_parallel_calls_one_by_one(directory: Path) -> None:
    """As Llama 3's: the server's own reply of two calls comes back with their results, in any order."""
    tokenizer = Tokenizer(directory, tool_templates.ALL["llama"])
    together = [*HELLO, called(1, 2, 3), result(3), result(1), result(2), result(4), *HELLO]
    text = tokenizer.render_chat_text(together, [TOOL])
    bodies = [part.partition("\n")[2].partition("<|im_end|>")[0] for part in text.split("<|im_start|>")[1:]]
    shown = ['{"a": 1}', "is 1", '{"a": 2}', "is 2", '{"a": 3}', "is 3", "is 4"]
    assert bodies == ["hello", *shown, "hello", ""]
    no_result = tokenizer.render_chat_text([*HELLO, called(1, 2), result(7)], [TOOL])
    assert no_result.index('{"a": 1}') < no_result.index('{"a": 2}') < no_result.index("is 7")


@pytest.mark.parametrize("template", [CHATML, tool_templates.NO_TOOLS, "tools {# tools #} {{ 'tools' }}"])
def test_a_template_that_does_not_read_them_is_found_out(directory: Path, template: str) -> None:
    assert Tokenizer(directory, template).tool_template is None


def test_a_template_that_knows_no_tools_shows_them_as_text(directory: Path) -> None:
    text = Tokenizer(directory, CHATML).render_chat_text(CALLED, [TOOL])
    system, user, assistant, result = text.split("<|im_start|>")[1:5]
    assert system.startswith("system\nBe brief.\n\nYou may call") and '"name": "add"' in system
    assert user == "user\nhi<|im_end|>\n"
    assert assistant == (
        'assistant\nHm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    )
    assert result == (
        "user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    )


def test_a_template_that_knows_no_system_message_shows_tools_to_the_user(directory: Path) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = Tokenizer(directory, strict).render_chat_text(HELLO, [TOOL])
    assert text.startswith("[user]You may call") and text.endswith("\n\nhello")
    with pytest.raises(InvalidRequest, match="no system"):
        Tokenizer(directory, strict).render_chat_text([{"role": "system", "content": "x"}, *HELLO])


@pytest.mark.parametrize("takes_system", [True, False])
def test_a_result_and_what_the_user_says_behind_it_are_one_message_where_roles_take_turns(
    directory: Path, takes_system: bool
) -> None:
    """As Gemma 3's, and Gemma 2's, which takes no system message: neither knows tools."""
    template = (
        "{% set start = 1 if TAKES and messages[0].role == 'system' else 0 %}{% for m in messages[start:] %}"
        "{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('take turns') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    ).replace("TAKES", str(takes_system).lower())
    tokenizer = Tokenizer(directory, template)
    text = tokenizer.render_chat_text([*CALLED, *HELLO], [TOOL])
    first, _, rest = text.partition("[assistant]")
    assert (
        first.startswith("[user]") and first.endswith("hi") and ("You may call" in first) is not takes_system
    )
    assert rest.startswith("Hm.\n<tool_call>")
    assert rest.partition("[user]")[2].endswith("4\n</tool_response>\n\nhello")
    with pytest.raises(InvalidRequest, match="take turns"):
        tokenizer.render_chat_text([*HELLO, *HELLO])


def test_a_template_of_its_own_for_tools_is_used_for_them_alone(directory: Path) -> None:
    own = {"default": "plain{{ messages | length }}", "tool_use": "tools{{ tools | length }}"}
    found = ChatTemplate(_WithTemplates(own))
    assert (found.render(HELLO), found.render(HELLO, [TOOL])) == ("plain1", "tools1")
    assert (found.text, found.tool_text) == (own["default"], own["tool_use"])


class _WithTemplates:
    """A tokenizer whose files hold several templates."""

    def __init__(self, templates: dict[str, str]) -> None:
        self.special_tokens_map: dict[str, str] = {}
        self.chat_template = templates
