"""Faults of one line, put into the sources one by one: a test of their room must notice each.

    make mutants                     # all of them, a minute or so each
    python tests/mutants.py dice     # those whose name has "dice"

Works on a copy of the sources under build/mutants. First the tests are run against the copy as it is, since a test that
fails anyhow notices nothing; then each fault has its line of a table: what came of it, and which test said so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).parents[1]
COPY = HOUSE / "build" / "mutants"
BUILD = COPY / "build" / "core"
MOST_SECONDS = 600  # of the tests of one fault, which may be one that never ends
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # where CMake may live
    "PYTHONPATH": str(COPY / "src"),
}


@dataclass(frozen=True)
class Mutant:
    """Replaces the only occurrence of `was` in `file`; one of `tests` must fail then."""

    name: str
    file: str
    was: str
    becomes: str
    tests: str


ESTIMATE = "core/tiers/transfer_estimate.hpp"
MUTANTS = [
    Mutant(
        "a load's estimate ignores other loads",
        ESTIMATE,
        "host.up, bytes, 1 + loads",
        "host.up, bytes, 1 + 0 * loads",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a load's estimate ignores copies the other way",
        ESTIMATE,
        "config_.demand_first ? 0 : copies);",
        "0 * copies);",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a copy's estimate ignores other copies",
        ESTIMATE,
        "host.down, bytes, 1 + copies, 0)",
        "host.down, bytes, 1 + 0 * copies, 0)",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a load that takes as long as computing is begun",
        "core/tiers/sources.cpp",
        "eta(now_ns, count) - now_ns >= saved_ns(count)",
        "eta(now_ns, count) - now_ns > saved_ns(count)",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "the dice of a block's load fall the same every time",
        "core/tiers/load_up.cpp",
        "load.blocks[0].sequence_hash(), loads_begun_, config_.seed",
        "load.blocks[0].sequence_hash(), 0, config_.seed",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "waits for room are not counted",
        "core/tiers/device_room.cpp",
        "    } else if (waiting(who)) {\n      ++totals_.room_waits;",
        "    } else if (waiting(who)) {",
        "tests/tiers/test_counters.py",
    ),
    Mutant(
        "failed loads have no length",
        "core/tiers/load_up.cpp",
        "  if (keeps_load_times_) onboard_ns_.push_back(time_ns - load.start_ns);",
        "  if (keeps_load_times_ && !load.failed) onboard_ns_.push_back(time_ns - load.start_ns);",
        "tests/tiers/test_counters.py",
    ),
    Mutant(
        "an end is rounded down where it is barely late",
        "core/links/link_flow_meters.cpp",
        "past_ticks <= late_ticks &&",
        "past_ticks <= 262144 &&",
        "tests/tiers/test_links.py",
    ),
    Mutant(
        "events of the host wait for the end of the step",
        "core/events/event_log.hpp",
        "if (record.tier == Tier::G1) return false;",
        "if (record.tier <= Tier::G2) return false;",
        "tests/tiers/test_event_times.py",
    ),
    Mutant(
        "an engine takes a second caller",
        "core/base/turn.hpp",
        "turns_.taken_.exchange(true)",
        "false && turns_.taken_.exchange(true)",
        "tests/kv/test_request_threads.py",
    ),
    Mutant(
        "an estimate forgets that blocks are still on their way down",
        "core/tiers/sources.cpp",
        "if (source.where == Source::Where::Landing) ready_ns =",
        "if (false && source.where == Source::Where::Landing) ready_ns =",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "what is not worth a load is cut by a block",
        "core/tiers/sources.cpp",
        "    while (count > 0 && sources_[count - 1].tier == tier) --count;",
        "    if (count > 0 && sources_[count - 1].tier == tier) --count;",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "ties are broken by how workers are numbered",
        "core/replay/fleet_together.cpp",
        "return rows.empty() ? workload_.size() + worker : rows.front();",
        "return rows.empty() ? workload_.size() + worker : worker;",
        "tests/tiers/test_causality.py",
    ),
    Mutant(
        "policies of the user's hear of one worker after the other",
        "core/replay/fleet.cpp",
        "return workers_.size() > 1 && std::ranges::any_of(",
        "return workers_.empty() && std::ranges::any_of(",
        "tests/replay/test_users_policies.py",
    ),
    Mutant(
        "a worker rests over the step that fills a block",
        "core/engine/vllm/rest.cpp",
        ": size - 1 - into;",
        ": size + 1 - into;",  # one that ends with that step is as good: its copy begins there
        "tests/tiers/test_resting.py",
    ),
    Mutant(
        "a landing does not rouse a worker that rests",
        "core/tiers/worker_tiers.cpp",
        "if (seen && before_landing_)",
        "if (false && seen && before_landing_)",
        "tests/tiers/test_resting.py",
    ),
    Mutant(
        "a prefetch evicts what it must copy",
        "core/tiers/device_room.cpp",
        "if (who == kNobody && copies && evicts_what_it_must_copy(out.size()))",
        "if (false && evicts_what_it_must_copy(out.size()))",
        "tests/tiers/test_onboard_numbers.py",
    ),
    Mutant(
        "the blocks of a shared tier over time are thinned from the wrong end",
        "core/tiers/shared_tier.cpp",
        "residency_[i] = residency_[2 * i];",
        "residency_[i] = residency_[2 * i + 1];",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "a thinned tier is sampled as often as before",
        "core/tiers/shared_tier.cpp",
        "sample_every_ns_ *= 2;",
        "sample_every_ns_ *= 1;",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "of samples that meet at a point of a coarser grid the first stays",
        "core/engine/token_log.cpp",
        "if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) --kept;",
        "if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) continue;",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "a leap counts on what is empty, whatever the order of eviction",
        "core/engine/vllm/leap_possible.cpp",
        "return e.kv_->evicts_last() && blocks",
        "return blocks",
        "tests/tiers/test_leaping.py tests/eviction/test_device_pool.py",
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What came of a fault."""

    word: str
    test: str = ""  # that noticed it

    @property
    def noticed(self) -> bool:
        """A crash of the tests is noticed too; a fault that cannot be built is a fault of this file."""
        return self.word in ("noticed", "crashed", "hung")


