"""What is shipped: metadata, type stubs, lean imports, the documents' examples and the command line."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import understudy
from understudy.cli import VERBS, main

ROOT = Path(__file__).parents[1]
PACKAGE = Path(understudy.__file__).parent


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", **environment},
    )


def fenced(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


# --- metadata and types -------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("understudy") == understudy.__version__
    assert f"## [{understudy.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_type_information_is_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_core.pyi").is_file()


# --- lean imports -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("understudy", ["numpy", "rich", "msgspec", "understudy._core"]),
        ("understudy.cli", ["numpy", "rich", "msgspec", "understudy._core"]),
        ("understudy.kv", ["torch", "rich", "msgspec"]),
        ("understudy.tokens", ["torch", "rich", "msgspec"]),
        ("understudy.server.api.endpoints", ["llguidance"]),
        (
            "understudy.timing.recorded.record",
            ["torch", "rich"],
        ),  # recorded steps time simulated engines anywhere
    ],
)
def test_importing_a_module_does_not_drag_in(module: str, unwanted: list[str]) -> None:
    done = python("-c", f"import {module}, sys; print(*(set({unwanted}) & set(sys.modules)))")
    assert (done.stdout.split(), done.stderr) == ([], "")


def test_nothing_in_the_block_manager_names_torch() -> None:
    sources = [*(PACKAGE / "kv").rglob("*.py"), PACKAGE / "tokens.py"]
    assert len(sources) > 1
    assert [path.name for path in sources if re.search(r"\btorch\b", path.read_text())] == []


# --- documents ----------------------------------------------------------------------------------------


def test_the_readme_example_prints_what_the_readme_says() -> None:
    (example,) = fenced("README.md", "python")
    (output,) = fenced("README.md", "text")
    done = python("-c", example)
    assert (done.stdout, done.stderr) == (output, "")


def test_code_in_contributing_is_the_code_of_the_example() -> None:
    quotes = fenced("CONTRIBUTING.md", "python")
    names = ("python_policy.py", "python_router.py")
    examples = "".join((ROOT / "examples" / name).read_text() for name in names)
    assert quotes
    for quote in quotes:
        assert quote in examples, f"{' or '.join(names)} has changed: quote it anew in CONTRIBUTING.md"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"])
def test_files_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    links = [(ROOT / document).parent / path for path in re.findall(r"\]\((?!https?:)([^)#\s]+)", text)]
    named = [ROOT / path for path in re.findall(r"`((?:core|src|tests|examples|docs)/[\w./]+\w)`", text)]
    assert [str(path) for path in links + named if not path.exists()] == []


# --- the command line ---------------------------------------------------------------------------------


def test_help_shows_every_verb_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "examples:" in text
    assert all(re.search(rf"^    {verb}\b", text, re.MULTILINE) for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"understudy {verb}" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"understudy {understudy.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"], ["demo", "--pol", "lru"]])
def test_bad_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("understudy")
    assert told.err.count("\n") == 1


def test_a_typed_error_is_one_line_without_a_traceback() -> None:
    done = python("-m", "understudy", "demo", "--policy", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("understudy demo: --policy 'nonsense' is not known")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "understudy", "demo"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.stderr == b""


@pytest.mark.parametrize("policy", ["lineage", "vllm"])
def test_the_demo_shows_hits_an_eviction_and_conserved_blocks(
    policy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["demo", "--policy", policy]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^ (\w+ (?:arrives|finish(?:es)?|arrives again)) .*$", text, re.MULTILINE)
    assert len(rows) == 6
    states = re.findall(r" (\d+) +(\d+) +(\d+) +(\d+)(?: +[+−\d ]+)?$", text, re.MULTILINE)
    assert [sum(map(int, row)) for row in states] == [12] * len(rows)
    assert re.search(r"bob arrives .* 48/84 ", text)
    assert re.search(r"carol arrives .* 0/132 .* \+8 −4", text)
