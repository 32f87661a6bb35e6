"""The worker side of vLLM's NIXL connectors, on a NIXL that moves nothing."""

from __future__ import annotations

import copy
import os
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    base_scheduler,
    base_worker,
    pull_scheduler,
    pull_worker,
    push_scheduler,
    push_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping

from exact.pd_network import Agent, Handshakes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from exact.pd_network import Line, Network

SIDE: dict[str, Line] = {
    name: {
        "every": 1,
        "stall": [],
        "kv_load_failure_policy": "fail",
        "kv_lease_duration": 30,
        "kv_role": role,
    }
    for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
}
"""Defaults of an instance's settings."""


def transfer_config(name: str, side: Line, *, push: bool) -> Any:
    """Build vLLM's KV transfer config of an instance."""
    return KVTransferConfig(
        kv_connector="NixlPushConnector" if push else "NixlConnector",
        kv_role=side["kv_role"],
        engine_id=name,
        kv_buffer_device="cuda",
        kv_load_failure_policy=side["kv_load_failure_policy"],
        kv_connector_extra_config={"kv_lease_duration": side["kv_lease_duration"]},
    )


@contextmanager
def without_devices(network: Network) -> Iterator[None]:
    """Run the connectors without GPU, NIXL and process groups, by the network's clock."""
    modules = (base_scheduler, base_worker, pull_scheduler, pull_worker, push_scheduler, push_worker)
    platform = SimpleNamespace(
        device_type="cuda",
        get_nixl_memory_type=lambda: "VRAM",
        is_rocm=lambda: False,
        set_device=lambda _: None,
    )
    worker = base_worker.NixlBaseConnectorWorker
    stand_ins: dict[tuple[Any, str], Any] = {
        **{(module, "time"): network for module in modules},
        (base_worker, "current_platform"): platform,
        (base_worker, "NixlWrapper"): lambda *_: None,
        (base_worker, "check_nixl_version"): lambda *_: None,
        (base_worker, "nixl_agent_config"): None,
        (base_worker, "get_tensor_model_parallel_rank"): lambda: 0,
        (base_worker, "get_tensor_model_parallel_world_size"): lambda: 1,
        (base_worker, "get_current_attn_backends"): lambda _: [SimpleNamespace(get_name=lambda: "NONE")],
        (worker, "_sync_block_size_with_kernel"): lambda _: None,
        (worker, "_log_failure"): lambda *_, **__: None,
        (push_worker.logger, "exception"): _raise_again,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER="0"))  # as in all recordings
        for (owner, name), stand_in in stand_ins.items():
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def _raise_again(*_: Any) -> None:
    """Raise the error that the writer's loop would log and forget."""
    raise


class Worker:
    """A real worker of one rank, connected to its peer by a handshake of the scenario's length."""

    def __init__(
        self, name: str, scheduler: Any, network: Network, *, push: bool, transfer: Any = None
    ) -> None:
        config = scheduler.vllm_config
        if transfer is not None:
            config = copy.copy(config)
            config.kv_transfer_config = transfer
        config.cache_config.kv_cache_layout = "LBHNC"
        make = push_worker.NixlPushConnectorWorker if push else pull_worker.NixlPullConnectorWorker
        self.push = push
        self.real: Any = make(config, name, scheduler.kv_cache_config)
        self.agent = Agent(name, network)
        self.expired: list[str] = []
        self._peer = self.agent.peer
        self._handshakes = Handshakes(network)
        real = self.real
        real.nixl_wrapper = self.agent
        real._handshake_initiation_executor.shutdown()
        real._handshake_initiation_executor = self._handshakes
        real._nixl_handshake = self._connect
        real.shutdown = lambda: None  # nothing was registered
        real.num_regions = 1
        real.region_group_ids = [0]
        real.dst_num_blocks[name] = real.num_blocks
        real.dst_region_num_blocks[name] = [real.num_blocks]
        real.src_xfer_handles_by_block_size[real.block_size] = 0
        real.transfer_topo = SimpleNamespace(
            get_engine_info=lambda _: SimpleNamespace(
                remote_tp_size=1,
                remote_dcp_size=1,
                remote_block_size=real.block_size,
                remote_physical_blocks_per_logical=1,
            ),
            tp_ratio=lambda _: 1,
            block_size_ratio=lambda _: 1,
        )
        self._observe_leases()
        if not network.wire["handshake"]:
            real._remote_agents[self._peer] = self._connect()[0]
            real._engine_by_address[("", 0)] = self._peer  # it serves an address, so it is kept

    def run(self, metadata: Any) -> Any:
        """Run the worker's part of an iteration: post transfers, then poll; return the results of the poll."""
        self.agent.clear()
        self.expired.clear()
        self._handshakes.end_due()
        self.real.start_load_kv(metadata)
        if self.push:
            self._run_writer_once()
        return self.real.get_transfer_results()

    def _connect(self, *_: Any) -> tuple[dict[tuple[int, int], str], float]:
        """Do the work of a handshake: set up what is known of the peer."""
        real, peer = self.real, self._peer
        real.tp_mappings[peer] = TPMapping(((0,),), (0,), {0: 0}, 0)
        blocks = 1 << 30
        real.dst_num_blocks[peer] = blocks
        real.dst_region_num_blocks[peer] = [blocks]
        real.dst_region_group_ids[peer] = [0]
        real.dst_uses_region_group_mapping[peer] = False
        real.dst_xfer_side_handles[peer][0] = 0
        return {(0, 0): peer}, 0.0

    def _run_writer_once(self) -> None:
        """Run one pass of the writer's loop, which is a thread in vLLM."""
        passes = iter([False, True])
        self.real._push_writer_stop = SimpleNamespace(is_set=lambda: next(passes), wait=lambda **_: None)
        self.real._push_writer_wake = SimpleNamespace(set=lambda: None, clear=lambda: None, wait=lambda: None)
        self.real._push_writer_loop()

    def _observe_leases(self) -> None:
        reap = self.real._reap_expired_send_leases

        def reaped(done: set[str]) -> None:
            before = set(done)
            reap(done)
            self.expired += done - before

        self.real._reap_expired_send_leases = reaped
