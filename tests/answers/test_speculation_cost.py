"""What speculation costs: bytes that drafts and their verification read, from the sizes of the models alone."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import understudy
from replay.building import single_turns
from understudy.cli import main
from understudy.engines.speculation import SpeculativeConfig
from understudy.engines.timing import Constant, Polynomial
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.server.flags.serving import read_serve
from understudy.tiers.gpu import GpuSettings
from understudy.workload import write_mooncake

if TYPE_CHECKING:
    from pathlib import Path

    from understudy._core import StepLoad
    from understudy.run.offline import OfflineRun

H100_BYTES_PER_MS = 3.35e12 / 1e3
H100_FLOP_PER_MS = 989e12 / 1e3
OUTPUTS = 60


class Sizes:
    """Sizes of a dense model, as its config.json has them."""

    def __init__(self, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int) -> None:
        self.layers, self.hidden, self.heads, self.kv, self.inner, self.vocab = (
            layers,
            hidden,
            heads,
            kv,
            inner,
            vocab,
        )

    @property
    def layer(self) -> int:
        """Parameters of a layer: queries and outputs, keys and values, three matrices of the MLP."""
        head = self.hidden // self.heads
        return 2 * self.hidden * head * (self.heads + self.kv) + 3 * self.hidden * self.inner

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @property
    def whole(self) -> int:
        """Parameters that a step reads."""
        return self.layers * self.layer + self.head

    @property
    def eagle3(self) -> int:
        """Parameters that a pass of an EAGLE3 head reads: a layer whose attention reads two inputs, and a head."""
        head = self.hidden // self.heads
        return self.layer + self.hidden * head * (self.heads + 2 * self.kv) + self.head


LLAMA_8B = Sizes(32, 4096, 32, 8, 14336, 128256)
LLAMA_1B = Sizes(16, 2048, 32, 8, 8192, 128256)
MODEL = "Llama-3.1-8B"
ON_H100 = GpuSettings(name="H100").timing(MODEL, None)


def speculate(method: str, drafts: int, rates: list[float] | None = None, **more: Any) -> SpeculativeConfig:
    given_rates = None if rates is None else tuple(rates)
    return SpeculativeConfig(
        **{"method": method, "num_speculative_tokens": drafts, "accept_rates": given_rates, **more}
    )


def serve(
    speculation: SpeculativeConfig | None, streams: int = 1, prompt: int = 100, **how: Any
) -> OfflineRun:
    """Replay `streams` equal requests at once with the times of an H100; `how` changes engine or run."""
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=20000,
        speculative_config=speculation,
        **{"async_scheduling": False, "timing": ON_H100, **how.pop("engine", {})},
    )
    return run_offline(RunPlan(single_turns([prompt] * streams, OUTPUTS), engine, **how))


def tpot(run: OfflineRun) -> float:
    """Return the mean time of a token after the first, in ms, from the columns of the run."""
    columns = run.timeline
    spans = (columns.last_token_ns - columns.first_token_ns) / 1e6
    return float(np.mean(spans / (columns.output_tokens - 1)))


# ── Cost in time ──

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("ngram", {}),
    ("eagle", {}),
    ("eagle3", {}),
    ("mtp", {}),
    ("draft_model", {"model": "Llama-3.2-1B"}),
]


@pytest.mark.parametrize(("method", "more"), WAYS, ids=[name for name, _ in WAYS])
@settings(max_examples=3)
@given(drafts=st.integers(1, 8), streams=st.sampled_from([1, 4, 32, 200]))
def test_drafts_that_are_never_accepted_cost_and_never_save(
    method: str, more: dict[str, Any], drafts: int, streams: int
) -> None:
    none = tpot(serve(None, streams))
    few = tpot(serve(speculate(method, drafts, [0.0] * drafts, **more), streams))
    many = tpot(serve(speculate(method, drafts + 1, [0.0] * (drafts + 1), **more), streams))
    assert none < few < many


class WholeSteps:
    """A model of a user that times tokens."""

    def step_ms(self, step: StepLoad) -> float:
        return 5 + 0.1 * step.tokens


class Halves:
    """A model of a user that times prompts and decodes apart."""

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int) -> float:
        return 0.1 * requests * (mean_input - mean_cached)

    def decode_ms(self, requests: int, context: int, mean: int, capacity: int) -> float:
        assert mean <= context
        assert mean >= 100  # of a sequence, which its drafts do not share
        return 5 + 0.1 * requests + 1e-6 * capacity


@pytest.mark.parametrize(
    "how",
    [{"engine": {"timing": Polynomial()}}, {"timing": WholeSteps()}, {"timing": Halves()}],
    ids=["polynomial", "a user's whole steps", "a user's halves"],
)
def test_times_that_know_no_model_charge_the_tokens_of_a_step(how: dict[str, Any]) -> None:
    none = tpot(serve(None, 8, **how))
    costs = [tpot(serve(speculate("eagle3", k, [0.0] * k), 8, **how)) for k in (1, 3, 7)]
    assert none < costs[0] < costs[1] < costs[2]


def test_constant_times_charge_nothing_for_drafts() -> None:
    constant = {"timing": Constant(prefill_ms=1, decode_ms=2)}
    drafted = serve(speculate("eagle3", 3, [0.0] * 3), 8, engine=constant)
    assert tpot(drafted) == tpot(serve(None, 8, engine=constant))


@settings(max_examples=4)
@given(drafts=st.integers(1, 7), streams=st.sampled_from([1, 8, 64]))
def test_a_step_takes_at_least_the_bytes_that_target_and_drafter_read(drafts: int, streams: int) -> None:
    accepted = serve(speculate("eagle3", drafts, [0.0] * drafts), streams)
    step_bytes = 2 * (LLAMA_8B.whole + drafts * LLAMA_8B.eagle3)
    tokens = streams * (1 + drafts)
    flop = 2 * tokens * LLAMA_8B.layer * LLAMA_8B.layers
    least = max(step_bytes / H100_BYTES_PER_MS, flop / H100_FLOP_PER_MS)
    assert least <= tpot(accepted) <= 3 * least + 5


@pytest.mark.parametrize(
    ("method", "more", "parameters"),
    [
        ("eagle3", {}, LLAMA_8B.eagle3),
        ("eagle", {}, LLAMA_8B.layer + LLAMA_8B.head + 2 * 4096**2),
        ("mtp", {}, LLAMA_8B.layer + LLAMA_8B.head + 2 * 4096**2),
        ("draft_model", {"model": "Llama-3.2-1B"}, LLAMA_1B.whole),
        ("ngram", {}, 0),
    ],
    ids=["eagle3", "eagle", "mtp", "draft_model", "ngram"],
)
def test_another_draft_costs_another_pass_of_the_drafter(
    method: str, more: dict[str, Any], parameters: int
) -> None:
    one, two = (tpot(serve(speculate(method, k, [0.0] * k, **more))) for k in (2, 3))
    read = 2 * parameters / H100_BYTES_PER_MS
    # Reading at 60 % of the peak or more, and some overhead; one more token to verify costs little at one stream.
    assert read <= two - one <= read / 0.6 + 0.3


@settings(max_examples=4)
@given(drafts=st.integers(1, 7), streams=st.sampled_from([1, 8]))
def test_full_acceptance_saves_less_than_the_drafts_and_less_than_their_cost_leaves(
    drafts: int, streams: int
) -> None:
    none = tpot(serve(None, streams))
    all_accepted = serve(speculate("eagle3", drafts, [1.0] * drafts), streams)
    drafting = 2 * drafts * LLAMA_8B.eagle3 / H100_BYTES_PER_MS
    # The last step may give fewer tokens than it could.
    steps = -(-(OUTPUTS - 1) // (1 + drafts))
    assert none / tpot(all_accepted) <= (OUTPUTS - 1) / steps * none / (none + drafting)


@settings(max_examples=5)
@given(drafts=st.integers(1, 6), data=st.data())
def test_more_acceptance_never_takes_longer(drafts: int, data: st.DataObject) -> None:
    accepted = sorted(data.draw(st.lists(st.integers(0, drafts), min_size=2, max_size=4)))
    times = []
    for count in accepted:
        rates = [1.0] * count + [0.0] * (drafts - count)
        times.append(tpot(serve(speculate("eagle3", drafts, rates), 4)))
    assert times == sorted(times, reverse=True)


def test_fast_forward_changes_nothing() -> None:
    speculation = speculate("eagle3", 3, [0.7, 0.6, 0.5])
    fast = serve(speculation, 12)
    slow = serve(speculation, 12, fast_forward=False)
    assert fast.facts.digest == slow.facts.digest


# ── Acceptance ──


@settings(max_examples=5)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.booleans())
def test_a_step_yields_the_tokens_of_the_rates(rates: list[float], marginal: bool) -> None:
    shares = list(np.cumprod(rates))
    given_rates = {"acceptance_per_position": tuple(shares)} if marginal else {"accept_rates": tuple(rates)}
    speculation = SpeculativeConfig(method="eagle3", num_speculative_tokens=len(rates), **given_rates)
    engine = VllmConfig(num_gpu_blocks=20000, speculative_config=speculation)
    run = run_offline(RunPlan(single_turns([20] * 60, 400), engine)).timeline
    assert 1 + run.accepted_tokens / run.draft_rounds == pytest.approx(1 + sum(shares), rel=0.05)
    assert speculation.mean_tokens == pytest.approx(1 + sum(shares))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accept_rates": [0.5, 0.5]}, "accept_rates has 2 rates for num_speculative_tokens=3"),
        (
            {"acceptance_per_position": [0.5]},
            "acceptance_per_position has 1 rates for num_speculative_tokens=3",
        ),
        ({"acceptance_per_position": [0.5, 0.6, 0.1]}, r"acceptance_per_position\[1\] must be at most"),
        ({"acceptance_per_position": [0.5, 0.4, -1]}, r"acceptance_per_position\[2\] must be in \[0, 1\]"),
        (
            {"acceptance_per_position": [0.5, 0.4, 0.3], "accept_rates": [0.5, 0.4, 0.3]},
            "both give the acceptance; give one",
        ),
        ({"method": "ngram", "model": "x"}, "ngram drafts without a model"),
    ],
)
def test_rates_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    spelt = {"method": "eagle3", "num_speculative_tokens": 3, **settings}
    with pytest.raises(ConfigError, match=message):
        VllmConfig.from_dict({"speculative_config": spelt})


def test_a_draft_model_without_sizes_is_refused_where_it_must_be_charged() -> None:
    with pytest.raises(
        ConfigError, match=r"speculative_config\.model: a draft model is charged by its own sizes"
    ):
        serve(speculate("draft_model", 2))


def test_a_draft_model_with_another_vocabulary_is_refused_as_vllm_refuses_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"speculative_config\.model: Qwen3-0\.6B has a vocabulary of 151,936.*128,256.*choose",
    ):
        serve(speculate("draft_model", 2, model="Qwen3-0.6B"))


# ── Notes ──


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_mooncake(single_turns([64] * 6, 20, arrival_ms=list(range(6))), path)
    return path


DRAFTING = '{"method":"eagle3","num_speculative_tokens":3}'


def test_assumed_acceptance_is_a_note_of_a_replay_with_its_numbers(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    flags = ["--model", MODEL, "--gpu", "H100", "--trace-block-size", "16", "--speculative-config", DRAFTING]
    assert main(["replay", str(trace), *flags, "--json", str(out)]) == 0
    notes = json.loads(out.read_text())["run"]["notes"]
    assert any(
        "acceptance is assumed, 0.85, 0.3, 0" in note and "2.1 tokens a step" in note for note in notes
    )
    assert any("3 passes of the drafter (one dense layer of Llama-3.1-8B" in note for note in notes)


def test_given_acceptance_is_not_called_assumed() -> None:
    engine = VllmConfig(speculative_config=speculate("eagle3", 2, [0.7, 0.5]))
    notes = understudy.replay(single_turns([64], 4), engine, model=MODEL, gpu="H100").run.notes
    assert any("acceptance is as given, 0.7, 0.5 (" in note for note in notes)
    assert not any("assumed" in note for note in notes)


def test_assumed_acceptance_is_a_note_of_a_sweep(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", MODEL, "--gpu", "H100", "--trace-block-size", "16", "--speculative-config", DRAFTING]
    goal = ["--vary", "workers=1,2", "--slo-ttft-ms", "1000", "--gpu-hour", "2"]
    assert main(["sweep", str(trace), *flags, *goal]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "acceptance is assumed, 0.85, 0.3, 0" in text


def test_the_command_of_a_sweep_has_only_settings_that_vllm_has(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = DRAFTING.replace("}", ',"accept_rates":[0.7,0.5,0.3],"draft_tensor_parallel_size":1}')
    flags = ["--model", MODEL, "--gpu", "H100", "--trace-block-size", "16", "--speculative-config", rates]
    goal = ["--vary", "workers=1,2", "--slo-ttft-ms", "1000", "--gpu-hour", "2"]
    assert main(["sweep", str(trace), *flags, *goal]) == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "vllm serve" in line]
    words = shlex.split(line)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}


def test_assumed_acceptance_is_a_note_of_a_server() -> None:
    plan = read_serve(["Llama-3.1-8B", "--gpu", "H100", "--speculative-config", DRAFTING])
    assert any("acceptance is assumed, 0.85, 0.3, 0" in note for note in plan.settings.notes)


def test_the_drafts_of_the_mocker_are_noted_as_free() -> None:
    engine = VllmConfig.from_dict({"aic_nextn": 2, "async_scheduling": False})
    (note,) = engine.notes()
    assert "acceptance is assumed, 0.85, 0.3" in note
    assert "take no time" in note


# ── Memory ──


def test_a_drafter_takes_its_weights_and_its_kv_from_the_blocks() -> None:
    blocks = {}
    for name, speculation in {"none": None, "eagle3": speculate("eagle3", 3)}.items():
        engine = VllmConfig(block_size=16, speculative_config=speculation)
        report = understudy.replay(single_turns([64], 4), engine, model=MODEL, gpu="H100")
        blocks[name] = report.run.engine["num_gpu_blocks"]
    kv = 2 * 8 * 128 * 2  # bytes of a token and layer
    stored = 2 * (LLAMA_8B.eagle3 + 3 * 4096**2)
    free = blocks["none"] * 16 * 32 * kv
    expected = (free - stored) / (16 * 33 * kv)
    assert blocks["eagle3"] == pytest.approx(expected, rel=0.002)
