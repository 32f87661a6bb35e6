#include "curves/block_visits.hpp"

#include <algorithm>

#include "base/errors.hpp"
#include "replay/trace_identities.hpp"

namespace understudy {

namespace {

constexpr std::uint32_t kNoParent = 0xFFFFFFFFu;

// Known tokens of a row: `stream_tokens` copies of the stream's ids, then `outputs`.
struct KnownTokens {
  std::span<const std::uint32_t> stream;
  std::uint64_t stream_tokens = 0;
  std::span<const std::uint32_t> outputs;
  bool has_output = false;
};

std::span<const std::uint32_t> prompt_ids(const WorkloadColumns& w, std::size_t row) {
  const auto first = static_cast<std::size_t>(w.hash_offsets[row]);
  return w.hash_ids.subspan(first, static_cast<std::size_t>(w.hash_offsets[row + 1]) - first);
}

KnownTokens known_tokens(const WorkloadColumns& w, std::size_t row) {
  const auto prompt = static_cast<std::uint64_t>(w.prompt_tokens[row]);
  const auto output = static_cast<std::uint64_t>(w.output_tokens[row]);
  if (!w.output_in_next.empty() && w.output_in_next[row]) {
    return {prompt_ids(w, static_cast<std::size_t>(w.next_turn[row])), prompt + output, {}, true};
  }
  KnownTokens known{prompt_ids(w, row), prompt, {}, output == 0};
  if (!w.output_token_offsets.empty()) {
    const auto first = static_cast<std::size_t>(w.output_token_offsets[row]);
    known.outputs =
        w.output_token_ids.subspan(first, static_cast<std::size_t>(w.output_token_offsets[row + 1]) - first);
    known.has_output = known.has_output || !known.outputs.empty();
  }
  return known;
}

}  // namespace

BlockVisits::BlockVisits(const WorkloadColumns& w, std::uint32_t block_size, VisitRule rule) : block_size_(block_size) {
  std::vector<BlockIdentity> identities;  // of the row before, until they are those of the row
  for (std::size_t row = 0; row < w.size(); ++row) {
    const auto prompt = static_cast<std::uint64_t>(w.prompt_tokens[row]);
    KnownTokens known;
    std::uint64_t matchable = 0;
    std::uint64_t held = 0;
    if (rule == VisitRule::Prompts) {
      known = {prompt_ids(w, row), 0, {}, false};
      held = (prompt + block_size - 1) / block_size;
      // The last id identifies the whole trace block, also where the prompt ends inside it.
      known.stream_tokens = std::min(held * block_size, known.stream.size() * std::uint64_t{w.trace_block_size});
      matchable = known.stream_tokens / block_size;
      readable_.push_back(static_cast<std::uint32_t>(matchable));
    } else {
      known = known_tokens(w, row);
      auto output = static_cast<std::uint64_t>(w.output_tokens[row]);
      if (!w.max_tokens.empty() && w.max_tokens[row] >= 0) {
        output = std::min(output, static_cast<std::uint64_t>(w.max_tokens[row]));
      }
      const bool is_ahead =
          rule == VisitRule::Ahead && !w.max_tokens.empty() && w.max_tokens[row] > static_cast<std::int64_t>(output);
      // The KV of the last token is computed only in a step that has begun when the request ends.
      const std::uint64_t computed = prompt + (output > 0 && !is_ahead ? output - 1 : output);
      matchable = (known.has_output ? computed : prompt) / block_size;
      held = computed / block_size;
      readable_.push_back(static_cast<std::uint32_t>((prompt - 1) / block_size));
    }
    const std::uint32_t adapter = w.adapter.empty() ? 0 : static_cast<std::uint32_t>(w.adapter[row] + 1);
    const TraceIdentities source(known.stream, w.trace_block_size, known.stream_tokens, known.outputs,
                                 matchable * block_size, block_size, row, adapter);
    const bool follows = rule != VisitRule::Prompts && row > 0 && !w.output_in_next.empty() &&
                         w.output_in_next[row - 1] && w.next_turn[row - 1] == static_cast<std::int64_t>(row) &&
                         (w.adapter.empty() || w.adapter[row - 1] == w.adapter[row]);
    // The prompt begins with prompt and output of the row before.
    const std::size_t known_blocks = follows ? std::min<std::size_t>(identities.size(), matchable) : 0;
    identities.resize(known_blocks);
    source.extend(identities, static_cast<std::size_t>(matchable));
    append(identities, known_blocks, static_cast<std::size_t>(held));
    prompt_tokens_.push_back(static_cast<std::uint32_t>(prompt));
  }
  branches_ = {};
}

void BlockVisits::append(std::span<const BlockIdentity> identities, std::size_t known, std::size_t held) {
  if (blocks_.size() + held >= kNoParent) {
    throw Error(ErrorKind::InvalidArgument, "block_size: ", block_size_,
                " tokens give 2^32 block visits or more, and curves are exact, not sampled; choose larger blocks");
  }
  std::uint32_t parent = kNoParent;
  if (known > 0) {
    const auto before = static_cast<std::size_t>(offsets_[offsets_.size() - 2]);
    blocks_.resize(blocks_.size() + known);
    std::copy_n(blocks_.begin() + static_cast<std::ptrdiff_t>(before), known,
                blocks_.end() - static_cast<std::ptrdiff_t>(known));
    parent = blocks_.back();
  }
  for (const BlockIdentity& block : identities.subspan(known)) {
    blocks_.push_back(parent = number_of(block.sequence_hash(), parent));
  }
  for (std::size_t i = identities.size(); i < held; ++i) {
    blocks_.push_back(distinct());
    hashes_.push_back(0);
  }
  offsets_.push_back(blocks_.size());
}

std::uint32_t BlockVisits::number_of(std::uint64_t hash, std::uint32_t parent) {
  const std::uint32_t next = distinct();
  const std::uint32_t guess = parent == kNoParent ? next : parent + 1;
  if (guess < next && hashes_[guess] == hash) return guess;
  // A new block behind the newest one has no siblings yet, and is found by its number.
  if (guess != next || parent == kNoParent) {
    const auto [entry, fresh] = branches_.try_emplace(hash, next);
    if (!fresh) return entry->second;
  }
  hashes_.push_back(hash);
  return next;
}

std::uint64_t BlockVisits::visits_of(std::span<const std::int64_t> rows) const noexcept {
  std::uint64_t total = 0;
  for (const std::int64_t row : rows) total += blocks_of(static_cast<std::size_t>(row)).size();
  return total;
}

void BlockVisits::check_rows(std::span<const std::int64_t> rows) const {
  for (const std::int64_t row : rows) {
    if (row < 0 || static_cast<std::size_t>(row) >= this->rows()) {
      throw Error(ErrorKind::InvalidArgument, "rows must lie in 0 … ", this->rows(), " (exclusive), got ", row);
    }
  }
}

}  // namespace understudy
