#include "store/reuse_stack.hpp"

#include <algorithm>
#include <bit>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

void ReuseStack::serve(std::span<const BlockIdentity> identities, std::size_t readable, std::size_t held) {
  if (readable > identities.size() || identities.size() > held) {
    throw Error(ErrorKind::InvalidArgument, "readable ", readable, ", known ", identities.size(), " and held ", held,
                " blocks must not decrease");
  }
  make_room(held);
  for (const BlockIdentity& block : identities.first(readable)) {
    const auto found = place_of_.find(block.sequence_hash());
    if (found == place_of_.end()) break;  // the following blocks were never there without it
    depths_.push_back(static_cast<std::uint32_t>(live_ - marked_before(found->second)));
  }
  for (std::size_t left = held; left > 0; --left) {
    const std::size_t index = left - 1;
    const std::uint64_t place = next_place_++;
    if (index < identities.size()) {
      const auto [entry, fresh] = place_of_.try_emplace(identities[index].sequence_hash(), place);
      // A block that had to be computed although it was there (the last of a prompt) leaves its older copy in place.
      if (!fresh && index < readable) unmark(entry->second);
      entry->second = place;
    }
    mark(place);
  }
}

void ReuseStack::mark(std::uint64_t place) {
  marks_[place / 64] |= std::uint64_t{1} << (place % 64);
  add(place / 64, 1);
  ++live_;
}

void ReuseStack::unmark(std::uint64_t place) {
  UNDERSTUDY_ASSERT((marks_[place / 64] >> (place % 64) & 1) != 0 && live_ > 0, "unmarks a free place");
  marks_[place / 64] &= ~(std::uint64_t{1} << (place % 64));
  add(place / 64, -1);
  --live_;
}

std::size_t ReuseStack::marked_before(std::uint64_t place) const {
  const std::uint64_t below = (std::uint64_t{1} << (place % 64)) - 1;
  std::int64_t count = std::popcount(marks_[place / 64] & below);
  for (std::uint64_t word = place / 64; word > 0; word &= word - 1) count += sums_[word - 1];
  return static_cast<std::size_t>(count);
}

void ReuseStack::add(std::uint64_t word, std::int64_t change) {
  for (++word; word <= sums_.size(); word += word & (~word + 1)) sums_[word - 1] += change;
}

// Compacts the marked places, in their order, when places run out.
void ReuseStack::make_room(std::size_t places) {
  if (next_place_ + places <= marks_.size() * 64) return;
  for (auto& [hash, place] : place_of_) place = marked_before(place);
  const std::size_t words = std::bit_ceil(std::max<std::size_t>(2 * (live_ + places), 4'096)) / 64;
  marks_.assign(words, 0);
  sums_.assign(words, 0);
  next_place_ = live_;
  live_ = 0;
  for (std::uint64_t place = 0; place < next_place_; ++place) mark(place);
}

}  // namespace understudy
