"""Run a build and print its progress: `python tools/build.py WHAT COMMAND...`; on failure print its whole output.

Progress comes from Ninja's lines (`[12/96] Building …`); the remaining time is estimated from the time so far.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

_STEP = re.compile(r"\[(\d+)/(\d+)\]")


def main(what: str, *command: str) -> int:
    """Return the exit code of the command."""
    began, first = 0.0, 0  # time and number of the first finished file
    output: list[str] = []
    reported_quarter = -1
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as build:
        assert build.stdout is not None
        for line in build.stdout:
            output.append(line)
            if (step := _STEP.search(line)) is None:
                continue
            done, total = int(step[1]), int(step[2])
            if not first or done < first:
                began, first = time.monotonic(), done
            left_s = (time.monotonic() - began) * (total - done) / max(done - first, 1)
            text = f"{what}: {done} of {total} files" + (
                f", about {left_s:.0f} s left" if done > first else ""
            )
            if sys.stderr.isatty():
                print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            elif done * 4 // total > reported_quarter:  # four lines in a log
                reported_quarter = done * 4 // total
                print(text, file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if build.returncode:
        sys.stderr.writelines(output)
    return build.returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("python tools/build.py WHAT COMMAND...")
    sys.exit(main(*sys.argv[1:]))
