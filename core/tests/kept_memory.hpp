// Checks the reuse of memory between runs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/huge_array.hpp"
#include "base/kept_mappings.hpp"
#include "tests/fail.hpp"

namespace understudy {

// An array starts empty, also in reused memory of which another array wrote only a part.
inline void check_kept_memory() {
  using Array = HugeArray<std::uint32_t>;
  (void)KeptMappings::give_back();
  for (const std::size_t size : {std::size_t{20'000}, std::size_t{600'000}}) {
    const std::uint32_t* first = nullptr;
    for (int round = 0; round < 6; ++round) {
      const KeptMappings kept;  // leaves mappings for the next round
      const bool dense = round % 3 == 0;
      Array array(size, dense ? Array::Writes::Dense : Array::Writes::Populated);
      if (round > 0 && array.get() != first) fail("memory is not kept");
      first = array.get();
      for (std::size_t i = 0; i < size; ++i) {
        if (array[i] != 0) fail("a new array is not zero");
      }
      const std::size_t written = dense ? size : size * (4 + static_cast<std::size_t>(round % 3)) / 8;
      array.populate(0, written);
      std::fill_n(array.get(), written, 7u);
    }
    const Array sparse(size);
    if (sparse.get() == first) fail("a sparsely written array reuses memory");
  }
  if (!KeptMappings::give_back()) fail("nothing was kept");
  if (KeptMappings::give_back()) fail("unmapped memory is still kept");
  for (const int runs : {2, 3}) {
    for (int run = 0; run < runs; ++run) {
      const KeptMappings kept;
      if (run == 0) Array(20'000, Array::Writes::Dense)[0] = 7;
    }
    if (KeptMappings::give_back() != (runs == 2)) fail("unused memory is not kept for exactly one more run");
  }
}

}  // namespace understudy
