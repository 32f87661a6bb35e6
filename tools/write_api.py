"""Write docs/api.md, the reference of the public Python names, from their docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import understudy
from understudy.cache.api import ReadableStudy
from understudy.calibrate.api import Calibration
from understudy.calibrate.predict import Predictions
from understudy.explain.api import Explanation
from understudy.live import LiveHandle
from understudy.report.compare import Comparison
from understudy.report.metrics import BY_KEY, METRICS
from understudy.report.report import Report
from understudy.report.verdict import Verdict
from understudy.run.facts import RunFacts
from understudy.workload.formats import ReaderOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
RETURNED = (RunFacts, Verdict, Comparison, Predictions, ReadableStudy, Calibration, Explanation, LiveHandle)
"""Types that public names return."""
INTERNAL = {"Report": ("build", "table"), "Comparison": ("table", "rows", "metrics"), "Predictions": ("of",)}
INTERNAL |= {
    "VllmConfig": ("core_config", "native", "native_timing", "check_recordable", "notes", "describe")
}
INTERNAL |= dict.fromkeys(
    ("SglangConfig", "TrtllmConfig"),
    ("core_config", "native_timing", "check_recordable", "notes", "describe"),
)
INTERNAL |= {
    "KvCacheGroup": ("native", "describe_kind"),
    "TiersConfig": ("describe", "drop_unused_kv_size"),
    "KvRouting": ("build",),
    "Outputs": ("paths",),
}
"""Public methods that users do not call."""

HEAD = """# Python API

`import understudy as us` offers these names; `examples/notebook.py` uses them in one script. This page is written from
the docstrings by `python tools/write_api.py`.

