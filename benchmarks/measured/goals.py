"""Errors by the goals of step times: deployments left out, speculation, saturated servers and KV blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from measured.speculation import score
from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.predict import Prediction, predict_table
from understudy.calibrate.tables import Table
from understudy.defaults import STATIC_SHARE
from understudy.engines.speculation import SpeculativeConfig
from understudy.errors import UnderstudyError
from understudy.timing.accuracy import read_errors
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.engine_names import ENGINES
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from understudy.timing.accuracy import MeasuredErrors

Measured = dict[str, dict[str, float]]
"""Errors in percent by goal and column."""
TPOT, TTFT, OTHER = "TPOT", "TTFT", "other"
_SLOW_FRONT_ENDS = ("gpustack_qwen3-14b_h100", "gpustack_qwen3-32b_h100")


class Goal(NamedTuple):
    """A goal, and the measured deployments that stand for it: by model, GPU, engine and type; empty: any."""

    title: str
    model: str = ""
    gpus: Sequence[str] = ()
    engines: Sequence[str] = ()
    types: Sequence[str] = ()

    def holds_for(self, one: MeasuredErrors) -> bool:
        """Whether a deployment stands for the goal."""
        return (
            one.model.startswith(self.model)
            and all(
                not given or name in given
                for given, name in (
                    (self.gpus, one.gpu),
                    (self.engines, one.engine),
                    (self.types, one.weights),
                )
            )
            and one.left_out is not None
        )


GOALS = (
    Goal("Qwen3-32B", "Qwen3-32B"),
    Goal("MiniMax-M2.5 fp8, H100 and B300, vLLM", "MiniMax", ("H100", "B300"), ("vllm",), ("fp8",)),
    Goal("MiniMax-M2.5 nvfp4, vLLM", "MiniMax", (), ("vllm",), ("nvfp4",)),
    Goal("Kimi-K2.5 int4, vLLM", "Kimi", (), ("vllm",), ("int4",)),
    Goal("Kimi-K2.5 nvfp4, vLLM", "Kimi", (), ("vllm",), ("nvfp4",)),
    Goal("DeepSeek-R1, SGLang", "DeepSeek-R1", (), ("sglang",)),
    Goal("DeepSeek-R1, TensorRT-LLM", "DeepSeek-R1", (), ("trtllm",)),
    Goal("Qwen3.5 B200, SGLang", "Qwen3.5", ("B200",)),
    Goal("Qwen3.5 B300, SGLang", "Qwen3.5", ("B300",)),
    Goal("Qwen3-235B, TensorRT-LLM", "Qwen3-235B"),
    Goal("gpt-oss-120b, TensorRT-LLM", "gpt-oss-120b", (), ("trtllm",)),
    Goal("Llama-3.1-70B, TensorRT-LLM", "Llama-3.1-70B", (), ("trtllm",)),
    Goal("Llama-3.1-8B", "Llama-3.1-8B"),
)
"""Goals of single deployments; their rows are of the same model and engine, or the nearest that there are."""


def _percent(errors: Iterable[float]) -> float:
    return 100 * float(np.median(np.abs(np.array(list(errors)))))


def deployment_errors() -> Measured:
    """Return the medians over left-out deployments that stand for each goal, and over those with own numbers."""
    found: Measured = {}
    for goal in GOALS:
        left = [one.left_out for one in read_errors() if goal.holds_for(one) and one.left_out is not None]
        first = [one.ttft.median for one in left if one.ttft is not None]
        found[goal.title] = {TPOT: float(np.median([one.tpot.median for one in left]))}
        if first:
            found[goal.title][TTFT] = float(np.median(first))
    return found


def left_out_medians() -> Measured:
    """Return medians over deployments: of vLLM and other engines left out, and of all with their own numbers."""
    found: Measured = {}
    for title, engines in (("vLLM", ("vllm",)), ("SGLang and TensorRT-LLM", ("sglang", "trtllm"))):
        left = [one.left_out for one in read_errors() if one.engine in engines and one.left_out is not None]
        found[f"left-out deployments, {title}"] = _medians(left)
    found["deployments with rows in the fit"] = _medians([one.own for one in read_errors()])
    dense = [one.own for one in read_errors() if one.engine == "vllm" and one.model == "Llama-3.1-70B"]
    found["Llama-3.1-70B, vLLM"] = _medians(dense)
    return found


def _medians(errors: Sequence[object]) -> dict[str, float]:
    return {
        name.upper(): float(
            np.median([one.median for each in errors if (one := getattr(each, name)) is not None])
        )
        for name in ("tpot", "ttft")
    }


def blis_errors(table: Table) -> Measured:
    """Return the errors of ITL, E2E and TTFT on constant rates."""
    rows = [
        (row, found)
        for row, found in zip(table.rows, predict_table(table), strict=True)
        if isinstance(found, Prediction)
    ]
    itl, e2e, first = (
        _percent(found.means[name] / float(row[name]) - 1 for row, found in rows)
        for name in ("itl_ms", "e2e_ms", "ttft_ms")
    )
    return {"BLIS, ITL": {TPOT: itl, TTFT: first}, "BLIS, E2E": {OTHER: e2e}}


def speculation_errors(table: Table) -> Measured:
    """Return the errors of TPOT by number of drafts."""
    rows = score(table)
    return {
        f"gpt-oss-120b H200 with EAGLE3, {drafts} drafts": {
            TPOT: _percent(row.simulated / row.measured - 1 for row in rows if row.drafts == drafts)
        }
        for drafts in sorted({row.drafts for row in rows} - {0})
    }


def mtp_errors(table: Table) -> Measured:
    """Return the errors of rows with a prediction layer, by model and engine: with assumed drafts and acceptance."""
    rows = [row for row in table.rows if row.get("speculation", "").startswith("mtp")]
    pairs: dict[str, dict[str, list[float]]] = {}
    for row, found in zip(rows, predict_table(Table(table.path, table.layout, rows)), strict=True):
        if isinstance(found, Prediction):
            model = row["model_path"].split("/")[-1].partition("-A17B")[0].removesuffix("-0528")
            own = pairs.setdefault(f"{model} with MTP, {ENGINES[row['backend']]}", {TPOT: [], TTFT: []})
            own[TPOT].append(found.means["tpot_ms"] / float(row["tpot_ms"]) - 1)
            own[TTFT].append(found.means["ttft_ms"] / float(row["ttft_ms"]) - 1)
    for title, own in pairs.items():
        print(f"{title}: bias {np.median(own[TPOT]):+.1%} in TPOT, {np.median(own[TTFT]):+.1%} in TTFT")
    return {title: {name: _percent(errors) for name, errors in own.items()} for title, own in pairs.items()}


def saturated_errors(table: Table) -> Measured:
    """Return the errors of requests per second of servers that get all prompts at once.

    Two models on H100 ran behind a front end that was slower than the GPU, as the source's short prompts show.
    """
    pairs: dict[str, list[float]] = {}
    rows = [{**row, "least_length": "1"} for row in table.rows]
    refused = 0
    for row, one in zip(rows, predict_table(Table(table.path, table.layout, rows)), strict=True):
        if not isinstance(one, Prediction):
            refused += 1
            print(one)
            continue
        title = "times measured there" if "uncalibrated" not in one.origin else "times of neighbours"
        if row["key"].startswith(_SLOW_FRONT_ENDS):
            title = "slow front end"
        error = one.means["req_per_s"] / float(row["req_per_s"]) - 1
        pairs.setdefault(title, []).append(error)
    found = {
        f"requests/s of saturated servers, {title}": {OTHER: _percent(errors)}
        for title, errors in pairs.items()
    }
    return found | {"rows of saturated servers refused": {OTHER: 100 * refused / len(table.rows)}}


def refused_share(table: Table) -> Measured:
    """Return the share of rows without a prediction."""
    refused = 0
    for place in range(len(table.rows)):
        try:
            one = table.experiment(place)
            one.preset()
        except UnderstudyError:
            refused += 1
    return {"rows of other engines refused": {OTHER: 100 * refused / len(table.rows)}}


class Logged(NamedTuple):
    """KV tokens that an engine's log names."""

    title: str
    tokens: int
    engine: str
    deployment: Deployment
    settings: Mapping[str, object]


