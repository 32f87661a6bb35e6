// Blocks of a live request, whose tokens and salt are known.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/request.hpp"

namespace understudy {

// Names for KV routers, and the tokens themselves for the tree, which compares parts of blocks.
class LiveTokens final : public IdentitySource {
 public:
  LiveTokens(Identities blocks, TokenList tokens, std::optional<std::uint64_t> salt)
      : names_(std::move(blocks)), tokens_(std::move(tokens)), salt_(salt) {}

  std::optional<std::uint64_t> salt() const noexcept { return salt_; }
  std::size_t size() const noexcept override { return names_.size(); }
  void extend(std::vector<BlockIdentity>& out, std::size_t count) const override { names_.extend(out, count); }
  void extend_names(std::vector<std::uint64_t>& out, std::size_t count, bool hashes) const override {
    names_.extend_names(out, count, hashes);
  }
  void append_tokens(TokenList& out, std::uint32_t from, std::uint32_t to, std::uint32_t,
                     RequestId request) const override {
    const std::uint32_t known = std::clamp(tokens_.size(), from, to);
    out.append_from(tokens_, from, known);
    out.append({kOwnTokens + (request << 24) + known, to - known});
  }

 private:
  static constexpr std::uint64_t kOwnTokens = std::uint64_t{1} << 63;

  GivenIdentities names_;
  TokenList tokens_;
  std::optional<std::uint64_t> salt_;
};

}  // namespace understudy
