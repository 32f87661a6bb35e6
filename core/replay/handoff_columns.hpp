// Columns of a run with prefill and decode pools, one row a request; empty in other runs.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

namespace understudy {

struct HandOffColumns {
  std::vector<std::uint8_t> way;  // RequestWay
  std::vector<std::int32_t> prefill_worker;
  std::vector<std::int64_t> prefill_admit_ns;
  std::vector<std::int64_t> prefill_done_ns;
  std::vector<std::int64_t> decode_arrival_ns;
  std::vector<std::int64_t> offered_ns;  // pushed KV: its decode worker had memory for it
  std::vector<std::int64_t> posted_ns;   // its transfer; -1: none
  std::vector<std::int64_t> landed_ns;
  std::vector<std::int64_t> bytes;
  std::vector<std::int64_t> decode_admit_ns;
  std::uint64_t late_notifications = 0;  // of the run: reads that ended after their lease
  std::int64_t pushed_busy_ns = -1;      // of the run: time in which pushed KV moved; -1: none is pushed

  void prepare(std::size_t rows) {
    way.assign(rows, 0);
    prefill_worker.assign(rows, -1);
    for (auto* column : {&prefill_admit_ns, &prefill_done_ns, &decode_arrival_ns, &offered_ns, &posted_ns, &landed_ns,
                         &decode_admit_ns}) {
      column->assign(rows, -1);
    }
    bytes.assign(rows, 0);
  }
};

}  // namespace understudy
