"""Choose routing and tiers for a trace with the public names alone, as in a notebook.

Run `python examples/notebook.py [TRACE]`; the default is the bundled trace.
"""

import sys
from pathlib import Path

import understudy as us

trace = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "demo_trace.jsonl"
workload = us.read_trace(trace)
model, gpu = "Llama-3.1-8B", "H100"
engine = us.VllmConfig(num_gpu_blocks=384)
tiers = us.TiersConfig.from_dict({"model": model, "tiers": [{"tier": "g2", "blocks": 4096}]})
kv = us.KvRouting(event_delay_ms=5)
runs = {
    "round robin": us.replay(workload, engine, model=model, gpu=gpu, workers=2),
    "KV routing": us.replay(workload, engine, model=model, gpu=gpu, workers=2, routing=kv),
    "host tier": us.replay(workload, engine, model=model, gpu=gpu, workers=2, tiers=tiers),
}
for name, report in runs.items():
    print(f"{name}: TTFT p99 {report.ttft_ms.p99:.0f} ms, {report.prefix_hit_ratio.total:.1%} of tokens hit")
    for verdict in report.verdicts:
        print(f"  {verdict.finding} {verdict.remedy}")
us.compare(*runs.values(), names=list(runs)).print()
best = min(runs, key=lambda name: runs[name].ttft_ms.p99)
print(f"lowest TTFT p99: {best} (digest {runs[best].run.digest})")
