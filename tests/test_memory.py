"""What needs more memory than there is is refused by name, with an estimate; what is not used takes none."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cli.fleet import read_fleet
from understudy.errors import ConfigError
from understudy.fleets.fleet import Fleet
from understudy.memory import ABSENT_BYTES, LIVE_BYTES, TIERS_BYTES, WORKER_BYTES

asan = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer takes memory and addresses of its own",
)
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
as_asked_for = pytest.mark.skipif(
    PAGES.exists() and "[always]" in PAGES.read_text(),
    reason="transparent huge pages are set to always: memory comes in two megabytes, asked for or not",
)

MAKES = """
import json, resource
from understudy import _core, replay
from understudy.engines.vllm_config import VllmConfig
from understudy.kv.kv_manager import KvManager
from understudy.errors import ConfigError
from understudy.kv import BlockManager, KvCacheManager, KvLayout
from understudy.workload import Fixed, SyntheticSpec, synthesise

MANY = 10**9
way = _core.LinkPairConfig(down_gbps=1, up_gbps=1)
disk = _core.SharedTierConfig(num_blocks=MANY, worker=way, backend=way)
host = _core.TierConfig(bytes_per_block=1, g2_blocks=MANY, host=way)
deep = _core.TierConfig(bytes_per_block=1, g2_blocks=9, host=way, g3=disk)
small, large = VllmConfig(num_gpu_blocks=100), VllmConfig(num_gpu_blocks=MANY, eviction_policy="vllm")
layout = KvLayout(page_size=16, num_layers=1, kv_heads=1, head_dim=1)
timing = small.native_timing(None)
workload = synthesise(SyntheticSpec(sessions=1, prompt_tokens=Fixed(16), output_tokens=Fixed(1)))
makes = {
    "num_gpu_blocks: 1000000000 blocks": lambda: _core.VllmEngine(large.native(), timing),
    "num_gpu_blocks: 100 blocks and 1000000000 of tiers": lambda: _core.VllmEngine(small.native(), timing, tiers=host),
    "and 1000000009 of tiers (g2_blocks, num_blocks)": lambda: _core.VllmEngine(small.native(), timing, tiers=deep),
    "num_blocks: 1000000000 blocks of shared tiers": lambda: _core.TierRun(deep, 16),
    "num_gpu_blocks: 1000000000 blocks need": lambda: KvManager(MANY, 16),
    "num_gpu_blocks: 1000000000 blocks need about": lambda: KvManager(MANY, 16, backend="native"),
    "num_blocks: 1000000000 blocks need": lambda: BlockManager(MANY),
    "num_blocks: 1000000000 blocks": lambda: KvCacheManager(MANY, layout),
    "requests: 10000000000 rows": lambda: _core.RunColumns(10**10),
    "num_gpu_blocks, tiers: 1000000000 blocks of 1 workers": lambda: replay(workload, engine=large),
}
limit = 3 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
told = []
for names, make in makes.items():
    try:
        make()
        told.append([names, "was made"])
    except ConfigError as error:
        told.append([names, str(error)])
BlockManager(1000).store.check()


def taken():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()


before = taken()
engine = _core.VllmEngine(VllmConfig(num_gpu_blocks=10**7, eviction_policy="vllm").native(), timing)
told.append(["bytes a slot", f"{(taken() - before) / 10**7}"])
replay(workload, engine=small)
replay(workload, engine=VllmConfig(num_gpu_blocks=MANY))  # runs of blocks take memory when they are filled
print(json.dumps(told))
"""


@asan
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere addresses have no limit that counts")
def test_what_no_address_space_is_left_for_is_refused_by_name(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", MAKES], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert len(told) == 11
    _, slot_bytes = told.pop()
    (estimate_gb,) = re.findall(r"need about ([0-9.]+) GB", told[0][1])
    assert float(estimate_gb) == pytest.approx(float(slot_bytes), rel=0.1)  # of a thousand million slots
    for names, message in told:
        assert names in message
        assert message.endswith("GB, more memory than there is; choose fewer")


# Hosts that could hold a million blocks each, all there at once since they share a disk, and what they get for `used`.
FILLS = """
import re, resource, sys
from pathlib import Path
import numpy as np
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import Workload

WORKERS, BLOCK, PROMPT = 50, 16, 256  # blocks
used = int(sys.argv[1])
rows = WORKERS * used // PROMPT
workload = Workload(
    arrival_ns=np.arange(rows) * 1_000_000,
    prompt_tokens=np.full(rows, PROMPT * BLOCK),
    output_tokens=np.full(rows, 1),
    hash_offsets=np.arange(rows + 1) * PROMPT,
    hash_ids=np.arange(rows * PROMPT),
    trace_block_size=BLOCK,
)
fast = {"down_gbps": "inf", "up_gbps": "inf"}
tiers = TiersConfig.from_dict({
    "kv_bytes_per_token": 1024,
    "tiers": [{"tier": "g2", "blocks": 10**6, "link": fast}, {"tier": "g3", "blocks": 1000}],
    "offload": {"mode": "write_through"},
})
engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=1024)


