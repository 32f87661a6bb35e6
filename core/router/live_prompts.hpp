// Tree of the prompts in progress: which worker has which leading blocks, and how many in total.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace understudy {

// A node is a run of blocks that the same prompts share; prompts diverge where it ends. So a prompt costs a few nodes
// and a memory comparison, not a step per block. A worker holds a node whole or not at all.
class LivePrompts {
 public:
  using Node = std::uint32_t;  // 0: a prompt without blocks

  LivePrompts() : nodes_(1) {}
  void add_worker() { blocks_.push_back(0); }

  // Adds a prompt of the worker, until `leave` with the returned node.
  Node enter(std::span<const std::uint64_t> prompt, std::uint32_t worker);
  void leave(Node last, std::uint32_t worker);

  // Leading blocks of a prompt that are among the blocks of each worker.
  void match(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const;
  std::uint64_t blocks(std::size_t worker) const { return blocks_[worker]; }  // distinct ones

 private:
  struct Holder {
    std::uint32_t worker;
    std::uint32_t prompts;  // prompts of the worker through this node
    bool operator==(const Holder&) const = default;
  };
  struct Stretch {
    Node parent = 0;
    std::uint32_t children = 0;  // number of children, and the xor of their ids: with one child, its id
    Node child = 0;
    std::vector<std::uint64_t> blocks;
    std::vector<Holder> holders;  // sorted by worker
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

  std::vector<Stretch> nodes_;  // node 0 is the root
  std::vector<Node> free_;
  std::unordered_map<Key, Node, KeyHash> children_;
  std::vector<std::uint64_t> blocks_;  // by worker
};

}  // namespace understudy
