// Prompts under way, as a tree: which worker has which leading blocks, and how many in all.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace understudy {

// A node is a stretch of blocks that the same prompts share; prompts part where it ends. So a prompt costs a few nodes
// and a comparison of memory, not a step for every block. What a worker holds of a node it holds whole.
class LivePrompts {
 public:
  using Node = std::uint32_t;  // 0: of a prompt without blocks

  explicit LivePrompts(std::size_t workers) : nodes_(1), blocks_(workers, 0) {}
  void add_worker() { blocks_.push_back(0); }

  // One more prompt of the worker, until `leave` with what this returns.
  Node enter(std::span<const std::uint64_t> prompt, std::uint32_t worker);
  void leave(Node last, std::uint32_t worker);

  // Leading blocks of a prompt that are among each worker's.
  void match(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const;
  std::uint64_t blocks(std::size_t worker) const { return blocks_[worker]; }  // distinct ones

 private:
  struct Holder {
    std::uint32_t worker;
    std::uint32_t prompts;  // of it that come through here
    bool operator==(const Holder&) const = default;
  };
  struct Stretch {
    Node parent = 0;
    std::uint32_t children = 0;  // how many, and all their numbers xored: of one, its number
    Node child = 0;
    std::vector<std::uint64_t> blocks;
    std::vector<Holder> holders;  // by worker
  };
  struct Key {
    Node parent;
    std::uint64_t first;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
      return static_cast<std::size_t>((key.first ^ key.parent) * 0x9E3779B97F4A7C15u);
    }
  };

  Node child(Node parent, std::uint64_t first) const;
  Node make(Node parent, std::span<const std::uint64_t> blocks);
  Node split(Node node, std::size_t at);
  void link(Node node);
  void unlink(Node node);
  void forget(Node node);
  void merge(Node node);
  void hold(Node node, std::uint32_t worker);

  std::vector<Stretch> nodes_;  // the first is the root
  std::vector<Node> free_;
  std::unordered_map<Key, Node, KeyHash> children_;
  std::vector<std::uint64_t> blocks_;  // by worker
};

}  // namespace understudy
