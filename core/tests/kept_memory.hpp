// Memory that a run leaves to the next one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/huge_array.hpp"
#include "base/kept_mappings.hpp"
#include "tests/fail.hpp"

namespace understudy {

// An array is empty at first, also in the memory of another that was not, and of which only a part was written.
inline void check_kept_memory() {
  using Array = HugeArray<std::uint32_t>;
  (void)KeptMappings::give_back();
  for (const std::size_t size : {std::size_t{20'000}, std::size_t{600'000}}) {
    const std::uint32_t* first = nullptr;
    for (int round = 0; round < 6; ++round) {
      const KeptMappings kept;  // what one leaves the next one finds
      const bool dense = round % 3 == 0;
      Array array(size, dense ? Array::Writes::Dense : Array::Writes::Populated);
      if (round > 0 && array.get() != first) fail("memory is not kept");
      first = array.get();
      for (std::size_t i = 0; i < size; ++i) {
        if (array[i] != 0) fail("an array has something in it at first");
      }
      const std::size_t written = dense ? size : size * (4 + static_cast<std::size_t>(round % 3)) / 8;
      array.populate(0, written);
      std::fill_n(array.get(), written, 7u);
    }
    const Array sparse(size);
    if (sparse.get() == first) fail("what is kept serves an array that is written here and there");
  }
  if (!KeptMappings::give_back()) fail("nothing was kept");
  if (KeptMappings::give_back()) fail("what was given back is still kept");
  for (const int runs : {2, 3}) {
    for (int run = 0; run < runs; ++run) {
      const KeptMappings kept;
      if (run == 0) Array(20'000, Array::Writes::Dense)[0] = 7;
    }
    if (KeptMappings::give_back() != (runs == 2)) fail("what nobody has used is kept for ever, or not until the next");
  }
}

}  // namespace understudy
