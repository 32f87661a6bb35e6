#include "traces/block_numbers.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <unordered_map>

namespace understudy {

namespace {

constexpr std::uint64_t kUnnumbered = std::numeric_limits<std::uint64_t>::max();
constexpr std::ptrdiff_t kMaxIdDigits = 20;

// BlockNumbers by id: a table where the ids are small, as those of most traces are.
class BlockNumbers {
 public:
  explicit BlockNumbers(std::span<const std::uint64_t> ids) {
    const std::uint64_t largest = ids.empty() ? 0 : *std::ranges::max_element(ids);
    if (largest < 4 * ids.size() + 1024) table_.resize(static_cast<std::size_t>(largest) + 1, kUnnumbered);
  }

  std::uint64_t& of(std::uint64_t id) {
    if (!table_.empty()) return table_[static_cast<std::size_t>(id)];
    return others_.try_emplace(id, kUnnumbered).first->second;
  }

 private:
  std::vector<std::uint64_t> table_;
  std::unordered_map<std::uint64_t, std::uint64_t> others_;
};

}  // namespace

std::vector<std::uint64_t> number_blocks(const LocalBlocks& blocks, std::span<const std::int64_t> order,
                                         std::uint64_t first) {
  BlockNumbers numbers(blocks.ids);
  std::vector<std::uint64_t> out;
  out.reserve(blocks.ids.size() + order.size());
  std::uint64_t next = first;
  for (const std::int64_t place : order) {
    const auto row = static_cast<std::size_t>(place);
    const auto begin = static_cast<std::size_t>(blocks.id_offsets[row]);
    const auto given = static_cast<std::uint64_t>(blocks.id_offsets[row + 1] - blocks.id_offsets[row]);
    const auto tokens = static_cast<std::uint64_t>(blocks.prompt_tokens[row]);
    const std::uint64_t shared = std::min(given, tokens / blocks.block_size);
    const std::uint64_t total = (tokens + blocks.block_size - 1) / blocks.block_size;
    for (std::size_t i = begin; i < begin + shared; ++i) {
      std::uint64_t& number = numbers.of(blocks.ids[i]);
      if (number == kUnnumbered) number = next++;
      out.push_back(number);
    }
    for (std::uint64_t i = shared; i < total; ++i) out.push_back(next++);
  }
  return out;
}

bool read_id_list(std::string_view text, IdLists& lists) {
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto skip_blanks = [&] {
    while (at != end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) ++at;
  };
  const auto take = [&](char wanted) {
    skip_blanks();
    if (at == end || *at != wanted) return false;
    ++at;
    return true;
  };
  const std::size_t before = lists.ids.size();
  if (!take('[')) return false;
  if (!take(']')) {
    do {
      skip_blanks();
      const char* const digits = at;
      std::uint64_t value = 0;
      for (; at != end; ++at) {
        const unsigned digit = static_cast<unsigned char>(*at) - unsigned{'0'};
        if (digit > 9) break;
        if (value > (kUnnumbered - digit) / 10) return false;
        value = 10 * value + digit;
      }
      if (at == digits || at - digits > kMaxIdDigits || (at - digits > 1 && *digits == '0')) return false;
      lists.ids.push_back(value);
    } while (take(','));
    if (!take(']')) return false;
  }
  skip_blanks();
  if (at != end) return false;
  lists.counts.push_back(static_cast<std::int64_t>(lists.ids.size() - before));
  return true;
}

}  // namespace understudy
