#include "events/wire_columns.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "events/msgpack.hpp"
#include "tokens/token_blocks.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

namespace {

using msgpack::Cursor;
using msgpack::Type;
using msgpack::Value;

enum Field : std::size_t {
  kHashes,
  kParent,
  kTokens,
  kBlockSize,
  kLoraId,
  kMedium,
  kLoraName,
  kExtraKeys,
  kGroup,
  kSpecKind,
  kSpecWindow,
  kLocality,
  kOwnership,
  kSession,
  kSalt,
  kNumFields
};

constexpr std::array<std::string_view, kNumFields> kNames = {"block_hashes",
                                                             "parent_block_hash",
                                                             "token_ids",
                                                             "block_size",
                                                             "lora_id",
                                                             "medium",
                                                             "lora_name",
                                                             "extra_keys",
                                                             "group_idx",
                                                             "kv_cache_spec_kind",
                                                             "kv_cache_spec_sliding_window",
                                                             "locality",
                                                             "ownership",
                                                             "session_id",
                                                             "cache_salt"};
// The places of an array behind its tag.
constexpr std::array kStoredPlaces = {kHashes,   kParent,    kTokens, kBlockSize, kLoraId,    kMedium,
                                      kLoraName, kExtraKeys, kGroup,  kSpecKind,  kSpecWindow};
constexpr std::array kRemovedPlaces = {kHashes, kMedium, kGroup};

struct Fields {
  std::array<Cursor, kNumFields> at{};
  std::array<bool, kNumFields> given{};

  void set(Field field, Cursor cursor) {
    at[field] = cursor;
    given[field] = true;
  }
  // Its value, nil when it was not given.
  bool read(Field field, Value& out) const {
    out = Value{};
    if (!given[field]) return true;
    Cursor cursor = at[field];
    return cursor.next(out);
  }
  bool is(Field field, Type type) const {
    Value value;
    return read(field, value) && (value.type == Type::Nil || value.type == type);
  }
};

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

// Low 64 bits, as the engines themselves shorten a digest. 0 is no hash.
bool read_hash(const Value& value, std::uint64_t& out) {
  if (value.type == Type::Int) {
    out = value.bits;
  } else if (value.type == Type::Bytes) {
    out = 0;
    const std::string_view digest =
        value.content.substr(value.content.size() - std::min<std::size_t>(8, value.content.size()));
    for (const char byte : digest) out = out << 8 | static_cast<std::uint8_t>(byte);
  } else {
    return false;
  }
  return out != 0;
}

// What the keys beside the tokens say: a salt, and which blocks are more than their tokens.
struct ExtraKeys {
  std::string_view salt;
  std::vector<std::size_t> opaque;

