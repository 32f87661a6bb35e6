// Locates the fields of one KV event in a message, by name (a map) or by position (an array), in any dialect.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "events/msgpack.hpp"
#include "tokens/token_blocks.hpp"

namespace understudy {

enum class WireField : std::size_t {
  Hashes,
  Parent,
  Tokens,
  BlockSize,
  LoraId,
  Medium,
  LoraName,
  ExtraKeys,
  Group,
  SpecKind,
  SpecWindow,
  Locality,
  Ownership,
  Session,
  Salt
};
inline constexpr std::size_t kWireFields = static_cast<std::size_t>(WireField::Salt) + 1;

class WireFields {
 public:
  std::string_view tag;  // kind of event

  // Finds the fields of an event. False: malformed.
  bool find(msgpack::Cursor event);

  bool given(WireField field) const { return given_[place(field)]; }
  // Reads a field's value; nil when it was not given.
  bool read(WireField field, msgpack::Value& out) const {
    out = msgpack::Value{};
    if (!given(field)) return true;
    msgpack::Cursor cursor = at_[place(field)];
    return cursor.next(out);
  }
  bool is(WireField field, msgpack::Type type) const {
    msgpack::Value value;
    return read(field, value) && (value.type == msgpack::Type::Nil || value.type == type);
  }

  // Appends the event's hashes to `out`.
  bool read_hashes(std::vector<std::uint64_t>& out) const;
  bool read_tokens(std::vector<Token>& out) const;
  // Reads keys other than tokens: a salt, and which blocks have keys that are not plain text.
  bool read_extra_keys(std::string_view lora, std::string_view& salt, std::vector<std::size_t>& opaque) const;

 private:
  static std::size_t place(WireField field) { return static_cast<std::size_t>(field); }
  void set(WireField field, msgpack::Cursor cursor) {
    at_[place(field)] = cursor;
    given_[place(field)] = true;
  }
  bool find_by_name(msgpack::Cursor cursor, std::size_t pairs);
  bool find_by_place(msgpack::Cursor cursor, std::size_t length);
  bool find_salt();

  std::array<msgpack::Cursor, kWireFields> at_{};
  std::array<bool, kWireFields> given_{};
};

// Reads a hash in an engine's form: the low 64 bits of a digest. False for 0.
bool read_wire_hash(const msgpack::Value& value, std::uint64_t& out);

}  // namespace understudy
