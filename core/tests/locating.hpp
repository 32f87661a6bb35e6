// Compares the ways of finding blocks in a store.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "store/block_store.hpp"
#include "tests/fail.hpp"

namespace understudy {

struct Located {
  std::vector<SlotId> found;
  std::vector<SlotId> claimed;
  bool operator==(const Located&) const = default;
};
inline Located locate(const BlockStore& store, std::size_t pool, std::span<const BlockIdentity> blocks) {
  Located out{std::vector<SlotId>(blocks.size()), std::vector<SlotId>(blocks.size())};
  std::vector<std::uint32_t> tags(blocks.size());
  store.compute_tags(blocks, tags);
  store.locate(pool, blocks, tags, out.found.data(), out.claimed.data());
  return out;
}

// Locating many blocks, with neighbour guesses, must agree with locating each alone.
inline Located locate_each(const BlockStore& store, std::size_t pool, std::span<const BlockIdentity> blocks) {
  Located out;
  for (const BlockIdentity& block : blocks) {
    const Located one = locate(store, pool, {&block, 1});
    out.found.push_back(one.found[0]);
    out.claimed.push_back(one.claimed[0]);
  }
  if (locate(store, pool, blocks) != out) fail("blocks are not located together as each of them is");

  const auto nowhere = [&](std::size_t i) { return out.found[i] == kNoSlot && out.claimed[i] == kNoSlot; };
  std::vector<std::uint32_t> expected;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (nowhere(i)) expected.push_back(static_cast<std::uint32_t>(i));
  }
  std::vector<SlotId> there = out.found;
  std::erase(there, kNoSlot);
  std::vector<std::uint32_t> tags(blocks.size());
  std::vector<std::uint32_t> missing;
  std::vector<SlotId> held;
  store.locate(pool, blocks, tags, false, missing, held);
  if (missing != expected || held != there) fail("missing blocks are reported wrong");
  std::vector<std::uint32_t> all_tags(blocks.size());
  store.compute_tags(blocks, all_tags);
  for (const std::uint32_t i : missing) {
    if (tags[i] != all_tags[i]) fail("the tag of a missing block was not computed");
  }

  Located run{std::vector<SlotId>(blocks.size()), std::vector<SlotId>(blocks.size())};
  const std::size_t length = store.locate_run(pool, blocks, run.found.data(), run.claimed.data());
  if (length != (expected.empty() ? blocks.size() : expected.front() + 1)) fail("a run ends elsewhere");
  if (!std::equal(out.found.begin(), out.found.begin() + length, run.found.begin()) ||
      !std::equal(out.claimed.begin(), out.claimed.begin() + length, run.claimed.begin())) {
    fail("a run is not where its blocks are");
  }
  return out;
}

// Guesses must not change the result.
inline void check_prefix(const BlockStore& store, std::size_t pool, std::span<const BlockIdentity> blocks,
                         std::vector<SlotId> guesses) {
  const std::vector<SlotId> found = locate(store, pool, blocks).found;
  std::vector<SlotId> unguessed(blocks.size(), kNoSlot);
  std::size_t unreferenced = 0;
  std::size_t unreferenced_too = 0;
  const std::size_t length = store.peek_prefix(pool, blocks, unguessed.data(), &unreferenced);
  const std::size_t length_too = store.peek_prefix(pool, blocks, guesses.data(), &unreferenced_too);
  guesses.resize(length_too);
  unguessed.resize(length);
  if (guesses != unguessed || unreferenced != unreferenced_too) fail("a guess changes a prefix");
  if (!std::equal(unguessed.begin(), unguessed.end(), found.begin())) fail("a prefix is not where its blocks are");
  if (length < blocks.size() && found[length] != kNoSlot) fail("a prefix ends before a block that is there");
}

}  // namespace understudy
