// Random operations on stores of every policy and duplicate rule, without Python, so that LeakSanitizer sees all memory
// of the core. Usage: understudy_soak [operations per store]
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "store/block_store.hpp"
#include "store/request_kv.hpp"
#include "tests/fail.hpp"
#include "tests/kept_memory.hpp"
#include "tests/locating.hpp"
#include "tests/queue_advisor.hpp"
#include "tests/refusal.hpp"
#include "tokens/identities.hpp"
#include "tokens/token_blocks.hpp"

namespace understudy {
namespace {

constexpr std::uint64_t kBlockSize = 4;
constexpr std::size_t kCheckEvery = 256;
constexpr std::ptrdiff_t kSeen = 40;

enum class Stage { Mutable, Staged, Claimed, Registered };

struct Held {
  std::size_t pool = 0;
  Stage stage = Stage::Mutable;
  std::vector<SlotId> slots;
  std::vector<BlockIdentity> blocks{};  // if claimed
};

class Soak {
 public:
  Soak(PolicyKind kind, DuplicatePolicy duplicates, bool quiet, std::uint64_t seed)
      : shared_(std::make_shared<BlockStore>(config(kind, duplicates, quiet))), store_(*shared_), random_(seed) {}

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      step();
      if (i % kCheckEvery == 0) store_.check();
    }
    finish();
  }

 private:
  // `quiet`: no events, and no details of blocks.
  static StoreConfig config(PolicyKind kind, DuplicatePolicy duplicates, bool quiet) {
    StoreConfig config;
    config.block_size = kBlockSize;
    // Copies have no token ids to publish.
    config.events = {.enabled = !quiet, .capacity = 64, .token_ids = duplicates == DuplicatePolicy::Allow};
    for (const Tier tier : {Tier::G1, Tier::G2}) {
      PoolConfig pool;
      pool.tier = tier;
      pool.num_blocks = tier == Tier::G1 ? 48 : 96;
      pool.policy.kind = kind;
      if (kind == PolicyKind::Advised) pool.policy.advisor = std::make_shared<QueueAdvisor>();
      pool.duplicates = duplicates;
      pool.keeps_details = !quiet;
      config.pools.push_back(pool);
    }
    return config;
  }

