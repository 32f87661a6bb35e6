"""SGLang's host tier without a device: its own tree, controller and host allocator; transfers end by a rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.pool_host import common as host_memory
from sglang.srt.runtime_context import get_context

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class _Event:
    """The end of a transfer; `ready` is the first step in which it has ended."""

    def __init__(self, transfers: Transfers | None = None) -> None:
        self._transfers = transfers
        self.ready = 0

    def query(self) -> bool:
        return self._transfers is None or self._transfers.step >= self.ready

    def synchronize(self) -> None:
        pass

    def record(self, *args: object) -> None:
        pass

    def wait(self, *args: object) -> None:
        pass


class Transfers:
    """SGLang's transfer engine; a transfer of a step ends `steps` later, and not before the one before it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.step = 0
        self.writes: list[int] = []
        self.loads: list[int] = []
        self._last_write = 0

    def submit_device_to_host(self, *_: Any, **__: Any) -> Any:
        """Begin a write."""
        return self._completion()

    def submit_host_to_device(self, *_: Any, **__: Any) -> Any:
        """Begin a load."""
        return self._completion()

    def _completion(self) -> Any:
        return SimpleNamespace(start_event=_Event(), finish_event=_Event(self), timing_enabled=False)

    def attach(self, tree: UnifiedRadixCache, params: CacheInitParams) -> None:
        """Give a tree its host tier."""
        stream = SimpleNamespace(wait_stream=lambda _: None)
        cache_controller.device_module = SimpleNamespace(
            Event=_Event, Stream=lambda *_, **__: stream, current_stream=lambda: stream
        )
        host_memory._cuda_host_register = lambda *_: None  # pinning needs a driver
        tree.init_hicache(get_context().server_args, params)
        tree.load_back_threshold = self._config["load_back_threshold"]
        controller = tree.cache_controller
        controller.l2_transfer_engine = self
        begin_writing, begin_loading = controller.start_writing, controller.start_loading

        def start_writing() -> None:
            queued = len(controller.write_queue)
            begin_writing()
            if queued:
                self._note_write(controller.ack_write_queue[-1])

        def start_loading() -> int:
            queued = len(controller.load_queue)
            producer = int(begin_loading())
            if queued:
                ack = controller.ack_load_queue[-1]
                ack.finish_event.ready = self.step + self._config["load_steps"]
                self.loads.append(ack.num_tokens)
            return producer

        controller.start_writing, controller.start_loading = start_writing, start_loading

    def _note_write(self, ack: Any) -> None:
        per_step = self._config["write_tokens_per_step"]
        takes = self._config["write_steps"] + (ack.num_tokens // per_step if per_step else 0)
        self._last_write = ack.finish_event.ready = max(self.step + takes, self._last_write)
        self.writes.append(ack.num_tokens)
