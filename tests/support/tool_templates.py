"""Chat templates that take tools, one a family: small, with what is the family's own about calls."""

_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> "
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}" + _END
)
LLAMA = (
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{% if tools %}{% for tool in tools %}{{ tool.function | tojson }}{% endfor %} Answer with "
    '{"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if 'tool_calls' in message %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{{ message.tool_calls[0].function.arguments | tojson }}{% else %}{{ message.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}" + _END
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS]["
    "{% for call in message.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids must have 9 characters') }}{% endif %}"
    "{{ {'id': call.id, 'name': call.function.name} | tojson }}{% endfor %}]"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }} {{ message.content }}"
    "{% else %}[INST]{{ message.content }}{% endif %}{% endfor %}"
)
ALL = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
NO_TOOLS = "{% for message in messages %}{{ message.tools }}{{ message.content }}{% endfor %}"
