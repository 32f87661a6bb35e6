"""Find the users of a workload, and which blocks of its prompts belong to one user only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.workload.columns import BoolColumn, Int64Column, first_row, intern_ids
from understudy.workload.time_order import time_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import UInt32Column
    from understudy.workload.workload import Workload

MOST_BRANCHES = 8
"""A prompt that more different prompts continue is a prefix of several users, such as a warm-up request."""


@dataclass(frozen=True, eq=False, slots=True)
class UserContent:
    """The user of each row, and the blocks that only one user has."""

    user: Int64Column
    """User of each row, numbered by first appearance in row order."""
    private: BoolColumn
    """For each entry of `hash_ids`: whether no other user has this block behind this prefix."""
    are_sessions: bool
    """Whether users are the trace's plays or sessions; otherwise they were found by their prompts."""

    @property
    def count(self) -> int:
        """Number of users."""
        return int(self.user.max(initial=-1)) + 1


def find_user_content(workload: Workload) -> UserContent:
    """Return the users of a workload and their private blocks.

    Users are the plays of a graph, else the sessions. If the trace has neither session ids nor turns, a request has the
    user of the earlier request whose whole prompt it continues (`_find_continued`); any other request has a user of its
    own.

    A block is its id and everything before it in the prompt. Adapters are ignored: content that users of several
    adapters have is shared content.
    """
    are_sessions = workload.session_ids is not None or bool(workload.turn.any())
    ids = workload.hash_ids
    graph = workload.graph
    user = workload.session.astype(np.int64) if graph is None else graph.play.astype(np.int64)
    are_sessions = are_sessions or graph is not None
    if first_row(ids != np.arange(len(ids))) is None:  # no block occurs twice, as in traces of lengths
        return UserContent(user, np.ones(len(ids), np.bool_), are_sessions)
    node, parent = _number_prefixes(workload)
    counts = np.diff(workload.hash_offsets)
    if not are_sessions:
        user = intern_ids(_follow(_find_continued(workload, node, parent))).astype(np.int64)
    user_of_id = np.repeat(user, counts)
    a_user = np.empty(len(parent), np.int64)
    a_user[node] = user_of_id
    is_shared = np.zeros(len(parent), np.bool_)
    is_shared[node[a_user[node] != user_of_id]] = True
    return UserContent(user, ~is_shared[node], are_sessions)


def _number_prefixes(workload: Workload) -> tuple[NDArray[np.integer], Int64Column]:
    """Number the distinct blocks, each with all before it; return the number per id, and each one's predecessor.

    −1 is the predecessor of a first block.
    """
    ids, starts = workload.hash_ids, workload.hash_offsets[:-1]
    if int(ids.max()) > 4 * len(ids):
        ids = intern_ids(ids)
    before = np.empty(len(ids), np.int64)
    before[1:] = ids[:-1]
    before[starts] = -1
    parent = np.full(int(ids.max()) + 1, -1, np.int64)
    parent[ids] = before
    if first_row(parent[ids] != before) is None:  # every id has one prefix, so that it names the block
        return ids, parent
    return _number_by_position(workload, ids)


def _number_by_position(workload: Workload, ids: UInt32Column) -> tuple[Int64Column, Int64Column]:
    """Number the blocks of ids that occur behind several prefixes, one position of all prompts after another."""
    starts, counts = workload.hash_offsets[:-1], np.diff(workload.hash_offsets)
    node = np.empty(len(ids), np.int64)
    parents = []
    live = np.arange(len(workload))
    prefix = np.full(len(live), -1, np.int64)
    position = known = 0
    while len(live):
        at = starts[live] + position
        keys, number = np.unique((prefix + 1) << 32 | ids[at].astype(np.int64), return_inverse=True)
        parents.append((keys >> 32) - 1)
        node[at] = known + number
        position += 1
        keep = counts[live] > position
        live, prefix = live[keep], known + number[keep]
        known += len(keys)
    return node, np.concatenate(parents)


def _find_continued(workload: Workload, node: NDArray[np.integer], parent: Int64Column) -> Int64Column:
    """Return, for each row, the earlier row whose whole prompt it continues, or the row itself if there is none.

    Row r continues row q if q was the first to reach the end of its prompt, all others that reach it have longer
    prompts, and at most MOST_BRANCHES different blocks follow.

    In some traces the id of a partly filled last block names the tokens that it has, so that no longer prompt has that
    id. If none does, the end of a prompt is that of its last full block; then others must be longer by q's answer at
    least, and only one block may follow.
    """
    size, starts, counts = (
        workload.trace_block_size,
        workload.hash_offsets[:-1],
        np.diff(workload.hash_offsets),
    )
    prompt = workload.prompt_tokens.astype(np.int64)
    rows = len(workload)
    row_of_id = np.repeat(np.arange(rows), counts)
    rank = np.empty(rows, np.int64)
    rank[time_order(workload)] = np.arange(rows)
    first = np.full(len(parent), rows, np.int64)
    np.minimum.at(first, node, rank[row_of_id])
    end = starts + counts - 1
    is_partial = prompt % size != 0
    longest = np.zeros(len(parent), np.int64)
    np.maximum.at(longest, node, prompt[row_of_id])
    goes_on = bool((is_partial & (longest[node[end]] > prompt)).any())
    least, most_branches, follows = prompt + 1, MOST_BRANCHES, np.ones(len(parent), np.bool_)
    if bool(is_partial.any()) and not goes_on:
        end = end - is_partial
        least, most_branches = np.maximum(prompt + workload.output_tokens, least), 1
        follows = np.zeros(len(parent), np.bool_)
        follows[node[np.arange(len(node)) - starts[row_of_id] < (prompt // size)[row_of_id]]] = True
    candidates = np.flatnonzero(end >= starts)
    candidates = candidates[first[node[end[candidates]]] == rank[candidates]]
    owner = np.full(len(parent), -1, np.int64)
    owner[node[end[candidates]]] = candidates
    its_owner = owner[node]
    is_other = (its_owner >= 0) & (its_owner != row_of_id)
    too_short = is_other & (prompt[row_of_id] < least[its_owner])
    owner[node[too_short]] = -1
    branching = np.flatnonzero(follows & (parent >= 0))
    branches = np.bincount(parent[branching], minlength=len(parent))
    owner[branches > most_branches] = -1
    its_owner = owner[node]
    at = np.where((its_owner >= 0) & (its_owner != row_of_id), np.arange(len(node)), -1)
    deepest = np.maximum.reduceat(at, starts)
    return np.where(deepest >= 0, its_owner[deepest], np.arange(rows))


def _follow(earlier: Int64Column) -> Int64Column:
    """Return the first row of each chain of continued rows."""
    while True:
        further = earlier[earlier]
        if first_row(further != earlier) is None:
            return earlier
        earlier = further