def peak():
    # Of this process alone: what getrusage tells begins with that of the one that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


before = peak()
run = run_offline(RunPlan(workload, engine, workers=WORKERS, tiers=tiers))
taken = peak() - before
host = run.timeline.tiers.tiers[1]
assert host.resident_blocks == WORKERS * used, host.resident_blocks
print(taken // WORKERS, resource.getpagesize())
"""


@asan
@as_asked_for
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not know its own peak")
@pytest.mark.parametrize("used", [256, 4608, 18432, 73728])
def test_a_host_takes_memory_for_what_it_is_filled_with(used: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FILLS, str(used)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    taken, page = map(int, ran.stdout.split())
    # A slot, its places in an index and an order that have grown fourfold: 60 to 100 bytes a block. Two megabytes
    # for an index of one, of which most is empty, would be 55 more.
    assert taken < (256 << 10) + 32 * page + 105 * used


# Two requests for so many workers, of whom most are idle: they meet, or are played one after another.
IDLES = """
import re, sys
from pathlib import Path
from understudy.engines.vllm_config import VllmConfig
from understudy.router import KvRouting
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import Fixed, SyntheticSpec, synthesise

routing = {"kv": KvRouting(predict_ttl_ms=100.0, queue_threshold=2.0)}.get(sys.argv[1], sys.argv[1])
workload = synthesise(SyntheticSpec(sessions=2, prompt_tokens=Fixed(64), output_tokens=Fixed(2)))
host = {"tier": "g2", "blocks": 10**6, "link": {"down_gbps": 25, "up_gbps": 25}}
modes = [{"kv_bytes_per_token": 1024, "tiers": [host], "offload": {"mode": mode}} for mode in sys.argv[3:]]
tiers = TiersConfig.from_dict(modes[0]) if modes else None


def peak_of(workers):
    run_offline(RunPlan(workload, VllmConfig(), workers=workers, routing=routing, tiers=tiers))
    # Of this process alone: what getrusage tells begins with that of the one that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


FEW, MANY = 2_000, int(sys.argv[2])
few = peak_of(FEW)
print((peak_of(MANY) - few) // (MANY - FEW))
"""


@asan
@as_asked_for
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not know its own peak")
@pytest.mark.parametrize(
    ("routing", "workers", "offload", "estimate"),
    [
        ("round_robin", 400_000, [], ABSENT_BYTES),
        ("least_loaded", 20_000, [], WORKER_BYTES),
        ("kv", 20_000, [], WORKER_BYTES),
        ("least_loaded", 8_000, ["write_through"], WORKER_BYTES + TIERS_BYTES),
        ("least_loaded", 8_000, ["vllm"], WORKER_BYTES + TIERS_BYTES),
    ],
)
def test_an_idle_worker_takes_no_more_than_is_reckoned_with(
    routing: str, workers: int, offload: list[str], estimate: int
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IDLES, routing, str(workers), *offload],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert 0 < int(ran.stdout) <= estimate, ran.stdout


# So many live workers, idle, each with its port.
LIVES = """
import asyncio, re, sys
from pathlib import Path
from understudy.cli.fleet import read_fleet
from understudy.fleets.fleet import Fleet


async def taken(workers):
    fleet = Fleet(read_fleet(["--workers", str(workers), "--base-port", "0", "--port", "0"])[0])
    await fleet.start()
    taken = int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    await fleet.stop()
    return taken


few = asyncio.run(taken(10))
print((asyncio.run(taken(210)) - few) // 200)
"""


@asan
@as_asked_for
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not know its own size")
def test_an_idle_live_worker_takes_no_more_than_is_reckoned_with() -> None:
    ran = subprocess.run([sys.executable, "-c", LIVES], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert 0 < int(ran.stdout) <= LIVE_BYTES, ran.stdout


def test_more_live_workers_than_fit_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.memory.available_bytes", lambda: 1_000_000_000)
    settings = read_fleet(["--workers", "50000", "--base-port", "0"])[0]
    with pytest.raises(ConfigError, match=r"50,000 live workers would take about 7.5 GB of memory"):
        Fleet(settings)


# Stacks of threads are as large as the process was told when it began: of the second run no thread can be made, of the
# third the first few.
THREADED = """
import resource, sys
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Fixed, SyntheticSpec, synthesise

workload = synthesise(SyntheticSpec(sessions=64, prompt_tokens=Fixed(64), output_tokens=Fixed(8)))
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
print(run_offline(RunPlan(workload, workers=32, threads=int(sys.argv[1]))).facts.digest)
"""


@asan
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere stacks do not follow that limit")
def test_threads_that_the_system_does_not_give_are_done_without() -> None:
    def digest(threads: int, stack_bytes: int) -> str:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, resource.RLIM_INFINITY))

        command = [sys.executable, "-c", THREADED, str(threads)]
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=limit,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    whole = digest(1, 8 << 20)
    assert digest(4, 64 << 30) == whole
    assert digest(32, 1 << 30) == whole
