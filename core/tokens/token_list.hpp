// Tokens as runs of consecutive values: a block of a trace is one run, and so is a request's output.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tokens/xxh3.hpp"

namespace understudy {

struct TokenSpan {
  std::uint64_t first = 0;  // the tokens are first, first + 1, …
  std::uint32_t count = 0;

  std::uint64_t end() const noexcept { return first + count; }
};

// A sequence of tokens; runs that continue each other are joined, so that equal tokens have equal runs.
class TokenList {
 public:
  std::uint32_t size() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
  std::size_t num_runs() const noexcept { return runs_.size(); }

  void append(TokenSpan run) {
    if (run.count == 0) return;
    const std::uint32_t end = size() + run.count;
    if (!runs_.empty() && runs_.back().end() == run.first) {
      runs_.back().count += run.count;
      ends_.back() = end;
    } else {
      runs_.push_back(run);
      ends_.push_back(end);
    }
  }
  void append_from(const TokenList& other, std::uint32_t from, std::uint32_t to) {
    other.each(from, to, [this](TokenSpan run) { append(run); });
  }
  TokenList slice(std::uint32_t from, std::uint32_t to) const {
    TokenList out;
    out.append_from(*this, from, to);
    return out;
  }
  std::uint64_t at(std::uint32_t position) const {
    const std::size_t run = run_at(position);
    return runs_[run].first + (position - begin_of(run));
  }
  // Calls `visit` with the runs of [from, to).
  template <typename Visit>
  void each(std::uint32_t from, std::uint32_t to, Visit visit) const {
    if (from >= to) return;
    for (std::size_t run = run_at(from); from < to; ++run) {
      const std::uint32_t stop = std::min(ends_[run], to);
      visit(TokenSpan{runs_[run].first + (from - begin_of(run)), stop - from});
      from = stop;
    }
  }
  // Equal tokens of this list from `from` on and of all of `other`, at most `limit`. Cost: O(runs).
  std::uint32_t common(std::uint32_t from, const TokenList& other, std::uint32_t limit) const {
    limit = std::min({limit, size() - from, other.size()});
    std::uint32_t equal = 0;
    std::size_t mine = limit == 0 ? 0 : run_at(from);
    std::size_t theirs = 0;
    while (equal < limit) {
      const std::uint64_t here = runs_[mine].first + (from + equal - begin_of(mine));
      const std::uint64_t there = other.runs_[theirs].first + (equal - other.begin_of(theirs));
      if (here != there) break;
      equal = std::min({limit, ends_[mine] - from, other.ends_[theirs]});
      mine += from + equal == ends_[mine];
      theirs += equal == other.ends_[theirs];
    }
    return equal;
  }
  // Hash of [from, to); equal tokens have equal hashes.
  std::uint64_t hash(std::uint32_t from, std::uint32_t to) const {
    if (to - from == 1) return at(from);
    std::uint64_t out = 0;
    each(from, to, [&out](TokenSpan run) { out = xxh3_64_pair(out, xxh3_64_pair(run.first, run.count, 7), 11); });
    return out;
  }

 private:
  std::size_t run_at(std::uint32_t position) const {
    return static_cast<std::size_t>(std::ranges::upper_bound(ends_, position) - ends_.begin());
  }
  std::uint32_t begin_of(std::size_t run) const { return run == 0 ? 0 : ends_[run - 1]; }

  std::vector<TokenSpan> runs_;
  std::vector<std::uint32_t> ends_;
};

}  // namespace understudy
