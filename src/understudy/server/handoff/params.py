"""`kv_transfer_params` of a request and of an answer, as vLLM's NixlConnector reads and writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.server.handoff.settings import HandOffSettings

MAX_NAME = 1024
"""Longest id of an engine or a request."""


class RemoteBlocks(NamedTuple):
    """Blocks of a prompt that a prefill server has."""

    engine_id: str
    request_id: str
    host: str
    port: int
    blocks: int
    """Their number."""


def wants_prefill(params: dict[str, Any]) -> bool:
    """Return True if another server will read the blocks of this prompt."""
    return bool(params.get("do_remote_decode"))


def read_remote(params: dict[str, Any], settings: HandOffSettings) -> RemoteBlocks | None:
    """Return where the blocks of a prompt are; None if nowhere else. ApiError names a missing or wrong field.

    vLLM has no such check: it parks the request for ever, or its engine ends.
    """
    if not params.get("do_remote_prefill"):
        return None
    if params.get("transfer_mode", "pull") != "pull":
        raise _invalid("transfer_mode", "must be pull")
    engine_id, request_id = _text(params, "remote_engine_id"), _text(params, "remote_request_id")
    host = _text(params, "remote_host")
    port = params.get("remote_port")
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise _invalid("remote_port", f"must be a port, got {port!r}")
    if not settings.may_contact(host):
        raise _invalid("remote_host", f"{host!r} is no peer of this server; allow it with --kv-peer")
    blocks = params.get("remote_block_ids")
    if isinstance(blocks, list) and len(blocks) == 1 and isinstance(blocks[0], list):
        blocks = blocks[0]  # of the only KV cache group
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, int) for block in blocks):
        raise _invalid("remote_block_ids", "must be a list with one list of block ids")
    return RemoteBlocks(engine_id, request_id, host, port, len(blocks))


def _text(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise _invalid(
            name, f"must be a text of 1 to {MAX_NAME} characters; pass on what the prefill server sent"
        )
    return value


def _invalid(name: str, why: str) -> ApiError:
    return ApiError(f"kv_transfer_params.{name} {why}", param="kv_transfer_params")


def describe_blocks(
    blocks: Sequence[int],
    *,
    engine_id: str,
    request_id: str,
    host: str,
    port: int,
    tokens: int,
    cached_tokens: int,
) -> dict[str, Any]:
    """Build the answer of a prefill server: what a decode server needs to read the blocks."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[block + 1 for block in blocks]],  # vLLM's block 0 is the null block
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }
