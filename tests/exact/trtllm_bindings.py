"""What the executor's Python classes take from TensorRT-LLM's C++ library: enumerations and the request object."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any


class State(enum.IntEnum):
    """States of a request."""

    DISAGG_TRANS_ERROR = -1
    UNKNOWN = 0
    ENCODER_INIT = 1
    DISAGG_CONTEXT_WAIT_SCHEDULER = 7
    DISAGG_GENERATION_INIT = 8
    DISAGG_GENERATION_TRANS_IN_PROGRESS = 9
    CONTEXT_INIT = 10
    DISAGG_CONTEXT_INIT_AND_TRANS = 11
    DISAGG_GENERATION_TRANS_COMPLETE = 12
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = 21
    DISAGG_CONTEXT_COMPLETE = 22
    DISAGG_GENERATION_WAIT_TOKENS = 23


class Finish(enum.IntEnum):
    """Reasons for which a request ends."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class RequestType(enum.IntEnum):
    """Parts of a request that an engine computes."""

    LLMREQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    LLMREQUEST_TYPE_CONTEXT_ONLY = 1
    LLMREQUEST_TYPE_GENERATION_ONLY = 2


class DataType(enum.Enum):
    """Element types."""

    HALF = 1
    BF16 = 2
    FP8 = 3
    NVFP4 = 4
    FLOAT = 5
    INT8 = 6


class CacheType(enum.Enum):
    """Kinds of KV caches."""

    SELF = 0
    CROSS = 1
    SELFKONLY = 2


class CpType(enum.IntEnum):
    """Kinds of context parallelism."""

    ULYSSES = 0
    STAR = 1
    RING = 2
    HELIX = 3


