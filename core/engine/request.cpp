#include "engine/request.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kOwnTokens = std::uint64_t{1} << 63;

}  // namespace

void IdentitySource::extend_names(std::vector<std::uint64_t>& out, std::size_t count, bool) const {
  if (out.size() >= count) return;
  std::vector<BlockIdentity> blocks;
  extend(blocks, count);
  for (std::size_t i = out.size(); i < blocks.size(); ++i) out.push_back(blocks[i].sequence_hash());
}

void GivenIdentities::extend_names(std::vector<std::uint64_t>& out, std::size_t count, bool) const {
  require(count);
  for (std::size_t i = out.size(); i < count; ++i) out.push_back(blocks_[i].sequence_hash());
}

void IdentitySource::append_tokens(TokenList& out, std::uint32_t from, std::uint32_t to, std::uint32_t block_size,
                                   RequestId request) const {
  std::vector<BlockIdentity> blocks;
  extend(blocks, std::min<std::size_t>(to / block_size, size()));
  while (from < to) {
    const std::uint32_t block = from / block_size;
    const std::uint32_t end = block < blocks.size() ? (block + 1) * block_size : to;
    const std::uint64_t first =
        block < blocks.size() ? blocks[block].sequence_hash() + from % block_size : kOwnTokens + (request << 24) + from;
    out.append({first, end - from});
    from = end;
  }
}

}  // namespace understudy
