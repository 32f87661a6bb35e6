#include "replay/trace_identities.hpp"

#include <algorithm>
#include <vector>

#include "token_blocks.hpp"
#include "xxh3.hpp"

namespace understudy {

void TraceIdentities::extend(std::vector<BlockIdentity>& out, std::size_t count) const {
  const std::uint64_t known_tokens = stream_tokens_ + outputs_.size();
  out.reserve(std::max(count, static_cast<std::size_t>(known_tokens / block_size_)));
  std::uint64_t parent = out.empty() ? 0 : out.back().sequence_hash();
  std::uint32_t last_id = 0;
  std::uint64_t last_local = 0;  // of a block that lies inside one trace block with that id
  while (out.size() < count) {
    const std::size_t position = out.size();
    const std::uint64_t first = position * std::uint64_t{block_size_};
    const std::uint64_t end = first + block_size_;
    std::uint64_t local = 0;
    if (end > known_tokens) {
      local = xxh3_64_pair(request_, position, ~kBaseSaltHash);
    } else if (end <= stream_tokens_ && first / trace_block_ == (end - 1) / trace_block_) {
      const std::uint32_t id = stream_[first / trace_block_];
      if (last_local == 0 || id != last_id) {
        last_id = id;
        last_local = xxh3_64_pair(id, block_size_, kBaseSaltHash);
      }
      local = last_local;
    } else {
      local = local_hash(first);
    }
    const std::uint64_t sequence = position == 0 ? local : chain_hash(parent, local);
    out.push_back({LineageHash::make(sequence, position > 0, parent, static_cast<std::uint32_t>(position)), local,
                   position == 0 ? 0 : parent});
    parent = sequence;
  }
}

// Of (id, length) runs, neighbours with one id joined: equal content has one hash however it is cut.
std::uint64_t TraceIdentities::local_hash(std::uint64_t first_token) const {
  std::vector<std::uint64_t> runs;
  const std::uint64_t end = first_token + block_size_;
  for (std::uint64_t at = first_token; at < end;) {
    const bool output = at >= stream_tokens_;
    const std::uint64_t id = output ? outputs_[at - stream_tokens_] : stream_[at / trace_block_];
    const std::uint64_t stop =
        output ? at + 1 : std::min({end, (at / trace_block_ + 1) * trace_block_, stream_tokens_});
    if (!runs.empty() && runs[runs.size() - 2] == id) {
      runs.back() += stop - at;
    } else {
      runs.insert(runs.end(), {id, stop - at});
    }
    at = stop;
  }
  return xxh3_64(runs.data(), runs.size() * sizeof(std::uint64_t), kBaseSaltHash);
}

}  // namespace understudy
