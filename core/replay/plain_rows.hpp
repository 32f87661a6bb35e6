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
  std::vector<std::uint64_t> hash_ids;  // of all rows, one after the other
};

// Reads whole lines, each a plain row: an object with `timestamp`, `input_length`, `output_length` and `hash_ids`,
// every one of them once, in any order, where numbers are non-negative integers of at most 18 digits, `input_length` at
// least 1, `timestamp` below 10^12, and `hash_ids` not empty. Nothing when any line is anything else, be it wrong or
// merely rare: a general decoder can tell.
std::optional<PlainRows> read_plain_rows(std::string_view lines);

}  // namespace understudy
