// SGLang's host tier (HiCache): a pool of host memory below the radix tree, with copies both ways.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/sglang/radix_tree.hpp"

namespace understudy {

enum class HostWritePolicy : std::uint8_t { WriteThrough, Selective, WriteBack };

struct HostSettings {
  HostWritePolicy policy = HostWritePolicy::WriteThrough;
  double ratio = 2.0;        // host tokens per device token
  std::uint64_t tokens = 0;  // size of the host pool; 0: by ratio
  std::uint32_t load_back_threshold = 10;
};

// The backup of a node; later splits of the node belong to it too.
struct HostWrite {
  std::vector<RadixNode*> parts;  // from the root down
  std::uint32_t tokens = 0;
};

// Nodes that are loaded for one request.
struct HostLoad {
  std::vector<RadixNode*> nodes;  // from the root down; the last one is locked on both tiers
  std::uint32_t tokens = 0;
  std::uint32_t host_locked = 1;  // the last nodes that share the host lock: more than one after a split
};

// Tokens copied and evicted since the tier was made.
struct HostTotals {
  std::uint64_t stored = 0;
  std::uint64_t evicted = 0;
  std::uint64_t loaded = 0;
  std::uint64_t loads = 0;           // one per admission that loads
  std::uint64_t refused_writes = 0;  // copies for which the host had no room
  std::uint64_t dropped = 0;         // evicted from the device without a copy on the host
};

// Decides when copies are ready. Times are steps of a recording, or nanoseconds.
class HostTransfers {
 public:
  virtual ~HostTransfers() = default;
  // When a copy is ready that is submitted now; at least `earliest`.
  virtual std::int64_t write_ready(std::uint64_t tokens, std::int64_t earliest) = 0;
  virtual std::int64_t load_ready(std::uint64_t tokens) = 0;
  virtual void wait_for_write(std::uint64_t tokens) = 0;  // a copy that the scheduler waits for
  virtual std::int64_t now() const = 0;
};

class HostCache final : private RadixWatcher {
 public:
  HostCache(const HostSettings& settings, std::uint32_t page_size, std::uint64_t device_tokens, RadixTree& tree,
            RadixTree::OnChange on_change, HostTransfers& transfers);

  // Finishes copies that are ready, after submitting queued ones.
  void poll();
  void submit_writes();
  void submit_loads();
  // Evicts device leaves until `avail` reaches `tokens` or none is left.
  void make_room(std::int64_t& avail, std::int64_t tokens);
  // Loads the nodes on the host only that end with `last` and takes their tokens from `avail`. False: refused.
  bool load_back(RadixNode* last, std::int64_t& avail);

  std::int64_t avail() const noexcept { return avail_; }
  std::size_t writing() const noexcept { return num_writes_; }
  std::size_t loading() const noexcept { return num_loads_; }
  bool is_idle() const noexcept { return num_writes_ == 0 && num_loads_ == 0; }
  std::uint64_t tokens() const noexcept { return capacity_; }
  const HostTotals& totals() const noexcept { return totals_; }
  // When the next copy in flight is ready; nothing: none is.
  std::optional<std::int64_t> next_ready() const noexcept {
    if (writes_.empty() && loads_.empty()) return std::nullopt;
    if (writes_.empty()) return loads_.front().ready;
    return loads_.empty() ? writes_.front().ready : std::min(writes_.front().ready, loads_.front().ready);
  }
  // When the last submitted copy is ready; 0: none is in flight.
  std::int64_t last_ready() const noexcept {
    return std::max(writes_.empty() ? 0 : writes_.back().ready, loads_.empty() ? 0 : loads_.back().ready);
  }
  // Tokens of each transfer submitted since the last call.
  std::vector<std::uint64_t> take_writes() { return std::exchange(submitted_writes_, {}); }
  std::vector<std::uint64_t> take_loads() { return std::exchange(submitted_loads_, {}); }
  void check() const;  // InvariantViolated

 private:
  template <typename Copy>
  struct Transfer {
    std::int64_t ready = 0;
    std::vector<std::unique_ptr<Copy>> copies;
  };

  void on_split(RadixNode& upper, RadixNode& lower) override;
  bool counts_hits() const override { return !writes_back(); }
  void on_hit(RadixNode& node) override;
  void on_restored(RadixNode& node) override { list_duplicate(node); }
  void on_removed(RadixNode& node) override;

  bool writes_back() const noexcept { return settings_.policy == HostWritePolicy::WriteBack; }
  bool reserve(std::uint32_t tokens);  // takes host memory; false: refused
  bool backup(RadixNode& node);
  bool write_back(RadixNode& node);
  std::int64_t evict_leaf(RadixNode& node);
  std::uint32_t drop_with_descendants(RadixNode& node);
  std::int64_t evict_host(std::int64_t tokens);
  std::int64_t evict_duplicates(std::int64_t tokens, bool leaves);
  void finish_write(const HostWrite& write);
  void finish_load(const HostLoad& load);
  void list_duplicate(RadixNode& node);
  void unlist(RadixNode& node);

  const HostSettings settings_;
  RadixTree& tree_;
  RadixTree::OnChange on_change_;
  HostTransfers& transfers_;
  const std::uint64_t capacity_;
  std::int64_t avail_;
  HostTotals totals_;
  std::vector<std::unique_ptr<HostWrite>> queued_writes_;
  std::vector<std::unique_ptr<HostLoad>> queued_loads_;
  std::deque<Transfer<HostWrite>> writes_;
  std::deque<Transfer<HostLoad>> loads_;
  std::size_t num_writes_ = 0;
  std::size_t num_loads_ = 0;
  std::vector<std::uint64_t> submitted_writes_;
  std::vector<std::uint64_t> submitted_loads_;
  // With write_back: nodes whose host copy may go because the device has one too, by place.
  std::map<std::uint64_t, RadixNode*> duplicates_;
  std::uint64_t places_ = 0;
};

}  // namespace understudy
