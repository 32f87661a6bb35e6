"""Structured answers satisfy their form by a reference implementation, or are refused in the library's words."""

from __future__ import annotations

import re
from importlib.metadata import version
from random import Random
from typing import Any

import msgspec
import pytest

from structured.draws import draw_document, draw_schema
from structured.schemas import FORMATTED, arbitrary, document_around, is_valid, value
from understudy.structured.form import Form
from understudy.structured.formed import FormError


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


def test_a_grammar_without_an_end_is_refused() -> None:
    assert refused({"grammar": 'start: "(" start ")"'}).startswith("Grammar error: ")
