// Report of an engine's cache groups at its end.
#pragma once

#include <cstdint>
#include <vector>

namespace understudy {

struct GroupReport {
  struct Sample {
    std::int64_t time_ns = 0;
    std::vector<std::uint64_t> held;  // distinct blocks in the tables of requests, by group
  };

  std::uint64_t admissions = 0;
  std::uint64_t shortened = 0;       // admissions whose hit another group made shorter than that of full attention
  std::uint64_t queries = 0;         // tokens
  std::uint64_t hits = 0;            // tokens, of the device and under vLLM's offload of its host
  bool has_full = false;             // some group is full attention
  std::uint64_t full_hits = 0;       // tokens that full attention alone had, if some group is that
  std::vector<Sample> samples;       // in order of time; empty: one group, or no request
  std::vector<std::uint64_t> peaks;  // most blocks held at one time, by group
};

}  // namespace understudy
