#include "replay/trace_identities.hpp"

#include <algorithm>
#include <utility>

#include "base/spares.hpp"
#include "tokens/token_blocks.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

// Every adapter computes KV of its own.
std::uint64_t TraceIdentities::seed_of(std::uint32_t adapter) {
  return adapter == 0 ? kBaseSaltHash : xxh3_64_pair(adapter, kBaseSaltHash, kBaseSaltHash);
}

void TraceIdentities::extend(std::vector<BlockIdentity>& out, std::size_t count) const {
  if (out.empty() && !made_.empty()) {
    std::swap(out, made_);
    Spares<BlockIdentity>::keep(std::move(made_));
  }
  make(out, count);
}

std::span<const BlockIdentity> TraceIdentities::first(std::size_t count, std::vector<BlockIdentity>&) const {
  make(made_, count);
  return std::span<const BlockIdentity>(made_).first(count);
}

void TraceIdentities::make(std::vector<BlockIdentity>& out, std::size_t count) const {
  if (out.size() >= count) return;
  out.reserve(std::max<std::size_t>(count, total_tokens_ / block_size_));       // once: outputs come block by block
  (void)LineageHash::make(0, false, 0, static_cast<std::uint32_t>(count - 1));  // raises before anything is appended
  std::uint64_t parent = out.empty() ? 0 : out.back().sequence_hash();
  visit(out.size(), count, [&](std::uint64_t local, std::size_t stop) {
    std::size_t position = out.size();
    out.resize(stop);
    if (position == 0) {
      out[position++] = {LineageHash::make(local, false, 0, 0), local, 0};
      parent = local;
    }
    while (position < stop) {
      const unsigned bits = LineageHash::fragment_bits(static_cast<std::uint32_t>(position));
      const std::size_t alike = std::min<std::size_t>(stop, LineageHash::end_of_bits(bits));
      for (; position < alike; ++position) {
        const std::uint64_t sequence = chain_hash(parent, local);
        out[position] = {LineageHash::pack(sequence, parent, static_cast<std::uint32_t>(position), bits), local,
                         parent};
        parent = sequence;
      }
    }
  });
}

void TraceIdentities::extend_names(std::vector<std::uint64_t>& out, std::size_t count, bool hashes) const {
  if (out.size() >= count) return;
  out.reserve(std::max<std::size_t>(count, total_tokens_ / block_size_));
  (void)LineageHash::make(0, false, 0, static_cast<std::uint32_t>(count - 1));
  if (hashes) {
    for (std::size_t i = out.size(); i < made_.size(); ++i) out.push_back(made_[i].sequence_hash());
  }
  // A chain either way; that of names alone is a third as long.
  const auto extend_by = [&](auto chain) {
    std::uint64_t parent = out.empty() ? 0 : out.back();
    visit(out.size(), count, [&](std::uint64_t local, std::size_t stop) {
      std::size_t position = out.size();
      out.resize(stop);
      if (position == 0) out[position++] = parent = local;
      for (; position < stop; ++position) out[position] = parent = chain(parent, local);
    });
  };
  if (hashes) {
    extend_by([](std::uint64_t parent, std::uint64_t local) { return chain_hash(parent, local); });
  } else {
    extend_by([](std::uint64_t parent, std::uint64_t local) {
      return xxh3::fold_product(parent ^ xxh3::kSecretWords[0], local ^ xxh3::kSecretWords[1]);
    });
  }
}

// Calls `append(local, stop)` for blocks of one content, from `position` to `count`: those up to `stop` hash to
// `local`.
template <typename Append>
void TraceIdentities::visit(std::size_t position, std::size_t count, Append append) const {
  const std::uint64_t known_tokens = stream_tokens_ + outputs_.size();
  while (position < count) {
    const std::uint64_t first = position * std::uint64_t{block_size_};
    const std::uint64_t end = first + block_size_;
    std::size_t stop = position + 1;
    std::uint64_t local = 0;
    if (end > known_tokens) {
      local = xxh3_64_pair(request_, position, ~kBaseSaltHash);
    } else if (ahead_ > 0) {
      local = local_hash(first);
      for (std::uint64_t token = end; token < end + ahead_; ++token) local = xxh3_64_pair(local, id_of(token), seed_);
    } else if (const std::uint64_t trace_end = std::min((first / trace_block_ + 1) * trace_block_, stream_tokens_);
               end > trace_end) {
      local = local_hash(first);
    } else {  // blocks inside one trace block are alike
      local = xxh3_64_pair(stream_[first / trace_block_], block_size_, seed_);
      stop = std::min(count, static_cast<std::size_t>(trace_end / block_size_));
    }
    append(local, stop);
    position = stop;
  }
}

void TraceIdentities::append_tokens(TokenList& out, std::uint32_t from, std::uint32_t to, std::uint32_t,
                                    RequestId) const {
  constexpr unsigned kOffsetBits = 24;  // tokens of a trace block, or of a request
  while (from < to) {
    std::uint32_t end = from + 1;
    std::uint64_t first = 0;
    if (from < stream_tokens_) {
      const std::uint64_t block = from / trace_block_;
      end = static_cast<std::uint32_t>(std::min<std::uint64_t>({to, (block + 1) * trace_block_, stream_tokens_}));
      first = (std::uint64_t{adapter_ % 63} << 56) + ((std::uint64_t{stream_[block]} + 1) << kOffsetBits) +
              from % trace_block_;
    } else if (from < stream_tokens_ + outputs_.size()) {
      first = (std::uint64_t{1} << 62) + outputs_[from - stream_tokens_];
    } else {
      end = to;
      first = (std::uint64_t{1} << 63) + (request_ << kOffsetBits) + from;
    }
    out.append({first, end - from});
    from = end;
  }
}

// The id that a known token is a copy of; other tokens belong to this request alone.
std::uint64_t TraceIdentities::id_of(std::uint64_t token) const {
  if (token < stream_tokens_) return stream_[token / trace_block_];
  if (token < stream_tokens_ + outputs_.size()) return outputs_[token - stream_tokens_];
  return xxh3_64_pair(request_, token, ~kBaseSaltHash);
}

// Hash (id, length) runs, with equal neighbours joined: equal content has one hash however it is split.
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
  return xxh3_64(runs.data(), runs.size() * sizeof(std::uint64_t), seed_);
}

}  // namespace understudy
