// Memory of vectors that come and go, for the next ones.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace understudy {

// A few vectors of the thread's, each of moderate size: what one request gives back the next one takes, still in the
// cache, where an allocator would search for its size, split and join.
template <typename T>
class Spares {
 public:
  // Empty, with the memory of the last that was kept, if any was.
  static std::vector<T> take() {
    std::vector<std::vector<T>>& all = kept();
    if (all.empty()) return {};
    std::vector<T> spare = std::move(all.back());
    all.pop_back();
    return spare;
  }
  static void keep(std::vector<T>&& used) {
    std::vector<T> spare = std::move(used);  // its owner has none from now on
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
