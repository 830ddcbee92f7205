#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden renderings of chat templates, by transformers' own renderer.

Writes tests/golden/chat.json: templates in the manner of published ones and for single features of
the language, conversations, and for each pair with and without a generation prompt the text, or
null where the template refuses the conversation.  Needs transformers, jinja2.
Run: python make_chat_golden.py
"""
import json
import pathlib

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

OUT = pathlib.Path(__file__).parent / "chat.json"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{{- tools | tojson }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) + '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

FEATURES = """{# a comment #}
  {% set x = 7 %}
{{ x // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 * 3 - 1 }} {{ 1.5 + 1 }} {{ 'ab' * 2 }} {{ 1 ~ 'b' ~ none ~ true }}
{{ [1, 'two', none, 2.5, {'k': "it's"}] }} {{ (1, 2)[1] }} {{ {'a': [1, 2], 'b': 'é"'} | tojson }} {{ {} | tojson }}
{{ {'a': [1, 2], 'b': {}} | tojson(indent=2) }}
{{ 'x' if messages else 'y' }} {{ 'z' if not messages }}|{{ missing }}|{{ missing | default('d') }}|{{ '' | default('e', true) }}
{{ messages | length }} {{ messages[0].content[::-1] }} {{ messages[0]['content'][:3] }} {{ messages[-1].content[-3:] }} {{ messages[0].role[0] }}{{ 'é中'[-1] }}
{{ ' Ab C ' | trim | upper | lower }} {{ 'a-b'.replace('-', '+') }} {{ 'a b  c'.split() | join(',') }} {{ 'a,b,c'.split(',', 1) }}
{{ messages[0].get('role') }} {{ messages[0].get('nope', 'none') }} {% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}

{%- for m in messages if m.role != 'system' %} {{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% else %} none{% endfor %}
{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% set block %}<{{ x }}>{% endset %}{{ block }}{{ 'a' in 'cat' }}{{ 3 in [1, 2] }}{{ 'role' not in messages[0] }}{{ 1 < 2 and 2 <= 2 or false }}
{% generation %}said{% endgeneration %} {{ x is defined and x is number and x is odd }} {{ messages is iterable }} {{ none is none }}
   {%+ if true %} kept {% endif %}
{{- ' tight ' -}}   
end {{ 'q' "r" }} {{ messages | map(attribute='role') | list }} {{ 'hello world' | title }} {{ 'hELLO' | capitalize }}
"""

CONVERSATIONS = [
    [{"role": "user", "content": "Hello, world!"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  2 + 2?  "}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
     {"role": "user", "content": "Größe \u4e2d\u6587 \U0001f600?"}],
    [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"},
     {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA"},
     {"role": "user", "content": "and?"}],
    [{"role": "user", "content": "call"},
     {"role": "assistant", "content": "",
      "tool_calls": [{"name": "f", "arguments": {"x": [1, 2.5, None, True], "s": "\u00e9"}}]}],
    [{"role": "assistant", "content": "I begin"}],
]
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3,
             "zephyr": ZEPHYR, "features": FEATURES}


def rendering(template, messages, prompt):
    try:
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=template,
                                            add_generation_prompt=prompt, **TOKENS)
        return rendered[0]
    except jinja2.TemplateError:
        return None


def main():
    out = {"tokens": TOKENS, "templates": TEMPLATES, "conversations": CONVERSATIONS, "texts": {}}
    for name, template in TEMPLATES.items():
        out["texts"][name] = [[rendering(template, messages, prompt) for prompt in (False, True)]
                              for messages in CONVERSATIONS]
    OUT.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
