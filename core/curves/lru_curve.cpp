#include "curves/lru_curve.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace understudy {

namespace {

constexpr std::uint32_t kNoPlace = 0xFFFFFFFFu;

// Marked places in the order of use: a bit each, with sums of 64 in a Fenwick tree.
class Places {
 public:
  explicit Places(std::uint64_t places) : marks_(places / 64 + 1), sums_(places / 64 + 1) {}

  std::uint64_t marked() const noexcept { return marked_; }
  std::uint64_t next() const noexcept { return next_; }

  // Marks the next `count` places.
  void mark(std::uint64_t count) noexcept {
    marked_ += count;
    while (count > 0) {
      const unsigned from = next_ % 64;
      const std::uint64_t bits = std::min<std::uint64_t>(64 - from, count);
      marks_[next_ / 64] |= (bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1) << from;
      add(next_ / 64, static_cast<std::int64_t>(bits));
      next_ += bits;
      count -= bits;
    }
  }
  // Unmarks a place; `flush` must follow before `marked_before`.
  void unmark(std::uint64_t place) noexcept {
    const std::uint64_t word = place / 64;
    if (word != changed_) flush();
    changed_ = word;
    marks_[word] &= ~(std::uint64_t{1} << (place % 64));
    ++unmarked_;
    --marked_;
  }
  void flush() noexcept {
    if (unmarked_ > 0) add(changed_, -std::exchange(unmarked_, 0));
    summed_ = kNone;
  }
  // Blocks of a run lie in neighbouring places, so the sum up to the last word is kept.
  std::uint64_t marked_before(std::uint64_t place) noexcept {
    const std::uint64_t word = place / 64;
    if (word != summed_) {
      summed_ = word;
      sum_ = 0;
      for (std::uint64_t at = word; at > 0; at &= at - 1) sum_ += sums_[at - 1];
    }
    const std::uint64_t below = (std::uint64_t{1} << (place % 64)) - 1;
    return static_cast<std::uint64_t>(sum_ + std::popcount(marks_[word] & below));
  }

 private:
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  void add(std::uint64_t word, std::int64_t change) noexcept {
    for (++word; word <= sums_.size(); word += word & (~word + 1)) sums_[word - 1] += change;
  }

  std::vector<std::uint64_t> marks_;
  std::vector<std::int64_t> sums_;
  std::uint64_t next_ = 0;
  std::uint64_t marked_ = 0;
  std::uint64_t changed_ = kNone;
  std::int64_t unmarked_ = 0;
  std::uint64_t summed_ = kNone;
  std::int64_t sum_ = 0;
};

// Serves `rows`; calls see(order, row, index, block, depth) for each readable block, with kNoPlace for an unknown one.
template <typename See>
std::uint64_t serve(const BlockVisits& visits, std::span<const std::int64_t> rows, See see) {
  Places places(visits.visits_of(rows));
  std::vector<std::uint32_t> place_of(visits.distinct(), kNoPlace);  // of the youngest copy
  for (std::size_t order = 0; order < rows.size(); ++order) {
    const auto row = static_cast<std::size_t>(rows[order]);
    const std::span<const std::uint32_t> blocks = visits.blocks_of(row);
    const std::size_t readable = visits.readable(row);
    places.flush();
    for (std::size_t i = 0; i < readable; ++i) {
      const std::uint32_t place = place_of[blocks[i]];
      see(order, row, i, blocks[i],
          place == kNoPlace ? std::uint64_t{kNoPlace} : places.marked() - places.marked_before(place));
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      std::uint32_t& place = place_of[blocks[i]];
      // A block that was computed although it was cached (the last of a prompt) leaves its older copy in place.
      if (place != kNoPlace && i < readable) places.unmark(place);
      place = static_cast<std::uint32_t>(places.next() + blocks.size() - 1 - i);
    }
    places.flush();
    places.mark(blocks.size());
  }
  return places.marked();
}

}  // namespace

LruCurve lru_curve(const BlockVisits& visits, std::span<const std::int64_t> rows, std::size_t warm_up) {
  LruCurve curve;
  curve.hit_tokens.assign(1, 0);
  const auto see = [&](std::size_t order, std::size_t row, std::size_t i, std::uint32_t, std::uint64_t depth) {
    if (depth == kNoPlace || order < warm_up) return;
    if (depth >= curve.hit_tokens.size()) curve.hit_tokens.resize(std::max(depth + 1, depth * 3 / 2));
    curve.hit_tokens[depth] += static_cast<std::int64_t>(visits.tokens_in(row, i + 1) - visits.tokens_in(row, i));
  };
  curve.distinct_blocks = static_cast<std::int64_t>(serve(visits, rows, see));
  while (curve.hit_tokens.size() > 1 && curve.hit_tokens.back() == 0) curve.hit_tokens.pop_back();
  std::int64_t sum = 0;
  for (std::int64_t& tokens : curve.hit_tokens) tokens = sum += tokens;
  return curve;
}

std::vector<std::uint32_t> lru_recomputed(const BlockVisits& visits, std::span<const std::int64_t> rows,
                                          std::uint64_t size) {
  std::vector<std::uint32_t> count(visits.distinct());
  serve(visits, rows, [&](std::size_t, std::size_t, std::size_t, std::uint32_t block, std::uint64_t depth) {
    count[block] += depth != kNoPlace && depth > size;
  });
  return count;
}

}  // namespace understudy