def copy_sources() -> None:
    """Brings the copy up to date. A file that is as it was keeps its time, so that nothing is built for it."""
    wanted = [HOUSE / "CMakeLists.txt"]
    for folder in ("core", "src"):
        wanted += [
            path for path in (HOUSE / folder).rglob("*") if path.suffix in (".py", ".pyi", ".cpp", ".hpp")
        ]
    names = {path.relative_to(HOUSE) for path in wanted}
    for folder in ("core", "src"):
        for path in (COPY / folder).rglob("*.?*"):
            if path.is_file() and path.suffix != ".so" and path.relative_to(COPY) not in names:
                path.unlink()
    for name in names:
        here, there = HOUSE / name, COPY / name
        if not there.exists() or there.read_bytes() != here.read_bytes():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(here.read_bytes())


def configure() -> None:
    """Warnings are errors here too, so a fault must use what it leaves out (`0 * copies`)."""
    command = ["cmake", "-S", str(COPY), "-B", str(BUILD), f"-DPython_EXECUTABLE={sys.executable}"]
    if not (BUILD / "CMakeCache.txt").exists() and shutil.which("ninja", path=ENVIRONMENT["PATH"]):
        command += ["-G", "Ninja"]
    subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)


def build() -> bool:
    """Compiles the copy into a package of its own."""
    command = ["cmake", "--build", str(BUILD), "--target", "_core", "--parallel", str(os.cpu_count() or 1)]
    if subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        return False
    for library in BUILD.glob("_core*.so"):
        shutil.copy(library, COPY / "src" / "understudy")
    return True


def run_tests(tests: str) -> Outcome:
    """Runs them against the copy, up to the first that fails."""
    how = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-rfE"]
    command = [sys.executable, "-m", "pytest", *how, *tests.split()]
    try:
        result = subprocess.run(
            command,
            cwd=HOUSE,
            env=ENVIRONMENT,
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


def try_out(mutant: Mutant) -> Outcome:
    """Puts the fault in, builds, asks its tests, and takes the fault out again."""
    path = COPY / mutant.file
    source = path.read_text()
    if source.count(mutant.was) != 1:
        return Outcome("NO SUCH LINE")
    path.write_text(source.replace(mutant.was, mutant.becomes))
    try:
        if path.suffix != ".py" and not build():
            return Outcome("NOT COMPILED")
        return run_tests(mutant.tests)
    finally:
        path.write_text(source)


def main(wanted: str) -> int:
    """Returns how many faults nobody noticed."""
    mutants = [mutant for mutant in MUTANTS if wanted in mutant.name]
    if not mutants:
        sys.exit(
            f'no fault has "{wanted}" in its name; the names: {", ".join(mutant.name for mutant in MUTANTS)}'
        )
    copy_sources()
    configure()
    if not build():
        sys.exit("the sources as they are do not compile")
    tests = " ".join(dict.fromkeys(path for mutant in mutants for path in mutant.tests.split()))
    if (before := run_tests(tests)).noticed:
        sys.exit(f"without any fault: {before.word} {before.test}")
    width = max(len(mutant.name) for mutant in mutants)
    print(f"{'fault':{width}}  outcome       seconds  noticed by")
    missed = 0
    for mutant in mutants:
        begun = time.monotonic()
        outcome = try_out(mutant)
        missed += not outcome.noticed
        seconds = time.monotonic() - begun
        print(
            f"{mutant.name:{width}}  {outcome.word:12}  {seconds:7.0f}  {outcome.test}".rstrip(), flush=True
        )
    print(f"{len(mutants)} faults, {missed} of them unnoticed")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
