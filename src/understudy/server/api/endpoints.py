"""The generation endpoints: turn a body into a generation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy._core import xxh3_64
from understudy.errors import InvalidArgument
from understudy.server.api.body_checks import check_batch, check_salt
from understudy.server.api.chat import ChatStyle
from understudy.server.api.completions import CompletionStyle
from understudy.server.api.errors import PAUSED, ApiError
from understudy.server.api.fields import Fields, whole_number
from understudy.server.api.generation import Generation, new_id
from understudy.server.api.plan import Plan, plan_answer
from understudy.server.api.prompts import (
    chat_text,
    read_conversations,
    read_scoring,
    room_for,
    tokens_of,
)
from understudy.server.api.reading import Reader
from understudy.server.api.sampling import Sampling, read_sampling
from understudy.server.api.schema import SCHEMAS, SCORING
from understudy.server.api.scoring import ScoringStyle
from understudy.server.api.time_slices import CHOICE_COST, run_in_slices
from understudy.server.api.type_checks import check_types
from understudy.server.outputs import Answer
from understudy.structured.form import MAX_FORMED, Form, characters_for
from understudy.structured.formed import MAX_CHARACTERS, Formed, FormError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    import numpy.typing as npt

    from understudy.http import Connection, Request
    from understudy.server.api.generation import Style
    from understudy.server.api.growing import GrowingPlan
    from understudy.server.api.reading import Read
    from understudy.server.worker import Worker

_STEP_COST = 8


class Endpoints:
    """Generates on behalf of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.reads = Reader(worker)
        self.in_flight: set[Generation] = set()

    def completions(
        self,
        body: dict[str, Any],
        request: Request,
        connection: Connection,
        style: Style | None = None,
        prefix: str = "cmpl-",
    ) -> Generation:
        """Answer `/v1/completions`, or a route that formats completions in another style."""
        read = self.reads.completion(body)
        sampling, model = read.sampling, read.model
        self._headers(sampling, request)
        if style is None:
            style = self._completion_style(read)
        generation = self._open(request, connection, sampling, style, prefix, model)
        return self._run(generation, request, read.tokens, sampling.n, empty=read.empty)

    def chat(
        self,
        body: dict[str, Any],
        request: Request,
        connection: Connection,
        style: Style | None = None,
        prefix: str = "chatcmpl-",
    ) -> Generation:
        """Answer `/v1/chat/completions`, or a route that formats chats in another style."""
        read = self.reads.chat(body, checked=style is not None)
        sampling, model, tool, (tokens,) = read.sampling, read.model, read.tool, read.tokens
        self._headers(sampling, request)
        generation = self._open(request, connection, sampling, style or self._chat_style(read), prefix, model)
        if read.text is not None:
            generation.detail["prompt_text"] = read.text
        if tool is not None:
            sampling.structure = {"json": tool.get("parameters") or {"type": "object"}}
        return self._run(generation, request, [tokens], sampling.n, tool=tool)

    def batch(self, body: dict[str, Any], request: Request, connection: Connection) -> Generation:
        """Answer `/v1/chat/completions/batch`: several conversations, one answer each."""
        worker, settings = self.worker, self.worker.settings
        check_batch(body)
        fields = Fields(body)
        conversations = read_conversations(fields, settings.names[0])
        check_types(fields, SCHEMAS[worker.release.version].batch)
        fields.done()
        sampling = read_sampling(fields, chat=True)
        sampling.stream = False
        model = self.reads.model(fields)
        self.reads.check(fields, sampling)
        texts = [
            chat_text(fields, messages, worker.tokenizer, trusted=settings.trust_request_chat_template)
            for messages in conversations
        ]
        self._headers(sampling, request)
        prompts = [tokens_of(text, sampling, worker.tokenizer, settings.max_model_len) for text in texts]
        generation = self._open(request, connection, sampling, ChatStyle(), "chatcmpl-", model)
        return self._run(generation, request, prompts)

    def scoring(self, body: dict[str, Any], request: Request, connection: Connection) -> Generation:
        """Answer `/generative_scoring`: score the labels after each item, from a prefill and one token."""
        worker, settings = self.worker, self.worker.settings
        check_salt(body)
        fields = Fields(body)
        query, items = read_scoring(fields)
        check_types(fields, SCORING)
        fields.done()
        model = self.reads.model(fields)
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
        most = settings.max_model_len - 1

        def ids(given: str | list[int]) -> list[int]:
            return (worker.tokenizer.encode(given, enough=most) if isinstance(given, str) else given)[:most]

        def prompts() -> Iterator[npt.NDArray[np.uint32]]:
            asked = ids(query)
            for item in items:
                prompt = ids(item) + asked if first else asked + ids(item)
                yield tokens_of(prompt[:most], sampling, worker.tokenizer, settings.max_model_len)

        return self._run(generation, request, prompts())

    # ── Parts ──

    def _completion_style(self, read: Read) -> Style:
        return CompletionStyle(echo=read.echo, echo_text=read.echoed)

    def _chat_style(self, read: Read) -> Style:
        return ChatStyle(read.role)

    def _room(self, prompt_tokens: int, sampling: Sampling) -> int:
        """Return the most tokens of an answer. ApiError if none fit, or more were requested than fit."""
        return room_for(prompt_tokens, sampling, self.worker.settings.max_model_len)

    def _headers(self, sampling: Sampling, request: Request) -> None:
        priority = whole_number(request.headers.get("x-vllm-priority", ""), 9)
        if priority is not None:
            sampling.priority = priority
        if sampling.cache_hit_threshold is None:
            sampling.cache_hit_threshold = self.worker.settings.global_cache_hit_threshold
        if request.headers.get("x-cache-threshold-finish-reason", "").lower() == "true":
            sampling.cache_hit_threshold = math.inf  # no cache reaches it
        sampling.session_id = sampling.session_id or request.headers.get("x-session-id", "")
        sampling.priority = max(min(sampling.priority, 2**62), -(2**62))
        if self.worker.settings.enable_force_include_usage and sampling.stream:
            sampling.include_usage = sampling.continuous_usage = True

    def _key(self, tokens: npt.NDArray[np.uint32], choice: int) -> int:
        return xxh3_64(tokens.tobytes(), choice)

    def _plan(
        self, tokens: npt.NDArray[np.uint32], sampling: Sampling, index: int, *, empty: bool = False
    ) -> Plan | GrowingPlan:
        room = self._room(len(tokens), sampling)
        if self.worker.given is not None:
            return self.worker.given.plan(sampling, self.worker.texts, room)
        outputs = self.worker.outputs
        if sampling.structure is not None:
            formed = self._formed(sampling, self._key(tokens, index), room)
            said = outputs.text_tokens(formed.text)
            if not formed.has_ended and len(said) <= room:
                raise ApiError(
                    f"structured_outputs: the answer would exceed {MAX_CHARACTERS} characters; ask for less"
                )
            if not len(said):  # a form may be met by nothing: then the end is all that is said
                said = np.array([self.worker.tokenizer.end_id], dtype=np.uint32)
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
        if empty:  # only the prompt is returned
            return msgspec.structs.replace(plan, pieces=["" for _ in plan.tokens])
        return plan

    def _formed(self, sampling: Sampling, key: int, room: int) -> Formed:
        """Make an answer of the form, or as much of it as `room` tokens hold.

        ApiError when the form is refused, or the answers to one request are too long together.
        """
        assert sampling.structure is not None
        try:
            if sampling.form is None:
                sampling.form = Form(sampling.structure)
            formed = sampling.form.answer(key, characters_for(room))
        except FormError as error:
            raise ApiError(str(error)) from None
        sampling.formed_characters += len(formed.text)
        sampling.formed_cost += len(formed.text) + _STEP_COST * formed.steps
        if sampling.formed_characters > MAX_FORMED:
            raise ApiError(
                f"the answers to one request that have a form are of {MAX_FORMED} characters together; send several"
            )
        return formed

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
        if params is not None and params.get("do_remote_decode") and self.worker.handoff is None:
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

    def _run(
        self,
        generation: Generation,
        request: Request,
        prompts: Iterable[npt.NDArray[np.uint32]],
        n: int = 1,
        *,
        empty: bool = False,
        tool: dict[str, Any] | None = None,
        samplings: list[Sampling] | None = None,
    ) -> Generation:
        """Make the answers and submit them to the engine, in time slices."""

        def work() -> Generator[int]:
            yield from self._answers(generation, prompts, n, empty=empty, tool=tool, samplings=samplings)
            self._admit(generation)
            rank = self._rank(request)
            if self.worker.pauses.rejects:
                generation.reject(PAUSED)
                return
            lora = generation.model if generation.model in self.worker.loras else ""
            for choice in generation.choices:
                generation.prepare(choice, rank, lora=lora)
                yield CHOICE_COST + len(choice.plan.tokens) // 8
            try:
                generation.run(rank)
            except InvalidArgument as error:
                raise ApiError(str(error)) from None

        generation.on_done = self._done
        run_in_slices(work(), generation, lambda: self.in_flight.add(generation))
        if generation.gone:  # rejected
            self.in_flight.discard(generation)
        return generation

    def _answers(
        self,
        generation: Generation,
        prompts: Iterable[npt.NDArray[np.uint32]],
        n: int,
        *,
        empty: bool,
        tool: dict[str, Any] | None,
        samplings: list[Sampling] | None,
    ) -> Generator[int]:
        """Make all answers to all prompts; yield the cost of each, in tokens and characters."""
        for place, tokens in enumerate(prompts):
            sampling = generation.sampling if samplings is None else samplings[place]
            generation.count_prompt(tokens)
            cost = len(tokens) // 8
            for index in range(n):
                before = sampling.formed_cost
                choice = generation.add(tokens, self._plan(tokens, sampling, index, empty=empty), sampling)
                if tool is not None:
                    arguments = choice.plan.text(self.worker.texts, choice.plan.total)
                    choice.tool = {
                        "id": f"chatcmpl-tool-{new_id()}",
                        "type": "function",
                        "function": {"name": tool.get("name", ""), "arguments": arguments},
                    }
                yield cost + CHOICE_COST + len(choice.plan.tokens) + sampling.formed_cost - before
                cost = 0

    def _rank(self, request: Request) -> int:
        number = whole_number(request.headers.get("x-data-parallel-rank", ""))
        if number is not None and number < 0:  # ignored, like a value that is not a number
            number = None
        ranks = self.worker.settings.data_parallel_size
        if number is not None and number >= ranks:
            raise ApiError(f"X-data-parallel-rank must be in 0 … {ranks - 1}, got {number}")
        return self.worker.pick_rank(number)

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
