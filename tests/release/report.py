"""Write the drill's report of a release, and the page that lists exact releases."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from release.families import Scenario
    from release.sources import Change


@dataclass
class FamilyResult:
    """Scenarios of a family: how many were recorded, failed to record, and differ.

    `keys`: how often each key was the first to differ.
    """

    family: str
    recorded: int = 0
    differ: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Smallest:
    """A shrunk scenario and its first difference."""

    family: str
    name: str
    scenario: Scenario
    steps: int
    difference: str


@dataclass(frozen=True)
class Facts:
    """Differences between two releases outside the schedule; each is a list of lines."""

    flags: list[str]
    metrics: list[str]
    events: list[str]


def compare_facts(old: dict[str, Any], new: dict[str, Any]) -> Facts:
    """Describe flags, metrics and event fields that were added, are gone or changed."""
    flags = _compare_flags(old["flags"], new["flags"])
    metrics = [f"added `{name}`" for name in new["metrics"] if name not in old["metrics"]]
    metrics += [f"gone `{name}`" for name in old["metrics"] if name not in new["metrics"]]
    events: list[str] = []
    for kind in sorted({*old["events"], *new["events"]}):
        before, after = old["events"].get(kind), new["events"].get(kind)
        if before is None or after is None:
            events.append(f"{'added' if before is None else 'gone'} `{kind}`")
            continue
        events += [f"added `{kind}.{name}`" for name in after if name not in before]
        events += [f"gone `{kind}.{name}`" for name in before if name not in after]
    errors = {
        name: f"could not be read: {text}" for facts in (old, new) for name, text in facts["errors"].items()
    }
    found = {"flags": _shortened(flags), "metrics": metrics, "events": events}
    return Facts(**{name: [errors[name]] if name in errors else lines for name, lines in found.items()})


def _compare_flags(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Describe flags by their first names; those with other alternative names share a line."""
    before = {names.split("/")[0]: (names, text) for names, text in old.items()}
    after = {names.split("/")[0]: (names, text) for names, text in new.items()}
    both = [flag for flag in after if flag in before]
    lines = [f"added `{names}` ({text})" for flag, (names, text) in after.items() if flag not in before]
    lines += [f"gone `{names}`" for flag, (names, _) in before.items() if flag not in after]
    lines += [
        f"changed `{flag}`: {before[flag][1]} → {after[flag][1]}"
        for flag in both
        if before[flag][1] != after[flag][1]
    ]
    renamed = [flag for flag in both if before[flag][0] != after[flag][0]]
    if renamed:
        first = f"as `{before[renamed[0]][0]}` → `{after[renamed[0]][0]}`"
        lines.append(f"{len(renamed)} flags with other alternative names, {first}: {', '.join(renamed)}")
    return lines


def _shortened(lines: list[str], longest: int = 2000) -> list[str]:
    return [line if len(line) <= longest else f"{line[:longest]} …" for line in lines]


def write_report(
    release: str,
    profile: str,
    seeds: range,
    results: Sequence[FamilyResult],
    smallest: Sequence[Smallest],
    changes: Sequence[Change] | None,
    facts: Facts | None,
) -> str:
    """Return the report of a release as Markdown; `changes` and `facts` are None without an older installation."""
    recorded = sum(result.recorded for result in results)
    differ = sum(result.differ for result in results)
    different = [result.family for result in results if result.differ]
    lines = [
        f"# vLLM {release} against the {profile} profile",
        "",
        f"Written by `make release VLLM={release} OLD={profile}.0`: seeds {seeds.start} to {seeds.stop - 1} of every "
        f"family, recorded with the scheduler of {release} on a CPU and compared with our engine under the profile of "
        f"{profile}.",
        "",
        f"**{differ} of {recorded} schedules differ"
        + (f", in {len(different)} of {len(results)} families.**" if differ else ": the profile is exact.**"),
        "",
        "| family | schedules | differ | first key that differs (schedules) |",
        "| --- | ---: | ---: | --- |",
    ]
    for result in results:
        keys = ", ".join(f"`{key}` {n}" for key, n in sorted(result.keys.items(), key=lambda item: -item[1]))
        lines.append(f"| {result.family} | {result.recorded} | {result.differ} | {keys} |")
    lines += _failures(results)
    if smallest:
        lines += ["", "## Smallest scenario of each family", ""]
        lines += [
            f"Recordings: `build/release/{release}/smallest`; `understudy conformance vllm` compares them again.",
        ]
    for one in smallest:
        lines += _smallest(one)
    if changes is not None:
        lines += _sources(release, changes)
    if facts is not None:
        for title, found in (
            ("Flags of `vllm serve`", facts.flags),
            ("Metric names in the sources", facts.metrics),
            ("KV event fields", facts.events),
        ):
            lines += ["", f"## {title}", "", *([f"* {line}" for line in found] or ["None changed."])]
    return "\n".join(lines) + "\n"


