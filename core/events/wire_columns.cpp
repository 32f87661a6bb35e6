#include "events/wire_columns.hpp"

#include <algorithm>
#include <string_view>

#include "events/msgpack.hpp"
#include "events/wire_fields.hpp"
#include "tokens/token_blocks.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

namespace {

using msgpack::Cursor;
using msgpack::Type;
using msgpack::Value;

enum class Verdict { Kept, Bad, Ignored };

int tier_of(const Value& medium) {
  if (medium.type == Type::Nil) return 1;
  if (medium.type != Type::Text) return 0;
  const std::string_view name = medium.content;
  if (name == "GPU") return 1;
  if (name == "CPU" || name == "CPU_PINNED" || name == "HOST_PINNED") return 2;
  if (name == "DISK" || name == "FS" || name == "STORAGE") return 3;
  if (name == "OBJ" || name == "EXTERNAL") return 4;
  return 0;
}

bool repeats(std::span<const std::uint64_t> hashes, std::uint64_t parent) {
  if (hashes.size() <= 16) {
    for (std::size_t i = 0; i < hashes.size(); ++i) {
      if (hashes[i] == parent || std::find(hashes.begin(), hashes.begin() + static_cast<std::ptrdiff_t>(i),
                                           hashes[i]) != hashes.begin() + static_cast<std::ptrdiff_t>(i)) {
        return true;
      }
    }
    return false;
  }
  std::vector<std::uint64_t> sorted(hashes.begin(), hashes.end());
  std::sort(sorted.begin(), sorted.end());
  return std::binary_search(sorted.begin(), sorted.end(), parent) ||
         std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
}

// Accepts what an index of whole prompts can use: the first cache group, the engine's own blocks, local memory.
Verdict judged(const WireFields& fields) {
  Value group;
  Value locality;
  Value owner;
  if (!fields.read(WireField::Group, group) || (group.type != Type::Nil && group.type != Type::Int))
    return Verdict::Bad;
  if (!fields.read(WireField::Locality, locality) || !fields.read(WireField::Ownership, owner)) return Verdict::Bad;
  if (locality.type != Type::Nil && locality.type != Type::Text) return Verdict::Bad;
  if (owner.type != Type::Nil && owner.type != Type::Text) return Verdict::Bad;
  const bool remote = locality.type == Type::Text && locality.content != "LOCAL";
  return group.bits != 0 || remote || owner.type != Type::Nil ? Verdict::Ignored : Verdict::Kept;
}

class EventReader {
 public:
  explicit EventReader(WireColumns& out) : out_(out) {}

  Verdict read(Cursor event) {
    WireFields fields;
    if (!fields.find(event)) return Verdict::Bad;
    if (fields.tag == "BlockStored") return stored(fields);
    if (fields.tag == "BlockRemoved") return removed(fields);
    if (fields.tag != "AllBlocksCleared") return Verdict::Bad;
    finish(2, 0, 0);
    return Verdict::Kept;
  }

 private:
  Verdict stored(const WireFields& fields) {
    Value parent;
    Value block_size;
    Value medium;
    Value lora;
    Value salt;
    if (!fields.given(WireField::Parent) || !fields.given(WireField::BlockSize)) return Verdict::Bad;
    fields.read(WireField::Parent, parent);
    fields.read(WireField::BlockSize, block_size);
    fields.read(WireField::Medium, medium);
    fields.read(WireField::LoraName, lora);
    fields.read(WireField::Salt, salt);
    const int tier = tier_of(medium);
    std::uint64_t parent_hash = 0;
    if (parent.type != Type::Nil && !read_wire_hash(parent, parent_hash)) return Verdict::Bad;
    if (tier == 0 || block_size.type != Type::Int || block_size.negative) return Verdict::Bad;
    if (!fields.is(WireField::LoraId, Type::Int) || !fields.is(WireField::LoraName, Type::Text) ||
        !fields.is(WireField::Salt, Type::Text) || !fields.is(WireField::SpecKind, Type::Text) ||
        !fields.is(WireField::SpecWindow, Type::Int) || !fields.is(WireField::Session, Type::Text)) {
      return Verdict::Bad;
    }
    const std::size_t begin = out_.sequence_hashes.size();
    std::string_view key_salt;
    std::vector<std::size_t> opaque;
    if (!fields.read_hashes(out_.sequence_hashes) || !fields.read_tokens(tokens_) ||
        !fields.read_extra_keys(lora.content, key_salt, opaque)) {
      return Verdict::Bad;
    }
    const std::span<const std::uint64_t> hashes = std::span(out_.sequence_hashes).subspan(begin);
    if (repeats(hashes, parent_hash)) return Verdict::Bad;
    const Verdict verdict = judged(fields);
    if (verdict != Verdict::Kept) return verdict;
    if (hashes.empty()) return Verdict::Kept;  // no blocks

    out_.local_hashes.resize(out_.sequence_hashes.size());
    const std::size_t size = static_cast<std::size_t>(block_size.bits);
    if (size > 0 && tokens_.size() / size == hashes.size() && tokens_.size() % size == 0) {
      const std::uint64_t seed = salt_hash(salt.type == Type::Text ? salt.content : key_salt, lora.content);
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        out_.local_hashes[begin + i] = xxh3_64(&tokens_[i * size], size * sizeof(Token), seed);
      }
      for (const std::size_t block : opaque) {
        if (block < hashes.size()) out_.local_hashes[begin + block] = 0;
      }
    }
    finish(0, tier, parent_hash);
    return Verdict::Kept;
  }

