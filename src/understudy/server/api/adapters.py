"""Routes of vLLM and of SageMaker that load and unload LoRA adapters at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from understudy.server.api.errors import ApiError, bad_request
from understudy.server.api.fields import Fields, read_body
from understudy.server.api.schema import LOAD_LORA, UNLOAD_LORA
from understudy.server.api.type_checks import check_types
from understudy.server.settings import LoraModule

if TYPE_CHECKING:
    from understudy.http import Request
    from understudy.server.worker import Worker

PREFIX = "/adapters/"


class Adapters:
    """Answers the adapter routes of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.plain = {
            "/v1/load_lora_adapter": {"POST": self._load},
            "/v1/unload_lora_adapter": {"POST": self._unload},
            "/adapters": {"POST": self._register},
        }

    def delete(self, path: str) -> tuple[int, str]:
        """Answer `DELETE /adapters/{name}`."""
        return self._remove(unquote(path[len(PREFIX) :]))

    def _load(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        check_types(fields, LOAD_LORA)
        fields.done()
        name, path = fields.text("lora_name"), fields.text("lora_path")
        return self._add(name or "", path or "", replace=fields.boolean("load_inplace"))

    def _unload(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        check_types(fields, UNLOAD_LORA)
        fields.done()
        name = fields.text("lora_name")
        if not name:
            raise ApiError("lora_name must be given", kind="InvalidUserInput")
        return self._remove(name)

    def _register(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Answer SageMaker's route, which takes any content type and treats invalid JSON as an empty body."""
        try:
            body = msgspec.json.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = None
        given = body if isinstance(body, dict) else {}
        name, path = given.get("name"), given.get("src")
        if not isinstance(name, str) or not isinstance(path, str):
            raise bad_request("an adapter has a name and a src, both texts")
        self._add(name, path, replace=False)
        return 200, f"adapter {name!r} is registered"

    def _add(self, name: str, path: str, *, replace: bool) -> tuple[int, str]:
        if not name or not path:
            raise ApiError("lora_name and lora_path must both be given", kind="InvalidUserInput")
        if name in self._worker.loras and not replace:
            raise ApiError(f"an adapter {name!r} is loaded already", kind="InvalidUserInput")
        self._worker.loras[name] = LoraModule(name, path)
        return 200, f"Success: adapter {name!r} is loaded."

    def _remove(self, name: str) -> tuple[int, str]:
        if name not in self._worker.loras:
            raise ApiError(f"The lora adapter {name!r} cannot be found.", status=404, kind="NotFoundError")
        del self._worker.loras[name]
        return 200, f"Success: adapter {name!r} is unloaded."