def _failures(results: Sequence[FamilyResult]) -> list[str]:
    failed = [(result.family, text, n) for result in results for text, n in result.failed.items()]
    if not failed:
        return []
    lines = ["", "Not recorded, because the release refused the scenario or raised:", ""]
    return lines + [f"* {family}, {n}: `{' '.join(text.split())[:300]}`" for family, text, n in failed]


def _smallest(one: Smallest) -> list[str]:
    scenario = one.scenario
    head = {key: value for key, value in scenario.items() if key not in ("requests", "aborts", "name")}
    aborts = f", {len(scenario['aborts'])} aborts" if scenario.get("aborts") else ""
    return [
        "",
        f"### {one.family}",
        "",
        f"From {one.name}: {len(scenario['requests'])} requests{aborts}, {one.steps} steps.",
        f"First difference: {one.difference}",
        "",
        "```json",
        json.dumps(head),
        *(json.dumps(request) for request in scenario["requests"]),
        *(json.dumps(abort) for abort in scenario.get("aborts") or ()),
        "```",
    ]


def _sources(release: str, changes: Sequence[Change]) -> list[str]:
    lines = [
        "",
        "## Sources that changed",
        "",
        f"Lines are those of {release}, by function; `build/release/{release}/source.diff` has the text.",
        "",
    ]
    if not changes:
        return [*lines, "None of the watched files changed."]
    for change in sorted(changes, key=lambda change: (-change.lines, change.path)):
        if change.status != "changed":
            lines.append(f"* `{change.path}`: {change.status}")
            continue
        places = "; ".join(
            f"{name} {', '.join(f'{a}' if a == b else f'{a}-{b}' for a, b in ranges)}"
            for name, ranges in change.places.items()
        )
        lines.append(f"* `{change.path}` ({change.lines} lines): {places}")
    return lines


def update_results(
    path: Path, release: str, profile: str, seeds: range, results: Sequence[FamilyResult]
) -> list[dict[str, Any]]:
    """Put the results of this release and profile into the file of results, and return all entries.

    Families of an earlier run with the same seeds are kept.
    """
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    counts = {result.family: {"recorded": result.recorded, "differ": result.differ} for result in results}
    for entry in [e for e in entries if (e["release"], e["profile"]) == (release, profile)]:
        entries.remove(entry)
        if entry["seeds"] == [seeds.start, seeds.stop]:
            counts = entry["families"] | counts
    entries.append(
        {
            "release": release,
            "profile": profile,
            "seeds": [seeds.start, seeds.stop],
            "families": counts,
        }
    )
    entries.sort(key=lambda entry: (_order(entry["release"]), _order(entry["profile"])), reverse=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return entries


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


SOURCE_ONLY = (
    "## Known from the source only",
    "",
    "No recording shows these rules of 0.33.0, so no count above covers them.",
    "",
    "* A waiting request that may compute 0 tokens is passed over instead of ending the admissions. Only "
    "encoder inputs and several MTP modules reach this rule; neither is simulated.",
    "* `kv_connector_extra_config.sync_load_budget_bytes` (off by default) loads small hits within the "
    "step. Not simulated.",
    "* Asynchronous loads of a connector do not count for `prefill_schedule_interval`; ranks of an MoE "
    "model share a counter for it.",
    "* A model with several MTP modules hashes as many lookahead tokens as it drafts. Simulated: one.",
    "* `ownership` and `locality` of KV events are set by secondary offload tiers only. Not simulated.",
)
"""Rules that no recording shows, as a section of the page."""


def write_page(entries: Sequence[dict[str, Any]], golden: Sequence[tuple[str, str, int]]) -> str:
    """Return the page of releases: results of the drill, and the recordings that every test run compares.

    `golden`: release, family and number of recordings.
    """
    families = list(dict.fromkeys(family for entry in entries for family in entry["families"]))
    lines = [
        "# Exact releases",
        "",
        "`make release VLLM=0.34.0` records random schedules with the scheduler of a vLLM release, compares them with "
        "our newest profile, and updates this page. A cell is the number of identical schedules of those recorded; "
        "a schedule is identical if every step has the same tokens, order, blocks and KV events.",
        "",
        "| release | profile | " + " | ".join(families) + " |",
        "| --- | --- |" + " ---: |" * len(families),
    ]
    for entry in entries:
        cells = []
        for family in families:
            counts = entry["families"].get(family)
            cells.append(f"{counts['recorded'] - counts['differ']} of {counts['recorded']}" if counts else "")
        name = entry["release"]
        title = f"[{name}](releases/{_short(name)}.md)" if _short(name) != entry["profile"] else name
        lines.append(f"| {title} | {entry['profile']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "A row whose profile is that of an older release says what the newer one changed; its report says where.",
        "",
        *SOURCE_ONLY,
        "",
        "## Recordings in the repository",
        "",
        "`make conformance` compares them; all are identical under the profile of their release.",
        "",
        "| release | family | recordings |",
        "| --- | --- | ---: |",
        *(f"| {release} | {family} | {count} |" for release, family, count in golden),
    ]
    return "\n".join(lines) + "\n"


def _short(release: str) -> str:
    return ".".join(release.split(".")[:2])
