// Pages of the KV cache of TensorRT-LLM's cache manager V2, and blocks of its tree.
//
// A page has one block of one life cycle (a group of layers with the same window). It is locked by running requests,
// held by suspended ones, or droppable. One that may be moved down or dropped is in the eviction list of its level.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tokens/identities.hpp"
#include "tokens/token_list.hpp"

namespace understudy {

struct TrtNode;

struct TrtPage {
  TrtNode* node = nullptr;  // block of the tree whose page it is; null: none
  TrtPage* before = nullptr;
  TrtPage* behind = nullptr;
  std::uint32_t slot = 0;
  std::uint32_t covered = 0;  // leading tokens of its block that it has, once committed
  std::uint32_t holds = 0;
  std::uint32_t locks = 0;
  std::uint8_t life_cycle = 0;
  std::uint8_t level = 0;
  bool committed = false;
  bool listed = false;

  bool droppable() const noexcept { return holds + locks == 0; }
  bool held() const noexcept { return holds > 0 && locks == 0; }
};

// Pages in the order in which they are evicted.
class TrtPageList {
 public:
  std::size_t size() const noexcept { return size_; }
  TrtPage* front() const noexcept { return first_; }
  void push_back(TrtPage& page) noexcept {
    page.before = last_;
    page.behind = nullptr;
    (last_ == nullptr ? first_ : last_->behind) = &page;
    last_ = &page;
    page.listed = true;
    ++size_;
  }
  void remove(TrtPage& page) noexcept {
    (page.before == nullptr ? first_ : page.before->behind) = page.behind;
    (page.behind == nullptr ? last_ : page.behind->before) = page.before;
    page.listed = false;
    --size_;
  }

 private:
  TrtPage* first_ = nullptr;
  TrtPage* last_ = nullptr;
  std::size_t size_ = 0;
};

// What separates requests whose equal tokens have different KV.
struct TrtScope {
  std::uint32_t adapter = 0;
  bool has_salt = false;
  std::uint64_t salt = 0;

  bool operator==(const TrtScope&) const = default;
};

// A block of the tree, or a root. Removed from the tree, it lives as long as a request refers to it.
struct TrtNode {
  static constexpr std::size_t kMostLifeCycles = 8;

  TrtNode* parent = nullptr;  // null: a root, or removed
  bool is_root = false;
  std::uint64_t key = 0;   // hash of its scope and of all tokens up to its end
  std::uint64_t hash = 0;  // as events name it
  std::uint32_t refs = 0;
  std::uint32_t depth = 0;  // blocks before it
  std::uint32_t num_children = 0;
  std::uint32_t short_children = 0;  // those of fewer tokens than a block
  TrtNode* first_child = nullptr;    // in the order in which they were inserted
  TrtNode* last_child = nullptr;
  TrtNode* before = nullptr;
  TrtNode* behind = nullptr;
  TokenList tokens;
  TrtScope scope;      // of a root
  BlockIdentity name;  // for KV events of the run, if it is named
  bool is_named = false;
  std::array<TrtPage*, kMostLifeCycles> pages{};

  bool removed() const noexcept { return parent == nullptr && !is_root; }
  std::uint32_t covered(std::size_t life_cycle) const noexcept {
    return pages[life_cycle] == nullptr ? 0 : pages[life_cycle]->covered;
  }
};

}  // namespace understudy