  std::size_t below(std::size_t bound) { return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random_); }

  // Prompts over two token values: prefixes are shared and equal blocks occur all the time.
  TokenBlocks prompt(std::size_t blocks) {
    std::vector<Token> tokens(blocks * kBlockSize);
    for (std::size_t b = 0; b < blocks; ++b) {
      std::fill_n(tokens.begin() + static_cast<std::ptrdiff_t>(b * kBlockSize), kBlockSize, Token(below(2)));
    }
    return TokenBlocks(tokens, kBlockSize);
  }

  void step() {
    switch (below(11)) {
      case 0:
      case 1:
        return allocate();
      case 2:
      case 3:
        return fill();
      case 4:
      case 5:
        return match();
      case 6:
      case 7:
        return release();
      case 8:
        return watch();
      case 9:
        return serve();
      default:
        return misuse();
    }
  }

  void allocate() {
    Held held{.pool = below(store_.num_pools()), .stage = Stage::Mutable, .slots = {}};
    held.slots.resize(1 + below(10));
    if (below(3) == 0) return reserve(std::move(held));
    if (below(2) == 0) return evict(std::move(held));
    std::vector<BlockIdentity> evicted;
    if (store_.try_allocate(held.pool, held.slots, &evicted)) held_.push_back(std::move(held));
  }

  // Evicted blocks must match the order, and their reported tags must find them on another tier. Hands some back.
  void evict(Held held) {
    const std::size_t count = held.slots.size();
    if (store_.available(held.pool) < count) return;
    std::vector<BlockIdentity> expected;
    if (!store_.advised(held.pool)) expected = store_.next_evicted(held.pool, count);
    std::vector<BlockIdentity> blocks(count);
    std::vector<SlotId> slots(count);
    std::vector<std::uint32_t> tags(count);
    const std::size_t other = below(store_.num_pools());
    const std::size_t gone = store_.allocate(held.pool, held.slots, {blocks, slots, tags, other});
    const std::span<const BlockIdentity> reported = std::span(blocks).last(gone);
    if (!store_.advised(held.pool) &&
        !std::equal(expected.rbegin(), expected.rend(), reported.begin(), reported.end())) {
      fail("evicted blocks are not those that were reported");
    }
    std::vector<std::uint32_t> missing;
    std::vector<std::uint32_t> missing_too;
    std::vector<SlotId> there;
    std::vector<SlotId> there_too;
    std::vector<std::uint32_t> worked_out(gone);
    store_.locate(other, reported, std::span(tags).last(gone), true, missing, there);
    store_.locate(other, reported, worked_out, false, missing_too, there_too);
    if (missing != missing_too || there != there_too) fail("the tags of what was evicted do not find it");
    for (std::size_t i = 0; i < gone; ++i) {
      const SlotId slot = slots[count - gone + i];
      if (slot != kNoSlot && std::ranges::find(held.slots, slot) == held.slots.end()) fail("an evicted slot is lost");
    }
    const std::size_t kept = below(count + 1);
    store_.hand_back(held.pool, std::span(held.slots).subspan(kept));
    held.slots.resize(kept);
    if (kept > 0) held_.push_back(std::move(held));
  }

  // Rejected when there are too few slots, or a block is there, on its way, or repeated.
  void reserve(Held held) {
    TokenBlocks tokens = prompt(held.slots.size());
    std::vector<BlockIdentity> blocks(tokens.blocks().begin(), tokens.blocks().end());
    if (below(8) == 0) blocks.back() = blocks.front();
    const std::uint64_t available = store_.available(held.pool);
    try {
      store_.reserve(held.pool, blocks, held.slots);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::WrongState && error.kind() != ErrorKind::CapacityExhausted &&
          !(store_.emits_token_ids() && error.kind() == ErrorKind::InvalidArgument))  // no tier has their token ids
        throw;
      if (store_.available(held.pool) != available) fail("a refused reservation keeps slots");
      return;
    }
    if (locate(store_, held.pool, blocks).claimed != held.slots) fail("a reserved block is not where it was put");
    held.blocks = std::move(blocks);
    held.stage = Stage::Claimed;
    held_.push_back(std::move(held));
  }

  void fill() {
    Held* held = pick();
    if (held == nullptr || held->stage == Stage::Registered) return;
    if (held->stage == Stage::Claimed) return land(*held);
    TokenBlocks tokens = prompt(held->slots.size());
    if (held->stage == Stage::Staged) {
      if (below(4) == 0) {
        store_.unstage(held->pool, held->slots);
        held->stage = Stage::Mutable;
        return;
      }
      store_.register_staged(held->pool, held->slots, tokens.tokens());
    } else if (below(3) == 0) {
      store_.stage(held->pool, held->slots, tokens.blocks());
      held->stage = Stage::Staged;
      return;
    } else if (below(2) == 0) {
      return claim(*held, tokens);
    } else {
      store_.commit(held->pool, held->slots, tokens.blocks(), tokens.tokens());
      seen_.insert(seen_.end(), tokens.blocks().begin(), tokens.blocks().end());
      if (std::ssize(seen_) > kSeen) seen_.erase(seen_.begin(), seen_.end() - kSeen);
    }
    held->stage = Stage::Registered;
  }

  // Rejected, with nothing changed, when a block is there or on its way.
  void claim(Held& held, const TokenBlocks& tokens) {
    const std::string before = store_.dump();
    try {
      store_.claim(held.pool, held.slots, tokens.blocks(), tokens.tokens());
      held.blocks.assign(tokens.blocks().begin(), tokens.blocks().end());
      held.stage = Stage::Claimed;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::WrongState) throw;
      if (store_.dump() != before) fail("a refused claim changed the store");
      return;
    }
    const auto there = std::make_unique<bool[]>(tokens.num_blocks());
    store_.has_blocks(held.pool, tokens.blocks(), there.get());
    const Located located = locate(store_, held.pool, tokens.blocks());
    for (std::size_t i = 0; i < tokens.num_blocks(); ++i) {
      if (there[i] || located.found[i] != kNoSlot || located.claimed[i] != held.slots[i])
        fail("a claimed block is not where it was put");
    }
  }

  void land(Held& held) {
    store_.land(held.pool, held.slots);
    const auto there = std::make_unique<bool[]>(held.blocks.size());
    store_.has_blocks(held.pool, held.blocks, there.get());
    for (std::size_t i = 0; i < held.blocks.size(); ++i) {
      if (!there[i]) fail("a landed block is not there");
      // Under Allow, a copy of a block that was registered meanwhile is reset on release.
      if (store_.duplicates(held.pool) == DuplicatePolicy::Allow) continue;
      if (!store_.is_registered(held.pool, held.slots[i])) fail("a landed block is not registered");
    }
    std::swap(held, held_.back());
    held_.pop_back();
  }

  void match() {
    const std::size_t pool = below(store_.num_pools());
    const TokenBlocks tokens = prompt(1 + below(10));
    Held held{.pool = pool, .stage = Stage::Registered, .slots = std::vector<SlotId>(tokens.num_blocks())};
    switch (below(3)) {
      case 0:
        held.slots.resize(store_.match_prefix(pool, tokens.blocks(), held.slots.data()));
        break;
      case 1:
        store_.match_scattered(pool, tokens.blocks(), held.slots.data());
        break;
      default:
        store_.scan(pool, tokens.blocks(), held.slots.data(), below(2) == 0);
        break;
    }
    std::erase(held.slots, kNoSlot);
    if (held.slots.empty()) return;
    if (below(4) == 0) {
      store_.retain(pool, held.slots);
      held_.push_back(held);
    }
    held_.push_back(std::move(held));
  }

  void release() {
    Held* held = pick();
    if (held == nullptr) return;
    if (held->stage == Stage::Registered && below(8) == 0) {
      store_.set_reset_on_release(held->pool, held->slots, below(2) == 0);
    }
    store_.release(held->pool, held->slots, below(2) == 0);
    std::swap(*held, held_.back());
    held_.pop_back();
  }

  void watch() {
    const std::size_t pool = below(store_.num_pools());
    const TokenBlocks tokens = prompt(1 + below(10));
    check_guesses(pool, tokens.blocks());
    locate_many(pool);
    const auto there = std::make_unique<bool[]>(tokens.num_blocks());
    store_.has_blocks(pool, tokens.blocks(), there.get());
    const std::size_t length = store_.prefix_length(pool, tokens.blocks());
    if (!std::all_of(there.get(), there.get() + length, [](bool hit) { return hit; })) fail("a prefix with a hole");
    store_.touch(pool, tokens.blocks());
    if (!store_.advised(pool) && store_.eviction_order(pool, 8).size() > 8) fail("an eviction order past its limit");
    if (below(2) == 0) store_.drain_events(1 + below(100));
    if (below(32) == 0) store_.clear_inactive(pool);
  }

  // Locates more blocks than one batch, many of which are there, mostly the first ones.
  void locate_many(std::size_t pool) {
    std::vector<BlockIdentity> blocks(seen_.begin() + static_cast<std::ptrdiff_t>(below(seen_.size() + 1)),
                                      seen_.end());
    const TokenBlocks others = prompt(1 + below(30));
    blocks.insert(blocks.end(), others.blocks().begin(), others.blocks().end());
    (void)locate_each(store_, pool, blocks);
    std::ranges::shuffle(blocks, random_);
    (void)locate_each(store_, pool, blocks);
  }

  // Mixes right and wrong guesses.
  void check_guesses(std::size_t pool, std::span<const BlockIdentity> blocks) {
    std::vector<SlotId> guesses = locate_each(store_, pool, blocks).found;
    for (SlotId& slot : guesses) {
      if (below(4) == 0) slot = below(4) == 0 ? kNoSlot : static_cast<SlotId>(below(store_.num_blocks(pool) + 2));
    }
    check_prefix(store_, pool, blocks, std::move(guesses));
  }

  // Runs a request for a few steps and drops it in any state.
  void serve() {
    RequestKv request(shared_, below(store_.num_pools()), prompt(1 + below(6)), 1 + below(12), below(4) != 0);
    try {
      request.match_prefix();
      for (std::size_t steps = below(8); steps > 0 && !request.finished(); --steps) {
        if (request.computed_tokens() < request.prefill_target()) {
          prefill(request);
        } else {
          decode(request);
        }
      }
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::CapacityExhausted) throw;
    }
  }

  void prefill(RequestKv& request) {
    const std::size_t left = request.prefill_target() - request.computed_tokens();
    const std::size_t chunk = 1 + below(left);
    request.schedule_prefill(chunk);
    if (below(8) == 0) return request.revert();
    const bool sampled = chunk == left && request.generated_tokens() < request.max_output_tokens();
    request.apply_prefill(sampled ? std::optional<Token>(below(2)) : std::nullopt);
    if (below(8) == 0) request.preempt();
  }

  void decode(RequestKv& request) {
    if (below(2) == 0) {
      request.schedule_decode();
      request.apply_decode(Token(below(2)));
      return;
    }
    std::vector<Token> accepted(1 + below(request.schedule_speculative(1 + below(6))), 1);
    request.apply_speculative(accepted);
  }

  void misuse() {
    const std::size_t pool = below(store_.num_pools());
    check_refusal(store_, pool, below(3), prompt(1).blocks());
  }

  void finish() {
    while (!held_.empty()) release();
    store_.check();
    for (std::size_t pool = 0; pool < store_.num_pools(); ++pool) {
      if (store_.available(pool) != store_.num_blocks(pool)) fail("blocks are missing after everything was released");
      if (store_.metrics(pool).active_references != 0) fail("references are left after everything was released");
    }
  }

  Held* pick() { return held_.empty() ? nullptr : &held_[below(held_.size())]; }

  std::shared_ptr<BlockStore> shared_;
  BlockStore& store_;
  std::mt19937_64 random_;
  std::vector<Held> held_;
  std::vector<BlockIdentity> seen_;  // last registered blocks
};

