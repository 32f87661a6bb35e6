"""Help, errors of usage and completion scripts of the command line."""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from understudy.cli import VERBS, build_parser, main
from understudy.cli.verbs import list_verbs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command line; return its exit code, standard output and standard error."""
    try:
        code = main(line.split())
    except SystemExit as error:
        code = int(str(error.code))
    told = capsys.readouterr()
    return code, told.out, told.err


def flags_shown(text: str) -> set[str]:
    return set(re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE))


def test_replay_help_shows_25_flags_by_task_after_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("replay --help", capsys)
    assert code == 0
    assert len(flags_shown(out)) == 25
    assert out.index("examples:") < out.index("describe the fleet:") < out.index("--help-all")


def test_examples_of_the_short_help_use_flags_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("replay --help", capsys)
    examples = out[out.index("examples:") : out.index("arguments:")]
    _, everything, _ = run("replay --help-all", capsys)
    assert set(re.findall(r"(?<= )--[a-z0-9-]+", examples)) <= flags_shown(everything)


def test_help_all_shows_every_flag_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("replay --help-all", capsys)
    assert (code, err) == (0, "")
    known = [
        action for action in list_verbs(build_parser())["replay"]._actions if action.help != "==SUPPRESS=="
    ]
    assert [flag for action in known for flag in action.option_strings if flag not in out] == []


def list_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of its verbs and their tasks."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from list_parsers(verb)


def test_every_help_has_a_short_usage_then_a_description_then_examples_then_flags() -> None:
    parsers = list(list_parsers(build_parser()))
    assert len(parsers) > len(VERBS)
    for parser in parsers:
        text = parser.format_help()
        usage, _, rest = text.partition("\n\n")
        assert len(usage.splitlines()) <= 3, parser.prog
        assert parser.description is not None
        places = [rest.find(word) for word in (parser.description, "examples:\n  ", f"\n  {parser.prog} ")]
        first_flag = re.search(r"^(?:options|arguments|verbs|positional arguments):$", rest, re.MULTILINE)
        assert first_flag is not None, parser.prog
        assert 0 <= places[0] < places[1] < first_flag.start(), parser.prog
        assert places[2] >= 0, parser.prog


MISSPELT = {
    "plan": ("--stroe", "--store"),
    "doctor": ("--fromat", "--format"),
    "replay": ("--wrkers", "--workers"),
    "compare": ("--hmtl", "--html"),
    "explain": ("--slowst", "--slowest"),
    "diff": ("--jsno", "--json"),
    "predict": ("--modle", "--model"),
    "accuracy": ("--kv-dtpe", "--kv-dtype"),
    "calibrate": ("--modle", "--model"),
    "cache": ("--sizs", "--sizes"),
    "capacity": ("--modle", "--model"),
    "sweep": ("--stroe", "--store"),
    "workload": ("--cuont", "--count"),
    "convert": ("--fromat", "--format"),
    "serve": ("--prot", "--port"),
    "fleet": ("--wrkers", "--workers"),
    "router": ("--wrkers", "--workers"),
    "load": ("--modle", "--model"),
    "agents": ("--lnaes", "--lanes"),
    "tokenizer": ("--hlep", "--help"),
    "events tap": ("--cuont", "--count"),
    "conformance": ("--ony", "--only"),
    "demo": ("--polcy", "--policy"),
    "qwen3 bench": ("--recrod", "--record"),
    "completion": ("--hlep", "--help"),
}


def test_every_verb_has_a_misspelt_flag_below() -> None:
    assert {verb.split()[0] for verb in MISSPELT} == set(VERBS)


@pytest.mark.parametrize("verb", MISSPELT)
def test_a_misspelt_flag_is_answered_with_the_one_that_was_meant(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, meant = MISSPELT[verb]
    code, out, err = run(f"{verb} {typed} 4", capsys)
    assert (code, out) == (2, "")
    assert err == f"understudy {verb}: {typed} is not a flag; did you mean {meant}?\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("replya", "understudy: VERB: 'replya' is not known; did you mean replay?"),
        ("events tpa", "understudy events: ACT: 'tpa' is not known; did you mean tap?"),
        ("", "understudy: VERB: missing; see `understudy --help`"),
        ("replay", "understudy replay: TRACE: missing; see `understudy replay --help`"),
        (
            "replay t --workers x",
            "understudy replay: --workers must be a whole number, got 'x'; write",
        ),
        (
            "replay t --slo-ttft-ms x",
            "understudy replay: --slo-ttft-ms must be a number of milliseconds, got 'x'; write",
        ),
        (
            "replay t --engine x",
            "understudy replay: --engine: 'x' is not known; choose vllm, sglang, trtllm or qwen3",
        ),
        ("replay t --json", "understudy replay: --json needs a value; see"),
        ("replay t --quiet=1", "understudy replay: --quiet takes no value, got '1'; leave it out"),
        ("replay t u", "understudy replay: 'u': one argument too many; see"),
        ("replay t -x", "understudy replay: -x is not a flag; see"),
        ("replay t --zzzzzz=3", "understudy replay: --zzzzzz is not a flag; see"),
        ("demo --pol lru", "understudy demo: --pol is not a flag; did you mean --policy?"),
        (
            "router --workers notaurl",
            "understudy router: --workers: 'notaurl' is not the URL of an engine; write",
        ),
        ("conformance vllm nodir", "understudy conformance: DIR: nodir does not exist; name a folder"),
        ("conformance sglang nodir", "understudy conformance: DIR: nodir does not exist; name a folder"),
    ],
)
def test_an_error_of_usage_is_one_line_with_a_remedy(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(line, capsys)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize("act", ["tap", "verify"])
def test_a_port_without_a_publisher_is_an_error_at_once(act: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        code, out, err = run(f"events {act} {address}{' --stream raw' * (act == 'verify')}", capsys)
        assert (code, out) == (2, "")
        assert err.startswith(f"understudy events: {address}: Connection refused; start the publisher")
        assert "--wait" in err
        assert main(["events", "tap", address, "--wait", "--seconds", "0.1"]) == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_contain_verbs_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(f"completion {shell}", capsys)
    assert (code, err) == (0, "")
    assert all(verb in out for verb in VERBS)
    flags = ("slo-ttft-ms", "enable-prefix-caching", "base-port", "kv-events-config", "joined-late")
    assert [flag for flag in flags if flag not in out] == []
    assert "no-leaping" not in out


def test_bash_completes_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    script = tmp_path / "completion.bash"
    script.write_text(run("completion bash", capsys)[1])
    ask = """source "$1"; COMP_WORDS=(understudy $2); COMP_CWORD=2
    $(complete -p understudy | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo "${COMPREPLY[@]}" """
    asked = subprocess.run(
        [bash, "-c", ask, "bash", str(script), "replay --slo-t"], capture_output=True, text=True, check=True
    )
    assert asked.stdout.split() == ["--slo-ttft-ms"]


SAME_IN_EVERY_VERB = (
    "--model",
    "--gpu",
    "--kv-dtype",
    "--users",
    "--workers",
    "--routing",
    "--max-tokens",
    "--tensor-parallel-size",
)


@pytest.mark.parametrize("flag", SAME_IN_EVERY_VERB)
def test_a_flag_of_several_verbs_has_one_help(flag: str) -> None:
    helps = {
        (action.help, action.metavar)
        for verb in ("replay", "sweep", "cache", "predict", "calibrate", "capacity")
        for action in list_verbs(build_parser())[verb]._actions
        if flag in action.option_strings
    }
    assert len(helps) == 1
