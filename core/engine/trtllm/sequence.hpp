// The KV cache of one request.
//
// Active: its pages are locked on the device. Suspended: they are held, and may be moved to lower levels. The first
// `committed` tokens are named in the tree, as far as nothing there prevented it; tokens before `history` are not
// written again; `capacity` tokens have pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/trtllm/page_store.hpp"
#include "engine/trtllm/tree.hpp"

namespace understudy {

// How prompts are kept for other requests.
struct TrtReuse {
  bool enabled = true;
  bool partial = true;
  bool minimal = false;  // only the ends of prompts, and the last block as a copy
  double max_util_for_resume = 0.95;
  bool swa_scratch = false;  // blocks that leave the window within a chunk have slots for one forward only
};

class TrtSequence {
 public:
  // Matches the tokens before `match_end` and holds what is found; 0: nothing is matched. `tokens` must outlive it.
  TrtSequence(TrtStore& store, TrtTree& tree, const TrtReuse& reuse, const TrtScope& scope, const TokenList& tokens,
              std::uint32_t match_end);
  ~TrtSequence() { close(); }
  TrtSequence(const TrtSequence&) = delete;
  TrtSequence& operator=(const TrtSequence&) = delete;

  bool active() const noexcept { return active_; }
  std::uint32_t capacity() const noexcept { return capacity_; }
  std::uint32_t history() const noexcept { return history_; }
  std::uint32_t committed() const noexcept { return committed_; }
  std::uint32_t num_blocks() const noexcept { return static_cast<std::uint32_t>(nodes_.size()); }
  const TrtPage* page(std::size_t block, std::size_t life_cycle) const { return entry(block, life_cycle).page; }

  // False: refused, nothing is locked.
  bool resume();
  void suspend();
  // False: out of pages, and the sequence is as before.
  bool resize(std::optional<std::uint32_t> capacity, std::optional<std::uint32_t> history = {});
  // Commits the tokens before `to`.
  void commit(std::uint32_t to);
  void stop_committing();
  // More capacity and history within blocks that are there.
  void count(std::uint32_t capacity, std::uint32_t history) noexcept {
    capacity_ = capacity;
    history_ = history;
  }
  void stop_scratch() noexcept { scratch_enabled_ = false; }
  void close();
  void check() const;

 private:
  enum class Commit : std::uint8_t { Allowed, Prevented, Stopped };
  struct Entry {
    TrtPage* page = nullptr;
    bool locked = false;
  };
  struct Place {
    std::uint32_t block;
    std::uint32_t life_cycle;
    TrtPage* page;
  };
  struct Range {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    std::uint32_t size() const noexcept { return end > begin ? end - begin : 0; }
    bool contains(std::uint32_t at) const noexcept { return at >= begin && at < end; }
  };

  Entry& entry(std::size_t block, std::size_t life_cycle) { return entries_[block * num_life_cycles_ + life_cycle]; }
  const Entry& entry(std::size_t block, std::size_t life_cycle) const {
    return entries_[block * num_life_cycles_ + life_cycle];
  }
  std::uint32_t blocks_of(std::uint32_t tokens) const noexcept { return (tokens + block_size_ - 1) / block_size_; }
  std::uint32_t stale_end(std::size_t life_cycle, std::uint32_t history) const {
    return store_.layout().life_cycles[life_cycle].stale_end(history, block_size_);
  }
  bool is_stale(std::size_t life_cycle, std::uint32_t block) const { return block < stale_end(life_cycle, history_); }
  Range scratch_range(std::size_t life_cycle, std::uint32_t capacity, std::uint32_t history) const;
  std::uint32_t scratch_slots(std::size_t life_cycle, Range range) const;
  std::vector<Place> active_places() const;

  bool set_without_effect(std::uint32_t capacity, std::uint32_t history);
  std::vector<Place> unlock_stale(std::uint32_t history);
  void lock_again(const std::vector<Place>& places);
  bool grow(std::uint32_t blocks, std::uint32_t capacity, std::uint32_t history);
  void add_blocks(std::uint32_t blocks, std::uint32_t capacity, std::uint32_t history, TrtStore::Slots& slots);
  bool take_for_resume(std::vector<std::optional<std::uint32_t>>& copies, bool has_part);
  void copy_part(const std::vector<std::optional<std::uint32_t>>& copies);
  void put_locked(std::uint32_t block, std::size_t life_cycle, std::uint32_t slot);
  void drop_entry(std::uint32_t block, std::size_t life_cycle);
  void drop_last_block();
  void free_scratch();

  void commit_block(std::uint32_t block, bool is_last);
  bool add_block_pages(std::uint32_t block, TrtNode& node);
  void rebase(std::uint32_t block, TrtNode& node, std::uint32_t tokens);
  void snapshot_part(std::uint32_t block);
  bool copy_to_node(TrtNode& node, const TrtPage& from, std::uint32_t tokens);
  TrtNode* parent_of(std::uint32_t block);
  void set_node(std::uint32_t block, TrtNode* node);
  void end_commits();

  TrtStore& store_;
  TrtTree& tree_;
  TrtReuse reuse_;
  TrtScope scope_;
  const TokenList& tokens_;
  std::uint32_t block_size_;
  std::size_t num_life_cycles_;
  bool active_ = false;
  bool was_resumed_ = false;
  bool closed_ = false;
  bool scratch_enabled_;
  Commit commit_ = Commit::Allowed;
  std::uint32_t capacity_ = 0;
  std::uint32_t history_ = 0;
  std::uint32_t committed_ = 0;
  std::uint32_t committed_blocks_ = 0;
  std::vector<Entry> entries_;                       // by block and life cycle
  std::vector<TrtNode*> nodes_;                      // by block: its block of the tree; null: not committed
  std::vector<std::vector<std::uint32_t>> scratch_;  // slots by life cycle
};

}  // namespace understudy
