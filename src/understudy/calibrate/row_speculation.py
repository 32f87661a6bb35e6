"""Read the speculation of a row: its method, drafts and acceptance, given or from published recipes and measurements.

A table that says only `mtp` leaves two numbers open. Engines and their recipes document how many tokens a prediction
layer drafts, and its acceptance was published for some models; both are stated as assumptions of the prediction.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from understudy.engines.speculation import SpeculativeConfig
from understudy.errors import InvalidArgument
from understudy.timing.engine_names import ENGINES

if TYPE_CHECKING:
    from understudy.calibrate.table_row import TableRow
    from understudy.timing.deployment import Deployment

_METHODS = ("eagle3", "eagle", "mtp", "draft_model", "ngram")
_SHARES = "acceptance_per_position"


class _Published(NamedTuple):
    """Acceptance of a model's own prediction layer: of each draft if those before it were; the last one repeats."""

    rates: tuple[float, ...]
    origin: str


_PUBLISHED = {
    "DeepSeek-": _Published(
        (0.85, 0.63),
        "DeepSeek-V3's report has 85 to 90 % for the first draft, and its layer 3.2 tokens a step with seven",
    ),
    "GLM-5": _Published((0.84, 0.79, 0.74), "InferenceX measured GLM-5.2 on prompts about code"),
    "Qwen3.5-": _Published((0.93, 0.86, 0.83), "InferenceX measured Qwen3.5-397B on prompts about code"),
}
"""By the start of a model's name."""


class RowSpeculation(NamedTuple):
    """Speculation of a row, None without one, and what it assumes."""

    config: SpeculativeConfig | None
    notes: tuple[str, ...] = ()


def read_speculation(row: TableRow, backend: str, deployment: Deployment) -> RowSpeculation:
    """Return the speculation of a row. InvalidArgument if a number is missing that nothing documents."""
    text = row.text("speculation", default="")
    if not text or text.lower() in ("no", "off"):
        return RowSpeculation(None)
    if text.lower() == "unknown":
        note = "without speculation, because the table does not know whether the engine speculated"
        return RowSpeculation(None, (note,))
    method = next((name for name in _METHODS if re.match(rf"{name}\b", text.lower())), None)
    named = re.search(r"num_speculative_tokens\D{0,3}(\d+)", text)
    given = row.text(_SHARES, default="")
    shares = tuple(row.numbers(_SHARES, or_zero=True)) if given else None
    published = _find_published(deployment.model.name) if method == "mtp" else None
    if method is None or (shares is None and published is None):
        raise InvalidArgument(
            f"{row.where}: speculation {text!r} needs a method ({', '.join(_METHODS)}), the number of drafts "
            f"(num_speculative_tokens=N) and the column {_SHARES}, a share for each draft; fill them, or leave the row "
            "out"
        )
    notes, rates = [], None
    if named is not None:
        drafts = int(named[1])
    elif shares is not None:
        drafts = len(shares)
    else:
        drafts, why = _count_usual_drafts(backend, deployment)
        notes.append(f"{drafts} draft{'s' if drafts > 1 else ''} a step assumed ({why})")
    if shares is None and published is not None:
        known = published.rates
        rates = (*known, *(known[-1],) * drafts)[:drafts]
        written = ", ".join(f"{rate:g}" for rate in rates)
        notes.append(
            f"acceptance {written} assumed, each if those before it were accepted ({published.origin})"
        )
    config = SpeculativeConfig(
        method=method,  # type: ignore[arg-type]
        num_speculative_tokens=drafts,
        acceptance_per_position=shares,
        accept_rates=rates,
    )
    if backend != "vllm":
        notes.append(f"scheduled as by vLLM, because speculation of {ENGINES[backend]} is not simulated")
    return RowSpeculation(config, tuple(notes))


def _find_published(model: str) -> _Published | None:
    return next((found for start, found in _PUBLISHED.items() if model.startswith(start)), None)


def _count_usual_drafts(backend: str, deployment: Deployment) -> tuple[int, str]:
    """Return the number of drafts that an engine's server or recipes use for a prediction layer, and which of them."""
    if backend == "sglang":
        return 3, "SGLang's own choice: three draft steps"
    if backend == "trtllm":
        if deployment.parallel.data > 1:
            return 1, "InferenceX's recipe of TensorRT-LLM under attention DP"
        return 3, "InferenceX's recipe of TensorRT-LLM"
    return 1, "vLLM's default: as many as the checkpoint has prediction layers"
