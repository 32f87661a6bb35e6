"""Forms that would stop a server are refused; forms at the limits are answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from structured.test_forms import refused
from understudy.structured import chooser, library, limits
from understudy.structured.form import Form
from understudy.structured.formed import MAX_CHARACTERS, FormError
from understudy.structured.limits import refuse_panics


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
