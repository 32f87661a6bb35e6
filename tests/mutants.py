"""Faults of one line in the core: a test of their room must notice each.

    make mutants                     # all of them: one build, then some seconds each
    python tests/mutants.py dice     # those whose name has "dice"

A copy of the sources under build/mutants has all faults at once, asleep; UNDERSTUDY_FAULT wakes one. First the tests
are run with all asleep, since a test that fails anyhow notices nothing; then each fault has its line of a table: what
came of it, and which test said so. Where a fault's line is no longer in the sources, nothing is built or run.
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
class Mutant:
    """In place of the only `was` of `file` stands `becomes`, whose FAULT is true while it is awake: one of
    `tests` must fail then."""

    name: str
    file: str
    was: str
    becomes: str
    tests: str


ESTIMATE = "core/tiers/transfer_estimate.hpp"
HUB = "core/tiers/transfer_hub.hpp"
YEARS = "tests/tiers/test_years.py"
MUTANTS = [
    Mutant(
        "a load's estimate ignores other loads",
        ESTIMATE,
        "host.up, bytes, 1 + loads",
        "host.up, bytes, 1 + (FAULT ? 0 : loads)",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a load's estimate ignores copies the other way",
        ESTIMATE,
        "config_.demand_first ? 0 : copies);",
        "FAULT || config_.demand_first ? 0 : copies);",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a copy's estimate ignores other copies",
        ESTIMATE,
        "host.down, bytes, 1 + copies",
        "host.down, bytes, 1 + (FAULT ? 0 : copies)",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a load that takes as long as computing is begun",
        "core/tiers/sources.cpp",
        "eta(now_ns, count) - now_ns >= saved_ns(count)",
        "eta(now_ns, count) - now_ns >= saved_ns(count) + (FAULT ? 1 : 0)",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "the dice of a block's load fall the same every time",
        "core/tiers/load_up.cpp",
        "load.blocks[0].sequence_hash(), loads_begun_",
        "load.blocks[0].sequence_hash(), FAULT ? 0 : loads_begun_",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "waits for room are not counted",
        "core/tiers/device_room.cpp",
        "    } else if (waiting(who)) {\n      ++totals_.room_waits;",
        "    } else if (waiting(who)) {\n      totals_.room_waits += FAULT ? 0 : 1;",
        "tests/tiers/test_counters.py",
    ),
    Mutant(
        "failed loads have no length",
        "core/tiers/load_up.cpp",
        "if (keeps_load_times_) onboard_ns_",
        "if (keeps_load_times_ && !(FAULT && load.failed)) onboard_ns_",
        "tests/tiers/test_counters.py",
    ),
    Mutant(
        "an end is rounded down where it is barely late",
        "core/links/link_flow_ends.hpp",
        "past_ticks <= late_ticks",
        "past_ticks <= (FAULT ? 262144 : late_ticks)",
        "tests/tiers/test_links_exact.py",
    ),
    Mutant(
        "events of the host wait for the end of the step",
        "core/events/event_log.hpp",
        "if (record.tier == Tier::G1) return false;",
        "if (record.tier == Tier::G1 || (FAULT && record.tier == Tier::G2)) return false;",
        "tests/tiers/test_event_times.py",
    ),
    Mutant(
        "what a router has taken is not recorded",
        "core/events/event_log.hpp",
        "if (keeps_taken_) {",
        "if (keeps_taken_ && !FAULT) {",
        "tests/replay/test_record_steps.py",
    ),
    Mutant(
        "an engine takes a second caller",
        "core/base/turn.hpp",
        "turns_.taken_.exchange(true)",
        "turns_.taken_.exchange(true) && !FAULT",
        "tests/kv/test_request_threads.py",
    ),
    Mutant(
        "an estimate forgets that blocks are still on their way down",
        "core/tiers/sources.cpp",
        "ready_ns = std::max(ready_ns, eta(source, arrival));",
        "if (!FAULT) ready_ns = std::max(ready_ns, eta(source, arrival));",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "what is not worth a load is cut by a block",
        "core/tiers/sources.cpp",
        "sources_[count - 1].tier == tier) --count;",
        "sources_[count - 1].tier == tier && (--count, !FAULT)) {}",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "ties are broken by how workers are numbered",
        "core/replay/fleet_together.cpp",
        "workload_.size() + worker : rows.front();",
        "workload_.size() + worker : FAULT ? worker : rows.front();",
        "tests/tiers/test_causality.py",
    ),
    Mutant(
        "policies of the user's hear of one worker after the other",
        "core/replay/fleet.cpp",
        "return workers_.size() > 1 && std::ranges::any_of(",
        "return !FAULT && workers_.size() > 1 && std::ranges::any_of(",
        "tests/replay/test_users_policies.py",
    ),
    Mutant(
        "a worker rests over the step that fills a block",
        "core/engine/vllm/leap_open.cpp",
        ": size_ - 1 - into;",
        ": size_ - 1 - into + (FAULT ? 2 : 0);",  # one that ends with that step is as good: its copy begins there
        "tests/tiers/test_resting.py",
    ),
    Mutant(
        "a landing does not rouse a worker that rests",
        "core/tiers/worker_tiers.cpp",
        "if (seen && watched_)",
        "if (!FAULT && seen && watched_)",
        "tests/tiers/test_resting.py",
    ),
    Mutant(
        "a prefetch evicts what it must copy",
        "core/tiers/device_room.cpp",
        "if (who == kNobody && copies",
        "if (!FAULT && who == kNobody && copies",
        "tests/tiers/test_onboard_numbers.py",
    ),
    Mutant(
        "the blocks of a shared tier over time are thinned from the wrong end",
        "core/tiers/shared_tier.cpp",
        "residency_[i] = residency_[2 * i];",
        "residency_[i] = residency_[2 * i + (FAULT ? 1 : 0)];",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "a thinned tier is sampled as often as before",
        "core/tiers/shared_tier.cpp",
        "sample_every_ns_ *= 2;",
        "sample_every_ns_ *= FAULT ? 1 : 2;",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "of samples that meet at a point of a coarser grid the first stays",
        "core/engine/token_log.cpp",
        "if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) --kept;",
        "if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) { if (FAULT) continue; --kept; }",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "a leap counts on what is empty, whatever the order of eviction",
        "core/engine/vllm/leap_possible.cpp",
        "return e.kv_->evicts_last() && blocks",
        "return (FAULT || e.kv_->evicts_last()) && blocks",
        "tests/tiers/test_leaping.py tests/eviction/test_device_pool.py",
    ),
    Mutant(
        "a pool's tier is summed up with another's",
        "core/replay/run_columns.cpp",
        "t.tier == tier && t.first_worker",
        "t.tier == tier && (FAULT ? pool.first_worker : t.first_worker)",
        "tests/replay/test_pools.py",
    ),
    Mutant(
        "a router counts on the disk of another pool",
        "core/router/kv_view.cpp",
        "if (pool_of(row / kTiers) != pool) continue;",
        "if (!FAULT && pool_of(row / kTiers) != pool) continue;",
        "tests/replay/test_pools.py",
    ),
    Mutant(
        "what lands after the last step is not told",
        "core/engine/vllm/tiers.cpp",
        "while (offload_links_ && !in_step_",
        "while (!FAULT && offload_links_ && !in_step_",
        "tests/server/test_online_tiers.py",
    ),
    Mutant(
        "a refused transfer is told once",
        HUB,
        "if (failure_) std::rethrow_exception(failure_);",
        "if (failure_) std::rethrow_exception(FAULT ? std::exchange(const_cast<TransferHub*>(this)->failure_, {}) "
        ": failure_);",
        YEARS,
    ),
    Mutant(
        "after a refused transfer others start",
        HUB,
        "    room_ = 0;\n",
        "    if (!FAULT) room_ = 0;\n",
        YEARS,
    ),
    Mutant(
        "a link's largest transfer is one block",
        "core/engine/vllm/setup.cpp",
        "static_cast<double>(at_most(count)) *",
        "static_cast<double>(FAULT ? 1 : at_most(count)) *",
        YEARS,
    ),
    Mutant(
        "a batch may be larger than a transfer",
        "core/engine/vllm/setup.cpp",
        "if (blocks <= most_blocks) return;",
        "if (FAULT || blocks <= most_blocks) return;",
        "tests/tiers/test_too_large.py",
    ),
    Mutant(
        "a step may end before it began",
        "core/engine/vllm/step.cpp",
        "in_step_ ? begun_ns_ : now_ns_; now_ns < here_ns",
        "in_step_ ? begun_ns_ : now_ns_; now_ns < here_ns && !(FAULT && in_step_)",
        "tests/engines/test_time_goes_on.py",
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What came of a fault."""

    word: str
    test: str = ""  # that noticed it

    @property
    def noticed(self) -> bool:
        """A crash of the tests is noticed too."""
        return self.word in ("noticed", "crashed", "hung")


