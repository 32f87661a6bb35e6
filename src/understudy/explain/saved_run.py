"""Runs that `replay --save-run` wrote: settings, times of requests, and every step."""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.explain.misses import MissColumns
from understudy.explain.saved_checks import Header, check_archive, check_columns, check_request_ids
from understudy.explain.saved_decisions import CHOICE_COLUMNS, DECISION_COLUMNS, describe_decisions
from understudy.outputs import create
from understudy.router.choices import Choices
from understudy.run.step_columns import StepColumns
from understudy.version import __version__

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import NDArray

    from understudy.router.kv import Decisions
    from understudy.run.facts import RunFacts
    from understudy.run.timeline import Timeline

FORMAT = "understudy.run/1"
REQUEST_COLUMNS = (
    "arrival_ns",
    "queued_ns",
    "first_admit_ns",
    "first_token_ns",
    "last_token_ns",
    "finish_ns",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens_first",
    "preemptions",
    "worker",
    "status",
)
"""Columns of the timeline that a saved run has, one row per request."""
_NOT_A_RUN = (
    *(ValueError, KeyError, TypeError, EOFError, AttributeError, MemoryError, RecursionError),
    *(NotImplementedError, zipfile.BadZipFile, zlib.error),
)
"""Errors of reading an archive that is damaged or of another kind."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SavedRun:
    """A run with every step: what `explain`, `diff` and the Perfetto writer read."""

    run: dict[str, Any]
    """Facts of the run: settings, workload digest, digests of the results."""
    steps: StepColumns
    requests: dict[str, NDArray[Any]]
    """`REQUEST_COLUMNS` by name; with tiers `loaded_g2`, `loaded_g3`, `loaded_g4` (tokens at the first admission)."""
    request_ids: list[str] | None
    front_end_ns: int = 0
    """Part of every latency between client and engine; the times of requests include it, those of steps do not."""
    block_size: int = 1
    worker_blocks: tuple[int, ...] = ()
    decisions: dict[str, NDArray[Any]] = field(default_factory=dict)
    """`DECISION_COLUMNS` or `CHOICE_COLUMNS` by name; empty for other routers."""
    reasons: list[str | None] | None = None
    """Reason of each decision, where a user-defined router gave any."""
    misses: MissColumns | None = None
    """Causes of missed prompt tokens; None where the run could not keep them."""
    links: list[dict[str, Any]] = field(default_factory=list)
    """Links of tiers: name, `bucket_ns`, and bytes in each bucket of time."""

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        steps: StepColumns,
        facts: RunFacts,
        decisions: Decisions | Choices | None,
        misses: MissColumns | None = None,
    ) -> SavedRun:
        """Combine the results of a replay that recorded its steps."""
        requests = {name: getattr(timeline, name) for name in (*REQUEST_COLUMNS, "session")}
        links = []
        if timeline.tiers is not None:
            for number, tokens in enumerate(timeline.tiers.below_tokens_first, 2):
                requests[f"loaded_g{number}"] = tokens
            links = [
                {"name": link.name, "bucket_ns": int(link.bucket_ns), "bytes": link.bucket_bytes.tolist()}
                for link in timeline.tiers.links
            ]
        times = facts.times
        return cls(
            run=facts.to_dict(),
            steps=steps,
            requests=requests,
            request_ids=None if timeline.request_ids is None else list(timeline.request_ids),
            front_end_ns=0 if times is None else round(times.front_end_ms * 1e6),
            block_size=timeline.block_size,
            worker_blocks=tuple(timeline.worker_blocks.tolist()),
            decisions={} if decisions is None else describe_decisions(decisions),
            reasons=list(decisions.reasons)
            if isinstance(decisions, Choices) and any(decisions.reasons)
            else None,
            misses=misses,
            links=links,
        )

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.requests["arrival_ns"])

    @property
    def served_ns(self) -> NDArray[np.int64]:
        """Time of each request's last token or, without tokens, of its finish; -1: neither."""
        tokens = self.requests["output_tokens"] > 0
        return np.where(tokens, self.requests["last_token_ns"], self.requests["finish_ns"])

    @property
    def latency_ns(self) -> NDArray[np.int64]:
        """Time from arrival to the last token of each request; -1 for requests that did not end."""
        ended = (self.served_ns >= 0) & (self.requests["arrival_ns"] >= 0)
        return np.where(ended, self.served_ns - self.requests["arrival_ns"], -1)

    def name(self, row: int) -> str:
        """Return the name of a request: its id in the trace, else its row."""
        return str(row) if self.request_ids is None or row < 0 else self.request_ids[row]

    def find(self, name: str) -> int:
        """Return the row of a request by its id or row. InvalidArgument if the run has no such request."""
        if self.request_ids is not None and name in self.request_ids:
            return self.request_ids.index(name)
        if name.isdecimal() and int(name) < len(self):
            return int(name)
        raise InvalidArgument(
            f"--request: the run has no request {name!r}; name a request id, or a row from 0 to {len(self) - 1}"
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the run as a .npz archive. InvalidArgument when the file cannot be written."""
        header = {
            "format": FORMAT,
            "understudy": __version__,
            "run": self.run,
            "front_end_ns": self.front_end_ns,
            "block_size": self.block_size,
            "worker_blocks": self.worker_blocks,
            "request_ids": self.request_ids,
            "reasons": self.reasons,
            "links": self.links,
        }
        arrays: dict[str, Any] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
        arrays |= self.steps.arrays()
        arrays |= {f"request_{name}": column for name, column in self.requests.items()}
        arrays |= {f"decision_{name}": column for name, column in self.decisions.items()}
        if self.misses is not None:
            arrays |= {f"miss_{name}": column for name, column in self.misses.arrays().items()}
        # Write what np.savez_compressed writes, at a level that takes a third of its time.
        with (
            create(path) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def read_run(path: str | PathLike[str]) -> SavedRun:
    """Read a saved run. InvalidArgument names the file and the problem."""
    try:
        with zipfile.ZipFile(path) as file:
            check_archive(file)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
            header = json.loads(arrays.pop("header").tobytes())
            found = header["format"]
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}") from error
    except _NOT_A_RUN as error:
        raise InvalidArgument(
            f"{path} is not a saved run; write one with `understudy replay TRACE --save-run run.npz`"
        ) from error
    if found != FORMAT:
        raise InvalidArgument(f"{path}: format must be {FORMAT}, got {found!r}; save the run again")
    try:
        return _check_run(header, arrays)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{path}: header: {error}; save the run again") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None


def _check_run(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> SavedRun:
    about = msgspec.convert(header, Header)
    requests, decisions = _by_prefix(arrays, "request_"), _by_prefix(arrays, "decision_")
    if missing := [name for name in REQUEST_COLUMNS if name not in requests]:
        raise InvalidArgument(f"column request_{missing[0]} is missing; save the run again")
    if decisions and not ({*DECISION_COLUMNS} <= {*decisions} or {*CHOICE_COLUMNS} <= {*decisions}):
        raise InvalidArgument("columns decision_* are not complete; save the run again")
    steps = StepColumns.from_arrays(arrays)
    check_columns(steps, requests, decisions, len(about.worker_blocks))
    check_request_ids(about.request_ids, len(requests["arrival_ns"]))
    if about.reasons is not None and len(about.reasons) != len(decisions.get("rows", ())):
        raise InvalidArgument("reasons: as many as there are decisions are needed; save the run again")
    return SavedRun(
        run=about.run,
        steps=steps,
        requests=requests,
        request_ids=about.request_ids,
        front_end_ns=about.front_end_ns,
        block_size=about.block_size,
        worker_blocks=about.worker_blocks,
        decisions=decisions,
        reasons=about.reasons,
        misses=MissColumns.from_arrays(_by_prefix(arrays, "miss_"), len(requests["arrival_ns"])),
        links=[msgspec.to_builtins(link) for link in about.links],
    )


def _by_prefix(arrays: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