"""


class Doc(NamedTuple):
    """A docstring by parts."""

    text: str
    parameters: dict[str, str]
    errors: str
    example: str


class Entry(NamedTuple):
    """A parameter or a field."""

    name: str
    kind: str
    default: str
    text: str


def read_doc(thing: Any) -> Doc:
    """Split the docstring into description, parameters, errors and example."""
    parts = re.split(r"^(Parameters|Errors|Example):", inspect.getdoc(thing) or "", flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    listed = textwrap.dedent(sections.get("Parameters", "").strip("\n"))
    found = re.findall(r"^(\w+): (.*(?:\n +.*)*)", listed, flags=re.MULTILINE)
    return Doc(
        parts[0].strip(),
        {name: " ".join(text.split()) for name, text in found},
        " ".join(sections.get("Errors", "").split()),
        textwrap.dedent(sections.get("Example", "").strip("\n")).rstrip(),
    )


def parse(thing: Any) -> Any:
    """Return the syntax tree of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def list_parameters(function: Any) -> Iterator[Entry]:
    """Yield the parameters of a function. KeyError names one without a description."""
    arguments = parse(function).args
    texts = read_doc(function).parameters
    positional = [argument for argument in arguments.args if argument.arg not in ("self", "cls")]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    several = [] if arguments.vararg is None else [arguments.vararg]
    listed = [*zip([*positional, *several], [*defaults, *([None] * len(several))], strict=True)]
    for argument, default in [*listed, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
        yield Entry(argument.arg, unparse(argument.annotation), unparse(default), texts[argument.arg])
    if arguments.kwarg is not None and "ReaderOptions" in unparse(arguments.kwarg.annotation):
        yield from list_fields(ReaderOptions)


def list_fields(cls: type) -> Iterator[Entry]:
    """Yield the fields of a class and of its bases. KeyError names one without a description."""
    for one in reversed(cls.__mro__):
        if not one.__module__.startswith("understudy"):
            continue
        body = parse(one).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            name = node.target.id
            if not name.startswith("_"):
                default = unparse(node.value)
                if default.isidentifier() and default.isupper():  # a constant of the module
                    default = repr(getattr(sys.modules[one.__module__], default)).replace("'", '"')
                kind = re.sub(r"\bSelf\b", cls.__name__, unparse(node.annotation))
                yield Entry(name, kind, default, describe_field(cls, name, after))


def describe_field(cls: type, name: str, after: Any) -> str:
    """Return the text that follows a field, or the definition of the metric of that name."""
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return " ".join(str(after.value.value).split())
    if cls is Report:
        if name in BY_KEY:
            metric = BY_KEY[name]
            unit = "" if metric.unit == metric.name.lower() else f", {metric.unit}"
            return f"{metric.name}{unit}. {metric.definition}"
        inside = [metric.key.partition(".")[2] for metric in METRICS if metric.key.startswith(f"{name}.")]
        if inside:
            return f"Has {', '.join(f'`{one}`' for one in inside)}."
    raise KeyError(f"{cls.__name__}.{name}: the docstring is missing; add one below the field")


def unparse(node: Any) -> str:
    """Return source text; empty without a node."""
    text = "" if node is None else ast.unparse(node).replace("'", '"')
    return "{}" if text.endswith("field(default_factory=dict)") else text


def tabulate(title: str, entries: list[Entry]) -> list[str]:
    """Build a table of parameters or fields; empty without any."""
    if not entries:
        return []
    rows = [f"| {title} | type | default | meaning |", "|---|---|---|---|"]
    for one in entries:
        cells = [
            f"`{one.name}`",
            *(f"`{cell}`" if cell else "" for cell in (one.kind, one.default)),
            one.text,
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return ["", *rows]


def write_signature(name: str, thing: Any, entries: list[Entry]) -> str:
    """Return the call on lines of at most 100 characters; types stand in the table."""
    if isinstance(thing, FunctionType):
        arguments = parse(thing).args
        starred = [f"*{arguments.vararg.arg}"] if arguments.vararg else ["*"] if arguments.kwonlyargs else []
        by_name = {one.name: one for one in entries}
        shown = [format_entry(by_name[one.arg]) for one in arguments.args] + starred
        shown += [format_entry(by_name[one.arg]) for one in arguments.kwonlyargs]
        shown += ["**options"] if arguments.kwarg and arguments.kwarg.arg == "options" else []
        end = f") -> {unparse(parse(thing).returns)}"
    else:
        shown, end = ["*", *map(format_entry, entries)], ")"
    lines = textwrap.wrap(
        f"us.{name}({', '.join(shown)}{end}", 100, subsequent_indent="    ", break_long_words=False
    )
    return "\n".join(lines)


def format_entry(entry: Entry) -> str:
    """Return a parameter with its default."""
    return f"{entry.name}={entry.default}" if entry.default else entry.name


def list_methods(cls: type) -> list[str]:
    """List public methods and properties with the first paragraph of their docstrings."""
    lines = []
    fields = {entry.name for entry in list_fields(cls)}
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") or name in fields or name in INTERNAL.get(cls.__name__, ()):
            continue
        owner = next(one for one in cls.__mro__ if name in vars(one))
        if not owner.__module__.startswith("understudy"):
            continue
        is_call = callable(member)
        if cls.__name__ == "VllmConfig" and not is_call:
            continue  # derived facts for the core
        text = read_doc(member).text.replace("\n", " ")
        arguments = parse(member).args if is_call else None
        names = [one.arg for one in arguments.args + arguments.kwonlyargs] if arguments else []
        call = f"({', '.join(one for one in names if one not in ('self', 'cls'))})" if is_call else ""
        lines.append(f"- `{name}{call}`: {' '.join(text.split())}")
    return ["", *lines] if lines else []


def describe_name(name: str, thing: Any, *, public: bool = True) -> str:
    """Return the section of one name. KeyError names what its docstring lacks."""
    doc = read_doc(thing)
    is_class = isinstance(thing, type)
    entries = list(list_fields(thing) if is_class else list_parameters(thing))
    lines = [f"{'##' if public else '###'} {name}", ""]
    if public:
        if not doc.example:
            raise KeyError(f"{name}: the docstring has no Example; add one")
        if thing is not Report:  # a result: users do not create it
            lines += ["```text", write_signature(name, thing, entries), "```", ""]
    lines += [doc.text, *tabulate("field" if is_class else "parameter", entries)]
    lines += list_methods(thing) if is_class else []
    lines += ["", f"Errors: {doc.errors}"] if doc.errors else []
    lines += ["", "```python", doc.example, "```"] if doc.example else []
    return "\n".join(lines)


def render() -> str:
    """Return the text of the page."""
    names = dir(understudy)
    summary = [
        f"- [`{name}`](#{name.lower()}): {read_doc(getattr(understudy, name)).text.splitlines()[0]}"
        for name in names
    ]
    sections = [describe_name(name, getattr(understudy, name)) for name in names]
    returned = [describe_name(cls.__name__, cls, public=False) for cls in RETURNED]
    errors = (
        "Errors derive from `understudy.errors.UnderstudyError`; their texts are `field: problem; remedy`."
    )
    return (
        HEAD
        + "\n".join(summary)
        + f"\n\n{errors}\n\n"
        + "\n\n".join([*sections, "## Returned types", *returned])
        + "\n"
    )


def main() -> int:
    """Write the page."""
    PAGE.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
