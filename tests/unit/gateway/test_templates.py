"""Chat templates: as transformers renders them, and bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from datetime import datetime

import pytest

from pagemesh.gateway.words import templates
from pagemesh.gateway.words.templates import ChatTemplate, TemplateRefused

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi {{ 1 + 1 }}"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "what?\n"},
]
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
LOOPS = """
{%- set ns = namespace(found=false) %}
{{- bos_token }}
{% for message in messages %}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {% elif loop.first and message.role == 'system' %}
        <<{{ message.content | trim | upper }}>>
    {% else %}
        {% set ns.found = true %}[{{ loop.index0 }}/{{ loop.length }}] {{ message | tojson }}
    {% endif %}
    {% if loop.last %}{{ ns.found ~ '/' ~ messages|length }}{% break %}{% endif %}
{% endfor %}
{% for part in 'a,b'.split(',') %}{{ part.replace('a', 'z') }}{% endfor %}
{{ messages | map(attribute='role') | join('-') }}
"""


def test_templates_render_as_transformers_renders_them() -> None:
    script = (
        "import json, sys\n"
        "from transformers.utils.chat_template_utils import render_jinja_template\n"
        "given = json.load(sys.stdin)\n"
        "out, _ = render_jinja_template(conversations=[given['messages']],\n"
        "    chat_template=given['template'], add_generation_prompt=True, bos_token='<s>')\n"
        "print(json.dumps(out[0]))\n"
    )
    for template in (CHATML, LOOPS):
        given = json.dumps({"messages": MESSAGES, "template": template})
        done = subprocess.run(
            [sys.executable, "-c", script], input=given, capture_output=True, text=True, check=True
        )
        expected = json.loads(done.stdout.splitlines()[-1])
        ours = ChatTemplate(template, {"bos_token": "<s>"}).render(MESSAGES)
        assert ours == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__()[0].x }}",
        "{{ messages.append(1) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ [0] * 999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{% set ns = namespace(t='xx') %}"
        "{% for _ in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        "{% set ns = namespace(t='xx') %}"
        "{% for _ in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        "{% set t = 'x' * 99999 %}{{ t.replace('x', t) }}",
        "{% set t = 'x' * 99999 %}{{ t | replace('x', t) }}",
        "{% set t = 'x' * 99999 %}{{ t.join(t) }}",
        "{% set t = 'x' * 99999 %}{{ t | join(t) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(18) }}",
        "{% for i in [18] recursive %}{% if i %}{{ loop([i-1]) }}{{ loop([i-1]) }}{% endif %}"
        "{% endfor %}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ lipsum(n=10000) }}",
    ],
)
def test_a_hostile_template_is_refused_in_bounds(template: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])


def test_a_template_says_why_it_refuses() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        template.render([])


def test_a_broken_template_is_refused_when_it_is_made() -> None:
    with pytest.raises(TemplateRefused, match="does not parse"):
        ChatTemplate("{% for %}", {})


def test_further_variables_replace_none_of_ours() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}{{ messages | length }}", {"bos_token": "B"})
    extra = {"mood": "calm", "messages": [], "bos_token": "forged"}
    assert template.render([{"role": "user"}], extra=extra) == "Bcalm1"


def test_the_date_is_the_clocks() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {}, now=lambda: datetime(1999, 1, 1))
    assert template.render([]) == "1999"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"b": 1, "a": ["\u00e9"]}'),
        ("separators=(',', ':')", '{"b":1,"a":["\u00e9"]}'),
        ("sort_keys=true", '{"a": ["\u00e9"], "b": 1}'),
        ("true", '{"b": 1, "a": ["\\u00e9"]}'),
        ("indent=0", '{\n"b": 1,\n"a": [\n"\u00e9"\n]\n}'),
        ("indent=12", json.dumps({"b": 1, "a": ["\u00e9"]}, ensure_ascii=False, indent=12)),
    ],
)
def test_json_is_written_as_transformers_writes_it(arguments: str, expected: str) -> None:
    template = ChatTemplate("{{ value | tojson(ARGUMENTS) }}".replace("ARGUMENTS", arguments), {})
    assert template.render([], extra={"value": {"b": 1, "a": ["\u00e9"]}}) == expected


@pytest.mark.parametrize("indent", [17, 10**12])
def test_json_is_not_written_far_wider_than_it_is(indent: int) -> None:
    template = ChatTemplate("{{ value | tojson(indent=indent) }}", {})
    with pytest.raises(TemplateRefused):
        template.render([], extra={"value": [1], "indent": indent})


def test_what_indents_add_to_json_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "CHARACTERS_MAX", 10_000)
    value: list[object] = [1] * 100
    for _ in range(20):
        value = [value]
    for indent, is_refused in ((0, False), (8, True)):
        template = ChatTemplate("{{ value | tojson(indent=indent) }}", {})
        with pytest.raises(TemplateRefused) if is_refused else nullcontext():
            template.render([], extra={"value": value, "indent": indent})


def test_json_takes_no_longer_than_a_template_may(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ value | tojson(indent=1) }}", {})
    assert template.render([], extra={"value": [1]})
    monkeypatch.setattr(templates, "RENDER_S_MAX", -1.0)
    with pytest.raises(TemplateRefused):
        template.render([], extra={"value": [1]})
