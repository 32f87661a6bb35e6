"""The endpoints that generate: a body in, a generation out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy._core import TokenBlocks, xxh3_64
from understudy.errors import InvalidArgument
from understudy.server.api.before import check_batch, check_chat, check_completion, check_salt
from understudy.server.api.chat import ChatStyle
from understudy.server.api.completions import CompletionStyle
from understudy.server.api.errors import ApiError, bad_value, no_such_model
from understudy.server.api.fields import Fields
from understudy.server.api.generation import Generation, new_id
from understudy.server.api.plan import Plan, plan_answer
from understudy.server.api.prompts import (
    MAX_PROMPTS,
    chat_text,
    read_conversations,
    read_messages,
    read_prompts,
    read_scoring,
    room_for,
    tokens_of,
)
from understudy.server.api.sampling import Sampling, check_sampling, read_sampling
from understudy.server.api.schema import BATCH, CHAT, COMPLETION, SCORING, check_types
from understudy.server.api.scoring import ScoringStyle
from understudy.server.api.structured import instance, structured_text
from understudy.server.outputs import Answer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy._core import Identities
    from understudy.server.api.generation import Style
    from understudy.server.api.growing import GrowingPlan
    from understudy.server.http import Connection, Request
    from understudy.server.worker import Worker


class Read(NamedTuple):
    """What a body asks for."""

    sampling: Sampling
    model: str
    tokens: list[npt.NDArray[np.uint32]]
    """Of its prompts."""
    echo: bool = False
    echoed: list[str] = []  # noqa: RUF012
    empty: bool = False
    """Only the prompt is to be told."""
    tool: dict[str, Any] | None = None
    role: str = "assistant"
    text: str | None = None
    """The prompt of a chat, where it is to be shown."""

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens as numbers."""
        return [tokens.tolist() for tokens in self.tokens]


