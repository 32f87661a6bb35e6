"""Faults of one line in SGLang's scheduler, its hybrid caches, and its prefill and decode sides."""

from __future__ import annotations

from mutant import Mutant

RECORDINGS = "tests/engines/test_sglang.py"
POOLS = "tests/replay/test_sglang_disaggregation.py"
SIDE = "core/engine/sglang/decode_side.cpp"
PREFILL_SIDE = "core/engine/sglang/prefill_side.cpp"
NET = "core/engine/sglang/push_net.cpp"
FAR = "core/engine/sglang/push_far.cpp"
PAIR = "tests/server/test_push.py"
SGLANG_MUTANTS = [
    Mutant(
        "a match ends behind less than a window",
        "core/engine/sglang/window_component.cpp",
        "behind >= window_) end = node;",
        "behind >= window_ - (FAULT ? 1 : 0)) end = node;",
        RECORDINGS,
    ),
    Mutant(
        "an eviction of window KV takes a leaf's window alone",
        "core/engine/sglang/radix_component.cpp",
        "node->lock == 0 && node->children.empty()",
        "!FAULT && node->lock == 0 && node->children.empty()",
        RECORDINGS,
    ),
    Mutant(
        "window KV of the page before the window is given back",
        "core/engine/sglang/window.cpp",
        "has_cache() ? up(std::max<std::int64_t>(window, page())) : window",
        "has_cache() && !FAULT ? up(std::max<std::int64_t>(window, page())) : window",
        RECORDINGS,
    ),
    Mutant(
        "a chunk without room in the window pool is not parked",
        "core/engine/sglang/prefill.cpp",
        "if (most <= 0) return;  // parked until memory is free",
        "if (most <= 0 && !FAULT) return;  // parked until memory is free",
        RECORDINGS,
    ),
    Mutant(
        "a prefill tracks no state where another prompt branches off",
        "core/engine/sglang/states.cpp",
        "if (has_branch && (",
        "if (has_branch && !FAULT && (",
        RECORDINGS,
    ),
    Mutant(
        "a path keeps more states than its cap",
        "core/engine/sglang/state_component.cpp",
        "(*node)->part_lock > 0 || (*node)->children.size() != 1",
        "FAULT || (*node)->part_lock > 0 || (*node)->children.size() != 1",
        RECORDINGS,
    ),
    Mutant(
        "a retraction keeps the ratio of new tokens",
        "core/engine/sglang/decode.cpp",
        "ratio_ = std::min(1.0, outputs / (wanted + 1));",
        "ratio_ = FAULT ? ratio_ : std::min(1.0, outputs / (wanted + 1));",
        RECORDINGS,
    ),
    Mutant(
        "a chunk that is aborted is computed to its end",
        "core/engine/sglang/schedule.cpp",
        "if (chunked_ != nullptr && chunk_aborted_) {",
        "if (chunked_ != nullptr && chunk_aborted_ && !FAULT) {",
        RECORDINGS,
    ),
    Mutant(
        "a request enters a full queue",
        "core/engine/sglang/receive.cpp",
        "waiting_.size() + 1 > *settings_.max_queued_requests",
        "waiting_.size() + (FAULT ? 0 : 1) > *settings_.max_queued_requests",
        RECORDINGS,
    ),
    Mutant(
        "the decode side reserves no tokens for requests on their way",
        SIDE,
        "running_.size() + side_.moving.size() + waiting_.size() + more",
        "running_.size() + (FAULT ? 0 : side_.moving.size()) + waiting_.size() + more",
        RECORDINGS,
    ),
    Mutant(
        "new requests overtake retracted ones",
        SIDE,
        "if (!side_.retracted.empty()) return;",
        "if (!side_.retracted.empty() && !FAULT) return;",
        RECORDINGS,
    ),
    Mutant(
        "a small request overtakes one that does not fit on the decode side",
        SIDE,
        "      tree_.release(request->lock);\n      break;",
        "      tree_.release(request->lock);\n      if (FAULT) continue;\n      break;",
        RECORDINGS,
    ),
    Mutant(
        "a retracted request resumes with one page less",
        SIDE,
        "const std::int64_t needed = up(filled) + settings_.side.num_reserved_decode_tokens;",
        "const std::int64_t needed = up(filled) + settings_.side.num_reserved_decode_tokens - (FAULT ? page() : 0);",
        RECORDINGS,
    ),
    Mutant(
        "the decode side polls in the first iteration of an interval",
        SIDE,
        "if (side_.polls != 0) return;",
        "if (side_.polls != (FAULT ? 1 % settings_.side.polling_interval : 0)) return;",
        RECORDINGS,
    ),
    Mutant(
        "a copy of a retracted request stays on the host",
        SIDE,
        "    drop_backup(*request);\n    preallocate",
        "    if (!FAULT) drop_backup(*request);\n    preallocate",
        RECORDINGS,
    ),
    Mutant(
        "pages of a failed transfer are free at once",
        SIDE,
        "    if (transport_->waits_for_drain()) {",
        "    if (transport_->waits_for_drain() && !FAULT) {",
        RECORDINGS,
    ),
    Mutant(
        "a request that has ended joins the running ones",
        SIDE,
        "    if (has_ended(*request)) {",
        "    if (has_ended(*request) && !FAULT) {",
        RECORDINGS,
    ),
    Mutant(
        "the prefill side sends part of a page before the last send",
        PREFILL_SIDE,
        "if (!last) end = static_cast<std::uint32_t>(down(end));",
        "if (!last && !FAULT) end = static_cast<std::uint32_t>(down(end));",
        RECORDINGS,
    ),
    Mutant(
        "the prefill side sends what the decode side has",
        PREFILL_SIDE,
        "request->sent = transport_->decode_prefix(request->id);",
        "request->sent = FAULT ? 0 : transport_->decode_prefix(request->id);",
        RECORDINGS,
    ),
    Mutant(
        "a failed transfer leaves nothing in the prefill side's cache",
        PREFILL_SIDE,
        "    release(*request, true);\n    ended.emplace_back",
        "    release(*request, !FAULT || state == SglangTransferState::Done);\n    ended.emplace_back",
        RECORDINGS,
    ),
    Mutant(
        "a prompt is computed before its decode worker has memory",
        NET,
        "if (side == kPrefill && transfer.offered_ns >= now_ns)",
        "if (!FAULT && side == kPrefill && transfer.offered_ns >= now_ns)",
        POOLS,
    ),
    Mutant(
        "a side sees what happens at the time of its poll",
        NET,
        "return transfer.done_ns < now_ns ?",
        "return transfer.done_ns < now_ns + (FAULT ? 1 : 0) ?",
        POOLS,
    ),
    Mutant(
        "a decode worker decodes when the first piece has arrived",
        NET,
        "if (!piece.last) return;",
        "if (!piece.last && !FAULT) return;",
        POOLS,
    ),
    Mutant(
        "pieces that wait are sent after a failure",
        NET,
        "transfer.pieces.resize(1);",
        "transfer.pieces.resize(FAULT ? transfer.pieces.size() : 1);",
        POOLS,
    ),
    Mutant(
        "a decode worker is not told of a failure on the other side",
        NET,
        "if (side == kPrefill) mark_failed(id, transfer, kDecode, now_ns);",
        "if (side == kPrefill && !FAULT) mark_failed(id, transfer, kDecode, now_ns);",
        POOLS,
    ),
    Mutant(
        "a fast-forward of a decode worker passes an arrival",
        "core/engine/sglang/fast_forward.cpp",
        "return !port_ || port_->next_ns() > now_ns_;",
        "return FAULT || !port_ || port_->next_ns() > now_ns_;",
        POOLS,
    ),
    Mutant(
        "the backend of pushed KV is busy between pieces",
        NET,
        "busy_.back().second >= from_ns",
        "(FAULT || busy_.back().second >= from_ns)",
        POOLS,
    ),
    Mutant(
        "a decode server goes on before its prefill server is found",
        FAR,
        "if (!connected) transfer.ready_ns = kNever;",
        "if (!connected && !FAULT) transfer.ready_ns = kNever;",
        PAIR,
    ),
    Mutant(
        "a live prefill server waits for ever for memory",
        FAR,
        "if (kind == 0) return transfer.offered_ns == kNever &&",
        "if (kind == 0) return !FAULT && transfer.offered_ns == kNever &&",
        PAIR,
    ),
    Mutant(
        "requests of a prefill server that is lost go on",
        FAR,
        "if (other != far || transfer.done_ns != kNever) continue;",
        "if (FAULT || other != far || transfer.done_ns != kNever) continue;",
        PAIR,
    ),
    Mutant(
        "a killed engine leaves the other side waiting",
        FAR,
        "if (transfer.done_ns == kNever) mark_failed(id, transfer, other, now_ns);",
        "if (transfer.done_ns == kNever && !FAULT) mark_failed(id, transfer, other, now_ns);",
        PAIR,
    ),
]
