"""`understudy accuracy MODEL GPU ENGINE`: what was measured near a deployment, and the range of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy accuracy DeepSeek-R1 H200 sglang --weight-dtype fp8
  understudy accuracy Qwen3-32B H100 vllm
  understudy accuracy MiniMax-M2.5 B300 vllm --weight-dtype nvfp4

The errors are those of public measurements (docs/accuracy.md): "own" with numbers that were fitted to the deployment,
"left out" with the numbers that are left without it, as for a deployment that was never measured.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy accuracy`."""
    verb = verbs.add_parser(
        "accuracy",
        help="show what was measured near a deployment, and how far an answer may be off",
        description="Show the measurements nearest to a deployment, their errors, and the range of an answer.",
        epilog=EXAMPLES,
    )
    verb.add_argument("model", metavar="MODEL", help="known model name, or path of a config.json")
    verb.add_argument("gpu", metavar="GPU", help="name of a GPU, such as H100")
    verb.add_argument("engine", metavar="ENGINE", help="vllm, sglang or trtllm")
    verb.add_argument("--weight-dtype", metavar="TYPE", help="type of the weights (default: the model's own)")
    verb.add_argument("--kv-dtype", metavar="TYPE", default="auto", help="type of the KV cache")


def run(args: argparse.Namespace) -> int:
    """Print the measurements and the range."""
    from understudy.timing.accuracy import find_accuracy
    from understudy.timing.engine_names import find_engine_name
    from understudy.timing.find_architecture import find_architecture
    from understudy.timing.gpus import find_gpu
    from understudy.timing.presets import preset, target_of

    model, gpu, engine = find_architecture(args.model), find_gpu(args.gpu), find_engine_name(args.engine)
    weights = args.weight_dtype or model.weights
    found = preset(model, gpu, weights, args.kv_dtype, engine=engine)
    accuracy = find_accuracy(target_of(model, gpu, weights, engine))
    print(f"{found.trust}: {found.origin}")
    print(accuracy.text())
    rows = [*([] if accuracy.own is None else [accuracy.own]), *accuracy.near]
    if not rows:
        return 0
    head = ("measured", "rows", "own TPOT", "own TTFT", "left out TPOT", "left out TTFT")
    cells = [
        (
            one.describe(),
            str(one.rows),
            *(
                "–" if errors is None or (error := getattr(errors, name)) is None else error.text()
                for errors in (one.own, one.left_out)
                for name in ("tpot", "ttft")
            ),
        )
        for one in rows
    ]
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(len(head))]
    for row in (head, *cells):
        aligned = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(aligned))
    print("errors are medians and 90th percentiles of |predicted / measured - 1|")
    return 0