  bool read(const Fields& fields, std::string_view lora) {
    Value head;
    if (!fields.read(kExtraKeys, head)) return false;
    if (head.type == Type::Nil) return true;
    if (head.type != Type::Array) return false;
    Cursor cursor = fields.at[kExtraKeys];
    cursor.next(head);
    for (std::size_t block = 0; block < head.length; ++block) {
      Cursor keys = cursor;
      if (!cursor.skip()) return false;
      Value list;
      keys.next(list);
      if (list.type == Type::Nil) continue;
      if (list.type != Type::Array) {
        opaque.push_back(block);
        continue;
      }
      bool plain = true;
      for (std::size_t i = 0; i < list.length; ++i) {
        Cursor inner = keys;
        if (!keys.skip()) return false;
        Value key;
        inner.next(key);
        if (key.type != Type::Text) {
          plain = false;
        } else if (key.content != lora && block == 0) {
          salt = key.content;
        }
      }
      if (!plain) opaque.push_back(block);
    }
    return true;
  }
};

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

bool read_hashes(const Fields& fields, std::vector<std::uint64_t>& out) {
  Value head;
  if (!fields.given[kHashes]) return false;
  Cursor cursor = fields.at[kHashes];
  if (!cursor.next(head) || head.type != Type::Array) return false;
  for (std::size_t i = 0; i < head.length; ++i) {
    Value value;
    std::uint64_t hash = 0;
    if (!cursor.next(value) || !read_hash(value, hash)) return false;
    out.push_back(hash);
  }
  return true;
}

bool read_tokens(const Fields& fields, std::vector<Token>& out) {
  out.clear();
  if (!fields.given[kTokens]) return false;
  Value head;
  Cursor cursor = fields.at[kTokens];
  if (!cursor.next(head) || head.type != Type::Array) return false;
  out.reserve(head.length);
  for (std::size_t i = 0; i < head.length; ++i) {
    Value value;
    if (!cursor.next(value) || value.type != Type::Int || value.negative) return false;
    if (value.bits > std::numeric_limits<Token>::max()) return false;
    out.push_back(static_cast<Token>(value.bits));
  }
  return true;
}

// Whether an index of whole prompts has a use for it: the first cache group, of the engine's own, in its own memory.
Verdict judged(const Fields& fields) {
  Value group;
  Value locality;
  Value owner;
  if (!fields.read(kGroup, group) || (group.type != Type::Nil && group.type != Type::Int)) return Verdict::Bad;
  if (!fields.read(kLocality, locality) || !fields.read(kOwnership, owner)) return Verdict::Bad;
  if (locality.type != Type::Nil && locality.type != Type::Text) return Verdict::Bad;
  if (owner.type != Type::Nil && owner.type != Type::Text) return Verdict::Bad;
  const bool remote = locality.type == Type::Text && locality.content != "LOCAL";
  return group.bits != 0 || remote || owner.type != Type::Nil ? Verdict::Ignored : Verdict::Kept;
}

class EventReader {
 public:
  explicit EventReader(WireColumns& out) : out_(out) {}

  Verdict read(Cursor cursor) {
    Value head;
    cursor.next(head);
    Fields fields;
    std::string_view tag;
    if (head.type == Type::Map) {
      if (!read_map(cursor, head.length, fields, tag)) return Verdict::Bad;
    } else if (head.type != Type::Array || !read_array(cursor, head.length, fields, tag)) {
      return Verdict::Bad;
    }
    if (tag == "BlockStored") return stored(fields);
    if (tag == "BlockRemoved") return removed(fields);
    if (tag != "AllBlocksCleared") return Verdict::Bad;
    finish(2, 0, 0);
    return Verdict::Kept;
  }

 private:
  static bool read_map(Cursor cursor, std::size_t pairs, Fields& fields, std::string_view& tag) {
    for (std::size_t i = 0; i < pairs; ++i) {
      Value key;
      if (!cursor.next(key) || key.type != Type::Text) return false;
      if (key.content == "type") {
        Value value;
        Cursor inner = cursor;
        if (!inner.next(value) || value.type != Type::Text) return false;
        tag = value.content;
      } else if (const auto name = std::find(kNames.begin(), kNames.end(), key.content); name != kNames.end()) {
        fields.set(static_cast<Field>(name - kNames.begin()), cursor);
      }
      if (!cursor.skip()) return false;
    }
    return true;
  }

  static bool read_array(Cursor cursor, std::size_t length, Fields& fields, std::string_view& tag) {
    Value first;
    if (length == 0 || !cursor.next(first) || first.type != Type::Text) return false;
    tag = first.content;
    const bool stored = tag == "BlockStored";
    const std::span<const Field> places =
        stored ? std::span<const Field>(kStoredPlaces) : std::span<const Field>(kRemovedPlaces);
    for (std::size_t i = 0; i + 1 < length && i < places.size(); ++i) {
      fields.set(places[i], cursor);
      if (!cursor.skip()) return false;
    }
    return salt_element(fields);
  }

