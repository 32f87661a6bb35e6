// Blocks of ended requests that a connector still reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/request_id.hpp"
#include "slots/slot.hpp"

namespace understudy {

class KeptTables {
 public:
  void keep(RequestId id, std::vector<SlotId> table) {
    references_ += table.size();
    const SlotId last = table.empty() ? 0 : std::ranges::max(table);
    if (last >= holders_.size()) holders_.resize(std::size_t{last} + 1);
    for (const SlotId slot : table) num_blocks_ += holders_[slot]++ == 0 ? 1 : 0;
    tables_.emplace(id, std::move(table));
  }
  // The blocks of a request; empty if none are kept.
  std::vector<SlotId> take(RequestId id) {
    const auto found = tables_.find(id);
    if (found == tables_.end()) return {};
    std::vector<SlotId> table = std::move(found->second);
    tables_.erase(found);
    references_ -= table.size();
    for (const SlotId slot : table) num_blocks_ -= --holders_[slot] == 0 ? 1 : 0;
    return table;
  }

  bool empty() const noexcept { return tables_.empty(); }
  const std::map<RequestId, std::vector<SlotId>>& tables() const noexcept { return tables_; }
  std::uint64_t num_blocks() const noexcept { return num_blocks_; }  // each once
  std::uint64_t references() const noexcept { return references_; }

 private:
  std::map<RequestId, std::vector<SlotId>> tables_;
  std::vector<std::uint32_t> holders_;  // requests that keep a block, by slot
  std::uint64_t num_blocks_ = 0;
  std::uint64_t references_ = 0;
};

}  // namespace understudy
