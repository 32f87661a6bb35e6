// The rows that nearly every Mooncake trace is made of, read without a general JSON decoder.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace understudy {

struct PlainRows {
  std::vector<double> timestamp_ms;
  std::vector<std::int64_t> input_length;
  std::vector<std::int64_t> output_length;
  std::vector<std::int64_t> hash_counts;
  std::vector<std::uint64_t> hash_ids;  // ids of all rows, concatenated
};

// Read whole lines, each a plain row: an object with `timestamp`, `input_length`, `output_length` and `hash_ids`, every
// one of them once, in any order, where numbers are non-negative integers of at most 18 digits, `input_length` at least
// 1, `timestamp` below 10^12, and `hash_ids` not empty. Returns nothing when any line differs, wrong or merely rare: a
// general decoder then decides.
std::optional<PlainRows> read_plain_rows(std::string_view lines);

}  // namespace understudy