class Endpoints:
    """Generates on behalf of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.in_flight: set[Generation] = set()

    def read_completion(self, body: dict[str, Any]) -> Read:
        """The prompts of a completion as tokens, and how they are to be answered. ApiError as vLLM's."""
        worker, settings = self.worker, self.worker.settings
        check_completion(body, MAX_PROMPTS)
        fields = Fields(body)
        check_types(fields, COMPLETION)
        prompts = read_prompts(fields)
        fields.done()
        sampling = read_sampling(fields, chat=False)
        echo = fields.boolean("echo")
        model = self._model(fields)
        empty = sampling.asked_tokens == 0 and echo
        if empty:
            sampling.asked_tokens = 1
        if fields.raw("suffix") is not None:
            raise bad_value("this model does not fill in the middle", "suffix", msgspec.UNSET)
        if fields.raw("prompt_embeds"):
            raise bad_value("prompt_embeds are not taken here", "prompt_embeds")
        self._check(fields, sampling)
        tokens = [tokens_of(prompt, sampling, worker.tokenizer, settings.max_model_len) for prompt in prompts]
        echoed: list[str] = []
        if echo:
            echoed = [
                prompt if isinstance(prompt, str) else worker.tokenizer.decode(prompt) for prompt in prompts
            ]
        return Read(sampling, model, tokens, echo=echo, echoed=echoed, empty=empty)

    def completions(
        self,
        body: dict[str, Any],
        request: Request,
        connection: Connection,
        style: Style | None = None,
        prefix: str = "cmpl-",
    ) -> Generation:
        """`/v1/completions`, and what is told in another style."""
        read = self.read_completion(body)
        sampling, model = read.sampling, read.model
        self._headers(sampling, request)
        if style is None:
            style = CompletionStyle(echo=read.echo, echo_text=read.echoed)
        generation = self._open(request, connection, sampling, style, prefix, model)
        for tokens in read.tokens:
            plans = [self._plan(tokens, sampling, index, empty=read.empty) for index in range(sampling.n)]
            generation.add(tokens, plans)
        return self._run(generation, request, model)

    def read_chat(self, body: dict[str, Any], *, checked: bool = False) -> Read:
        """The same of a chat. `checked`: fields that contradict each other were looked for elsewhere."""
        worker, settings = self.worker, self.worker.settings
        if not checked:
            check_chat(body)
        fields = Fields(body)
        if fields.raw("messages") is None:
            fields.note("missing", "messages", "must be given")
        messages = read_messages(fields, "messages", settings.names[0]) if fields.has("messages") else []
        check_types(fields, CHAT)
        fields.done()
        sampling = read_sampling(fields, chat=True)
        model = self._model(fields)
        self._check(fields, sampling)
        tool = self.check_tools(fields)
        text = chat_text(fields, messages, worker.tokenizer, trusted=settings.trust_request_chat_template)
        tokens = tokens_of(text, sampling, worker.tokenizer, settings.max_model_len)
        role = "assistant" if fields.boolean("add_generation_prompt", True) else messages[-1][0]
        shown = text if fields.boolean("return_prompt_text") else None
        return Read(sampling, model, [tokens], tool=tool, role=role, text=shown)

    def chat(
        self,
        body: dict[str, Any],
        request: Request,
        connection: Connection,
        style: Style | None = None,
        prefix: str = "chatcmpl-",
    ) -> Generation:
        """`/v1/chat/completions`, and what is told in another style."""
        read = self.read_chat(body, checked=style is not None)
        sampling, model, tool, (tokens,) = read.sampling, read.model, read.tool, read.tokens
        self._headers(sampling, request)
        generation = self._open(request, connection, sampling, style or ChatStyle(read.role), prefix, model)
        if read.text is not None:
            generation.detail["prompt_text"] = read.text
        if tool is not None:
            sampling.structure = {"json": tool.get("parameters", {})}
        generation.add(tokens, [self._plan(tokens, sampling, index) for index in range(sampling.n)])
        if tool is not None:
            for choice in generation.choices:
                arguments = msgspec.json.encode(
                    instance(tool.get("parameters", {}), self._key(tokens, choice.index))
                )
                choice.tool = {
                    "id": f"chatcmpl-tool-{new_id()}",
                    "type": "function",
                    "function": {"name": tool.get("name", ""), "arguments": arguments.decode()},
                }
        return self._run(generation, request, model)

    def batch(self, body: dict[str, Any], request: Request, connection: Connection) -> Generation:
        """`/v1/chat/completions/batch`: several conversations, an answer to each."""
        worker, settings = self.worker, self.worker.settings
        check_batch(body)
        fields = Fields(body)
        conversations = read_conversations(fields, settings.names[0])
        check_types(fields, BATCH)
        fields.done()
        sampling = read_sampling(fields, chat=True)
        sampling.stream = False
        model = self._model(fields)
        self._check(fields, sampling)
        texts = [
            chat_text(fields, messages, worker.tokenizer, trusted=settings.trust_request_chat_template)
            for messages in conversations
        ]
        self._headers(sampling, request)
        prompts = [tokens_of(text, sampling, worker.tokenizer, settings.max_model_len) for text in texts]
        generation = self._open(request, connection, sampling, ChatStyle(), "chatcmpl-", model)
        for tokens in prompts:
            generation.add(tokens, [self._plan(tokens, sampling, 0)])
        return self._run(generation, request, model)

    def scoring(self, body: dict[str, Any], request: Request, connection: Connection) -> Generation:
        """`/generative_scoring`: how likely the labels are after each item, from a prefill and one token."""
        worker, settings = self.worker, self.worker.settings
        check_salt(body)
        fields = Fields(body)
        query, items = read_scoring(fields)
        check_types(fields, SCORING)
        fields.done()
        model = self._model(fields)
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
        style = ScoringStyle(labels, softmax=fields.boolean("apply_softmax", True))
        generation = self._open(request, connection, sampling, style, "generative-scoring-", model)
        first = fields.boolean("item_first")
        query_ids = worker.tokenizer.encode(query) if isinstance(query, str) else query
        for item in items:
            ids = worker.tokenizer.encode(item) if isinstance(item, str) else item
            prompt = (ids + query_ids if first else query_ids + ids)[: settings.max_model_len - 1]
            tokens = tokens_of(prompt, sampling, worker.tokenizer, settings.max_model_len)
            generation.add(tokens, [self._plan(tokens, sampling, 0)])
        return self._run(generation, request, model)

    def prompt_blocks(self, body: dict[str, Any]) -> tuple[int, Identities | None]:
        """For routers: tokens of a body's (first) prompt, and the blocks that they fill. ApiError if there is none."""
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
        else:
            prompts = read_prompts(fields)
            if not prompts:
                raise ApiError("no prompt")
            prompt = prompts[0]
        fields.done()
        tokens = tokens_of(prompt, sampling, worker.tokenizer, settings.max_model_len)
        model = self._model(fields)
        lora = model if model in worker.loras else ""
        blocks = TokenBlocks(tokens, settings.engine.block_size, salt=sampling.cache_salt, lora=lora)
        return len(tokens), blocks.identities

    # ── Parts ──

    def _check(self, fields: Fields, sampling: Sampling) -> None:
        settings = self.worker.settings
        sampling.stream_interval = max(sampling.stream_interval, settings.stream_interval)
        check_sampling(
            fields,
            sampling,
            max_logprobs=settings.max_logprobs,
            vocabulary=self.worker.tokenizer.vocabulary,
        )

    def _model(self, fields: Fields) -> str:
        names = self.worker.settings.names
        given = fields.text("model")
        if given is None or given == "":
            return names[0]
        if given not in names and given not in self.worker.loras:
            fields.done()
            raise no_such_model(given, (*names, *self.worker.loras))
        return given

    def check_tools(self, fields: Fields) -> dict[str, Any] | None:
        """The function that is to be called, if one must be. ApiError where the server was not told how."""
        settings = self.worker.settings
        tools, choice = fields.raw("tools"), fields.raw("tool_choice")
        if tools is None or choice == "none" or (choice is None and fields.has("tool_choice")):
            return None
        functions: list[dict[str, Any]] = [tool["function"] for tool in tools]
        if choice in (None, "auto"):
            if not (settings.enable_auto_tool_choice and settings.tool_call_parser):
                raise ApiError('tool_choice "auto" needs --enable-auto-tool-choice and --tool-call-parser')
            return None
        if choice == "required":
            if not settings.tool_call_parser:
                raise ApiError('tool_choice "required" needs --tool-call-parser')
            return functions[0]
        name = choice["function"]["name"]
        if not settings.tool_call_parser:
            raise ApiError(f"tool_choice of function {name!r} needs --tool-call-parser")
        return next(function for function in functions if function["name"] == name)

    def _headers(self, sampling: Sampling, request: Request) -> None:
        priority = request.headers.get("x-vllm-priority", "")
        if priority.lstrip("-").isdigit() and len(priority) < 10:
            sampling.priority = int(priority)
        if sampling.cache_hit_threshold is None:
            sampling.cache_hit_threshold = self.worker.settings.global_cache_hit_threshold
        if request.headers.get("x-cache-threshold-finish-reason", "").lower() == "true":
            sampling.cache_hit_threshold = math.inf  # nobody has so much
        sampling.session_id = sampling.session_id or request.headers.get("x-session-id", "")
        sampling.priority = max(min(sampling.priority, 2**62), -(2**62))
        if self.worker.settings.enable_force_include_usage and sampling.stream:
            sampling.include_usage = sampling.continuous_usage = True

    def _key(self, tokens: npt.NDArray[np.uint32], choice: int) -> int:
        return xxh3_64(tokens.tobytes(), choice)

    def _plan(
        self, tokens: npt.NDArray[np.uint32], sampling: Sampling, index: int, *, empty: bool = False
    ) -> Plan | GrowingPlan:
        room = room_for(len(tokens), sampling, self.worker.settings.max_model_len)
        if self.worker.given is not None:
            return self.worker.given.plan(sampling, self.worker.texts, room)
        outputs = self.worker.outputs
        if sampling.structure is not None:
            said = outputs.text_tokens(structured_text(sampling.structure, self._key(tokens, index)))
            answer = Answer(said[:room], len(said) <= room, room)
        else:
            seed = None if sampling.seed is None else sampling.seed & (2**32 - 1)
            answer = outputs.answer(
                tokens,
                room,
                asked=sampling.asked_tokens,
                choice=index,
                seed=seed,
                ignore_eos=sampling.ignore_eos,
                min_tokens=sampling.min_tokens,
            )
        plan = plan_answer(answer, sampling, self.worker.texts)
        if empty:  # only the prompt is told
            return msgspec.structs.replace(plan, pieces=["" for _ in plan.tokens])
        return plan

    def _open(
        self,
        request: Request,
        connection: Connection,
        sampling: Sampling,
        style: Style,
        prefix: str,
        model: str,
    ) -> Generation:
        given = request.headers.get("x-request-id") or sampling.request_id or new_id()
        generation = Generation(
            self.worker, connection, sampling, style, name=f"{prefix}{given}", model=model
        )
        generation.load_format = request.headers.get("endpoint-load-metrics-format", "").upper()
        params = sampling.kv_transfer_params
        if params is not None and params.get("do_remote_decode"):
            generation.detail["kv_transfer_params"] = {
                **params,
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": f"understudy-{self.worker.index}",
                "remote_block_ids": [],
                "remote_host": "127.0.0.1",
                "remote_port": self.worker.settings.port,
                "tp_size": 1,
            }
        return generation

    def _run(self, generation: Generation, request: Request, model: str) -> Generation:
        worker, settings = self.worker, self.worker.settings
        self._admit(generation)
        wanted = request.headers.get("x-data-parallel-rank", "")
        number = int(wanted) if wanted.isdigit() and len(wanted) < 20 else None  # others are no wish
        if number is not None and number >= settings.data_parallel_size:
            raise ApiError(
                f"X-data-parallel-rank must be in 0 … {settings.data_parallel_size - 1}, got {number}"
            )
        rank = worker.pick_rank(number)
        try:
            generation.run(rank, lora=model if model in worker.loras else "")
        except InvalidArgument as error:
            raise ApiError(str(error)) from None
        self.in_flight.add(generation)
        generation.on_done = self._done
        return generation

    def _admit(self, generation: Generation) -> None:
        settings = self.worker.settings
        if settings.max_num_queued_reqs is None and settings.max_num_queued_tokens is None:
            return
        waiting = [
            choice.request
            for other in self.in_flight
            for choice in other.choices
            if choice.request is not None and choice.request.admitted_ns < 0
        ]
        requests, tokens = len(waiting), sum(request.prompt_tokens for request in waiting)
        reason = ""
        if settings.max_num_queued_reqs is not None and requests >= settings.max_num_queued_reqs:
            reason = "max_num_queued_reqs"
        elif (
            settings.max_num_queued_tokens is not None
            and tokens + generation.prompt_tokens > settings.max_num_queued_tokens
        ):
            reason = "max_num_queued_tokens"
        if reason:
            self.worker.admission_rejections[reason].add()
            raise ApiError(
                f"the queue is full ({reason}); try again later", status=503, kind="Service Unavailable"
            )

    def _done(self, generation: Generation, how: str) -> None:  # noqa: ARG002
        self.in_flight.discard(generation)
