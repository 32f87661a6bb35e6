"""Structured answers satisfy their form by a reference implementation, or are refused in the library's words."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from structured.draws import draw_document, draw_schema
from structured.schemas import FORMATTED, arbitrary, document_around, is_valid, value
from understudy.structured import chooser, library, limits
from understudy.structured.form import Form
from understudy.structured.formed import MAX_CHARACTERS, FormError
from understudy.structured.limits import refuse_panics


def answered(schema: Any, key: int = 1) -> Any:
    """Return the answer; it has an end and satisfies its schema."""
    formed = Form({"json": schema}).answer(key)
    assert formed.has_ended
    made = msgspec.json.decode(formed.text)
    assert is_valid(schema, made), (schema, made)
    return made


def refused(form: dict[str, Any]) -> str:
    with pytest.raises(FormError) as caught:
        Form(form).answer(1)
    return str(caught.value)


# ── Random schemas ──


@pytest.mark.parametrize("part", range(2))
def test_every_random_schema_of_what_is_supported_is_satisfied(part: int) -> None:
    for seed in range(150 * part, 150 * (part + 1)):
        rng = Random(f"draw{seed}")
        answered(draw_schema(rng) if seed % 3 else draw_document(rng), rng.getrandbits(64))


REFUSALS = (
    "NoExtension|Unimplemented keys|Unsatisfiable schema|only supported when all|oneOf constraints|too many|"
    "regex|lookaround"
)


@pytest.mark.parametrize("part", range(4))
def test_random_schemas_are_satisfied_or_refused(part: int) -> None:
    answers, refusals = 0, []
    for seed in range(150 * part, 150 * (part + 1)):
        rng = Random(f"arbitrary{seed}")
        schema = arbitrary(rng) if seed % 2 else document_around(rng, value(rng))
        try:
            answered(schema, seed)
            answers += 1
        except FormError as error:
            refusals.append(str(error))
    assert answers >= 90
    assert not [text for text in refusals if not re.match(f"Grammar error: (.|\n)*({REFUSALS})", text)]


def test_an_answer_depends_on_its_key_alone() -> None:
    for seed in range(50):
        schema = draw_schema(Random(seed))
        assert len({Form({"json": schema}).answer(7).text for _ in range(3)}) == 1
    assert len({Form({"json": {"type": "string"}}).answer(key).text for key in range(8)}) == 8


# ── Keywords ──

TREE = {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "integer"}}}
BELOW = {"type": "integer", "multipleOf": 7, "maximum": -(10**4)}
SATISFIABLE: list[Any] = [
    *(True, {}, {"type": ["null", "integer"], "minimum": 5}),
    {"type": "string", "pattern": "^[a-z]{3}-[0-9]+$", "minLength": 9, "maxLength": 9},
    {"type": "string", "pattern": "foo", "minLength": 20, "maxLength": 20},
    {"type": "string", "pattern": "(?i)^YES$"},
    {
        "type": "string",
        "allOf": [{"pattern": "^a"}, {"pattern": "z$"}, {"pattern": "[0-9]{3}"}],
        "maxLength": 5,
    },
    {"type": "string", "minLength": 3, "maxLength": 3, "pattern": "é"},
    {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 19.98, "maximum": 20},
    BELOW,
    {"type": "integer", "allOf": [{"multipleOf": 6}, {"multipleOf": 4}, {"exclusiveMinimum": 12}]},
    {"type": "array", "prefixItems": [{"enum": [1, 2]}, {"const": 1}], "minItems": 2, "items": False},
    {"type": "object", "minProperties": 3, "maxProperties": 3, "additionalProperties": {"type": "null"}},
    {"type": "object", "required": ["b"], "additionalProperties": {"const": 1}, "properties": {"a": False}},
    {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 1}, {"type": "null"}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer", "minimum": 3}}, "maximum": 3},
    *(TREE, {**TREE, "required": ["v"]}),
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/link"}, "right": {"$ref": "#/$defs/link"}},
                "required": ["left", "right"],
            },
            "link": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
    },
    {"type": "object", "properties": {f"p{n}": {"$ref": "#"} for n in range(20)}},
    {"type": "array", "minItems": 2000, "items": {"type": "integer"}},
    {"type": "string", "minLength": 5000},
    {"const": ["<|im_end|>", "</s>"]},
]


@pytest.mark.parametrize("schema", SATISFIABLE, ids=range(len(SATISFIABLE)))
def test_a_schema_is_satisfied(schema: Any) -> None:
    if schema == BELOW and tuple(map(int, version("llguidance").split(".")[:2])) < (1, 9):
        pytest.skip("llguidance before 1.9 refuses multiples below 0")
    for key in range(4):
        answered(schema, key)


@pytest.mark.parametrize("name", FORMATTED)
def test_a_format_is_satisfied(name: str) -> None:
    answered({"type": "string", "format": name})


def test_optional_properties_are_shown_unless_they_refer_back_or_contradict() -> None:
    assert answered(TREE) == {"v": 0}
    inner = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert answered({"type": "object", "properties": {"b": inner, "c": {"type": "integer"}}}) == {
        "b": {"a": None},
        "c": 0,
    }
    assert (
        answered(
            {
                "properties": {"a": {"type": "null"}},
                "allOf": [{"additionalProperties": False}],
                "type": "object",
            }
        )
        == {}
    )
    assert (
        answered({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}})
        == {}
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"json": {name: {}}}, f'Grammar error: Unimplemented keys: ["{name}"]')
        for name in ("not", "if", "contains")
    ),
    ({"json": {"type": "array", "uniqueItems": True}}, 'Grammar error: Unimplemented keys: ["uniqueItems"]'),
    ({"json": {"oneOf": [{}, {}]}}, "Grammar error: oneOf constraints are not supported"),
    ({"json": {"type": "text"}}, "Grammar error: Invalid type: text"),
    ({"json": {"enum": []}}, "Grammar error: Unsatisfiable schema"),
    ({"json": False}, "Grammar error: Unsatisfiable schema"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Grammar error: Unsatisfiable schema"),
    ({"json": {"type": "string", "format": "foo"}}, "Grammar error: Unknown format: foo"),
    ({"json": {"type": "string", "pattern": "a(?=b)"}}, "Grammar error: regex parse error"),
    ({"json": {"$ref": "#/$defs/none"}}, "Grammar error: Pointer '/$defs/none' does not exist"),
    ({"json": {"$ref": "#"}}, "Grammar error: NoExtension"),
    ({"json": {"type": "integer", "minimum": 10**30}}, "Invalid grammar specification: minimum: "),
    ({"json": []}, "Invalid grammar specification: the schema must be an object"),
    ({"json": "{"}, "structured_outputs.json is no JSON"),
    ({"regex": "("}, "Grammar error: "),
    ({"regex": "\\ud800"}, "Grammar error: "),
    ({"regex": 5}, "structured_outputs.regex must be a string."),
    ({"grammar": "root ::= nothing"}, "Invalid grammar specification: Failed to convert the grammar"),
    ({"grammar": "start: nothing"}, "Grammar error: "),
    ({"choice": []}, "structured_outputs.choice must be a list of strings"),
    (
        {"structural_tag": {"structures": [], "triggers": []}},
        "Invalid grammar specification: No structural tags found",
    ),
    ({"structural_tag": {"format": {}}}, "Invalid grammar specification: 'structures'"),
    ({"structural_tag": 5}, "Invalid grammar specification: "),
]


@pytest.mark.parametrize(("form", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_form_that_the_library_refuses_is_refused_in_its_words(form: dict[str, Any], message: str) -> None:
    assert refused(form).startswith(message)


# ── Other forms ──


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-[a-f]+",
        "(ab){3}c?[0-9]{2}",
        r"[\s\S]*end",
        "(?s).*foobar.*",
        "(?i)yes|no",
        "[^a-z]{4}",
        "(a|b)*",
        "é+[日本]",
    ],
)
def test_an_expression_is_matched(pattern: str) -> None:
    for key in range(3):
        assert re.fullmatch(pattern, Form({"regex": pattern}).answer(key).text)


def test_a_choice_is_one_of_them() -> None:
    assert {Form({"choice": ["yes", "no"]}).answer(key).text for key in range(2)} == {"yes", "no"}


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (
            'root ::= "SELECT " column " from " table\ncolumn ::= "a" | "b"\ntable ::= [a-z]+ ";"',
            r"SELECT [ab] from [a-z]+;",
        ),
        ('?start: sum\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]+/', r"\d+(\+\d+)*"),
        ('start: "(" start ")" | "x"', r"\(*x\)*"),
        ('start: "a" %json {"type": "boolean"}', "a(true|false)"),
    ],
)
def test_a_grammar_is_followed(grammar: str, pattern: str) -> None:
    for key in range(4):
        assert re.fullmatch(pattern, Form({"grammar": grammar}).answer(key).text)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_structural_tag_is_begun_filled_and_ended(as_text: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    structures = [
        {"begin": f"<function={name}>", "schema": schema, "end": "</function>"} for name in ("f", "g")
    ]
    tags: Any = {"structures": structures, "triggers": ["<function="]}
    form = Form({"structural_tag": msgspec.json.encode(tags).decode() if as_text else tags})
    for key, name in enumerate("fg"):
        found = re.fullmatch(rf"<function={name}>(.*)</function>", form.answer(key).text)
        assert found is not None
        assert is_valid({**schema, "required": ["city"]}, msgspec.json.decode(found[1]))


# ── Limits ──


def chain(count: int, link: str, last: str, begin: str = "") -> str:
    """A grammar of `count` rules, each of which is the next one."""
    return begin + "".join(link.format(number, number + 1) for number in range(count)) + last.format(count)


def linked(count: int, *, through: str | None = None) -> dict[str, Any]:
    """A schema of `count` references, each to the next one, or to an object of it."""
    defs: dict[str, Any] = {f"a{count}": {"type": "string"}}
    for number in range(count):
        refers = {"$ref": f"#/$defs/a{number + 1}"}
        held = {"type": "object", "properties": {through: refers}, "required": [through]}
        defs[f"a{number}"] = refers if through is None else held
    return {"$defs": defs, "$ref": "#/$defs/a0"}


def joined(count: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f".*a{{{number}}}.*"} for number in range(count)]}


HOSTILE: list[tuple[dict[str, Any], str]] = [
    (
        {"grammar": chain(3000, "a{}: a{}\n", 'a{}: "x"', "start: a0\n")},
        "the grammar has more than 500 rules",
    ),
    ({"grammar": chain(8000, 'A{}: A{} "y"\n', 'A{}: "x"', "start: A0\n")}, "grammar has more than 65,536"),
    (
        {"grammar": chain(900, "a{} ::= a{}\n", 'a{} ::= "x"', "root ::= a0\n")},
        "the grammar has more than 500 rules",
    ),
    ({"grammar": "start: A\nA: " + " & ".join(["/.*a/"] * 30)}, "more than 16 intersections"),
    ({"grammar": "start: A\nA: " + " & ".join(['/"?.*a/'] * 30)}, "more than 16 intersections"),
    ({"grammar": f"start: %json {msgspec.json.encode(joined(16)).decode()}"}, "more than 8 patterns"),
    ({"grammar": "start: " + "(" * 30_000}, "too deeply nested"),
    ({"json": linked(3000)}, "the schema has more than 500 references"),
    ({"json": linked(3000, through="p")}, "the schema has more than 500 references"),
    ({"json": joined(16)}, "more than 8 patterns"),
    ({"json": {"allOf": [{"multipleOf": step} for step in (3, 7, 11, 13, 17, 19, 23)]}}, "common multiple"),
    (
        {"json": {"patternProperties": {f"^{'a' * size}$": {} for size in range(400)}}},
        "more than 64 patterns",
    ),
    ({"json": {"type": "string", "pattern": "a?" * 10_000}}, "more than 16,384 characters"),
    ({"json": {"type": "string", "minLength": 10**9}}, "too many states"),
    ({"json": {"enum": ["x" * 1000] * 200}}, "more than 131,072 characters"),
    ({"regex": "a?" * 10_000 + "a" * 10_000}, "more than 16,384 characters"),
]
"""Forms that would take minutes, gigabytes or the stack of the process."""


@pytest.mark.parametrize(("form", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_form_that_would_stop_the_server_is_refused(form: dict[str, Any], message: str) -> None:
    assert message in refused(form)


def test_forms_at_their_limits_are_answered_on_the_stack_of_a_thread() -> None:
    forms: list[dict[str, Any]] = [
        {"grammar": chain(490, "a{}: a{}\n", 'a{}: "x"', "start: a0\n")},
        {"grammar": chain(490, 'A{}: A{} "y"\n', 'A{}: "x"', "start: A0\n")},
        {"grammar": chain(490, "a{} ::= a{}\n", 'a{} ::= "x"', "root ::= a0\n")},
        {"json": linked(490)},
        {"json": linked(490, through="p")},
        {"json": {"allOf": [{"type": "integer", "multipleOf": step} for step in (3, 7, 11, 13, 17)]}},
    ]
    with ThreadPoolExecutor(1) as pool:
        assert all(formed.has_ended for formed in pool.map(lambda form: Form(form).answer(1), forms))


def test_the_page_of_live_servers_names_the_limits() -> None:
    said = " ".join((Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8").split())
    for limit in (
        f"at most {MAX_CHARACTERS:,} characters",
        f"{library._LIMITS.max_lexer_states:,} states of the lexer",
        f"{chooser.MAX_STEPS:,} steps of an answer",
        f"{limits._MAX_LINKS} references or rules",
        f"{limits.MAX_PATTERN:,} characters of expressions, {limits.MAX_TEXT:,} of a grammar",
        f"{limits.MAX_WRITTEN:,} of a schema",
        f"{limits._MAX_INTERSECTIONS} intersections",
        f"{limits._MAX_KEY_PATTERNS} patterns of keys",
        f"{limits._MAX_TOGETHER} patterns in a schema that joins parts",
        f"common multiple up to {limits._MAX_MULTIPLE:,}",
    ):
        assert limit in said


def test_a_failed_assertion_of_the_library_is_a_refusal() -> None:
    class PanicException(BaseException):
        """As the library's bindings name it."""

    with pytest.raises(FormError, match="Grammar error: lost"), refuse_panics():
        raise PanicException("lost")
    with pytest.raises(KeyboardInterrupt), refuse_panics():
        raise KeyboardInterrupt


def test_no_value_of_any_kind_is_more_than_refused() -> None:
    rng = Random(3)
    junk: list[Any] = [
        None,
        5,
        "x",
        "",
        [],
        {},
        [{}],
        True,
        1e300,
        {"a": {}},
        "\ud800",
        ["\ud800"],
        {"$ref": "#"},
        "(" * 5000,
    ]
    names = (
        "type",
        "properties",
        "required",
        "items",
        "anyOf",
        "pattern",
        "minimum",
        "multipleOf",
        "$ref",
        "enum",
        "minLength",
    )
    deep: Any = {}
    for _ in range(900):
        deep = {"properties": {"a": deep}}
    forms: list[dict[str, Any]] = [{"json": deep}]
    for _ in range(400):
        forms.append({"json": {name: rng.choice(junk) for name in rng.sample(names, 2)}})
        tags = [{name: rng.choice(junk) for name in rng.sample(("begin", "schema", "end"), 3)}]
        forms.append(
            {
                "structural_tag": {
                    "structures": rng.choice((tags, junk)),
                    "triggers": rng.choice((["x"], junk)),
                }
            }
        )
    forms += [
        {kind: one} for kind in ("json", "regex", "choice", "grammar", "structural_tag") for one in junk
    ]
    for form in forms:
        with suppress(FormError):
            Form(form).answer(1, 256)


def test_only_the_beginning_of_a_text_that_exceeds_all_answers_is_made() -> None:
    for pattern in ("((((a{999}){999}){999}){999}){999}", "(ab{9}){99999}"):
        formed = Form({"regex": pattern}).answer(1)
        assert formed.text.startswith("a")
        assert (len(formed.text), formed.has_ended) == (1 << 17, False)
    formed = Form({"json": {"type": "array", "minItems": 16, "items": {"const": "a" * 10_000}}}).answer(
        1, 512
    )
    assert (len(formed.text), formed.has_ended) == (512, False)


def test_an_answer_that_takes_long_is_made_once_for_a_request() -> None:
    form = Form({"json": {"type": "array", "minItems": 3000, "items": {"type": "integer"}}})
    first, second = form.answer(1), form.answer(2)
    assert (second.text, second.has_ended, second.steps) == (first.text, True, 0)
    assert first.steps > 2048


def test_a_grammar_without_an_end_is_refused() -> None:
    assert refused({"grammar": 'start: "(" start ")"'}).startswith("Grammar error: ")
