"""Faults of one line in the core, and the tests of their room that must notice them: mutants.py tries each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In place of the only `was` of `file` stands `becomes`, whose FAULT is true while the mutant is on: one
    of `tests` must fail then."""

    name: str
    file: str
    was: str
    becomes: str
    tests: str


ESTIMATE = "core/tiers/transfer_estimate.hpp"
HUB = "core/tiers/transfer_hub.hpp"
RESTING = "tests/tiers/test_quiet_steps.py"
YEARS = "tests/tiers/test_years.py"
GROUP_POOL = "core/engine/vllm/groups/group_pool.cpp"
FAST_FORWARD = "core/engine/vllm/fast_forward.cpp"
BLOCK_POOL = "core/engine/vllm/kv/block_pool.cpp"
KEY_INDEX = "core/engine/vllm/groups/key_index.hpp"
GROUPS = "tests/engines/test_kv_groups.py"
SIDE_BY_SIDE = "tests/engines/test_block_pool.py"
SGLANG_HYBRID = "tests/engines/test_sglang.py"
TRT_SCHEDULE = "core/engine/trtllm/schedule.cpp"
TRT_PAGES = "core/engine/trtllm/page_store.cpp"
TRTLLM = "tests/engines/test_trtllm.py"
MUTANTS = [
    Mutant(
        "a load's estimate ignores other loads",
        ESTIMATE,
        "host.up, bytes, 1 + loads",
        "host.up, bytes, 1 + (FAULT ? 0 : loads)",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a load's estimate ignores copies the other way",
        ESTIMATE,
        "config_.demand_first ? 0 : copies);",
        "FAULT || config_.demand_first ? 0 : copies);",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a copy's estimate ignores other copies",
        ESTIMATE,
        "host.down, bytes, 1 + copies",
        "host.down, bytes, 1 + (FAULT ? 0 : copies)",
        "tests/tiers/test_transfer_estimate.py",
    ),
    Mutant(
        "a load that takes as long as computing is begun",
        "core/tiers/sources.cpp",
        "eta(now_ns, count) - now_ns >= saved_ns(count)",
        "eta(now_ns, count) - now_ns >= saved_ns(count) + (FAULT ? 1 : 0)",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "a block's load draws the same number every time",
        "core/tiers/load_up.cpp",
        "load.blocks[0].sequence_hash(), loads_begun_",
        "load.blocks[0].sequence_hash(), FAULT ? 0 : loads_begun_",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "waits for room are not counted",
        "core/tiers/device_room.cpp",
        "    } else if (waiting(request)) {\n      ++totals_.room_waits;",
        "    } else if (waiting(request)) {\n      totals_.room_waits += FAULT ? 0 : 1;",
        "tests/tiers/test_counters.py",
    ),
    Mutant(
        "failed loads have no length",
        "core/tiers/load_up.cpp",
        "if (keeps_load_times_) onboard_ns_",
        "if (keeps_load_times_ && !(FAULT && load.failed)) onboard_ns_",
        "tests/tiers/test_counters.py",
    ),
    Mutant(
        "an end is rounded down where it is barely late",
        "core/links/link_flow_ends.hpp",
        "past_ticks <= late_ticks",
        "past_ticks <= (FAULT ? 262144 : late_ticks)",
        "tests/tiers/test_links_exact.py",
    ),
    Mutant(
        "events of the host wait for the end of the step",
        "core/events/event_log.hpp",
        "if (record.tier == Tier::G1) return false;",
        "if (record.tier == Tier::G1 || (FAULT && record.tier == Tier::G2)) return false;",
        "tests/tiers/test_event_times.py",
    ),
    Mutant(
        "what a router has taken is not recorded",
        "core/events/event_log.hpp",
        "if (keeps_taken_) {",
        "if (keeps_taken_ && !FAULT) {",
        "tests/replay/test_record_steps.py",
    ),
    Mutant(
        "an engine takes a second caller",
        "core/base/exclusive_call.hpp",
        "flag_.in_call_.exchange(true)",
        "flag_.in_call_.exchange(true) && !FAULT",
        "tests/kv/test_request_threads.py",
    ),
    Mutant(
        "an estimate forgets that blocks are still on their way down",
        "core/tiers/sources.cpp",
        "ready_ns = std::max(ready_ns, eta(source, arrival));",
        "if (!FAULT) ready_ns = std::max(ready_ns, eta(source, arrival));",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "what is not worth a load is cut by a block",
        "core/tiers/sources.cpp",
        "sources_[count - 1].tier == tier) --count;",
        "sources_[count - 1].tier == tier && (--count, !FAULT)) {}",
        "tests/tiers/test_load_or_recompute.py",
    ),
    Mutant(
        "ties are broken by how workers are numbered",
        "core/replay/fleet_together.cpp",
        "workload_.size() + worker : row;",
        "workload_.size() + worker : FAULT ? worker : row;",
        "tests/tiers/test_causality.py",
    ),
    Mutant(
        "policies of the user's hear of one worker after the other",
        "core/replay/fleet.cpp",
        "return (workers_.size() > 1 || config_.elastic) && std::ranges::any_of(",
        "return !FAULT && (workers_.size() > 1 || config_.elastic) && std::ranges::any_of(",
        "tests/replay/test_users_policies.py",
    ),
    Mutant(
        "a prefetch evicts what it must copy",
        "core/tiers/device_room.cpp",
        "if (request == kNoRequest && copies",
        "if (!FAULT && request == kNoRequest && copies",
        "tests/tiers/test_onboard_waiting.py",
    ),
    Mutant(
        "the blocks of a shared tier over time are thinned from the wrong end",
        "core/tiers/shared_tier.cpp",
        "residency_[i] = residency_[2 * i];",
        "residency_[i] = residency_[2 * i + (FAULT ? 1 : 0)];",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "a thinned tier is sampled as often as before",
        "core/tiers/shared_tier.cpp",
        "sample_every_ns_ *= 2;",
        "sample_every_ns_ *= FAULT ? 1 : 2;",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "of samples that meet at a point of a coarser grid the first stays",
        "core/engine/token_log.cpp",
        "if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) --kept;",
        "if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) { if (FAULT) continue; --kept; }",
        "tests/tiers/test_thinning.py",
    ),
    Mutant(
        "a fast-forward counts on what is empty, whatever the order of eviction",
        "core/engine/vllm/kv_backend.hpp",
        "return evicts_last() && blocks",
        "return (FAULT || evicts_last()) && blocks",
        "tests/tiers/test_fast_forward.py tests/eviction/test_device_pool.py",
    ),
    Mutant(
        "a pool's tier is summed up with another's",
        "core/replay/run_columns.cpp",
        "t.tier == use.tier && t.first_worker",
        "t.tier == use.tier && (FAULT ? pool.first_worker : t.first_worker)",
        "tests/replay/test_pools.py",
    ),
    Mutant(
        "a router counts on the disk of another pool",
        "core/router/kv_view.cpp",
        "if (pool_of_[worker] != pool || (worker",
        "if ((!FAULT && pool_of_[worker] != pool) || (worker",
        "tests/replay/test_pools.py",
    ),
    Mutant(
        "what lands after the last step is not told",
        "core/engine/vllm/tiers.cpp",
        "while (offload_links_ && !polls_ && !clock_.in_step",
        "while (!FAULT && offload_links_ && !polls_ && !clock_.in_step",
        "tests/server/test_online_tiers.py",
    ),
    Mutant(
        "a refused transfer is told once",
        HUB,
        "if (failure_) std::rethrow_exception(failure_);",
        "if (failure_) std::rethrow_exception(FAULT ? std::exchange(const_cast<TransferHub*>(this)->failure_, {}) "
        ": failure_);",
        YEARS,
    ),
    Mutant(
        "after a refused transfer others start",
        HUB,
        "    room_ = 0;\n",
        "    if (!FAULT) room_ = 0;\n",
        YEARS,
    ),
    Mutant(
        "a link's largest transfer is one block",
        "core/engine/vllm/setup.cpp",
        "static_cast<double>(at_most(count)) *",
        "static_cast<double>(FAULT ? 1 : at_most(count)) *",
        YEARS,
    ),
    Mutant(
        "a batch may be larger than a transfer",
        "core/engine/vllm/setup.cpp",
        "if (blocks <= most_blocks) return;",
        "if (FAULT || blocks <= most_blocks) return;",
        "tests/tiers/test_too_large.py",
    ),
    Mutant(
        "a step may end before it began",
        "core/engine/vllm/step.cpp",
        "polling_ ? clock_.begun_ns : clock_.now_ns; now_ns < here_ns",
        "polling_ ? clock_.begun_ns : clock_.now_ns; now_ns < here_ns && !(FAULT && clock_.in_step)",
        "tests/engines/test_time_goes_on.py",
    ),
    Mutant(
        "an index has places for all slots at once",
        "core/store/block_pool.hpp",
        "std::min<std::size_t>(count, std::max({needed, more, kFirstRoom}));",
        "FAULT ? count : std::min<std::size_t>(count, std::max({needed, more, kFirstRoom}));",
        "tests/test_memory.py",
    ),
    Mutant(
        "what was in memory that is kept stays in it",
        "core/base/huge_array.hpp",
        "if (had_ > 0) std::memset",
        "if (!FAULT && had_ > 0) std::memset",
        "tests/replay/test_kept_memory.py",
    ),
    Mutant(
        "memory that is kept is cleared as far as the first array went",
        "core/base/huge_array.hpp",
        "written_ = std::max(written_, to * sizeof(T));",
        "written_ = FAULT && had_ > 0 ? written_ : std::max(written_, to * sizeof(T));",
        "tests/replay/test_kept_memory.py",
    ),
    Mutant(
        "arrays that are mostly empty are kept",
        "core/base/huge_array.hpp",
        "written_ >= kShort && 2 * populated_ >= written_;",
        "written_ >= kShort && (FAULT || 2 * populated_ >= written_);",
        "tests/replay/test_kept_memory.py",
    ),
    Mutant(
        "links of both orders are one network wherever they are",
        "core/links/link.cpp",
        "mixed_ = mixed_ || orders == 3;",
        "mixed_ = FAULT || mixed_ || orders == 3;",
        "tests/tiers/test_links_refused.py",
    ),
    Mutant(
        "a cached block is evicted at an earlier place in the queue",
        GROUP_POOL,
        "  queued.block = kNoSlot;",
        "  if (!FAULT) queued.block = kNoSlot;",
        GROUPS,
    ),
    Mutant(
        "evictions do not lower the count of cached blocks",
        GROUP_POOL,
        "  num_cached_ -= cached.size();",
        "  num_cached_ -= FAULT ? 0 : cached.size();",
        GROUPS,
    ),
    Mutant(
        "a block with another reference is free",
        GROUP_POOL,
        "      if (b.references > 1) {",
        "      if (b.references > (FAULT ? 2 : 1)) {",
        GROUPS,
    ),
    Mutant(
        "an evicted block keeps its key",
        GROUP_POOL,
        "        blocks_[block] = {1, kNoKey, 0};",
        "        blocks_[block] = {1, FAULT ? kOwnKey : kNoKey, 0};",
        GROUPS,
    ),
    Mutant(
        "later equal keys are lost with the first",
        GROUP_POOL,
        "    if (next == kNone) return index_.erase(",
        "    if (FAULT || next == kNone) return index_.erase(",
        GROUPS,
    ),
    Mutant(
        "a search ends at a full bucket",
        KEY_INDEX,
        "      buckets_[path.at()].guest_bits |= guest_bit(hash);",
        "      buckets_[path.at()].guest_bits |= FAULT ? 0 : guest_bit(hash);",
        GROUPS,
    ),
    Mutant(
        "a refused request ignores blocks that windows leave behind",
        FAST_FORWARD,
        "      freed += state_.grouped->step_frees(request(order), position);",
        "      freed += FAULT ? 0 : state_.grouped->step_frees(request(order), position);",
        GROUPS,
    ),
    Mutant(
        "a refused request ignores that its hit is evicted",
        FAST_FORWARD,
        "state_.grouped->evictions() + fresh > refusal.evictions",
        "(!FAULT && state_.grouped->evictions() + fresh > refusal.evictions)",
        GROUPS,
    ),
    Mutant(
        "a released run is queued in front of the others",
        BLOCK_POOL,
        "    queue(run, nullptr);\n  }\n  table.runs.clear();",
        "    queue(run, FAULT ? front_ : nullptr);\n  }\n  table.runs.clear();",
        SIDE_BY_SIDE,
    ),
    Mutant(
        "a head is evicted before the tail that was split off it",
        "core/engine/vllm/kv/pool_blocks.cpp",
        "queue(part, &run);",
        "queue(part, FAULT ? run.after : &run);",
        SIDE_BY_SIDE,
    ),
    Mutant(
        "a copy grows ahead of copies that were registered before",
        BLOCK_POOL,
        "if (ends && last->references == 1 && !last->phantom && last->next_copy == nullptr) {",
        "if (ends && last->references == 1 && !last->phantom && (last->next_copy == nullptr || FAULT)) {",
        SIDE_BY_SIDE,
    ),
    Mutant(
        "blocks without a name are handed out in the order of the table",
        BLOCK_POOL,
        "in_front_.insert(in_front_.end(), ids.begin(), ids.end());",
        "FAULT ? in_front_.insert(in_front_.end(), ids.rbegin(), ids.rend())\n"
        "          : in_front_.insert(in_front_.end(), ids.begin(), ids.end());",
        SIDE_BY_SIDE,
    ),
    Mutant(
        "a match ends behind less than a window",
        "core/engine/sglang/window_component.cpp",
        "behind >= window_) end = node;",
        "behind >= window_ - (FAULT ? 1 : 0)) end = node;",
        SGLANG_HYBRID,
    ),
    Mutant(
        "an eviction of window KV takes a leaf's window alone",
        "core/engine/sglang/radix_component.cpp",
        "node->lock == 0 && node->children.empty()",
        "!FAULT && node->lock == 0 && node->children.empty()",
        SGLANG_HYBRID,
    ),
    Mutant(
        "window KV of the page before the window is given back",
        "core/engine/sglang/window.cpp",
        "has_cache() ? up(std::max<std::int64_t>(window, page())) : window",
        "has_cache() && !FAULT ? up(std::max<std::int64_t>(window, page())) : window",
        SGLANG_HYBRID,
    ),
    Mutant(
        "a chunk without room in the window pool is not parked",
        "core/engine/sglang/prefill.cpp",
        "if (most <= 0) return;  // parked until memory is free",
        "if (most <= 0 && !FAULT) return;  // parked until memory is free",
        SGLANG_HYBRID,
    ),
    Mutant(
        "a prefill tracks no state where another prompt branches off",
        "core/engine/sglang/states.cpp",
        "if (has_branch && (",
        "if (has_branch && !FAULT && (",
        SGLANG_HYBRID,
    ),
    Mutant(
        "a path keeps more states than its cap",
        "core/engine/sglang/state_component.cpp",
        "(*node)->part_lock > 0 || (*node)->children.size() != 1",
        "FAULT || (*node)->part_lock > 0 || (*node)->children.size() != 1",
        SGLANG_HYBRID,
    ),
    Mutant(
        "a request that is computed again may be one that this pass suspended",
        TRT_SCHEDULE,
        "(has_lower || !was_suspended) && may_pause(*one)",
        "(FAULT || has_lower || !was_suspended) && may_pause(*one)",
        TRTLLM,
    ),
    Mutant(
        "a chunk is not a multiple of its unit",
        TRT_SCHEDULE,
        "if (tokens < wanted) tokens = tokens / chunk_unit_ * chunk_unit_;",
        "if (tokens < wanted && !FAULT) tokens = tokens / chunk_unit_ * chunk_unit_;",
        TRTLLM,
    ),
    Mutant(
        "a prompt that finds no memory stays on the device",
        TRT_SCHEDULE,
        "if (request.in_first_chunk()) request.cache->suspend();",
        "if (request.in_first_chunk() && !FAULT) request.cache->suspend();",
        TRTLLM,
    ),
    Mutant(
        "a pass that suspended a request counts as a deadlock",
        TRT_SCHEDULE,
        "if (batch_.empty() && pass.suspended.empty() && pass.recomputed.empty()) {",
        "if (batch_.empty() && (FAULT || pass.suspended.empty()) && pass.recomputed.empty()) {",
        TRTLLM,
    ),
    Mutant(
        "pages of a refused resume leave their list",
        TRT_PAGES,
        "if (were_listed[i]) list_if_evictable(*pages[i]);",
        "if (were_listed[i] && !FAULT) list_if_evictable(*pages[i]);",
        TRTLLM,
    ),
    Mutant(
        "a page of a removed node may be evicted",
        TRT_PAGES,
        "page.node == nullptr || page.node->removed();",
        "page.node == nullptr || (!FAULT && page.node->removed());",
        TRTLLM,
    ),
]
