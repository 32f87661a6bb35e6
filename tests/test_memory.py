"""What needs more memory than there is is refused by name, with an estimate, and nothing else happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

MAKES = """
import json, resource
from understudy import _core, replay
from understudy.engines.config import VllmConfig
from understudy.engines.kv_manager import KvManager
from understudy.errors import ConfigError
from understudy.kv import BlockManager, KvCacheManager, KvLayout
from understudy.workload import Fixed, SyntheticSpec, synthesise

MANY = 10**9
way = _core.WayConfig(down_gbps=1, up_gbps=1)
disk = _core.SharedTierConfig(num_blocks=MANY, worker=way, backend=way)
host = _core.TierConfig(bytes_per_block=1, g2_blocks=MANY, host=way)
deep = _core.TierConfig(bytes_per_block=1, g2_blocks=9, host=way, g3=disk)
small, large = VllmConfig(num_gpu_blocks=100), VllmConfig(num_gpu_blocks=MANY)
layout = KvLayout(page_size=16, num_layers=1, kv_heads=1, head_dim=1)
timing = small.native_timing(None)
workload = synthesise(SyntheticSpec(sessions=1, prompt_tokens=Fixed(16), output_tokens=Fixed(1)))
makes = {
    "num_gpu_blocks of 1000000000": lambda: _core.Engine(large.native(), timing),
    "tiers of 1000000000 blocks": lambda: _core.Engine(small.native(), timing, tiers=host),
    "and tiers of 1000000009 blocks": lambda: _core.Engine(small.native(), timing, tiers=deep),
    "num_blocks of 1000000000 in the shared tiers": lambda: _core.TierRun(deep, 16),
    "num_gpu_blocks of 1000000000 need": lambda: KvManager(MANY, 16),
    "num_gpu_blocks of 1000000000 need about": lambda: KvManager(MANY, 16, backend="native"),
    "num_blocks of 1000000000 in all": lambda: BlockManager(MANY),
    "num_blocks of 1000000000": lambda: KvCacheManager(MANY, layout),
    "rows of 10000000000 requests": lambda: _core.RunColumns(10**10),
    "1 workers and 1000000000 blocks (num_gpu_blocks": lambda: replay(workload, engine=large),
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
engine = _core.Engine(VllmConfig(num_gpu_blocks=10**7).native(), timing)
told.append(["bytes a slot", f"{(taken() - before) / 10**7}"])
replay(workload, engine=small)
print(json.dumps(told))
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer takes all addresses")
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
        assert "GB, more memory than there is" in message
