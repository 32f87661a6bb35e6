"""Settings of a server: the model it simulates, and how it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy.engines.kinds.registry import DEFAULT_ENGINE, kind_of
from understudy.engines.offload import UNLIMITED_BLOCKS
from understudy.http.bodies import MAX_BODY_BYTES, MAX_BODY_DEPTH
from understudy.run.session_kv import SessionKv  # noqa: TC001 (msgspec reads it)
from understudy.server.handoff.settings import HandOffSettings  # noqa: TC001 (msgspec reads it)
from understudy.server.push.settings import PushSettings  # noqa: TC001 (msgspec reads it)
from understudy.server.release import ApiRelease, find_release
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig as AnyEngineConfig
    from understudy.engines.kinds.kind import EngineKind
else:
    AnyEngineConfig = Any  # msgspec passes an object of any kind on


class LoraModule(msgspec.Struct, frozen=True):
    """An adapter that requests can name as their model."""

    name: str
    path: str = ""
    base_model_name: str | None = None


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server, under vLLM's names where it has one."""

    model: str = "understudy/tok"
    served_model_name: tuple[str, ...] = ()
    max_model_len: int = 32768
    engine: AnyEngineConfig = DEFAULT_ENGINE
    notes: tuple[str, ...] = ()
    """Notes on the engine's groups and blocks, printed at start."""
    tiers: TiersConfig = TiersConfig()
    most_blocks: int = UNLIMITED_BLOCKS
    """Most blocks that requests can fill: the capacity of a tier without a limit."""
    session_kv: SessionKv | None = None
    """What happens to the KV of sessions between their requests; None: nothing."""
    data_parallel_size: int = 1
    handoff: HandOffSettings | None = None
    """Hand-offs of KV blocks to or from other servers; None: none."""
    push: PushSettings | None = None
    """One side of SGLang's prefill/decode disaggregation; None: neither."""
    tokenizer: str | None = None
    response_mode: Literal["filler", "echo", "recorded"] = "filler"
    response_file: str | None = None
    seed: int = 0
    clock_speed: float = 1.0

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    """Path of a Unix socket to listen on, instead of host and port."""
    api_keys: tuple[str, ...] = ()
    admin_hosts: tuple[str, ...] = ()
    """Addresses and networks whose clients may call control routes; without a key only."""
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    max_body_depth: int = MAX_BODY_DEPTH
    """Levels of lists and objects in a body."""
    shutdown_timeout_s: float = 0.0
    startup_duration_s: float = 0.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    global_cache_hit_threshold: float | None = None
    """Least cached share of a prompt; with less it is not computed here. A request may set its own."""

    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    enable_server_load_tracking: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    trust_request_chat_template: bool = False
    enable_log_requests: bool = False
    max_logprobs: int = 20
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    sse_keep_alive_interval_s: float = 0.0
    incremental_streaming_output: bool = False
    """SGLang: chunks of a stream of `/generate` have only the new text."""
    stream_interval: int = 1
    """Tokens in a chunk of a stream, but for the first and the last."""

    enable_lora: bool = False
    max_loras: int = 1
    max_cpu_loras: int | None = None
    lora_modules: tuple[LoraModule, ...] = ()
    runtime_lora: bool = False
    disable_fastapi_docs: bool = False
    enable_scale_out: bool = False
    dev_mode: bool = False
    profile_dir: str | None = None
    """Folder of profiles; None: `/start_profile` is not there, as with vLLM."""
    latency_ms: tuple[float, float] | None = None
    """(prefill, decode) of every step, changeable by `/admin/config`; None: the engine's timing model."""
    latency_std_dev_ms: tuple[float, float] = (0.0, 0.0)
    """Standard deviations of `latency_ms`, drawn by `seed`; a draw is within 70 % of the mean."""
    live_config: dict[str, Any] = msgspec.field(default_factory=dict)
    """Initial values of `/admin/config`."""
    metrics: Literal["vllm", "sglang"] = "vllm"
    old_metric_names: bool = False
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    """Share of blocks whose residency is measured, with `kv_cache_metrics`."""
    kv_events_config: dict[str, Any] = msgspec.field(default_factory=dict)
    cache_info: dict[str, str] = msgspec.field(default_factory=dict)
    """Labels of cache_config_info that flags give."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model; the first is its label in metrics."""
        return self.served_model_name or (self.model,)

    @property
    def kind(self) -> EngineKind:
        """Kind of the engine, as which the server answers."""
        return kind_of(self.engine)

    @property
    def release(self) -> ApiRelease:
        """The vLLM release that the server answers as."""
        return find_release(getattr(self.engine, "vllm_version", None))

    @property
    def scheme(self) -> str:
        """URL scheme of the server's addresses."""
        return "http" if self.ssl_certfile is None else "https"

    def describe_times(self) -> str:
        """Describe the origin of step times."""
        if self.latency_ms is None:
            return self.engine.timing.describe_origin()
        first, each = self.latency_ms
        return f"given constants: {first:g} ms of prefill, {each:g} ms of decode"
