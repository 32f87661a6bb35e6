"""Reads requests to OpenAI's routes as SGLang does, where it differs from vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.server.api.errors import ApiError
from understudy.server.api.reading import Reader
from understudy.server.api.sampling import check_choices, check_sampling
from understudy.server.push.rooms import take_fields
from understudy.server.sglang.lengths import read_tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy.server.api.fields import Fields
    from understudy.server.api.sampling import Sampling

DEFAULT_MODEL = "default"


class SglangReader(Reader):
    """Reads the requests of one SGLang worker."""

    def model(self, fields: Fields) -> str:
        """Return the name that the request gives: SGLang answers under any."""
        return fields.text("model") or DEFAULT_MODEL

    def check(self, fields: Fields, sampling: Sampling) -> None:
        """Check the sampling parameters. ApiError for the first problem."""
        settings = self.worker.settings
        sampling.priority_given = fields.raw("priority") is not None
        sampling.stream_interval = max(sampling.stream_interval, settings.stream_interval)
        sampling.include_stop = fields.boolean("no_stop_trim")
        sampling.bootstrap = take_fields(fields)
        rid = fields.raw("rid")
        if isinstance(rid, str):
            sampling.request_id = rid
        if sampling.asked_tokens is not None and sampling.asked_tokens < 1:
            raise ApiError("max_tokens must be positive", kind="Bad Request")
        check_choices(sampling.n)
        n, sampling.n = sampling.n, 1  # SGLang samples several answers at temperature 0 too
        check_sampling(fields, sampling, max_logprobs=-1, vocabulary=self.worker.tokenizer.vocabulary)
        sampling.n = n

    def check_tools(self, fields: Fields) -> dict[str, Any] | None:
        """Return the function that must be called, if any; without a parser of tool calls there is none."""
        if self.worker.settings.tool_call_parser is None or fields.raw("tool_choice") in (None, "auto"):
            return None
        return super().check_tools(fields)

    def tokens(self, prompt: str | list[int], sampling: Sampling) -> npt.NDArray[np.uint32]:  # noqa: ARG002
        """Tokenize a prompt. ApiError if it is too long, empty or out of vocabulary."""
        return read_tokens(prompt, self.worker.tokenizer, self.worker.settings.max_model_len)
