"""Plans the answers to a generation request: their whole text, before the engine has seen the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from understudy._core import xxh3_64
from understudy.server.api.errors import ApiError
from understudy.server.api.ids import new_id
from understudy.server.api.plan import CHOICE_COST, Plan, plan_answer
from understudy.server.api.prompts import room_for
from understudy.server.outputs import Answer
from understudy.structured.form import MAX_FORMED, Form, characters_for
from understudy.structured.formed import MAX_CHARACTERS, Formed, FormError

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy.typing as npt

    from understudy.server.api.growing import GrowingPlan
    from understudy.server.api.reading import Read
    from understudy.server.api.sampling import Sampling
    from understudy.server.worker import Worker

MAX_CHOICES = 1 << 16
MAX_PLANNED = 1 << 23
"""Most tokens in the answers to one request; they are generated when the request arrives."""
_STEP_COST = 8
"""Cost of a step of a formed answer, as that of so many generated tokens."""


class PlannedAnswer(NamedTuple):
    """One answer to one prompt."""

    prompt: npt.NDArray[np.uint32]
    plan: Plan | GrowingPlan
    sampling: Sampling
    tool: dict[str, Any] | None = None
    """The call of a tool that the answer is."""


class PlannedAnswers(NamedTuple):
    """The answers to a request, by prompt."""

    prompts: int
    prompt_tokens: int
    answers: list[PlannedAnswer]


class Planner:
    """Plans the answers of one worker. It changes nothing of the worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def plan(self, read: Read) -> Generator[int, None, PlannedAnswers]:
        """Plan all answers to all prompts; yield the cost of each, in tokens and characters.

        ApiError when the answers exceed one request's limits.
        """
        prompts = prompt_tokens = planned = 0
        answers: list[PlannedAnswer] = []
        for place, tokens in enumerate(read.tokens):
            sampling = read.sampling if read.samplings is None else read.samplings[place]
            prompts += 1
            prompt_tokens += len(tokens)
            cost = len(tokens) // 8
            for index in range(read.n):
                before = sampling.formed_cost
                plan = self.plan_one(tokens, sampling, index, empty=read.empty)
                planned += len(plan.tokens)
                if len(answers) >= MAX_CHOICES or planned > MAX_PLANNED:
                    raise ApiError(
                        f"one request has at most {MAX_CHOICES} answers, of {MAX_PLANNED} tokens together; send several"
                    )
                answers.append(PlannedAnswer(tokens, plan, sampling, self._call(read.tool, plan)))
                yield cost + CHOICE_COST + len(plan.tokens) + sampling.formed_cost - before
                cost = 0
        return PlannedAnswers(prompts, prompt_tokens, answers)

    def room_for(self, prompt_tokens: int, sampling: Sampling) -> int:
        """Return the most tokens of an answer. ApiError if none fit, or more were requested than fit."""
        return room_for(prompt_tokens, sampling, self.worker.settings.max_model_len)

    def plan_one(
        self, tokens: npt.NDArray[np.uint32], sampling: Sampling, index: int, *, empty: bool = False
    ) -> Plan | GrowingPlan:
        """Plan one answer to a prompt; `empty`: without text, as only the prompt is returned."""
        room = self.room_for(len(tokens), sampling)
        if self.worker.given is not None:
            return self.worker.given.plan(sampling, self.worker.texts, room)
        outputs = self.worker.outputs
        if sampling.structure is not None:
            formed = self._formed(sampling, xxh3_64(tokens.tobytes(), index), room)
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
        if empty:
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

    def _call(self, tool: dict[str, Any] | None, plan: Plan | GrowingPlan) -> dict[str, Any] | None:
        """Return the call of a tool whose arguments are the answer."""
        if tool is None:
            return None
        arguments = plan.text(self.worker.texts, plan.total)
        return {
            "id": f"chatcmpl-tool-{new_id()}",
            "type": "function",
            "function": {"name": tool.get("name", ""), "arguments": arguments},
        }
