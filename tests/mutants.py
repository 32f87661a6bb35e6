"""Faults of one line in the core: a test of their room must notice each.

    make mutants                     # all of them: one build, then some seconds each
    python tests/mutants.py dice     # those whose name has "dice"; of several words, any of them
    python tests/mutants.py --random 40 --seed 7     # random faults of SGLang's engine and of hand-offs

A copy of the sources under build/mutants has all faults at once, asleep; UNDERSTUDY_FAULT wakes one. First the tests
are run with all asleep, since a test that fails anyhow notices nothing; then each fault has its line of a table: what
came of it, and which test said so. Where a fault's line is no longer in the sources, nothing is built or run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import random_faults
from faults import MUTANTS as LISTED

if TYPE_CHECKING:
    from mutant import Mutant

HOUSE = Path(__file__).parents[1]
COPY = HOUSE / "build" / "mutants"
BUILD = COPY / "build" / "core"
MOST_SECONDS = 600  # of the tests of one fault, which may be one that never ends
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # where CMake may live
    "PYTHONPATH": str(COPY / "src"),
}


# Stands in front of each file that has faults.
WAKES = """#ifndef UNDERSTUDY_FAULTS
#define UNDERSTUDY_FAULTS
#include <cstdlib>
namespace understudy {
inline bool fault(int number) {
  static const char* const awake = std::getenv("UNDERSTUDY_FAULT");
  static const int chosen = awake ? std::atoi(awake) : 0;
  return chosen == number;
}
}  // namespace understudy
#endif
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a fault."""

    word: str
    test: str = ""  # that noticed it

    @property
    def noticed(self) -> bool:
        """A crash of the tests is noticed too."""
        return self.word in ("noticed", "crashed", "hung")


def copy_sources(mutants: list[Mutant]) -> None:
    """Brings the copy up to date, faults and all. A file that is as it was keeps its time: nothing is built for it."""
    texts = {Path("CMakeLists.txt"): (HOUSE / "CMakeLists.txt").read_text()}
    for folder in ("core", "src"):
        for path in (HOUSE / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".so", ".pyc"):
                texts[path.relative_to(HOUSE)] = path.read_text()
        for path in (COPY / folder).rglob("*.?*"):
            if path.is_file() and path.suffix != ".so" and path.relative_to(COPY) not in texts:
                path.unlink()
    put_in(texts, mutants)
    for name, text in texts.items():
        there = COPY / name
        if not there.exists() or there.read_text() != text:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text(text)


def put_in(texts: dict[Path, str], mutants: list[Mutant]) -> None:
    """All faults, numbered from one, whichever are to be tried: the copy is built once for all."""
    gone = []
    for number, mutant in enumerate(mutants, start=1):
        name = Path(mutant.file)
        if (found := texts.get(name, "").count(mutant.was)) != 1:  # or a fault before it stands there
            gone.append(f"{mutant.file} has {found} times: {mutant.was}")
            continue
        awake = mutant.becomes.replace("FAULT", f"fault({number})")
        texts[name] = texts[name].replace(mutant.was, awake)
    if gone:
        sys.exit("\n".join(["faults whose line is no longer in the sources, exactly once:", *gone]))
    for name in {Path(mutant.file) for mutant in mutants}:
        texts[name] = WAKES + texts[name]


def build() -> None:
    """Compiles the copy into a package of its own."""
    configure = ["cmake", "-S", str(COPY), "-B", str(BUILD), f"-DPython_EXECUTABLE={sys.executable}"]
    if not (BUILD / "CMakeCache.txt").exists() and shutil.which("ninja", path=ENVIRONMENT["PATH"]):
        configure += ["-G", "Ninja"]
    subprocess.run(configure, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    compile_ = ["cmake", "--build", str(BUILD), "--target", "_core", "--parallel", str(os.cpu_count() or 1)]
    subprocess.run(compile_, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    for library in BUILD.glob("_core*.so"):
        shutil.copy(library, COPY / "src" / "understudy")


def run_tests(tests: str, awake: int) -> Outcome:
    """Runs them against the copy with that fault awake (0: none), up to the first that fails."""
    how = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-rfE"]
    command = [sys.executable, "-m", "pytest", *how, *tests.split()]
    try:
        result = subprocess.run(
            command,
            cwd=HOUSE,
            env=ENVIRONMENT | {"UNDERSTUDY_FAULT": str(awake)},
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Outcome("hung")
    if result.returncode == 0:
        return Outcome("SURVIVED")
    if result.returncode < 0:
        return Outcome("crashed")
    failed = re.search(r"^FAILED (?:\S*/)?(\S+)", result.stdout, re.MULTILINE)
    if result.returncode != 1 or not failed:
        sys.exit(f"pytest {tests} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    return Outcome("noticed", failed[1])


def main(words: list[str]) -> int:
    """Returns how many faults nobody noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of the names of faults to try")
    parser.add_argument("--random", type=int, metavar="N", help="try N random faults, not the listed ones")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults (default: 0)")
    given = parser.parse_args(words)
    words, tried = (
        given.words,
        LISTED if given.random is None else random_faults.draw(given.random, given.seed),
    )
    mutants = {
        number: mutant
        for number, mutant in enumerate(tried, 1)
        if not words or any(word in mutant.name for word in words)
    }
    if not mutants:
        names = ", ".join(mutant.name for mutant in tried)
        sys.exit(f"no fault has {' or '.join(words)} in its name; the names: {names}")
    copy_sources(tried)
    build()
    tests = " ".join(dict.fromkeys(path for mutant in mutants.values() for path in mutant.tests.split()))
    if (before := run_tests(tests, 0)).noticed:
        sys.exit(f"without any fault: {before.word} {before.test}")
    width = max(len(mutant.name) for mutant in mutants.values())
    print(f"{'fault':{width}}  outcome       seconds  noticed by")
    missed = 0
    for number, mutant in mutants.items():
        begun = time.monotonic()
        outcome = run_tests(mutant.tests, number)
        missed += not outcome.noticed
        seconds = time.monotonic() - begun
        print(
            f"{mutant.name:{width}}  {outcome.word:12}  {seconds:7.0f}  {outcome.test}".rstrip(), flush=True
        )
    print(f"{len(mutants)} faults, {missed} of them unnoticed")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
