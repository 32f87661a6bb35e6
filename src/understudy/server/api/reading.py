"""Reads generation requests: prompts as tokens, and sampling parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from understudy._core import TokenBlocks
from understudy.server.api.body_checks import (
    NO_SUCH_TOOL,
    check_batch,
    check_chat,
    check_completion,
    check_salt,
)
from understudy.server.api.errors import ApiError, bad_value, no_such_model
from understudy.server.api.fields import Fields
from understudy.server.api.prompts import (
    MAX_PROMPTS,
    chat_text,
    read_conversations,
    read_messages,
    read_prompts,
    read_scoring,
    tokens_of,
)
from understudy.server.api.sampling import Sampling, check_sampling, read_sampling
from understudy.server.api.schema import SCHEMAS, SCORING
from understudy.server.api.type_checks import check_types

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

    from understudy._core import Identities
    from understudy.server.worker import Worker


class Read(NamedTuple):
    """The content of a generation request."""

    sampling: Sampling
    model: str
    tokens: Iterable[npt.NDArray[np.uint32]]
    """Tokens of each prompt."""
    n: int = 1
    """Number of answers to each prompt."""
    samplings: list[Sampling] | None = None
    """Parameters of each prompt's answers; None: `sampling` for all."""
    echo: bool = False
    echoed: list[str] = []  # noqa: RUF012
    empty: bool = False
    """True when only the prompt is to be returned."""
    tool: dict[str, Any] | None = None
    role: str = "assistant"
    text: str | None = None
    """The rendered prompt of a chat, if requested."""
    labels: list[int] = []  # noqa: RUF012
    """Tokens whose probabilities are scored after each prompt."""
    softmax: bool = True
    """Whether scores are shares of the labels' sum."""

    @property
    def prompts(self) -> list[list[int]]:
        """Tokens of each prompt as a list."""
        return [tokens.tolist() for tokens in self.tokens]


