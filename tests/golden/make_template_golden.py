#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden renderings of single features of the template language, by jinja2.

Writes tests/golden/template.json: the variables that all templates are given, and for each template
its text, or null where jinja2 refuses it or raises an exception.  The environment is that of
transformers' apply_chat_template.  Needs jinja2.  Run: python make_template_golden.py
"""
import json
import pathlib

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

OUT = pathlib.Path(__file__).parent / "template.json"

VARIABLES = {
    "messages": [
        {"role": "system", "content": "\u00a0\u3000Be brief.\u2003\u0085"},
        {"role": "user", "content": "Gr\u00f6\u00dfe \u4e2d\u6587 \U0001f600?", "weight": 2},
        {"role": "assistant", "content": None, "tool_calls": [
            {"function": {"name": "f", "arguments": {"x": [1, 2.5, None, True], "s": "\u00e9'\""}}}]},
        {"role": "user", "content": "bye", "weight": 1},
    ],
    "numbers": [3, 1, 2.0, -7, 10],
    "words": ["pear", "Apple", "fig", "apple"],
    "d": {"b": 1, "a": {"items": [1]}, "items": "own", "_x": 5, "": 0},
    "text": "one two\tthree\u00a0four",
    "html": "<b>&'\"</b>",
    "big": 12345678901234567890,
    "yes": True,
    "nothing": None,
    "empty": {"list": [], "dict": {}, "text": ""},
}

# Templates, one a line; a blank line separates subjects.
LINES = r"""
{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ +yes }}
{{ 1 + 2 ~ 3 + 4 }}
{{ 2 * 3 ~ 4 }} {{ 'a' ~ none ~ true ~ 1.0 ~ [] ~ undefined_thing ~ 'b' }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 3 > 2 > 1 == 1 }} {{ 1 == 1.0 }} {{ 1 == true }} {{ 0 == false }} {{ '1' == 1 }} {{ none == false }}
{{ 1 in [true] }} {{ true in {1: 2} }} {{ {1: 'a', true: 'b', 1.0: 'c'} }} {{ [1, 2] == (1, 2) }} {{ (1, 2) == (1, 2) }}
{{ not 1 == 2 }} {{ not true and false }} {{ 1 or 2 }} {{ 0 or '' or 'x' }} {{ 1 and 0 and 2 }} {{ none or undefined_thing or 5 }}
{{ 'a' if true }}|{{ 'a' if false }}|{{ 'a' if false else 'b' if false else 'c' }}|{{ ('a' if false) is defined }}
{{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ [1] * 2 }} {{ (1,) * 2 }} {{ 'a' * -1 }}| {{ 'a' * true }}
{{ 1_000 }} {{ 0x1F }} {{ 0b101 }} {{ 0o17 }} {{ 1e3 }} {{ 1.5e-7 }} {{ 1e16 }} {{ 1e15 }} {{ 123456789.123456789 }} {{ 0.1 + 0.2 }} {{ 1e400 }}
{{ big }} {{ big * 10 }} {{ 2 ** 100 }} {{ big + 1 == 12345678901234567891 }}
{{ 10 ** 30 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 1 + 'a' }}
{{ 'a' + 1 }}
{{ [1] + (2,) }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ -'a' }}
{{ [1] < [2] }} {{ [1, 2] < [1, 2, 3] }} {{ (1, 'b') > (1, 'a') }} {{ 'B' < 'a' }} {{ '\u00e9' > 'z' }}
{{ 1.0 }} {{ 100.0 }} {{ -0.0 }} {{ 1e22 }} {{ 3.14 }} {{ 2.0 * 3 }} {{ 7 // 2.0 }}

{{ "a\tb\n\x41\u00e9\U0001f600\101\q\'" }}|{{ 'x' "y" }}|{{ "it's" }}|{{ 'say "hi"' }}
{{ ['it\'s', 'say "x"', 'both \' "', 'tab\t', 'nl\n', 'back\\', 'nul\x00', '\x7f', '\u00a0', '\u200b', '\ue000', '\u00e9'] }}
{{ [1, 2.0, none, true, 'x', [], {}, (), (1,), {'a': 1, 2: (3, 4)}] }}
{{ {'a': undefined_thing} }} {{ [undefined_thing] }} {{ range(3) }} {{ range(1, 9, 2) }} {{ range(3) | list }} {{ d.keys() }} {{ {'a': 1}.items() }} {{ {'a': 1}.values() }}
{{ nothing }} {{ none }} {{ None }} {{ True }} {{ true }} {{ False }}

{{ messages | length }} {{ undefined_thing | length }} {{ 'ab\u00e9' | length }} {{ d | count }} {{ range(5) | length }} {{ d.items() | length }}
{{ 1 | length }}
{{ nothing | length }}
{{ messages | map(attribute='role') | length }}
{{ 'x' in undefined_thing }} {{ undefined_thing in [1] }} {{ undefined_thing == other_thing }} {{ undefined_thing == none }} {{ undefined_thing != 1 }}
{% for x in undefined_thing %}a{% else %}none{% endfor %} {{ undefined_thing | list }} {{ undefined_thing | items | list }} {{ undefined_thing | join(',') }}| {{ undefined_thing | first is defined }}
{{ undefined_thing.x }}
{{ undefined_thing['x'] }}
{{ undefined_thing + 1 }}
{{ undefined_thing() }}
{{ undefined_thing | int }}
{{ undefined_thing | float }}
{{ undefined_thing < 1 }}
{{ messages[0].nope.x }}
{{ messages[0].nope }}|{{ messages[9] }}|{{ messages['x'] }}|{{ messages[0][1] }}|{{ nothing.x }}|{{ 1 .real }}|{{ nothing['x'] is defined }}
{{ undefined_thing | default('d') }} {{ '' | default('e', true) }} {{ '' | default('e', boolean=true) }} {{ nothing | default('x') }} {{ none | d('y', true) }} {{ undefined_thing | d }}|
{{ undefined_thing is defined }} {{ undefined_thing is undefined }} {{ undefined_thing is none }} {{ undefined_thing is string }} {{ undefined_thing is mapping }} {{ undefined_thing is iterable }} {{ undefined_thing is sequence }} {{ undefined_thing is callable }}
{{ undefined_thing | upper }}|{{ undefined_thing | trim }}|{{ undefined_thing | replace('a', 'b') }}|{{ undefined_thing | string }}|{{ undefined_thing ~ 'x' }}
{{ undefined_thing | tojson }}
{{ not undefined_thing }} {{ undefined_thing or 'x' }} {{ 'y' if undefined_thing else 'n' }}

{{ messages[0].content | trim }}|{{ messages[0].content.strip() }}|{{ messages[0]['content'].lstrip() }}|{{ messages[0].content.rstrip() }}|
{{ text.split() }} {{ text.split(none, 1) }} {{ text.rsplit(none, 1) }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'a, b'.split(sep=', ', maxsplit=5) }} {{ ''.split() }} {{ ''.split(',') }} {{ ' a '.split(' ') }}
{{ 'x'.split('') }}
{{ '/a/' | trim('/') }} {{ 'xxaxx'.strip('x') }} {{ 'abcba' | trim('ab') }} {{ 'abc'.lstrip('ab') }} {{ 'abc'.rstrip('bc') }} {{ '\u00e9a\u00e9'.strip('\u00e9') }}
{{ 'a' | trim(characters='x') }}
{{ 'a\x1cb\x1dc\x1ed\x1fe\x85f\u2028g'.split() }} {{ 'a\nb\rc\r\nd\x0be\x0cf\x1cg\x85h\u2028i\u2029j'.splitlines() }} {{ 'a\nb\n'.splitlines(true) }} {{ '\n'.splitlines() }}
{{ 'stra\u00dfe \u01c6 \ufb01'.upper() }} {{ 'STRASSE \u0130 \u03a3\u03a3 \u03a3'.lower() }} {{ '\u01c6abc \u00dfx'.title() }} {{ '\u01c6ABC'.capitalize() }} {{ 'Stra\u00dfe'.casefold() }} {{ 'aB\u00e9\u00c9'.swapcase() }}
{{ '\u00e9t\u00e9' | upper }} {{ '\u00c9T\u00c9' | lower }} {{ '\u00e9cole DE x' | capitalize }} {{ "it's a-b (cd) [ef] <gh> {ij}" | title }} {{ "it's a-b".title() }}
{{ 'aXbX' | replace('X', '-', 1) }} {{ 'aXbX' | replace('X', '-') }} {{ 'aXbX'.replace('X', '-', 1) }} {{ 'abc'.replace('', '-') }} {{ 'abc'.replace('', '-', 2) }} {{ 'abc' | replace('', '+', count=1) }} {{ 12 | replace(1, 'x') }} {{ 'a' | replace(old='a', new='b') }}
{{ 'aXbX'.replace('X', '-', count=1, more=2) }}
{{ 'abc'.find('c') }} {{ '\u00e9\u00e9c'.find('c') }} {{ 'abc'.find('x') }} {{ 'abcabc'.rfind('b') }} {{ 'abcabc'.find('b', 2) }} {{ 'abcabc'.find('b', -2, -1) }} {{ 'abcabc'.count('b') }} {{ 'aaa'.count('aa') }} {{ 'abc'.count('') }} {{ 'abc'.index('b') }}
{{ 'abc'.index('x') }}
{{ 'abc'.startswith('ab') }} {{ 'abc'.startswith(('x', 'a')) }} {{ 'abc'.endswith('bc') }} {{ 'abc'.startswith('b', 1) }} {{ 'abc'.endswith('b', 0, 2) }} {{ ''.startswith('') }}
{{ 'abc'.startswith(['a']) }}
{{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.py'.removesuffix('.py') }} {{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'abc'.partition('-') }} {{ 'abc'.rpartition('-') }}
{{ 'a'.center(4) }}| {{ 'ab'.center(5, '*') }} {{ 'a'.ljust(3, '.') }} {{ 'a'.rjust(3, '.') }} {{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ 'a' | center(5) }}| {{ 'a\tb'.expandtabs(4) }}|{{ '\t'.expandtabs() }}|
{{ ','.join(['a', 'b']) }} {{ '-'.join('abc') }} {{ ''.join([]) }}| {{ ','.join({'a': 1, 'b': 2}) }}
{{ ','.join([1]) }}
{{ '123'.isdigit() }} {{ '12a'.isdigit() }} {{ '\u00b2'.isdigit() }} {{ '\u00b2'.isdecimal() }} {{ '\u00bd'.isnumeric() }} {{ 'ab\u00e9'.isalpha() }} {{ 'a1'.isalnum() }} {{ ' \u00a0'.isspace() }} {{ ''.isspace() }} {{ 'a'.islower() }} {{ 'A1'.isupper() }} {{ 'Ab Cd'.istitle() }} {{ 'ab'.isascii() }} {{ 'a_1'.isidentifier() }} {{ '1a'.isidentifier() }} {{ 'a\n'.isprintable() }}
{{ 'abc'[1] }} {{ 'abc'[-1] }} {{ 'a\u00e9\U0001f600b'[2] }} {{ 'a\u00e9\U0001f600b'[-2] }} {{ 'abc'[5] is defined }} {{ 'abc'[1:] }} {{ 'abc'[:-1] }} {{ 'abcdef'[::2] }} {{ 'abcdef'[::-1] }} {{ 'abcdef'[4:1:-1] }} {{ 'abcdef'[-100:100] }} {{ 'abc'[none:2] }} {{ 'abc'[3:1] }}|
{{ text['a':] }}
{{ 'abc'[::0] }}
{{ numbers[1:3] }} {{ numbers[-2:] }} {{ numbers[::-1] }} {{ (1, 2, 3)[:2] }} {{ range(10)[2:5] }} {{ range(10)[-1] }} {{ numbers[true] }} {{ numbers[1.0] is defined }}
{{ d[1:2] }}
{{ nothing[1:] }}
{{ 'abc'.upper }}{# a method prints its address #}
{{ 'abc'.nope is defined }} {{ 'abc'.nope }}|{{ 'abc'['upper']() }} {{ 'abc'.upper is callable }} {{ 'abc'.upper is defined }}
{{ 'abc'.nope() }}

{{ '%s-%d-%5.2f|%-5s|%05d|%x|%%|%r|%c' % ('a', 3, 2.345, 'b', 42, 255, 'q', 'z') }}
{{ '%(a)s %(b)03d' % {'a': 1, 'b': 2} }} {{ '%s' % 'x' }} {{ '%s' % [1, 2] }} {{ '%+d % d %#x %#o %X %e %g %G' % (1, 2, 255, 8, 255, 12345.678, 0.00001, 1e20) }}
{{ '%s %s' % 'a' }}
{{ '%s' % ('a', 'b') }}
{{ '%d' % 'a' }}
{{ '%*d|%-*d|%.3s' % (5, 1, 4, 2, 'abcdef') }} {{ 'x' % {} }} {{ '%s' % {} }} {{ '%5s|%-5s|' % (none, true) }} {{ '%i %u' % (1.9, -2) }}
{{ '%s items' | format(3) }} {{ '%(a)s' | format(a=1) }} {{ '%s, %s' | format('x', 'y') }}
{{ '%s' | format(1, a=2) }}
{{ '{} {}'.format('a', 1) }} {{ '{1}{0}'.format('a', 'b') }} {{ '{x}'.format(x=5) }} {{ '{:>5}|{:<5}|{:^5}|{:*^7}'.format('a', 'b', 'c', 'd') }} {{ '{:05.1f} {:,} {:x} {:#b} {:e} {:%} {:+}'.format(3.14159, 1234567, 255, 5, 12345.6, 0.25, 3) }} {{ '{{}} {!r} {!s}'.format('a', 'b') }} {{ '{0[role]} {0.role}'.format(messages[0]) }} {{ '{:{}}|'.format('a', 4) }} {{ '{:d}|{:5}|{:<5}|'.format(3, 4, true) }}
{{ '{}'.format() }}
{{ '{a}'.format(b=1) }}

{{ d.b }} {{ d['b'] }} {{ d['items'] }} {{ d.items is callable }} {{ d.items() | list | length }} {{ d._x }} {{ d[''] }} {{ d.get('b') }} {{ d.get('z') }} {{ d.get('z', 'q') }}
{{ d.get(key='b') is defined }}
{{ d.get('z', 'q') }} {{ d.keys() | list }} {{ d.values() | list | length }} {{ 'b' in d }} {{ 'b' in d.keys() }} {{ 5 in d.values() }} {{ ('b', 1) in d.items() }} {{ d.copy() == d }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %} {% for k in d %}{{ k }},{% endfor %} {% for k, v in d | dictsort %}{{ k }},{% endfor %} {% for k, v in {'b': 2, 'A': 1, 'c': 0} | dictsort(true) %}{{ k }}{% endfor %} {{ {'b': 2, 'A': 1} | dictsort(by='value') }} {{ {'b': 2, 'A': 1} | dictsort(false, 'value', true) }}
{{ d.items()[0] is defined }} {{ d.keys()[0] is defined }} {{ (d.items() | list)[0][0] }} {{ d | list }} {{ d | first }} {{ d | last }}
{{ d.update({'x': 1}) }}
{{ d.pop('b') }}
{{ numbers.append(1) }}
{{ d.update is defined }} {{ numbers.append is defined }} {{ numbers.count(3) }} {{ numbers.index(2) }} {{ (1, 2).index(2) }} {{ numbers.copy() == numbers }}
{{ {'a': 1, 'b': 2, 'a': 3} }} {{ {1: 'x'}[1] }} {{ {(1, 2): 'x'}[(1, 2)] }} {{ {none: 1}[none] }} {{ {1.5: 2}[1.5] }}
{{ {[]: 1} }}
{{ dict(a=1, b=2) }} {{ dict([('x', 1), ('y', 2)], z=3) }} {{ dict({'a': 1}, a=2) }} {{ dict() }}
{{ messages[1].__class__ is defined }} {{ ''.__class__ is defined }} {{ ''.__class__ }}|
{{ ''.__class__.__mro__ }}
{{ messages[1].weight.real }} {{ numbers.0 }} {{ messages.1.role }} {{ (1).real }} {{ true.real }} {{ 5 .bit_length() }} {{ (2.0).is_integer() }}

{{ messages | tojson }}
{{ d | tojson(indent=2) }}
{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ {'a': [1, 2]} | tojson(separators=(',', ':')) }} {{ '\u00e9\U0001f600\x7f' | tojson(ensure_ascii=true) }} {{ '\u00e9\x7f\u2028' | tojson }} {{ '</script>' | tojson }}
{{ {'a': [], 'b': {}, 'c': [1]} | tojson(indent=1) }} {{ [1, [2]] | tojson(indent=0) }} {{ [1] | tojson(indent='--') }} {{ {'a': [1]} | tojson(indent=1, separators=(' ,', ' : ')) }} {{ [1, 2] | tojson(none, 2) }}
{{ {1: 'a', true: 'b', none: 'c', 2.5: 'd'} | tojson }} {{ (1, 2) | tojson }} {{ 1.0 | tojson }} {{ 1e22 | tojson }} {{ big | tojson }} {{ "a\"\\\b\f\n\r\t\x01/" | tojson }}
{{ range(3) | tojson }}
{{ d.items() | tojson }}
{{ {(1, 2): 3} | tojson }}
{{ messages | tojson(indent=2, unknown=3) }}
{{ [{'z': 1, 'y': {'b': 1, 'a': 2}}] | tojson(sort_keys=true, indent=2) }}

{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }} {{ messages | rejectattr('role', 'equalto', 'user') | list | length }} {{ messages | selectattr('weight') | list | length }} {{ messages | selectattr('weight', 'defined') | map(attribute='weight') | join(',') }} {{ messages | rejectattr('content', 'none') | list | length }}
{{ messages | selectattr('role', 'in', ['user', 'system']) | list | length }} {{ messages | selectattr('tool_calls', 'defined') | map(attribute='tool_calls.0.function.name') | list }} {{ messages | selectattr('role', '==', 'system') | first | length }}
{{ messages | selectattr('weight', 'gt', 1) | list | length }}
{{ numbers | select('gt', 2) | list }} {{ numbers | reject('odd') | list }} {{ numbers | select | list }} {{ [0, 1, '', none, 'x'] | select | list }} {{ [0, 1, ''] | reject | list }} {{ [1, none, 2] | reject('none') | list }} {{ ['a', 1] | select('string') | list }} {{ numbers | select('divisibleby', 5) | list }} {{ [] | select('nonexistent') | list }}
{{ numbers | select('nonexistent') | list }}
{{ messages | selectattr | list }}
{{ words | map('upper') | list }} {{ words | map('replace', 'p', 'q') | join(' ') }} {{ [{}, {'k': 1}] | map(attribute='k', default=0) | join(',') }} {{ ['1', 'x'] | map('int', default=9) | list }} {{ [[1, 2], [3]] | map('first') | list }} {{ [[1, 2], [3]] | map(attribute=0) | list }} {{ messages | map(attribute='role') | unique | list }}
{{ words | map | list }}
{{ words | map('nope') | list }}
{{ words | map(attribute='x', other=1) | list }}
{% set g = words | map('upper') %}{{ g | list }}{{ g | list }} {% set it = words | map('lower') %}{{ it | first }} {{ it | first }} {{ it | join('/') }} {{ (words | map('upper'))[0] is defined }}
{{ words | sort }} {{ words | sort(true) }} {{ words | sort(case_sensitive=true) }} {{ words | sort(reverse=true, case_sensitive=true) }} {{ messages | sort(attribute='role') | map(attribute='role') | join(',') }} {{ [{'a': 2, 'b': 1}, {'a': 1, 'b': 2}, {'a': 1, 'b': 1}] | sort(attribute='a,b') }} {{ numbers | sort }}
{{ [1, 'a'] | sort }}
{{ words | unique | list }} {{ words | unique(true) | list }} {{ [1, true, 1.0, 2] | unique | list }} {{ messages | unique(attribute='role') | map(attribute='role') | list }}
{{ numbers | sum }}
{{ messages | sum(attribute='weight', start=10) }}
{{ [{'w': 1}, {'w': 2}] | sum(attribute='w', start=10) }} {{ [[1], [2]] | sum(start=[]) }} {{ [] | sum }}
{{ ['a'] | sum }}
{{ numbers | min }} {{ numbers | max }} {{ words | min }} {{ words | max }} {{ words | max(case_sensitive=true) }} {{ [] | min is defined }} {{ messages[1:2] | max(attribute='weight') | length }}
{{ words | join }} {{ words | join(', ') }} {{ [1, none, true, 2.5] | join('-') }} {{ messages | join(',', attribute='role') }} {{ 'abc' | join('.') }} {{ words | join(d=';') }} {{ [[1, 2]] | join }} {{ {'a': 1} | join }}
{{ words | first }} {{ words | last }} {{ [] | first is defined }} {{ 'abc' | first }} {{ 'abc' | last }} {{ range(4) | last }}
{{ numbers | first(1) }}
{{ words | map('upper') | last }}
{{ words | reverse | list }} {{ 'abc' | reverse }} {{ d | reverse | list | length }} {{ range(3) | reverse | list }} {{ (words | map('upper')) | reverse }}
{{ numbers | batch(2) | list }} {{ numbers | batch(2, 'x') | list }} {{ numbers | slice(2) | list }} {{ numbers | slice(3, 'x') | list }}
{% for g in messages | groupby('role') %}{{ g.grouper }}:{{ g.list | length }} {{ g[0] }};{% endfor %} {% for role, items in messages | groupby(attribute='role') %}{{ role }}{{ items | length }}{% endfor %} {{ words | groupby(0) | map(attribute='grouper') | list }} {{ [{'k': 1}, {}] | groupby('k', default=0) }}
{{ 'abc' | list }} {{ (1, 2) | list }} {{ {'a': 1} | items | list }}
{{ 1 | list }}
{{ 'x' | items | list }}
{{ 'x' | int(7) }} {{ '11' | int(base=2) }} {{ ' 42 ' | int }} {{ '4.7' | int }} {{ 4.7 | int }} {{ -4.7 | int }} {{ none | int }} {{ '0x1A' | int(0, 16) }} {{ '0x1A' | int(base=0) }} {{ true | int }} {{ '1_000' | int }} {{ '1__0' | int }} {{ '' | int(3) }} {{ '1e3' | int }} {{ [] | int(5) }} {{ 'inf' | int(8) }}
{{ '2.5' | float }} {{ 'x' | float }} {{ 'x' | float(1.5) }} {{ 3 | float }} {{ ' 1e3 ' | float }} {{ none | float }} {{ 'nan' | float }} {{ '-inf' | float }} {{ '1_0.5' | float }}
{{ 42.55 | round }} {{ 42.55 | round(1) }} {{ 42.55 | round(1, 'floor') }} {{ 42.55 | round(0, 'ceil') }} {{ 2.5 | round }} {{ 3.5 | round }} {{ -2.5 | round }} {{ 42 | round }} {{ 2.675 | round(2) }} {{ 1234.5 | round(-2) }} {{ 42 | round(method='floor') }} {{ 7 | round(precision=1, method='ceil') }}
{{ 4.2 | round(method='nope') }}
{{ -5 | abs }} {{ (-5) | abs }} {{ -2.5 | abs }} {{ true | abs }}
{{ 'a' | abs }}
{{ 'line1\nline2\n\nline4' | indent }} {{ 'a\nb' | indent(2, true) }} {{ 'a\n\nb' | indent(width=1, blank=true) }} {{ 'a\nb' | indent('>>') }} {{ 'a\nb' | indent(first=true) }}
{{ 'Hello World and everyone' | truncate(14) }} {{ 'Hello World and everyone' | truncate(14, true) }} {{ 'Hello World' | truncate(8, false, '..', 0) }} {{ 'Hello' | truncate(3, leeway=5) }} {{ '\u00e9\u00e9\u00e9\u00e9\u00e9' | truncate(3, true, '', 0) }}
{{ html | e }} {{ html | escape | e }} {{ html | forceescape }} {{ html | safe }} {{ (html | safe) + '<i>' }} {{ '<i>' + (html | safe) }} {{ [html | e] }} {{ (html | e) is escaped }} {{ html | e | upper }} {{ html | string }} {{ 1 | e }} {{ ('<' | safe) ~ '<' }} {{ (html | safe) * 2 }} {{ (html | safe).lower() + '&' }}
{{ 'a b&c/d?e=\u00e9' | urlencode }} {{ {'a b': 'c&d', 'e': 1} | urlencode }} {{ [('x', 'y z')] | urlencode }}
{{ 'one two,three' | wordcount }} {{ 1 | filesizeformat }} {{ 13000 | filesizeformat }} {{ 1234567890 | filesizeformat(true) }} {{ 999 | filesizeformat }}
{{ messages[0] | attr('role') is defined }} {{ 'abc' | attr('upper') is callable }} {{ d | attr('items') is callable }}
{{ 'a' | string is string }} {{ 1 | string + 'b' }} {{ [1] | string | length }}
{{ 'a' | nope }}
{% if false %}{{ 'a' | nope }}{% endif %}ok
{% for x in [] %}{{ 'a' | nope }}{% endfor %}ok
{{ 'a' | nope if false else 'b' }}
{{ 1 is nope }}
{{ 'a' | upper('x') }}
{{ 'a' | upper(x=1) }}
{{ 'a' | default('b', 'c', 'd') }}
{{ 'upper' is filter }} {{ 'nope' is filter }} {{ 'odd' is test }} {{ 'nope' is test }}

{{ 3 is odd }} {{ 4 is even }} {{ 2.0 is even }} {{ 9 is divisibleby(3) }} {{ 9 is divisibleby 4 }} {{ 1 is number }} {{ true is number }} {{ 1 is integer }} {{ true is integer }} {{ 1.0 is integer }} {{ 1.0 is float }} {{ true is boolean }} {{ 1 is boolean }} {{ true is true }} {{ 1 is true }} {{ false is false }} {{ 0 is false }} {{ none is none }}
{{ 'a' is odd }}
{{ 'ab' is lower }} {{ 'AB' is upper }} {{ 'Ab' is lower }} {{ 1 is lower }} {{ 'a' is string }} {{ d is mapping }} {{ [] is sequence }} {{ 'a' is sequence }} {{ d is sequence }} {{ 1 is sequence }} {{ d.items() is sequence }} {{ range(2) is sequence }} {{ d.items() is iterable }} {{ 1 is iterable }} {{ none is iterable }} {{ (words | map('upper')) is iterable }} {{ (words | map('upper')) is sequence }}
{{ 1 is eq 1 }} {{ 1 is eq(1) }} {{ 1 is equalto 2 }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 1 is le 1 }} {{ 2 is gt 1 }} {{ 2 is ge 3 }} {{ 1 is in [1, 2] }} {{ 'a' is in 'cat' }} {{ 3 is not in [1] }} {{ 1 is sameas 1 }} {{ none is sameas none }} {{ true is sameas(true) }} {{ 1 is sameas true }} {{ [] is sameas [] }} {{ 1 is greaterthan 0 }} {{ 1 is lessthan 0 }}
{{ 1 is not none }} {{ not 1 is none }} {{ 1 is odd and 2 is even }}
{{ 1 is defined is defined }}
{{ 1 is defined and 2 is not defined or false }} {{ 'x' if 1 is odd else 'y' }} {{ range is callable }} {{ strftime_now is defined }} {{ raise_exception is defined }} {{ namespace is defined }} {{ nope is defined }} {{ messages is callable }}
{{ strftime_now('%Y') | length }} {{ strftime_now('%d %b') | length }} {{ strftime_now('') }}|

{% macro wrap(text, mark="*") -%}{{ mark }}{{ text }}{{ mark }}{%- endmacro %}{{ wrap('a') }}{{ wrap("b", mark="-") }}{{ wrap(mark='+', text='c') }}{{ wrap() }}{{ wrap('a', 'b') | upper }}
{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m('x', 'y') }}
{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m(b=1) }}
{% macro m(a, b=a ~ '!', c=[]) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}{{ m(1, 2, 3) }}{{ m(1, c='z') }}
{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }}{{ m() }}
{% macro m(a) %}{{ a is defined }}{% endmacro %}{{ m() }}{{ m(none) }}{{ m(undefined_thing) }}
{% macro m(a='d') %}{{ a is defined }}{% endmacro %}{{ m() }}{{ m(undefined_thing) }}
{% macro list_of(items) %}{% for i in items %}<{{ caller(i) }}>{% endfor %}{% endmacro %}{% call(x) list_of([1, 2]) %}{{ x * 2 }}{% endcall %}
{% macro box(title) %}{{ title }}: {{ caller() }}{% endmacro %}{% set y = 3 %}{% call box('T') %}body {{ y }}{% endcall %}
{% macro m() %}{{ caller is defined }}{{ caller() if caller else 'no' }}{% endmacro %}{{ m() }}{% call m() %}x{% endcall %}
{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}
{% macro fact(n) %}{{ n if n <= 1 else n * (fact(n - 1) | int) }}{% endmacro %}{{ fact(5) }}
{% macro walk(t) %}{% for k, v in t.items() %}{{ k }}{% if v is mapping %}({{ walk(v) }}){% endif %}{% endfor %}{% endmacro %}{{ walk({'a': {'b': {'c': 1}}, 'd': 2}) }}
{% macro m() %}{{ x }}{% endmacro %}{{ m() }}|{% set x = 1 %}{{ m() }}|{% set x = 2 %}{{ m() }}
{% macro m() %}{% set z = 5 %}{{ z }}{% endmacro %}{{ m() }}{{ z }}|{{ m.name }} {{ m.arguments }} {{ m.caller }}
{% for i in [1, 2] %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}{{ m is defined }}
{% if true %}{% macro m() %}in{% endmacro %}{% endif %}{{ m() }}
{% macro m(a, a) %}{% endmacro %}
{% macro m(a=1, b) %}{% endmacro %}
{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}
{% macro m(x) %}{{ x }}{% endmacro %}{% set f = m %}{{ f(1) }}{{ [m][0](2) }}{{ {'k': m}.k(3) }}
{{ m() }}{% macro m() %}{% endmacro %}
{% macro m(x) %}{{ x }}{% endmacro %}{{ m(*[1]) }}{{ m(**{'x': 2}) }}{{ m(*[], **{}) }}
{% macro m(x) %}{% endmacro %}{{ m(*[1, 2]) }}
{% macro m(x) %}{{ x }}{% endmacro %}{{ m(*[1]) }}{{ m(**{'x': 2}) }}{{ '%s %s' | format(*[1, 2]) }}
{% macro m(role) %}{{ messages | selectattr('role', 'equalto', role) | list | length }}{% endmacro %}{{ m('user') }}{{ m(role='system') }}