  // SGLang's map with a salt stands where vLLM has the name of an adapter.
  static bool salt_element(Fields& fields) {
    Value head;
    if (!fields.read(kLoraName, head)) return false;
    if (head.type != Type::Map) return true;
    Cursor cursor = fields.at[kLoraName];
    cursor.next(head);
    fields.given[kLoraName] = false;
    for (std::size_t i = 0; i < head.length; ++i) {
      Value key;
      if (!cursor.next(key) || key.type != Type::Text) return false;
      if (key.content == "cache_salt") fields.set(kSalt, cursor);
      if (!cursor.skip()) return false;
    }
    return true;
  }

  Verdict stored(const Fields& fields) {
    Value parent;
    Value block_size;
    Value medium;
    Value lora;
    Value salt;
    if (!fields.given[kParent] || !fields.given[kBlockSize]) return Verdict::Bad;
    fields.read(kParent, parent);
    fields.read(kBlockSize, block_size);
    fields.read(kMedium, medium);
    fields.read(kLoraName, lora);
    fields.read(kSalt, salt);
    const int tier = tier_of(medium);
    std::uint64_t parent_hash = 0;
    if (parent.type != Type::Nil && !read_hash(parent, parent_hash)) return Verdict::Bad;
    if (tier == 0 || block_size.type != Type::Int || block_size.negative) return Verdict::Bad;
    if (!fields.is(kLoraId, Type::Int) || !fields.is(kLoraName, Type::Text) || !fields.is(kSalt, Type::Text) ||
        !fields.is(kSpecKind, Type::Text) || !fields.is(kSpecWindow, Type::Int) || !fields.is(kSession, Type::Text)) {
      return Verdict::Bad;
    }
    const std::size_t begin = out_.sequence_hashes.size();
    ExtraKeys extra;
    if (!read_hashes(fields, out_.sequence_hashes) || !read_tokens(fields, tokens_) ||
        !extra.read(fields, lora.content)) {
      return Verdict::Bad;
    }
    const std::span<const std::uint64_t> hashes = std::span(out_.sequence_hashes).subspan(begin);
    if (repeats(hashes, parent_hash)) return Verdict::Bad;
    const Verdict verdict = judged(fields);
    if (verdict != Verdict::Kept) return verdict;
    if (hashes.empty()) return Verdict::Kept;  // nothing was said

    out_.local_hashes.resize(out_.sequence_hashes.size());
    const std::size_t size = static_cast<std::size_t>(block_size.bits);
    if (size > 0 && tokens_.size() / size == hashes.size() && tokens_.size() % size == 0) {
      const std::uint64_t seed = salt_hash(salt.type == Type::Text ? salt.content : extra.salt, lora.content);
      for (std::size_t i = 0; i < hashes.size(); ++i) {
        out_.local_hashes[begin + i] = xxh3_64(&tokens_[i * size], size * sizeof(Token), seed);
      }
      for (const std::size_t block : extra.opaque) {
        if (block < hashes.size()) out_.local_hashes[begin + block] = 0;
      }
    }
    finish(0, tier, parent_hash);
    return Verdict::Kept;
  }

  Verdict removed(const Fields& fields) {
    Value medium;
    fields.read(kMedium, medium);
    const int tier = tier_of(medium);
    if (tier == 0 || !read_hashes(fields, out_.sequence_hashes)) return Verdict::Bad;
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

// The envelope: a time, events, perhaps a rank. Nothing is kept of one that does not hold together.
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
      sequence_hashes.resize(static_cast<std::size_t>(offsets.back()));  // of an event that was not finished
      local_hashes.resize(static_cast<std::size_t>(offsets.back()));
    }
  } else {
    time = 0;
    rank = -1;
    malformed.push_back(static_cast<std::uint32_t>(ts.size()));
  }
  ts.push_back(time);
  ranks.push_back(rank);
  message_events.push_back(static_cast<std::int64_t>(kinds.size()));
}

}  // namespace understudy
