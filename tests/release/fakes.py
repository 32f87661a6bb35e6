"""Stand-ins for a recorder of a real engine: our own engines, or a recorder that refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from release.process import RecordingFailed
from understudy.conformance.clock import ClockScenario, run_clock_scenario
from understudy.conformance.group_offload_recording import GroupOffloadRun, GroupOffloadScenario
from understudy.conformance.group_recording import GroupRun, GroupScenario
from understudy.conformance.handoff_recording import HandOffRun
from understudy.conformance.handoff_scenario import HandOffScenario
from understudy.conformance.offload_recording import OffloadRun, OffloadScenario
from understudy.conformance.recorder import run_scenario
from understudy.conformance.sglang_clock import run_sglang_clock
from understudy.conformance.sglang_recording import SglangScenario, run_sglang_scenario
from understudy.conformance.spec_recording import SpecScenario, run_spec_scenario
from understudy.conformance.trtllm_recording import TrtScenario, run_trtllm_scenario
from understudy.engines.offload_profiles import offload_profile
from understudy.engines.profiles import find_profile
from understudy.errors import UnderstudyError
from understudy.workload.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable


class EngineRecorder:
    """Record our engine as if it were a vLLM release; count the calls."""

    def __init__(self, release: str) -> None:
        self._release = release
        self._profile = find_profile(release)
        self.calls = 0

    def record(self, kind: str, scenario: dict[str, Any]) -> dict[str, Any]:
        """Return the recording of a scenario; RecordingFailed when the engine refuses it."""
        self.calls += 1
        try:
            return self._record(kind, scenario)
        except UnderstudyError as error:
            raise RecordingFailed(str(error)) from error

    def _record(self, kind: str, scenario: dict[str, Any]) -> dict[str, Any]:
        if kind == "steps":
            lines = list(run_scenario(msgspec.convert(scenario, Scenario), self._profile))
            return {"vllm": self._release, "recorded": [{"header": {"vllm": self._release}}, *lines]}
        if kind == "clock":
            record = run_clock_scenario(msgspec.convert(scenario, ClockScenario), self._profile)
            return {"vllm": self._release, "recorded": msgspec.to_builtins(record)}
        if kind == "offload":
            rules = offload_profile(self._release)
            header: dict[str, Any] = {"vllm": self._release}
            run: OffloadRun | GroupOffloadRun
            if "groups" in scenario["config"]:
                header["config"] = {"groups": []}
                run = GroupOffloadRun(msgspec.convert(scenario, GroupOffloadScenario), self._profile, rules)
            else:
                run = OffloadRun(msgspec.convert(scenario, OffloadScenario), self._profile, rules)
            return {"vllm": self._release, "recorded": [{"header": header}, *run.lines()]}
        if kind == "groups":
            grouped = GroupRun(msgspec.convert(scenario, GroupScenario), self._profile)
            header = {"vllm": self._release, "config": {"groups": []}}
            return {"vllm": self._release, "recorded": [{"header": header}, *grouped.lines()]}
        if kind == "pairs":
            pair = HandOffRun(msgspec.convert(scenario, HandOffScenario), self._profile)
            return {"vllm": self._release, "recorded": [{"header": {"vllm": self._release}}, *pair.lines()]}
        played = msgspec.convert(scenario, SpecScenario)
        steps = list(run_spec_scenario(played, self._profile, events=True))
        events = [step.pop("kv_events") for step in steps]
        return {"vllm": self._release, "recorded": steps, "events": events}


class SglangEngineRecorder:
    """Record our SGLang engine as if it were SGLang; `change` alters each recording."""

    def __init__(self, change: Callable[[Any], None] = lambda _: None) -> None:
        self._change = change

    def record(self, kind: str, scenario: dict[str, Any]) -> dict[str, Any]:
        """Return the recording of a scenario."""
        parsed = msgspec.convert(scenario, SglangScenario)
        recorded: Any
        if kind == "clock":
            recorded = {"config": scenario["config"], **run_sglang_clock(parsed)}
        else:
            recorded = [{"header": {"config": scenario["config"]}}, *run_sglang_scenario(parsed)]
        self._change(recorded)
        return {"sglang": "0.5.23", "recorded": recorded}


class TrtEngineRecorder:
    """Record our TensorRT-LLM engine as if it were TensorRT-LLM; `change` alters each recording."""

    def __init__(self, change: Callable[[Any], None] = lambda _: None) -> None:
        self._change = change

    def record(self, kind: str, scenario: dict[str, Any]) -> dict[str, Any]:
        """Return the recording of a scenario."""
        assert kind == "passes"
        sizes, *lines = run_trtllm_scenario(msgspec.convert(scenario, TrtScenario))
        sizes["pools"] = [[[pages, None] for pages in groups] for groups in sizes["pools"]]
        recorded = [{"config": scenario["config"], **sizes}, *lines]
        self._change(recorded)
        return {"trtllm": "1.3.0rc25", "recorded": recorded}


class RefusingRecorder:
    """Refuse every scenario."""

    def record(self, kind: str, scenario: dict[str, Any]) -> dict[str, Any]:
        """Raise RecordingFailed."""
        raise RecordingFailed(f"ValueError: {kind} of {len(scenario)} keys is not known")
