#include "events/wire_fields.hpp"

#include <algorithm>
#include <limits>
#include <span>

namespace understudy {

using msgpack::Cursor;
using msgpack::Type;
using msgpack::Value;

namespace {

constexpr std::array<std::string_view, kWireFields> kWireNames = {"block_hashes",
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
// Positions in an array, after its tag.
using enum WireField;
constexpr std::array kStoredPlaces = {Hashes,   Parent,    Tokens, BlockSize, LoraId,    Medium,
                                      LoraName, ExtraKeys, Group,  SpecKind,  SpecWindow};
constexpr std::array kRemovedPlaces = {Hashes, Medium, Group};

}  // namespace

bool WireFields::find(Cursor event) {
  Value head;
  event.next(head);
  if (head.type == Type::Map) return find_by_name(event, head.length);
  return head.type == Type::Array && find_by_place(event, head.length);
}

bool WireFields::read_hashes(std::vector<std::uint64_t>& out) const {
  Value head;
  if (!given(Hashes)) return false;
  Cursor cursor = at_[place(Hashes)];
  if (!cursor.next(head) || head.type != Type::Array) return false;
  for (std::size_t i = 0; i < head.length; ++i) {
    Value value;
    std::uint64_t hash = 0;
    if (!cursor.next(value) || !read_wire_hash(value, hash)) return false;
    out.push_back(hash);
  }
  return true;
}

bool WireFields::read_tokens(std::vector<Token>& out) const {
  out.clear();
  if (!given(Tokens)) return false;
  Value head;
  Cursor cursor = at_[place(Tokens)];
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

bool WireFields::read_extra_keys(std::string_view lora, std::string_view& salt,
                                 std::vector<std::size_t>& opaque) const {
  Value head;
  if (!read(ExtraKeys, head)) return false;
  if (head.type == Type::Nil) return true;
  if (head.type != Type::Array) return false;
  Cursor cursor = at_[place(ExtraKeys)];
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

bool WireFields::find_by_name(Cursor cursor, std::size_t pairs) {
  for (std::size_t i = 0; i < pairs; ++i) {
    Value key;
    if (!cursor.next(key) || key.type != Type::Text) return false;
    if (key.content == "type") {
      Value value;
      Cursor inner = cursor;
      if (!inner.next(value) || value.type != Type::Text) return false;
      tag = value.content;
    } else if (const auto name = std::find(kWireNames.begin(), kWireNames.end(), key.content);
               name != kWireNames.end()) {
      set(static_cast<WireField>(name - kWireNames.begin()), cursor);
    }
    if (!cursor.skip()) return false;
  }
  return true;
}

bool WireFields::find_by_place(Cursor cursor, std::size_t length) {
  Value first;
  if (length == 0 || !cursor.next(first) || first.type != Type::Text) return false;
  tag = first.content;
  const bool stored = tag == "BlockStored";
  const std::span<const WireField> places =
      stored ? std::span<const WireField>(kStoredPlaces) : std::span<const WireField>(kRemovedPlaces);
  for (std::size_t i = 0; i + 1 < length && i < places.size(); ++i) {
    set(places[i], cursor);
    if (!cursor.skip()) return false;
  }
  return find_salt();
}

// SGLang sends a map with the salt where vLLM sends the name of an adapter.
bool WireFields::find_salt() {
  Value head;
  if (!read(LoraName, head)) return false;
  if (head.type != Type::Map) return true;
  Cursor cursor = at_[place(LoraName)];
  cursor.next(head);
  given_[place(LoraName)] = false;
  for (std::size_t i = 0; i < head.length; ++i) {
    Value key;
    if (!cursor.next(key) || key.type != Type::Text) return false;
    if (key.content == "cache_salt") set(Salt, cursor);
    if (!cursor.skip()) return false;
  }
  return true;
}

bool read_wire_hash(const Value& value, std::uint64_t& out) {
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

}  // namespace understudy