def copy_sources() -> None:
    """Brings the copy up to date, faults and all. A file that is as it was keeps its time: nothing is built for it."""
    texts = {Path("CMakeLists.txt"): (HOUSE / "CMakeLists.txt").read_text()}
    for folder in ("core", "src"):
        for path in (HOUSE / folder).rglob("*"):
            if path.suffix in (".py", ".pyi", ".cpp", ".hpp"):
                texts[path.relative_to(HOUSE)] = path.read_text()
        for path in (COPY / folder).rglob("*.?*"):
            if path.is_file() and path.suffix != ".so" and path.relative_to(COPY) not in texts:
                path.unlink()
    put_in(texts)
    for name, text in texts.items():
        there = COPY / name
        if not there.exists() or there.read_text() != text:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text(text)


def put_in(texts: dict[Path, str]) -> None:
    """All faults, numbered from one, whichever are to be tried: the copy is built once for all."""
    gone = [
        f"{mutant.file} has {found} times: {mutant.was}"
        for mutant in MUTANTS
        if (found := texts.get(Path(mutant.file), "").count(mutant.was)) != 1
    ]
    if gone:
        sys.exit("\n".join(["faults whose line is no longer in the sources, exactly once:", *gone]))
    for number, mutant in enumerate(MUTANTS, start=1):
        name = Path(mutant.file)
        awake = mutant.becomes.replace("FAULT", f"fault({number})")
        texts[name] = texts[name].replace(mutant.was, awake)
    for name in {Path(mutant.file) for mutant in MUTANTS}:
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


def main(wanted: str) -> int:
    """Returns how many faults nobody noticed."""
    mutants = {number: mutant for number, mutant in enumerate(MUTANTS, 1) if wanted in mutant.name}
    if not mutants:
        sys.exit(
            f'no fault has "{wanted}" in its name; the names: {", ".join(mutant.name for mutant in MUTANTS)}'
        )
    copy_sources()
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
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
