// Reuses the memory of short-lived vectors.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace understudy {

// Per thread, a few vectors of moderate size: a request takes the memory that the previous one released, still in the
// CPU cache and without an allocator's search.
template <typename T>
class Spares {
 public:
  // Returns an empty vector, with the memory of the last one kept if there is one.
  static std::vector<T> take() {
    std::vector<std::vector<T>>& all = kept();
    if (all.empty()) return {};
    std::vector<T> spare = std::move(all.back());
    all.pop_back();
    return spare;
  }
  static void keep(std::vector<T>&& used) {
    std::vector<T> spare = std::move(used);  // leaves the owner's vector empty
    if (spare.capacity() == 0 || spare.capacity() * sizeof(T) > kMostBytes || kept().size() == kMost) return;
    spare.clear();
    kept().push_back(std::move(spare));
  }

 private:
  static constexpr std::size_t kMost = 16;
  static constexpr std::size_t kMostBytes = std::size_t{1} << 16;

  static std::vector<std::vector<T>>& kept() {
    static thread_local std::vector<std::vector<T>> all;
    return all;
  }
};

}  // namespace understudy
