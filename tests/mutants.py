"""Faults of one line, put into the core one by one: a test of its room must notice each.

    make mutants                     # all of them, a minute or so each
    python tests/mutants.py dice     # those whose name has "dice"

Works on a copy of the sources under build/mutants, and reports the survivors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).parents[1]
COPY = HOUSE / "build" / "mutants"


@dataclass(frozen=True)
class Mutant:
    """Replaces the only occurrence of `was` in core/`file`; `tests` must fail then."""

    name: str
    file: str
    was: str
    becomes: str
    tests: str


ESTIMATE = "tiers/transfer_estimate.hpp"
MUTANTS = [
    Mutant(
        "a load's estimate ignores other loads",
        ESTIMATE,
        "host.up, bytes, 1 + loads",
        "host.up, bytes, 1",
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
        "tiers/onboard.cpp",
        "eta(now_ns, count) - now_ns >= saved_ns(count)",
        "eta(now_ns, count) - now_ns > saved_ns(count)",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "the dice of a block's load fall the same every time",
        "tiers/load_up.cpp",
        "load.blocks[0].sequence_hash(), loads_begun_, config_.seed",
        "load.blocks[0].sequence_hash(), 0, config_.seed",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "waits for room are not counted",
        "tiers/copy_down.cpp",
        "    } else if (waiting(who)) {\n      ++totals_.room_waits;",
        "    } else if (waiting(who)) {",
        "tests/tiers/test_counters.py",
    ),
    Mutant(
        "failed loads have no length",
        "tiers/load_up.cpp",
        "  onboard_ns_.push_back(time_ns - load.start_ns);",
        "  if (!load.failed) onboard_ns_.push_back(time_ns - load.start_ns);",
        "tests/tiers/test_counters.py",
    ),
    Mutant(
        "an end is rounded down where it is barely late",
        "links/link_flow.cpp",
        "past_ticks <= late_ticks &&",
        "past_ticks <= 262144 &&",
        "tests/tiers/test_links.py",
    ),
    Mutant(
        "events of the host wait for the end of the step",
        "events/event_log.hpp",
        "if (record.tier == Tier::G1) return false;",
        "if (record.tier <= Tier::G2) return false;",
        "tests/tiers/test_event_times.py",
    ),
    Mutant(
        "an engine takes a second caller",
        "base/turn.hpp",
        "turns_.taken_.exchange(true)",
        "false && turns_.taken_.exchange(true)",
        "tests/kv/test_request_threads.py",
    ),
    Mutant(
        "an estimate forgets that blocks are still on their way down",
        "tiers/onboard.cpp",
        "if (source.where == Source::Where::Landing) ready_ns =",
        "if (false && source.where == Source::Where::Landing) ready_ns =",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "what is not worth a load is cut by a block",
        "tiers/onboard.cpp",
        "    while (count > 0 && sources_[count - 1].tier == tier) --count;",
        "    if (count > 0 && sources_[count - 1].tier == tier) --count;",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "ties are broken by how workers are numbered",
        "replay/fleet_together.cpp",
        "return rows.empty() ? workload_.size() + worker : rows.front();",
        "return rows.empty() ? workload_.size() + worker : worker;",
        "tests/tiers/test_causality.py",
    ),
    Mutant(
        "a worker rests over the step that fills a block",
        "engine/vllm/rest.cpp",
        "size - 1 - into);",
        "size - into);",
        "tests/tiers/test_resting.py",
    ),
    Mutant(
        "a landing does not rouse a worker that rests",
        "tiers/copy_down.cpp",
        "if (seen && before_landing_)",
        "if (false && seen && before_landing_)",
        "tests/tiers/test_resting.py",
    ),
    Mutant(
        "a prefetch evicts what it must copy",
        "tiers/copy_down.cpp",
        "if (who == kNobody && copies && evicts_what_it_must_copy(out.size()))",
        "if (false && evicts_what_it_must_copy(out.size()))",
        "tests/tiers/test_onboard_numbers.py",
    ),
    Mutant(
        "the blocks of a shared tier over time are thinned from the wrong end",
        "tiers/shared_tier.cpp",
        "residency_[i] = residency_[2 * i];",
        "residency_[i] = residency_[2 * i + 1];",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "a thinned tier is sampled as often as before",
        "tiers/shared_tier.cpp",
        "sample_every_ns_ *= 2;",
        "sample_every_ns_ *= 1;",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "of samples that meet at a point of a coarser grid the first stays",
        "engine/token_log.cpp",
        "if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) --kept;",
        "if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) continue;",
        "tests/tiers/test_thinning.py",
    ),
]


def build() -> bool:
    """Compiles the copy into a package of its own."""
    command = ["cmake", "--build", str(COPY / "build"), "--target", "_core", "--parallel"]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        return False
    for library in (COPY / "build").glob("_core*.so"):
        shutil.copy(library, COPY / "src" / "understudy")
    return True


def noticed(tests: str) -> bool:
    """Whether a test fails against the copy."""
    how = ["-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *how, *tests.split()],
        cwd=HOUSE,
        env=os.environ | {"PYTHONPATH": str(COPY / "src")},
        capture_output=True,
        check=False,
    )
    return result.returncode == 1


def main(wanted: str) -> int:
    shutil.rmtree(COPY / "core", ignore_errors=True)
    for folder in ("core", "src"):
        shutil.copytree(HOUSE / folder, COPY / folder, dirs_exist_ok=True)
    shutil.copy(HOUSE / "CMakeLists.txt", COPY)
    configure = ["cmake", "-S", str(COPY), "-B", str(COPY / "build"), f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([*configure, "-DUNDERSTUDY_WERROR=OFF"], stdout=subprocess.DEVNULL, check=True)
    if not build():
        sys.exit("the sources as they are do not compile")
    survivors = []
    for mutant in MUTANTS:
        if wanted not in mutant.name:
            continue
        path = COPY / "core" / mutant.file
        source = path.read_text()
        if source.count(mutant.was) != 1:
            sys.exit(f"{mutant.name}: {mutant.file} has the line {source.count(mutant.was)} times")
        path.write_text(source.replace(mutant.was, mutant.becomes))
        if not build():
            sys.exit(f"{mutant.name}: the fault does not compile")
        caught = noticed(mutant.tests)
        path.write_text(source)
        print(f"{'noticed ' if caught else 'SURVIVED'}  {mutant.name}", flush=True)
        if not caught:
            survivors.append(mutant.name)
    print(f"{len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