class Policy(enum.StrEnum):
    """Capacity scheduler policies."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class Chunking(enum.StrEnum):
    """Context chunking policies."""

    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"
    FORCE_CHUNK = "FORCE_CHUNK"


class WaitingPolicy(enum.StrEnum):
    """Orders of the waiting queue."""

    FCFS = "fcfs"
    PRIORITY = "priority"


ELEMENT_BYTES = {DataType.HALF: 2, DataType.BF16: 2, DataType.FP8: 1, DataType.INT8: 1, DataType.FLOAT: 4}


class IdSet(set[int]):
    """A set of request ids with the names of its methods in C++."""

    def insert(self, one: int) -> None:
        """Add an id."""
        self.add(one)

    def erase(self, one: int) -> None:
        """Remove an id if it is there."""
        self.discard(one)


class IndexMapper:
    """Rows of the page table by request."""

    def __init__(self, rows: int, _beam_width: int) -> None:
        self._free = list(range(rows))[::-1]
        self._rows: dict[int, int] = {}

    def num_free_slots(self) -> int:
        """Return the number of rows that no request has."""
        return len(self._free)

    def size(self) -> int:
        """Return the number of rows."""
        return len(self._rows) + len(self._free)

    def add_new_sequence(self, request: int) -> int:
        """Give a row to a request."""
        self._rows[request] = self._free.pop()
        return self._rows[request]

    def get_index(self, request: int) -> int:
        """Return the row of a request."""
        return self._rows[request]

    def remove_sequence(self, request: int) -> None:
        """Take the row of a request back."""
        self._free.append(self._rows.pop(request))


class PrefixReuseSummary:
    """Counts of reusable blocks and tokens."""

    def __init__(self) -> None:
        self.reusable_blocks = self.reusable_blocks_all = 0
        self.estimated_reusable_tokens = self.reusable_tokens = 0


def _in_states(*states: State) -> Any:
    return property(lambda request: request.state in states)


class LlmRequest:
    """A request with beam width 1 of a model without drafts, as far as the Python executor uses it."""

    is_child = False
    is_context_init_state = _in_states(State.CONTEXT_INIT, State.DISAGG_CONTEXT_INIT_AND_TRANS)
    is_generation_in_progress_state = _in_states(
        State.GENERATION_IN_PROGRESS, State.GENERATION_TO_COMPLETE, State.DISAGG_GENERATION_TRANS_COMPLETE
    )
    is_generation_to_complete_state = _in_states(State.GENERATION_TO_COMPLETE)
    is_generation_complete_state = _in_states(State.GENERATION_COMPLETE)
    is_finished = _in_states(State.GENERATION_COMPLETE)
    is_disagg_generation_init_state = _in_states(State.DISAGG_GENERATION_INIT)
    is_disagg_generation_transmission_complete = _in_states(State.DISAGG_GENERATION_TRANS_COMPLETE)
    is_disagg_generation_transmission_in_progress = _in_states(State.DISAGG_GENERATION_TRANS_IN_PROGRESS)
    is_disagg_context_transmission_state = _in_states(State.DISAGG_CONTEXT_TRANS_IN_PROGRESS)
    is_disagg_context_complete_state = _in_states(State.DISAGG_CONTEXT_COMPLETE)

    def __init__(
        self,
        request_id: int,
        max_new_tokens: int,
        input_tokens: list[int],
        lora_task_id: int | None = None,
        cache_salt: str | None = None,
        **_: object,
    ) -> None:
        self.request_id = request_id
        self.max_new_tokens = max_new_tokens
        self._tokens = list(input_tokens)
        self.prompt_len = self.orig_prompt_len = len(input_tokens)
        self.lora_task_id, self.cache_salt = lora_task_id, cache_salt
        self.state = State.CONTEXT_INIT
        self.context_current_position = self.prepopulated_prompt_len = 0
        self._chunk = self.prompt_len
        self.llm_request_type = RequestType.LLMREQUEST_TYPE_CONTEXT_AND_GENERATION
        self.sampling_config = SimpleNamespace(beam_width=1, min_length=None, beam_width_array=None)
        self.streaming = True
        self.return_perf_metrics = self.is_dummy_request = False
        self.end_id = self.seq_slot = self.draft_tokens = self.context_phase_params = None
        self.multimodal_hashes = self.multimodal_positions = self.multimodal_lengths = None
        self.expect_snapshot_points = self.parent_request_id = self.guided_decoding_params = None
        self.estimated_reusable_tokens = self.decoding_iter = 0
        self.num_tokens_per_iteration = 1
        self.priority = 0.5
        self.child_requests: list[Any] = []
        self.finish_reasons = [Finish.NOT_FINISHED]

    @property
    def state_value(self) -> int:
        """Return the state as a number."""
        return int(self.state)

    def get_tokens(self, _beam: int = 0) -> list[int]:
        """Return prompt and outputs."""
        return list(self._tokens)

    def get_num_tokens(self, _beam: int = 0) -> int:
        """Return the length of prompt and outputs."""
        return len(self._tokens)

    def add_new_token(self, token: int, _beam: int = 0) -> int:
        """Append an output; return the new length."""
        self._tokens.append(token)
        return len(self._tokens)

    @property
    def max_beam_num_tokens(self) -> int:
        """Return the length of prompt and outputs."""
        return len(self._tokens)

    @property
    def max_num_generated_tokens(self) -> int:
        """Return the number of outputs since the last pause."""
        return len(self._tokens) - self.prompt_len

    @property
    def num_draft_tokens(self) -> int:
        """Return 0: there are no drafts."""
        return 0

    @property
    def context_remaining_length(self) -> int:
        """Return the tokens of the prompt that are not computed."""
        return self.prompt_len - self.context_current_position

    @property
    def is_context_only_request(self) -> bool:
        """Return whether another engine generates."""
        return self.llm_request_type == RequestType.LLMREQUEST_TYPE_CONTEXT_ONLY

    @property
    def is_first_context_chunk(self) -> bool:
        """Return whether the chunk is the first after what was reused."""
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def is_last_context_chunk(self) -> bool:
        """Return whether the chunk ends the prompt."""
        return self.context_current_position + self._chunk == self.prompt_len

    @property
    def context_chunk_size(self) -> int:
        """Return the chunk; only while the prompt is computed."""
        assert self.is_context_init_state
        return self._chunk

    @context_chunk_size.setter
    def context_chunk_size(self, tokens: int) -> None:
        assert self.is_context_init_state
        assert tokens >= 0
        self._chunk = min(tokens, self.context_remaining_length)

    def set_prepopulated_prompt_len(self, tokens: int, block: int) -> None:
        """Begin behind reused tokens; a chunk before the end of the prompt ends at a block."""
        assert tokens < self.prompt_len
        self.prepopulated_prompt_len = tokens
        if tokens == 0:
            return
        chunk = self.context_chunk_size
        if tokens + chunk < self.prompt_len:
            chunk = (tokens + chunk) // block * block - tokens
        self.context_current_position = tokens
        self.context_chunk_size = chunk
        assert self.is_last_context_chunk or (tokens + self._chunk) % block == 0

    def move_to_next_context_chunk(self) -> None:
        """Count the chunk as computed."""
        assert self.is_context_init_state
        self.context_current_position += self._chunk
        self._chunk = 0

    def will_complete_next_iteration(self) -> bool:
        """Return whether the next token reaches the limit."""
        return self.max_num_generated_tokens + self.num_tokens_per_iteration >= self.max_new_tokens

    def get_beam_width_by_iter(self, *_: object) -> int:
        """Return 1."""
        return 1

    def pause(self, max_input_len: int) -> None:
        """Make outputs part of the prompt, to be computed again."""
        length = min(max_input_len, len(self._tokens))
        del self._tokens[length:]
        self.max_new_tokens -= length - self.prompt_len
        self.prompt_len = self._chunk = length
        self.state = State.CONTEXT_INIT
        self.context_current_position = self.prepopulated_prompt_len = self.estimated_reusable_tokens = 0
        self.seq_slot = None

    def set_finished_reason(self, reason: Finish, _beam: int) -> None:
        """Set the reason of its end."""
        self.finish_reasons = [reason]

    def finish_by_reason(self, reason: Finish) -> None:
        """End the request."""
        self.finish_reasons = [reason]
        self.state = State.GENERATION_COMPLETE

    def create_response(self, *_: object) -> Any:
        """Return an answer without content."""
        return SimpleNamespace(result=SimpleNamespace())