int soak(std::size_t operations) {
  check_kept_memory();
  std::size_t stores = 0;
  for (const PolicyKind kind : {PolicyKind::Lineage, PolicyKind::LineageFifo, PolicyKind::Lru, PolicyKind::MultiLru,
                                PolicyKind::Fifo, PolicyKind::Vllm, PolicyKind::VllmAppend, PolicyKind::Advised}) {
    for (const DuplicatePolicy duplicates : {DuplicatePolicy::Allow, DuplicatePolicy::Reject, DuplicatePolicy::Keep}) {
      for (const bool quiet : {false, true}) Soak(kind, duplicates, quiet, ++stores).run(operations);
    }
  }
  std::printf("soak: %zu stores, %zu random operations each: consistent, and nothing is held\n", stores, operations);
  return 0;
}

}  // namespace
}  // namespace understudy

int main(int argc, char** argv) {
  std::size_t operations = 5'000;
  if (argc > 1) {
    const char* end = argv[1] + std::strlen(argv[1]);
    if (const auto parsed = std::from_chars(argv[1], end, operations); parsed.ec != std::errc() || parsed.ptr != end) {
      std::fprintf(stderr, "usage: %s [operations per store]\n", argv[0]);
      return 2;
    }
  }
  try {
    return understudy::soak(operations);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
