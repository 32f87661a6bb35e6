"""`make` shows how far a build is, and all of it where it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "build.py"


def build(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "building it", sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_build_says_how_far_it_is_with_what_is_left() -> None:
    done = build("for n in range(1, 41): print(f'  [{n}/40] Building CXX object {n}.o', flush=True)")
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert [line.split(" of ")[0] for line in lines] == [f"building it: {n}" for n in (1, 10, 20, 30, 40)]
    assert lines[-1] == "building it: 40 of 40 files, about 0 s left"


def test_a_build_that_fails_shows_all_that_it_said() -> None:
    done = build("print('[1/2] Building a.o'); print('a.cpp:3: error: no'); raise SystemExit(3)")
    assert done.returncode == 3
    assert "a.cpp:3: error: no" in done.stderr
