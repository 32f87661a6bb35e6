// Python values in and out of the core. Every reader raises InvalidArgument naming the argument, and holds
// the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "named.hpp"
#include "tiers/tier_config.hpp"
#include "tokens/lineage_hash.hpp"
#include "tokens/token_blocks.hpp"

namespace understudy {

namespace nb = nanobind;

// An int (or anything with __index__) from 0 to `max`.
std::uint64_t read_uint(nb::handle value, const std::string& name,
                        std::uint64_t max = std::numeric_limits<std::uint64_t>::max());

// TypeError: the value of a setting is not of its type.
[[noreturn]] void refuse_type(nb::handle value, const std::string& name, const std::string& type);

// Bytes of a block's slot, used or not: only address space at first. 36 on tiers that publish no events.
inline constexpr double kSlotBytes = 64;

// Slots that tiers take on each worker, and those that workers share.
inline double slots_below(const TierConfig& tiers, double workers) {
  double slots = workers * static_cast<double>(std::min(tiers.g2_blocks, tiers.most_blocks));
  for (const std::optional<SharedTierConfig>& shared : {tiers.g3, tiers.g4}) {
    if (shared) slots += static_cast<double>(tiers.slots_for(shared->num_blocks, shared->policy));
  }
  return slots;
}

// Run `make`, which needs about `bytes` bytes. Converts a failed allocation into a ConfigError; `what` names the field
// and its value.
template <typename Make>
decltype(auto) within_memory(const std::string& what, double bytes, Make make) {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::ConfigError, what, " need about ", std::ceil(bytes / 1e8) / 10,
                " GB, more memory than there is; choose fewer");
  }
}

// Unsigned integers from an array or a sequence. A contiguous array of the right type is read in place and
// kept alive; anything else is converted with every element checked. Must be destroyed with the GIL held.
template <typename T>
class IntArray {
 public:
  IntArray(nb::handle value, const std::string& name);
  std::span<const T> span() const noexcept { return view_; }

 private:
  nb::ndarray<nb::ro, nb::device::cpu> array_;
  std::vector<T> copy_;
  std::span<const T> view_;
};
extern template class IntArray<std::uint32_t>;
extern template class IntArray<std::uint64_t>;

// A lineage hash is a Python int of 128 bits.
LineageHash read_lineage(nb::handle value, const std::string& name);
WideInt lineage_to_int(const LineageHash& lineage);
WideInt wide_to_int(std::uint64_t hi, std::uint64_t lo);

// Multimodal runs from a sequence of (mm_hash, offset, length).
std::vector<MultimodalRun> read_runs(nb::handle value, const std::string& name);

// Hands the values to numpy without a copy, as a one-dimensional array.
template <typename T, typename Allocator>
Array<T> to_array(std::vector<T, Allocator> values) {
  using Values = std::vector<T, Allocator>;
  auto owned = std::make_unique<Values>(std::move(values));
  T* const data = owned->data();
  const std::size_t size = owned->size();
  nb::capsule owner(owned.get(), [](void* p) noexcept { delete static_cast<Values*>(p); });
  (void)owned.release();
  return Array<T>(nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, owner)));
}

}  // namespace understudy
