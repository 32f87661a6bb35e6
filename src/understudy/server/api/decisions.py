"""Checks the bodies of `/v1/decisions`, which vLLM has since 0.33."""

from __future__ import annotations

from typing import Any

from understudy.server.api.body_checks import check_salt
from understudy.server.api.fields import Fields

MAX_QUESTIONS = 200
MAX_IDENTIFIER = 128
_FIELDS = ("model", "input", "questions", "safety_identifier", "joint", "cache_salt")
_OPTIONS = {"choice": ("choices", "value", 255), "score": ("levels", "label", 10)}
"""By type of question: the list of options, the name of an option, and the most options."""
_IMAGES = "Decisions supports text input only; images are not supported"


def check_decisions(body: dict[str, Any]) -> None:
    """Check a body in vLLM's order. ApiError lists the problems."""
    check_salt(body)
    fields = Fields(body)
    _check_text(fields, body, "model", required=True)
    if "input" not in body:
        fields.note("missing", "input", "must be given")
    elif not isinstance(body["input"], str):
        _check_input(fields, body["input"])
    _check_questions(fields, body)
    identifier = body.get("safety_identifier")
    if identifier is not None:
        _check_text(fields, body, "safety_identifier")
        if isinstance(identifier, str) and len(identifier) > MAX_IDENTIFIER:
            fields.note("string_too_long", "safety_identifier", f"at most {MAX_IDENTIFIER} characters")
    if not isinstance(body.get("joint", False), bool):
        fields.note("bool_type", "joint", "must be true or false", body["joint"])
    _check_no_others(fields, body, "", _FIELDS)
    fields.done()


def _check_text(
    fields: Fields, values: dict[str, Any], name: str, where: str = "", *, required: bool = False
) -> None:
    if name not in values:
        if required:
            fields.note("missing", f"{where}{name}", "must be given")
    elif not isinstance(values[name], str):
        fields.note("string_type", f"{where}{name}", "must be a string", values[name])


def _check_no_others(fields: Fields, values: dict[str, Any], where: str, known: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            fields.note("extra_forbidden", f"{where}{name}", "is not a field", values[name])


def _check_input(fields: Fields, value: Any) -> None:
    """Note problems of an input that is not text; vLLM names the form of text first."""
    within = Fields({})
    for place, message in enumerate(value if isinstance(value, list) else ()):
        where = f"input.{place}"
        if not isinstance(message, dict):
            within.note("model_type", where, "must be an object", message)
            continue
        content = message.get("content")
        if isinstance(content, list) and any(
            isinstance(part, dict) and part.get("type") == "input_image" for part in content
        ):
            within.note("value_error", where, _IMAGES, message)
        elif message.get("role") != "user":
            within.note("literal_error", f"{where}.role", "must be user", message.get("role"))
        elif not isinstance(content, str | list):
            within.note("string_type", f"{where}.content", "must be a text or parts", content)
    if within.problems or not isinstance(value, list):
        fields.note("string_type", "input.constrained-str", "must be a string or a list of messages", value)
        fields.problems += within.problems


def _check_questions(fields: Fields, body: dict[str, Any]) -> None:
    questions = body.get("questions")
    if "questions" not in body:
        fields.note("missing", "questions", "must be given")
    elif not isinstance(questions, list):
        fields.note("list_type", "questions", "must be a list", questions)
    elif not 1 <= len(questions) <= MAX_QUESTIONS:
        kind = "too_long" if questions else "too_short"
        fields.note(kind, "questions", f"from 1 to {MAX_QUESTIONS} questions", len(questions))
    else:
        for place, question in enumerate(questions):
            _check_question(fields, f"questions.{place}", question)


def _check_question(fields: Fields, where: str, question: Any) -> None:
    if not isinstance(question, dict) or "type" not in question:
        fields.note("union_tag_not_found", where, "must be an object with a type", question)
        return
    kind = question["type"]
    if kind not in ("predicate", "choice", "score"):
        fields.note("union_tag_invalid", where, "type must be predicate, choice or score", kind)
        return
    inner = f"{where}.{kind}"
    before = len(fields.problems)
    known: tuple[str, ...] = ("instructions", "name", "type")
    _check_text(fields, question, "instructions", f"{inner}.", required=True)
    if question.get("name") is not None:
        _check_text(fields, question, "name", f"{inner}.")
    if kind in _OPTIONS:
        known = (*known, _OPTIONS[kind][0])
        _check_options(fields, inner, question, kind)
    _check_no_others(fields, question, f"{inner}.", known)
    if len(fields.problems) > before:
        return
    if "name" in question and question["name"] is None:
        fields.note("value_error", inner, "name must be a string when provided")
    elif kind == "choice":
        values = [(type(option["value"]), option["value"]) for option in question["choices"]]
        if len(set(values)) < len(values):
            fields.note("value_error", inner, "choice values must be distinct")


def _check_options(fields: Fields, where: str, question: dict[str, Any], kind: str) -> None:
    name, label, most = _OPTIONS[kind]
    options = question.get(name)
    if name not in question:
        fields.note("missing", f"{where}.{name}", "must be given")
    elif not isinstance(options, list):
        fields.note("list_type", f"{where}.{name}", "must be a list", options)
    elif not 2 <= len(options) <= most:
        kind = "too_short" if len(options) < 2 else "too_long"
        fields.note(kind, f"{where}.{name}", f"from 2 to {most} options", len(options))
    else:
        for place, option in enumerate(options):
            inner = f"{where}.{name}.{place}"
            if not isinstance(option, dict):
                fields.note("model_type", inner, "must be an object", option)
                continue
            value = option.get(label)
            if label not in option:
                fields.note("missing", f"{inner}.{label}", "must be given")
            elif not isinstance(value, str) and not (label == "value" and isinstance(value, bool)):
                fields.note("string_type", f"{inner}.{label}", "must be a string", value)
            _check_text(fields, option, "description", f"{inner}.")
            _check_no_others(fields, option, f"{inner}.", (label, "description"))