{% for x in numbers %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.index0 }} {% endfor %}
{% for x in words %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {{ loop.cycle('odd', 'even') }} {{ loop.changed(x | lower) }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}
{% for x in numbers if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% endfor %}{% for x in numbers if x > 100 %}{% else %}none{% endfor %}
{% for a, b in [(1, 2), [3, 4], 'xy'] %}{{ a }}{{ b }} {% endfor %}{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{% for i in [1] %}{% continue %}{% else %}else{% endfor %}{% for i in [1, 2] %}{{ i }}{% break %}{% else %}else{% endfor %}
{% break %}
{% for i in [1] %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}
{% set x = 0 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}
{% set ns = namespace(x=0, l=[]) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.x }}{{ ns.l }}{{ ns.y is defined }}{{ ns }}
{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}{{ ns['a'] }}
{% set a.b = 1 %}
{% set a = {} %}{% set a.b = 1 %}
{% set ns = namespace() %}{% set ns.a, ns.b = 1, 2 %}{{ ns.a }}{{ ns.b }}{% set a, b = [1, 2] %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}
{% set block %}<{{ 1 }}>{% endset %}{{ block }}{% set up | upper %}abc{{ 'd' }}{% endset %}{{ up }}{% set q | replace('a', 'b') | trim %} aa {% endset %}[{{ q }}]
{% filter upper %}abc {{ 'def' }}{% endfilter %}{% filter replace('a', 'b') | indent(1, true) %}a{% endfilter %}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}{% set a = 5 %}{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q }}
{% for x in [1, 2] %}{% for y in [3, 4] %}{{ loop.index }}{{ x }}{{ y }} {% endfor %}{{ loop.index }}{% endfor %}
{% for x in [[1, [2, 3]], 4] recursive %}{{ loop.depth }}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}
{% for c in 'a\u00e9b' %}{{ c }}-{% endfor %}{% for k in {'x': 1} %}{{ k }}{% endfor %}{% for x in (words | map('upper')) %}{{ loop.last }}{{ x }}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for x in nothing %}{% endfor %}
{% for m in messages if not ns is defined %}{{ m.role[0] }}{% endfor %}{% set found = namespace(v=false) %}{% for x in [1, 2, 3] if not found.v %}{{ x }}{% set found.v = true %}{% endfor %}
{% for x in [1, 2] %}{{ x }}{% if loop.first %}{% set flag = 'f' %}{% endif %}{{ flag }}{% endfor %}{{ flag is defined }}
{% if false %}{% set yes = 'inner' %}{% endif %}{{ yes }}{% if true %}{% set yes = 'inner' %}{% endif %}{{ yes }}
{% set messages = messages[1:] %}{{ messages | length }}{% for m in messages %}{% set messages = [] %}{{ messages | length }}{% endfor %}{{ messages | length }}
{% for x in [1] %}{% set loop = 2 %}{% endfor %}
{{ loop is defined }}{% for x in [1, 2] %}{{ loop.length }}{% for y in [1] %}{{ loop.length }}{% endfor %}{{ loop.index }}{% endfor %}
{% for x in [1, 2, 3] %}{{ loop.nextitem if not loop.last }}{% if loop.nextitem is undefined %}end{% endif %}{% endfor %}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner('|') %}{{ j() }}a{{ j() }}b{{ j() }}c
{% generation %}said {{ 1 }}{% set inner = 2 %}{% endgeneration %}{{ inner is defined }}
{% block a %}A{{ text[:3] }}{% endblock %}{% set outer = 1 %}{% block b %}{{ outer }}{% endblock b %}{% for i in [1] %}{% block c %}{{ i is defined }}{% endblock %}{% endfor %}
{% block a %}{% endblock %}{% block a %}{% endblock %}
{% include 'x' %}
{% import 'x' as y %}
{% from 'x' import y %}
{% extends 'x' %}
{% if false %}{% include 'x' %}{% endif %}ok
{% do [].append(1) %}
{% print 1, 'a' %}{% if 1: %}colon{% endif %}{% for x in 1, 2 %}{{ x }}{% endfor %}{{ 1, 2 }}{{ () }}
{% if 1 %}a{% elif 2 %}b{% else %}c{% endif %}{% if 0 %}a{% elif 2 %}b{% else %}c{% endif %}{% if 0 %}a{% elif '' %}b{% elif [] %}x{% else %}c{% endif %}
{% nope %}
{% if %}{% endif %}
{% endif %}
{% for x in y
{{ 'a }}
{{ [1, 2 }}
{{ (1 }}
{{ 1 2 }}
{{ @ }}
{# never ends
{{ a.b. }}
{{ range(100001) }}
{{ range(1, 2, 0) }}
{{ raise_exception('no') }}
{% if false %}{{ raise_exception('no') }}{% endif %}fine
{{ namespace }}{{ undefined_thing.__x__ }}
{{ lipsum is defined }} {{ dict is defined }} {{ cycler is defined }}

{% raw %}{{ not }} {% rendered %} {# at all #}{% endraw %}|{%- raw -%}  x  {%- endraw -%}  y
{% raw %}{{ unfinished
  a {%- if true -%}  b  {%- endif -%}  c
a{{- ' b ' -}}  c {{+ 1 }} {%+ if true +%} d {% endif %}
{{ '}}' }}{{ {'a': {'b': 1}} }}{{ '{%' }}{# }} %} #}x{{ "#}" }}
{{ 1 }}{# c -#}   x   {#- d #}y
"""

MULTILINE = [
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "a\n  {%+ if true %}\n  b\n  {%- endif %}\nc\n\n",
    "a\n\u00a0{% if true %}\nb{% endif %}\n",
    "x\n \t{# comment #}\n \t{{ 1 }}\n y {% set a = 1 %}\n\nz",
    "a\r\nb\r{% if true %}\r\nc\n{% endif %}\r\n",
    "{% if true %}\n\n  x{% endif %}\n \n{% for i in [1,2] %}\n{{ i }}\n{% endfor %}\n",
    "{%- for m in messages -%}\n  {{ m.role }}\n{%- endfor -%}\n\n",
    "\n\n  {%- set x = 1 -%}  \n {{ x }} \n",
    "{% raw %}\n  {{ a }}\n  {% endraw %}\n b",
    "  {%- raw %}\n x \n{%- endraw %}\n b",
    "{% macro a() %}\n  x\n{% endmacro %}\n[{{ a() }}]\n",
    "{{ 'a\nb' }}\n{{ \"x\\\ny\" }}",
    "{{\n  1\n  +\n  2\n}}\n{%\n  if true\n%}\nyes\n{%\n  endif\n%}",
    "{#- a -#}\n\n{#+ b +#}\nc",
    "   {% if true %}   \n  a   {% endif %}   \n",
    "\u2003{%- if true %}\u2003a{% endif -%}\u3000\u0085\nb",
    "a{% if true +%}\nb{% endif %}",
    "{% set t %}\n  line\n{% endset %}\n[{{ t }}]",
    "{% call(x) f() %}{% endcall %}",
    "",
    "\n",
    "\n\n",
    "{{ 1 }}\n",
    "plain { text } with % signs # and }} ends %} #}",
    "{ {{ 1 }} } {{ '{' }} {{ \"{{\" }}",
    "{% set \u00e9t\u00e9 = 1 %}{{ \u00e9t\u00e9 }}",
    "{{ 1\u00a0+\u20032 }}",
]


def environment():
    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        @jinja2.pass_eval_context
        def _said(self, context, caller):
            return caller()

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    def strftime_now(form):
        import datetime
        return datetime.datetime.now().strftime(form)

    out = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, jinja2.ext.loopcontrols])
    out.filters["tojson"] = to_json
    out.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return out


def rendering(env, template):
    try:
        return env.from_string(template).render(**VARIABLES)
    except Exception:  # pylint: disable=broad-except  # templates raise Python's exceptions too
        return None


def main():
    env = environment()
    lines = [line for line in LINES.split("\n") if line and "prints its address" not in line]
    cases = [{"template": template, "text": rendering(env, template)}
             for template in lines + MULTILINE]
    for case in cases:
        if case["text"] is not None and " at 0x" in case["text"]:
            raise SystemExit(f"prints an address: {case['template']}")
    OUT.write_text(json.dumps({"variables": VARIABLES, "cases": cases}, indent=0) + "\n")
    print(len(cases), "cases,", sum(case["text"] is None for case in cases), "refused")


if __name__ == "__main__":
    main()
