"""Profiles of live workers: /start_profile and /stop_profile write a Perfetto trace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import serving
from understudy.errors import ConfigError
from understudy.server.flags.serving import read_serve

if TYPE_CHECKING:
    from pathlib import Path

BODY = {"prompt": list(range(40)), "max_tokens": 5, "ignore_eos": True}


def test_without_a_folder_there_are_no_profiles() -> None:
    async def main() -> None:
        async with serving() as (client, _):
            for path in ("/start_profile", "/stop_profile"):
                assert (await client.post(path, {})).status == 404

    asyncio.run(main())


def test_a_window_is_written_with_its_requests_and_steps(tmp_path: Path) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

    async def main() -> None:
        async with serving(profile_dir=str(tmp_path / "out"), data_parallel_size=2) as (client, _):
            assert (await client.post("/v1/completions", BODY, x_request_id="before")).status == 200
            started = await client.post("/start_profile", {})
            assert (started.status, started.body) == (200, b"")
            asked = [client.post("/v1/completions", BODY, x_request_id=f"in{at}") for at in range(4)]
            assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
            assert (await client.post("/stop_profile", {})).status == 200
            assert (await client.post("/v1/completions", BODY, x_request_id="after")).status == 200

    asyncio.run(main())
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == "understudy-worker0-0.pftrace"
    trace = protos.Trace()
    trace.ParseFromString(path.read_bytes())
    names = {one.name for packet in trace.packet for one in packet.interned_data.event_names}
    assert {f"cmpl-in{at}" for at in range(4)} <= names
    assert "cmpl-before" not in names
    events = [packet.track_event for packet in trace.packet if packet.HasField("track_event")]
    begun = [one for one in events if one.type == protos.TrackEvent.TYPE_SLICE_BEGIN]
    assert len(begun) >= 4 + 5
    assert len(begun) == sum(one.type == protos.TrackEvent.TYPE_SLICE_END for one in events)
    assert {flow for one in begun for flow in one.flow_ids} == {1, 2, 3, 4}


def test_windows_open_and_close_in_turn(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(profile_dir=str(tmp_path)) as (client, server):
            stopped = await client.post("/stop_profile", {})
            assert stopped.status == 400
            assert "no profile is running" in stopped.json["error"]["message"]
            for _ in range(2):
                assert (await client.post("/start_profile", {})).status == 200
                again = await client.post("/start_profile", {})
                assert again.status == 400
                assert "a profile is running" in again.json["error"]["message"]
                assert (await client.post("/stop_profile", {})).status == 200
            assert all(core.recorder is None for core in server.worker.cores)

    asyncio.run(main())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "understudy-worker0-0.pftrace",
        "understudy-worker0-1.pftrace",
    ]


def test_an_engine_that_is_replaced_is_recorded_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(profile_dir=str(tmp_path), dev_mode=True) as (client, _):
            assert (await client.post("/start_profile", {})).status == 200
            assert (await client.post("/reset_prefix_cache", {})).json == {"success": True}
            assert (await client.post("/v1/completions", BODY)).status == 200
            assert (await client.post("/stop_profile", {})).status == 200

    asyncio.run(main())
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size > 500


@pytest.mark.parametrize(
    ("config", "found"),
    [({"profiler": "torch", "torch_profiler_dir": "/tmp/x"}, "/tmp/x"), ({"profiler": None}, None)],
)
def test_the_folder_is_that_of_the_profiler_config(config: dict[str, Any], found: str | None) -> None:
    import json

    plan = read_serve(["m", "--profiler-config", json.dumps(config)])
    assert plan.settings.profile_dir == found
    assert read_serve(["m"]).settings.profile_dir is None


@pytest.mark.parametrize(
    ("config", "message"),
    [('{"profiler": "torch"}', "torch_profiler_dir is missing"), ('{"profiler": "cuda"}', "needs a GPU")],
)
def test_a_profiler_that_writes_no_trace_is_refused(config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_serve(["m", "--profiler-config", config])