def _logs() -> list[Logged]:
    oss = Deployment(model=find_architecture("gpt-oss-120b"), gpu=find_gpu("H200"), weights="mxfp4")
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "block_size": 16}
    logs = [Logged("gpt-oss-120b H200, vLLM", 16 * 103_690, "vllm", oss, limits)]
    for drafts, words, blocks in ((1, "1 draft", 93_687), (7, "7 drafts", 92_148)):
        config = SpeculativeConfig(method="eagle3", num_speculative_tokens=drafts)
        logs.append(
            Logged(
                f"gpt-oss-120b H200, vLLM, EAGLE3 with {words}",
                16 * blocks,
                "vllm",
                oss,
                {**limits, "speculative_config": config},
            )
        )
    r1 = Deployment(
        model=find_architecture("DeepSeek-R1"),
        gpu=find_gpu("H200"),
        weights="fp8",
        parallel=Parallelism(tensor=8),
    )
    recipe = {"gpu_memory_utilization": 0.82}  # of InferenceX; the log does not say it
    return [*logs, Logged("DeepSeek-R1 fp8 8 H200, SGLang", 509_157, "sglang", r1, recipe)]


def block_errors() -> Measured:
    """Return the errors of the KV blocks that are estimated where a log names them."""
    found: Measured = {}
    errors = []
    for one in _logs():
        settings = {"gpu_memory_utilization": STATIC_SHARE, **one.settings}
        config = build_engine_config(one.deployment, engine=one.engine, **settings)  # type: ignore[arg-type]
        assert isinstance(config.num_gpu_blocks, int)
        errors.append(config.num_gpu_blocks * config.block_size / one.tokens - 1)
        print(f"{one.title}: {config.num_gpu_blocks * config.block_size:,} tokens, {one.tokens:,} logged")
        found[f"KV blocks: {one.title}"] = {OTHER: 100 * abs(errors[-1])}
    found["KV blocks, median"] = {OTHER: _percent(errors)}
    return found
