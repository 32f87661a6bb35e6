// Blocks of ended requests that a connector still reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/request_id.hpp"
#include "engine/vllm/kv/block_table.hpp"
#include "slots/slot.hpp"

namespace understudy {

class KeptTables {
 public:
  void keep(RequestId id, KvTable table) {
    references_ += table.size();
    const SlotId last = table.ids.empty() ? 0 : std::ranges::max(table.ids);
    if (last >= holders_.size()) holders_.resize(std::size_t{last} + 1);
    for (const SlotId slot : table.ids) num_blocks_ += holders_[slot]++ == 0 ? 1 : 0;
    table.runs.settle(0);
    for (const HeldRun& held : table.runs.runs) num_blocks_ += held.run->keepers++ == 0 ? held.blocks : 0;
    num_blocks_ += table.runs.loose.size();
    tables_.emplace(id, std::move(table));
  }
  // The blocks of a request; empty if none are kept.
  KvTable take(RequestId id) {
    const auto found = tables_.find(id);
    if (found == tables_.end()) return {};
    KvTable table = std::move(found->second);
    tables_.erase(found);
    references_ -= table.size();
    for (const SlotId slot : table.ids) num_blocks_ -= --holders_[slot] == 0 ? 1 : 0;
    table.runs.settle(0);
    for (const HeldRun& held : table.runs.runs) num_blocks_ -= --held.run->keepers == 0 ? held.blocks : 0;
    num_blocks_ -= table.runs.loose.size();
    return table;
  }

  bool empty() const noexcept { return tables_.empty(); }
  const std::map<RequestId, KvTable>& tables() const noexcept { return tables_; }
  std::uint64_t num_blocks() const noexcept { return num_blocks_; }  // each once
  std::uint64_t references() const noexcept { return references_; }

 private:
  std::map<RequestId, KvTable> tables_;
  std::vector<std::uint32_t> holders_;  // requests that keep a block, by slot; of runs the pool knows it
  std::uint64_t num_blocks_ = 0;
  std::uint64_t references_ = 0;
};

}  // namespace understudy
