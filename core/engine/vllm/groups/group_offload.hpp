// The scheduler's side of vLLM's native host offload with several cache groups.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "engine/vllm/groups/block_groups.hpp"
#include "engine/vllm/offload_connector.hpp"

namespace understudy {

// A chunk has blocks of one group, and its key has the group. A load needs chunks of all groups that are cached: the
// leading ones of full attention, and of a window those that it covers. Windows store what other requests can reach,
// and state groups the states that get a key on the device. If a state can end inside a block, so can a load: the last
// chunks of all groups (tails) then end there.
class GroupOffload final : public OffloadConnector {
 public:
  GroupOffload(const VllmOffload& config, BlockGroups& backend, std::uint64_t num_device_blocks, BlockStore& store);

  void came(const KvRequest& request) override;
  std::optional<std::uint32_t> look_up(KvRequest& request, std::uint32_t local, std::int64_t now_ns) override;
  bool can_load(const KvRequest& request, std::uint32_t local, std::uint32_t tokens) override;
  void begin_load(const KvRequest& request, std::uint32_t local, std::uint32_t tokens) override;
  void preempted(const KvRequest& request) override;
  void scheduled(KvRequest& request, std::uint32_t after, bool admitted, bool resumed) override;
  void ended(KvRequest& request, std::uint32_t computed, bool aborted, std::int64_t now_ns) override;

 private:
  struct Group {
    std::uint32_t block = 0;              // tokens
    std::uint32_t chunk = 0;              // tokens
    std::optional<std::uint32_t> window;  // chunks; none: full attention
  };
  struct Held {
    std::vector<SlotId> blocks;  // as reported by schedules; kNoSlot: null, or handed out again
    std::size_t reported = 0;    // of them before the current schedule
    std::uint32_t next_stored = 0;
    std::vector<ChunkMemo> memos;                   // by chunk
    std::map<std::uint32_t, ChunkMemo> tail_memos;  // by end, inside a chunk
  };
  struct State {
    std::vector<Held> groups;
    std::uint64_t updated_in = 0;  // schedule
    std::uint32_t junction = 0;    // tokens
  };
  struct Chunk {
    std::size_t group;
    std::uint32_t end;  // tokens
  };

  void before_flushes() override;
  void before_stores() override;
  void store_offer(const Offer& offer) override;
  void store_ended(std::uint32_t index) override;
  void end_on_host(std::uint32_t index) override;

  State& state_of(const KvRequest& request) { return states_[seats_[request.slot].tracked]; }
  void name_all(KvRequest& request) const;
  static BlockIdentity key(BlockIdentity last, std::size_t group);
  const BlockIdentity& last(std::span<const BlockIdentity> names, Chunk chunk) const {
    return names[chunk.end / layout_.hash_block - 1];
  }
  Chunk chunk_at(std::size_t g, std::uint32_t index) const { return {g, (index + 1) * groups_[g].chunk}; }
  std::uint32_t index_of(Chunk chunk) const { return ceil_div(chunk.end, groups_[chunk.group].chunk) - 1; }
  ChunkMemo& memo(State& state, Chunk chunk) const;
  VllmHost::Found find(State& state, std::span<const BlockIdentity> names, Chunk chunk);
  // Chunks that a load up to `tokens` tokens needs of a window.
  std::uint32_t load_window(std::size_t g, std::uint32_t tokens) const;
  std::optional<std::uint32_t> scan(State& state, const KvRequest& request, std::uint32_t local);
  std::optional<std::uint32_t> find_run(State& state, std::span<const BlockIdentity> names, std::size_t g,
                                        std::uint32_t first, std::uint32_t end);
  std::optional<std::uint32_t> find_window(State& state, std::span<const BlockIdentity> names, std::size_t g,
                                           std::uint32_t first, std::uint32_t end, std::uint32_t bound);
  bool is_loading(State& state, std::span<const BlockIdentity> names, std::uint32_t local, std::uint32_t total);

  // group_tails.cpp
  // The load with a tail behind `hit` tokens behind the local ones, if there is one.
  std::optional<std::uint32_t> scan_tails(State& state, const KvRequest& request, std::uint32_t local,
                                          std::uint32_t hit);
  void store_states(std::vector<BlockGroups::KeptState> states);
  void store_tail(std::span<const BlockGroups::KeptState> states);
  // Store the chunks of these groups that end with a state, from one block each.
  void store_end(const BlockGroups::KeptState& state, std::span<const std::size_t> groups,
                 std::span<const SlotId> blocks);

  // Offer chosen_ to the host; returns a job, yet without its blocks, for those that are absent there, if any.
  OffloadJob* offer(std::uint32_t index, bool& room);
  void log_store(const OffloadJob& job);

  void report_allocated(std::span<const SlotId> table);
  void drop_reused();

  std::uint32_t num_storable(const Held& held, std::size_t g, std::uint32_t tokens) const;
  void advance(State& state, std::uint32_t tokens);
  void store(std::uint32_t index, std::span<const BlockIdentity> names, std::uint32_t known, std::uint32_t after,
             std::uint32_t prompt, bool finished);
  // Append the chunks of a group that are worth storing; returns the end of those that were considered.
  std::uint32_t choose(const State& state, std::size_t g, std::uint32_t tokens, std::uint32_t prompt, bool finished);
  // Whether a load can reach each block of [first, end); empty: all. `horizon`: blocks where the request may end.
  std::vector<bool> reachable(const State& state, std::size_t g, std::uint32_t first, std::uint32_t end,
                              std::optional<std::uint32_t> horizon, std::uint32_t prompt) const;
  // Prepare keys, memos and positions of chosen_, for a call of the host.
  void gather(State& state, std::span<const BlockIdentity> names);
  void clear_gathered();
  void gather_one(State& state, Chunk chunk, const BlockIdentity& last);
  // Write memos back.
  void scatter(State& state);
  ChunkUser user(Tracked& tracked) { return {tracked.user, 0, positions_.data()}; }

  BlockGroups& backend_;
  const GroupLayout& layout_;
  std::vector<Group> groups_;
  std::vector<std::size_t> offloaded_;  // groups: those that are cached
  std::vector<std::size_t> stored_;     // of them: those whose chunks are stored by position
  std::vector<std::size_t> full_;       // groups
  std::vector<std::size_t> windows_;    // the widest first; a state is a window of one chunk
  std::uint32_t alignment_ = 0;         // tokens: loads end at multiples of it; 0: anywhere
  std::uint32_t state_chunk_ = 0;       // tokens; 0: no states
  bool has_tails_ = false;
  std::vector<State> states_;  // by index of tracked_

  // Scratch.
  std::vector<Chunk> chosen_;
  std::vector<BlockIdentity> chosen_keys_;
  std::vector<ChunkMemo> chosen_memos_;
  std::vector<std::uint64_t> positions_;
};

}  // namespace understudy
