"""vLLM's offload with several KV cache groups, compared with a slow model in random scenarios."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from model.group_offload import Request
from model.group_offload_run import ModelRun, model_scenario
from release.families import FAMILIES
from understudy.conformance.group_offload_recording import GroupOffloadRun, GroupOffloadScenario
from understudy.engines.offload_profiles import offload_profile
from understudy.engines.profiles import PROFILES


@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["lru", "lru", "arc"]),
    room=st.sampled_from([1.0, 1.2, 2.0]),
    host=st.integers(1, 4),
)
def test_random_schedules_are_those_of_the_model(seed: int, policy: str, room: float, host: int) -> None:
    _, drawn = FAMILIES["group-offload"].scenario(seed)
    drawn = model_scenario(drawn, room)
    drawn["offload"] |= {"eviction_policy": policy, "host_chunks": host * drawn["offload"]["host_chunks"]}
    scenario = msgspec.convert(drawn, GroupOffloadScenario)
    run = GroupOffloadRun(scenario, PROFILES["v0.33"], offload_profile("0.33"), check=True)
    *lines, end = run.lines()
    longest = scenario.config.max_model_len
    requests: dict[str, Request] = {}
    for index, spec in sorted(enumerate(scenario.requests), key=lambda pair: (pair[1].arrival_step, pair[0])):
        tokens = tuple(spec.tokens(index, longest).tolist())
        prompt = len(spec.prompt_tokens())
        arrival = index if spec.arrival_time is None else spec.arrival_time
        requests[spec.id] = Request(spec.id, tokens, prompt, (arrival, len(requests)), known=prompt)
    model = ModelRun(drawn, requests)
    if all(model.compare(line) for line in lines) and end["end"]["reason"] == "done":
        # Conservation: all transfers have ended, and every chunk is ready.
        assert not model.model.jobs
        assert not model.model.loading
        assert all(chunk.refs == 0 for chunk in model.model.host.policy.chunks.values())
