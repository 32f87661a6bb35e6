"""Files that are written: whole or not at all, and never over an input or each other."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from understudy import outputs
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.outputs import check_outputs, create, files_named


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with create(path) as file:
        file.write(b"some")
        assert not path.exists()
    assert path.read_bytes() == b"some"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), create(path) as file:
        file.writelines([b"half of it", None])  # type: ignore[list-item]
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_another_process_of_our_number_left_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "_numbers", iter(range(5)))
    for number in range(
        3
    ):  # of one that was killed, or that writes beside us, each in a container of its own
        (tmp_path / f".understudy-{os.getpid()}-{number}.part").write_bytes(b"theirs")
    with create(tmp_path / "new") as file:
        file.write(b"ours")
    assert (tmp_path / "new").read_bytes() == b"ours"
    assert len(list(tmp_path.glob(".understudy-*"))) == 3


def test_a_replaced_file_keeps_its_rights_and_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"before")
    path.chmod(0o600)
    link.symlink_to(path)
    with create(link) as file:
        file.write(b"after")
    assert link.is_symlink()
    assert path.read_bytes() == b"after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_file_has_the_rights_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with create(tmp_path / "ours"):
        pass
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_device_is_written_as_it_is() -> None:
    with create(os.devnull) as file:
        file.write(b"nothing to keep")
    assert not Path(os.devnull).is_file()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no/file"), create(tmp_path / "no" / "file"):
        pass


def test_standard_output_is_a_dash(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with create("-") as file:
        file.write(b"out")
    assert capfdbinary.readouterr().out == b"out"
    assert not Path("-").exists()


def test_standard_output_that_is_a_file_goes_on_behind_what_it_has(tmp_path: Path) -> None:
    path, link = tmp_path / "log", tmp_path / "link"
    path.write_text("precious\n")
    link.symlink_to("/dev/stdout")
    script = (
        "from understudy.outputs import create\n"
        "print('a table', flush=True)\n"
        f"for name in ('-', '/dev/stdout', '/dev/fd/1', '/proc/self/fd/1', {str(link)!r}):\n"
        "    with create(name) as file:\n"
        "        file.write(name[-4:].encode() + b'\\n')\n"
        "print('the end')\n"
    )
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, check=True)
    assert path.read_text().splitlines() == [
        *("precious", "a table", "-", "dout", "fd/1", "fd/1", "link", "the end")
    ]


def test_a_pipe_that_the_shell_has_opened_is_written_as_it_is() -> None:
    read_end, write_end = os.pipe()
    with create(f"/dev/fd/{write_end}") as file:
        file.write(b"out")
    check_outputs({"--json": f"/dev/fd/{write_end}"}, {})
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read() == b"out"


def test_two_names_of_standard_output_are_one_output() -> None:
    with pytest.raises(ConfigError, match="--html would overwrite /dev/stdout, which is written for --json"):
        check_outputs({"--json": "-", "--html": "/dev/stdout"}, {})


@pytest.mark.parametrize("how", ["same", "dotted", "symlink", "hard link"])
def test_an_input_under_any_name_is_no_output(tmp_path: Path, how: str) -> None:
    path = tmp_path / "trace"
    path.write_text("precious")
    other = {"same": path, "dotted": tmp_path / "." / "x" / ".." / "trace"}.get(how, tmp_path / "other")
    (tmp_path / "x").mkdir()
    if how == "symlink":
        other.symlink_to(path)
    if how == "hard link":
        other.hardlink_to(path)
    with pytest.raises(ConfigError, match=r"--json would overwrite .*, which is read for TRACE"):
        check_outputs({"--json": other}, {"TRACE": path})


def test_two_outputs_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html would overwrite .*, which is written for --json"):
        check_outputs({"--json": tmp_path / "a", "--html": tmp_path / "a"}, {})
    with pytest.raises(ConfigError, match="--html"):
        check_outputs({"--json": "-", "--html": "-"}, {})
    check_outputs({"--json": os.devnull, "--html": os.devnull, "--events": None}, {})


def test_a_folder_is_no_file_and_a_missing_one_no_place(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(ConfigError, match="folder"):
            check_outputs({"--json": path}, {})


def test_a_place_where_nothing_can_be_written_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "no" / "file")
    with pytest.raises(ConfigError, match="link: the folder does not exist"):
        check_outputs({"--json": dangling}, {})
    with pytest.raises(ConfigError, match="File name too long"):
        check_outputs({"--json": tmp_path / ("a" * 300)}, {})
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=r"cannot write .*new: Permission denied"):
        check_outputs({"--json": tmp_path / "new"}, {})
    check_outputs({"--json": os.devnull}, {})


def test_a_folder_that_is_read_stands_for_what_is_read_of_it(tmp_path: Path) -> None:
    (tmp_path / "tp2").mkdir()
    for name in ("config.json", "model.safetensors", "report.json", "tp2/dense.csv.gz", "tp2/notes.csv"):
        (tmp_path / name).touch()
    found = files_named({"gpu": {"op_tables": str(tmp_path)}, "model": Path(tmp_path)}).values()
    assert {str(path.relative_to(tmp_path)) for path in found} == {
        *("config.json", "model.safetensors", "tp2/dense.csv.gz")
    }


def test_settings_name_files_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, steps = tmp_path / "router.py", tmp_path / "steps"
    script.touch()
    steps.touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kv").touch()
    settings = {
        "routing": f"{script}:Mine",
        "policy": "kv",  # a name of ours, though there is such a file
        "pools": [{"engine": VllmConfig(), "timing": {"path": "steps"}}, None, 3],
        "trace": Path("kv"),
        "missing": str(tmp_path / "none"),
        "text": "x" * 5000 + "/y",
    }
    assert files_named(settings) == {
        "routing": script,
        "pools.0.timing.path": Path("steps"),
        "trace": Path("kv"),
    }


WRITES = """
import sys, time
from understudy import outputs
if sys.argv[2] == "named":
    outputs._open_unnamed = lambda target: None
with outputs.create(sys.argv[1] + "/one") as file, outputs.create(sys.argv[1] + "/two") as other:
    file.write(b"half of it")
    file.flush()
    print("open", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "number"),
    [("named", signal.SIGTERM), ("unnamed", signal.SIGTERM), ("unnamed", signal.SIGKILL)],
)
def test_a_signal_that_ends_the_process_leaves_no_file_behind(
    tmp_path: Path, how: str, number: signal.Signals
) -> None:
    if how == "unnamed" and not hasattr(os, "O_TMPFILE"):
        pytest.skip("needs files without a name")
    (tmp_path / "two").write_bytes(b"before")
    command = [sys.executable, "-c", WRITES, str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        process.send_signal(number)
        assert process.wait(30) == -number
    assert [file.name for file in tmp_path.iterdir()] == ["two"]
    assert (tmp_path / "two").read_bytes() == b"before"


def test_a_named_part_takes_the_place_of_the_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "_open_unnamed", lambda target: None)  # noqa: ARG005
    before = signal.getsignal(signal.SIGTERM)
    with create(tmp_path / "one") as file:
        file.write(b"whole")
    with pytest.raises(RuntimeError), create(tmp_path / "one") as file:
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("one", b"whole")]
