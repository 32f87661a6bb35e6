// Block identities of a trace row: from its block ids, without ever making tokens.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/request.hpp"

namespace understudy {

// A trace block of `trace_block` tokens represents as many copies of its id, so an engine's block is identified by the
// runs of ids that it covers, whatever the two sizes are. `stream` has the ids of all `stream_tokens` known tokens (a
// prompt, or the next turn's prompt when that contains this turn's output), and `outputs` are tokens that follow them;
// a LoRA `adapter` (0: none) has its own blocks. The identity of a block covers the `ahead` tokens behind it too.
// Beyond the known tokens, up to `total_tokens` if the request runs to its end, blocks belong to this request alone,
// and keep their identity for its life.
class TraceIdentities final : public IdentitySource {
 public:
  TraceIdentities(std::span<const std::uint32_t> stream, std::uint32_t trace_block, std::uint64_t stream_tokens,
                  std::span<const std::uint32_t> outputs, std::uint64_t total_tokens, std::uint32_t block_size,
                  std::uint64_t request, std::uint32_t adapter = 0, std::uint32_t ahead = 0)
      : stream_(stream),
        trace_block_(trace_block),
        stream_tokens_(stream_tokens),
        outputs_(outputs),
        total_tokens_(total_tokens),
        block_size_(block_size),
        request_(request),
        adapter_(adapter),
        seed_(seed_of(adapter)),
        ahead_(ahead) {}

  void extend(std::vector<BlockIdentity>& out, std::size_t count) const override;
  void extend_names(std::vector<std::uint64_t>& out, std::size_t count, bool hashes) const override;
  void append_tokens(TokenList& out, std::uint32_t from, std::uint32_t to, std::uint32_t block_size,
                     RequestId request) const override;
  std::span<const BlockIdentity> first(std::size_t count, std::vector<BlockIdentity>& room) const override;
  void offer(std::vector<BlockIdentity>& blocks) const override { std::swap(made_, blocks); }

 private:
  void make(std::vector<BlockIdentity>& out, std::size_t count) const;
  template <typename Append>
  void visit(std::size_t position, std::size_t count, Append append) const;
  static std::uint64_t seed_of(std::uint32_t adapter);
  std::uint64_t local_hash(std::uint64_t first_token) const;
  std::uint64_t id_of(std::uint64_t token) const;

  std::span<const std::uint32_t> stream_;
  std::uint32_t trace_block_;
  std::uint64_t stream_tokens_;
  std::span<const std::uint32_t> outputs_;
  std::uint64_t total_tokens_;
  std::uint32_t block_size_;
  std::uint64_t request_;
  std::uint32_t adapter_;
  std::uint64_t seed_;
  std::uint32_t ahead_;
  mutable std::vector<BlockIdentity> made_;  // made before; the next `extend` of an empty list takes them
};

}  // namespace understudy