class Reader:
    """Reads the requests of one worker. vLLM's ApiError for invalid ones."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._schemas = SCHEMAS[worker.release.version]

    def completion(self, body: dict[str, Any]) -> Read:
        """Read a completion request."""
        worker = self.worker
        check_completion(body, MAX_PROMPTS)
        fields = Fields(body)
        check_types(fields, self._schemas.completion)
        prompts = read_prompts(fields, self.worker.release)
        fields.done()
        sampling = read_sampling(fields, chat=False)
        echo = fields.boolean("echo")
        model = self.model(fields)
        empty = sampling.asked_tokens == 0 and echo
        if empty:
            sampling.asked_tokens = 1
        if fields.raw("suffix") is not None:
            raise bad_value("suffix is only supported for models with FIM completion rendering", "suffix")
        if fields.raw("prompt_embeds"):
            raise bad_value("prompt_embeds are not taken here", "prompt_embeds")
        self.check(fields, sampling)
        tokens = [self.tokens(prompt, sampling) for prompt in prompts]
        echoed: list[str] = []
        if echo:
            echoed = [
                prompt if isinstance(prompt, str) else worker.tokenizer.decode(prompt) for prompt in prompts
            ]
        return Read(sampling, model, tokens, sampling.n, echo=echo, echoed=echoed, empty=empty)

    def chat(self, body: dict[str, Any], *, checked: bool = False) -> Read:
        """Read a chat request. `checked`: contradictory fields were checked before."""
        worker, settings = self.worker, self.worker.settings
        if not checked:
            check_chat(body)
        fields = Fields(body)
        if fields.raw("messages") is None:
            fields.note("missing", "messages", "must be given")
        messages = read_messages(fields, "messages", settings.names[0]) if fields.has("messages") else []
        check_types(fields, self._schemas.chat)
        fields.done()
        sampling = read_sampling(fields, chat=True)
        model = self.model(fields)
        self.check(fields, sampling)
        tool = self.check_tools(fields)
        text = chat_text(fields, messages, worker.tokenizer, trusted=settings.trust_request_chat_template)
        tokens = self.tokens(text, sampling)
        role = "assistant" if fields.boolean("add_generation_prompt", True) else messages[-1][0]
        shown = text if fields.boolean("return_prompt_text") else None
        return Read(sampling, model, [tokens], sampling.n, tool=tool, role=role, text=shown)

    def batch(self, body: dict[str, Any]) -> Read:
        """Read a request of several conversations, each with one answer."""
        worker, settings = self.worker, self.worker.settings
        check_batch(body)
        fields = Fields(body)
        conversations = read_conversations(fields, settings.names[0])
        check_types(fields, self._schemas.batch)
        fields.done()
        sampling = read_sampling(fields, chat=True)
        sampling.stream = False
        model = self.model(fields)
        self.check(fields, sampling)
        texts = [
            chat_text(fields, messages, worker.tokenizer, trusted=settings.trust_request_chat_template)
            for messages in conversations
        ]
        prompts = [tokens_of(text, sampling, worker.tokenizer, settings.max_model_len) for text in texts]
        return Read(sampling, model, prompts)

    def scoring(self, body: dict[str, Any]) -> Read:
        """Read a request to score labels after items; its prompts are tokenized one at a time."""
        worker = self.worker
        check_salt(body)
        fields = Fields(body)
        query, items = read_scoring(fields)
        check_types(fields, SCORING)
        fields.done()
        model = self.model(fields)
        labels = fields.integers("label_token_ids")
        unknown = [label for label in labels if not 0 <= label < worker.tokenizer.vocabulary]
        if unknown:
            raise ApiError(f"label_token_ids: {unknown[0]} is not in the vocabulary.")
        if not labels or not items:
            raise ApiError(f"{'items' if labels else 'label_token_ids'} must not be empty.")
        sampling = read_sampling(
            Fields({name: body.get(name) for name in ("request_id", "cache_salt")}), chat=False
        )
        sampling.asked_tokens = 1
        softmax = fields.boolean("apply_softmax", True)
        item_first = fields.boolean("item_first")
        most = worker.settings.max_model_len - 1

        def ids(given: str | list[int]) -> list[int]:
            return (worker.tokenizer.encode(given, enough=most) if isinstance(given, str) else given)[:most]

        def prompts() -> Iterator[npt.NDArray[np.uint32]]:
            asked = ids(query)
            for item in items:
                prompt = ids(item) + asked if item_first else asked + ids(item)
                yield tokens_of(prompt[:most], sampling, worker.tokenizer, worker.settings.max_model_len)

        return Read(sampling, model, prompts(), labels=labels, softmax=softmax)

    def prompt_blocks(self, body: dict[str, Any]) -> tuple[int, Identities | None]:
        """Return, for routers, the length of the first prompt and its blocks. ApiError without a prompt."""
        worker, settings = self.worker, self.worker.settings
        fields = Fields(body)
        chat = "messages" in body or "input" in body
        sampling = read_sampling(fields, chat=chat)
        if chat:
            name = "messages" if "messages" in body else "input"
            messages = (
                read_messages(fields, name, "")
                if isinstance(body[name], list)
                else [("user", str(body[name]))]
            )
            prompt: str | list[int] = worker.tokenizer.render_chat(messages)
        elif "text" in body or "input_ids" in body:  # SGLang's /generate
            given: Any = body.get("text") or body.get("input_ids")
            first = given[0] if isinstance(given, list) and given else given
            prompt = given if isinstance(first, int) else first
            if not isinstance(prompt, str | list):
                raise ApiError("no prompt")
        else:
            prompts = read_prompts(fields, self.worker.release)
            if not prompts:
                raise ApiError("no prompt")
            prompt = prompts[0]
        fields.done()
        tokens = self.tokens(prompt, sampling)
        model = self.model(fields)
        lora = model if model in worker.loras else ""
        blocks = TokenBlocks(tokens, settings.engine.block_size, salt=sampling.cache_salt, lora=lora)
        return len(tokens), blocks.identities

    def tokens(self, prompt: str | list[int], sampling: Sampling) -> npt.NDArray[np.uint32]:
        """Tokenize a prompt, truncated as requested. ApiError if it is too long, empty or out of vocabulary."""
        return tokens_of(prompt, sampling, self.worker.tokenizer, self.worker.settings.max_model_len)

    def check(self, fields: Fields, sampling: Sampling) -> None:
        """Check the sampling parameters against the server's limits. ApiError for the first problem."""
        settings = self.worker.settings
        if self.worker.release.has_weight_versions:
            sampling.return_weight_versions = fields.boolean("return_weight_versions")
        sampling.stream_interval = max(sampling.stream_interval, settings.stream_interval)
        check_sampling(
            fields,
            sampling,
            max_logprobs=settings.max_logprobs,
            vocabulary=self.worker.tokenizer.vocabulary,
        )

    def model(self, fields: Fields) -> str:
        """Return the requested model or adapter; the server's model by default."""
        names = self.worker.settings.names
        given = fields.text("model")
        if given is None or given == "":
            return names[0]
        if given not in names and given not in self.worker.loras:
            fields.done()
            raise no_such_model(given, (*names, *self.worker.loras))
        return given

    def check_tools(self, fields: Fields) -> dict[str, Any] | None:
        """Return the function that must be called, if any. ApiError when the server has no tool parser."""
        settings = self.worker.settings
        tools, choice = fields.raw("tools"), fields.raw("tool_choice")
        if tools is None or choice == "none" or (choice is None and fields.has("tool_choice")):
            return None
        functions: list[dict[str, Any]] = [tool["function"] for tool in tools]
        if choice in (None, "auto"):
            if not (settings.enable_auto_tool_choice and settings.tool_call_parser):
                raise ApiError(
                    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
                )
            return None
        if choice == "required":
            if not settings.tool_call_parser:
                raise ApiError('tool_choice="required" requires --tool-call-parser to be set')
            return functions[0]
        name = choice["function"]["name"]
        if not settings.tool_call_parser:
            raise ApiError(f"tool_choice of function {name!r} requires --tool-call-parser to be set")
        chosen = next((function for function in functions if function["name"] == name), None)
        if chosen is None:
            raise bad_value(NO_SUCH_TOOL, "tool_choice")
        return chosen
