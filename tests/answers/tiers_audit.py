"""Audit tiers: hits by tier add up, bytes are those of blocks, and waits are those of requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from answers.definitions import distribution, ratio
from answers.links_audit import use_of_link
from answers.report_audit import duration_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence

_TIERS = ("g1", "g2", "g3", "g4")


def hits_by_tier_add_up(evidence: Evidence) -> Iterator[Difference]:
    """The tokens that each tier served, from the requests' lines; with the computed ones they are the prompt."""
    tiers = evidence.report.get("tiers")
    if tiers is None:
        return
    admitted = [line for line in evidence.lines if line["first_admit_ms"] is not None]
    prompts = sum(line["prompt_tokens"] for line in admitted)
    for line in admitted:
        parts = sum(line.get(f"prompt_from_{tier}") or 0 for tier in _TIERS) + line["prompt_computed"]
        yield f"{line['request']}: prompt by source", parts, line["prompt_tokens"]
        for tier in _TIERS[1:]:
            yield (
                f"{line['request']}: {tier}",
                line[f"below_tokens_first_{tier}"],
                line[f"prompt_from_{tier}"],
            )
    for tier in tiers["tiers"]:
        pool, _, name = tier["tier"].rpartition(" ")  # those of a pool are named after it
        own = [line for line in admitted if not pool or evidence.case.pool_of[line["worker"]] == pool]
        tokens = sum(line.get(f"prompt_from_{name}") or 0 for line in own)
        yield f"{tier['tier']}: hit tokens", tier["hit_tokens_first"], tokens
        if name != "g1":
            all_ = sum(line[f"below_tokens_total_{name}"] for line in own)
            yield f"{tier['tier']}: hit tokens, all", tier["hit_tokens_total"], all_
        looked_up = sum(line["looked_up_tokens"] for line in evidence.lines)
        yield (
            f"{tier['tier']}: hit ratio, all",
            tier["hit_ratio_total"],
            ratio(tier["hit_tokens_total"], looked_up),
        )
        yield f"{tier['tier']}: hit ratio", tier["hit_ratio_first"], ratio(tokens, prompts)
    hits = evidence.report["prefix_hit_ratio"]
    for name, total in (("first", hits["first_admission"]), ("total", hits["total"])):
        parts_ = [tier[f"hit_ratio_{name}"] for tier in tiers["tiers"]]
        yield f"{name}: sum over tiers", None if None in parts_ else math.fsum(parts_), total


def bytes_of_tiers_are_blocks(evidence: Evidence) -> Iterator[Difference]:
    """Links moved whole blocks, as many as were copied and loaded; residents are stored less evicted ones."""
    tiers, flags = evidence.report.get("tiers"), evidence.case.flags
    if tiers is None or evidence.case.pools:  # links of pools have names and speeds of their own
        return
    size = int(flags["kv-bytes-per-token"]) * evidence.report["run"]["engine"]["block_size"]
    links = {link["name"]: link for link in tiers["links"]}
    yield "bytes down", links["g1_to_g2"]["bytes"], tiers["counts"]["offloaded_blocks"] * size
    yield "bytes up", links["g2_to_g1"]["bytes"], tiers["counts"]["onboarded_blocks"] * size
    workers = evidence.report["run"]["workers"]
    given = float(flags["g2-bandwidth-gbps"])
    for name in ("g1_to_g2", "g2_to_g1"):
        yield f"{name}: bandwidth", links[name]["bandwidth_gbps"], None if math.isinf(given) else given
    for name, link in links.items():
        yield f"{name}: links", link["links"], 1 if name.endswith("backend") else workers
        yield f"{name}: bytes beyond blocks", link["bytes"] % size, 0
        yield (
            f"{name}: transfers",
            min(link["transfers"], 1) <= link["bytes"] // size >= link["transfers"],
            True,
        )
        yield from use_of_link(name, link, duration_s(evidence.lines))
    for tier in tiers["tiers"]:
        if flags.get(tier["tier"]) == "unlimited":
            names = ("capacity_blocks", "resident_mean", "resident_max", "resident_end")
            yield f"{tier['tier']}: unlimited", [tier[name] for name in names], [None] * 4
        else:
            yield f"{tier['tier']}: capacity", tier["capacity_blocks"], _capacity(evidence, tier["tier"])
    for tier in tiers["tiers"]:
        if tier["capacity_blocks"] is not None:
            resident = tier["resident_end"] * tier["capacity_blocks"]
            stays = tier["stored_blocks"] - tier["evicted_blocks"]
            yield f"{tier['tier']}: resident at the end", round(resident, 6), float(stays)
        if tier["resident_max"] is not None:
            yield (
                f"{tier['tier']}: within its capacity",
                (tier["resident_mean"] or 0) <= tier["resident_max"] <= 1,
                True,
            )


def _capacity(evidence: Evidence, tier: str) -> int:
    """Blocks of a tier: host memory and the GPU belong to each worker, disk and object store to all."""
    flags, workers = evidence.case.flags, evidence.report["run"]["workers"]
    if tier == "g1":
        return int(evidence.report["run"]["engine"]["num_gpu_blocks"]) * int(workers)
    return int(flags[tier]) * (workers if tier == "g2" else 1)


def waits_for_tiers(evidence: Evidence) -> Iterator[Difference]:
    """Time that requests waited for loads and for room, from their lines."""
    tiers = evidence.report.get("tiers")
    if tiers is None:
        return
    for name in ("parked", "room_wait"):
        waits = [line[f"{name}_ms"] for line in evidence.lines if line[f"{name}_ms"]]
        yield f"tiers.{name}_s", tiers[f"{name}_s"], math.fsum(waits) / 1000
        for key, value in distribution(waits).items():
            yield f"tiers.{name}_ms.{key}", tiers[f"{name}_ms"][key], value
