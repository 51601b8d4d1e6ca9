"""Chat templates made of anything that Jinja knows: a text of bounded length, or one line."""

from hostile import answer
from hypothesis import given
from hypothesis import strategies as st

from redline.engine.template import LONGEST, fill

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "{{ 1 }}"}]
PIECES = [
    "{% for m in messages %}",
    "{% for i in range(300) %}",
    "{% endfor %}",
    "{% if m.role %}",
    "{% endif %}",
    "{% break %}",
    "{{ m.content }}",
    "{{ messages[7].content }}",
    "{{ messages|tojson }}",
    "{{ messages.append(1) }}",
    "{{ 'a' * 9999999 }}",
    "{{ 'a'.__class__ }}",
    "{{ 1 // 0 }}",
    "{{ '%c' % -1 }}",
    "{{ nothing.at.all }}",
    "{{ self }}{{ loop }}",
    "{% set x = namespace(a=1) %}{% set x.a = x %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ raise_exception('no\\nline') }}",
    "{{ ''|center(9**9) }}",
    "{% include 'x' %}",
    "{#",
    "#}",
    "{{",
    "}}",
    "%}",
]


@given(template=st.lists(st.sampled_from(PIECES) | st.text(max_size=10), max_size=8).map("".join))
def test_a_template_of_anything(monkeypatch, template):
    monkeypatch.setattr("redline.engine.template.PROCESSOR_S", 1)
    text = answer(lambda: fill(template, messages=MESSAGES, add_generation_prompt=True, tools=None))
    assert text is None or len(text) <= LONGEST