  Verdict removed(const WireFields& fields) {
    Value medium;
    fields.read(WireField::Medium, medium);
    const int tier = tier_of(medium);
    if (tier == 0 || !fields.read_hashes(out_.sequence_hashes)) return Verdict::Bad;
    const Verdict verdict = judged(fields);
    if (verdict != Verdict::Kept) return verdict;
    if (static_cast<std::int64_t>(out_.sequence_hashes.size()) == out_.offsets.back()) return Verdict::Kept;
    out_.local_hashes.resize(out_.sequence_hashes.size());
    finish(1, tier, 0);
    return Verdict::Kept;
  }

  void finish(std::uint8_t kind, int tier, std::uint64_t parent) {
    out_.kinds.push_back(kind);
    out_.tiers.push_back(static_cast<std::uint8_t>(tier));
    out_.parents.push_back(parent);
    out_.offsets.push_back(static_cast<std::int64_t>(out_.sequence_hashes.size()));
  }

  WireColumns& out_;
  std::vector<Token> tokens_;
};

// Parses the envelope: a time, events, optionally a rank. False if it is malformed.
bool open(std::span<const std::uint8_t> payload, double& ts, std::int64_t& rank, std::vector<Cursor>& events) {
  Cursor cursor(payload.data(), payload.data() + payload.size());
  Value head;
  Value value;
  if (!cursor.next(head) || head.type != Type::Array || head.length < 2) return false;
  if (!cursor.next(value)) return false;
  if (value.type == Type::Int) {
    ts = value.negative ? static_cast<double>(static_cast<std::int64_t>(value.bits)) : static_cast<double>(value.bits);
  } else if (value.type == Type::Float) {
    ts = value.number;
  } else {
    return false;
  }
  if (!cursor.next(value) || value.type != Type::Array) return false;
  const std::size_t count = value.length;
  events.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t* begin = cursor.at();
    if (!cursor.skip()) return false;
    events.emplace_back(begin, cursor.at());
  }
  for (std::size_t i = 2; i < head.length; ++i) {
    Cursor inner = cursor;
    if (!cursor.skip() || !inner.next(value)) return false;
    if (i > 2) continue;
    if (value.type != Type::Nil && value.type != Type::Int) return false;
    if (value.type == Type::Int) rank = static_cast<std::int64_t>(value.bits);
  }
  return cursor.done();
}

}  // namespace

void WireColumns::read(std::span<const std::uint8_t> payload) {
  double time = 0;
  std::int64_t rank = -1;
  std::vector<Cursor> events;
  if (open(payload, time, rank, events)) {
    EventReader reader(*this);
    for (const Cursor& event : events) {
      const Verdict verdict = reader.read(event);
      bad_events += verdict == Verdict::Bad;
      ignored_events += verdict == Verdict::Ignored;
      sequence_hashes.resize(static_cast<std::size_t>(offsets.back()));  // drops hashes of an event that was rejected
      local_hashes.resize(static_cast<std::size_t>(offsets.back()));
    }
  } else {
    time = 0;
    rank = -1;
    malformed.push_back(static_cast<std::uint32_t>(ts.size()));
  }
  ts.push_back(time);
  ranks.push_back(rank);
}

}  // namespace understudy
