// MessagePack reader for untrusted bytes: checks every length against the bytes that are there; nesting costs no stack.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace understudy::msgpack {

enum class Type : std::uint8_t { Nil, Bool, Int, Float, Text, Bytes, Array, Map, Extension };

// One value; for an array or a map only its head.
struct Value {
  Type type = Type::Nil;
  bool negative = false;     // Int
  std::uint64_t bits = 0;    // Int (two's complement when negative), Bool
  double number = 0;         // Float
  std::size_t length = 0;    // Array: elements; Map: pairs
  std::string_view content;  // Text, Bytes
};

class Cursor {
 public:
  Cursor() = default;
  Cursor(const std::uint8_t* begin, const std::uint8_t* end) noexcept : at_(begin), end_(end) {}

  const std::uint8_t* at() const noexcept { return at_; }
  bool done() const noexcept { return at_ == end_; }

  // False when the bytes end too early or are not MessagePack; the cursor is then unusable.
  bool next(Value& out) noexcept {
    if (done()) return false;
    const std::uint8_t head = *at_++;
    if (head < 0x80) return integer(out, head);
    if (head >= 0xe0) return integer(out, static_cast<std::uint64_t>(static_cast<std::int8_t>(head)), true);
    if (head < 0x90) return container(out, Type::Map, head & 0x0fu);
    if (head < 0xa0) return container(out, Type::Array, head & 0x0fu);
    if (head < 0xc0) return content(out, Type::Text, head & 0x1fu);
    return long_value(out, head);
  }

  // Skips one whole value.
  bool skip() noexcept {
    for (std::uint64_t left = 1; left > 0; --left) {
      Value value;
      if (!next(value)) return false;
      if (value.type == Type::Array) left += value.length;
      if (value.type == Type::Map) left += 2 * static_cast<std::uint64_t>(value.length);
    }
    return true;
  }

 private:
  std::size_t remaining() const noexcept { return static_cast<std::size_t>(end_ - at_); }

  bool big_endian(std::size_t bytes, std::uint64_t& out) noexcept {
    if (remaining() < bytes) return false;
    out = 0;
    for (std::size_t i = 0; i < bytes; ++i) out = out << 8 | *at_++;
    return true;
  }

  static bool integer(Value& out, std::uint64_t bits, bool negative = false) noexcept {
    out.type = Type::Int;
    out.bits = bits;
    out.negative = negative;
    return true;
  }

  // An element takes at least a byte: rejects longer lists before anything is reserved for them.
  bool container(Value& out, Type type, std::uint64_t length) noexcept {
    if (length * (type == Type::Map ? 2 : 1) > remaining()) return false;
    out.type = type;
    out.length = static_cast<std::size_t>(length);
    return true;
  }

  bool content(Value& out, Type type, std::uint64_t length) noexcept {
    if (length > remaining()) return false;
    out.type = type;
    out.content = {reinterpret_cast<const char*>(at_), static_cast<std::size_t>(length)};
    at_ += length;
    return true;
  }

  bool long_value(Value& out, std::uint8_t head) noexcept {
    std::uint64_t bits = 0;
    switch (head) {
      case 0xc0:
        out.type = Type::Nil;
        return true;
      case 0xc2:
      case 0xc3:
        out.type = Type::Bool;
        out.bits = head & 1u;
        return true;
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return big_endian(std::size_t{1} << (head - 0xc4), bits) && content(out, Type::Bytes, bits);
      case 0xc7:
      case 0xc8:
      case 0xc9:
        return big_endian(std::size_t{1} << (head - 0xc7), bits) && content(out, Type::Extension, bits + 1);
      case 0xca:
        if (!big_endian(4, bits)) return false;
        out.type = Type::Float;
        out.number = static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
        return true;
      case 0xcb:
        if (!big_endian(8, bits)) return false;
        out.type = Type::Float;
        out.number = std::bit_cast<double>(bits);
        return true;
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        return big_endian(std::size_t{1} << (head - 0xcc), bits) && integer(out, bits);
      case 0xd0:
      case 0xd1:
      case 0xd2:
      case 0xd3: {
        const std::size_t bytes = std::size_t{1} << (head - 0xd0);
        if (!big_endian(bytes, bits)) return false;
        const unsigned unused = 64 - 8 * static_cast<unsigned>(bytes);
        const auto value = static_cast<std::int64_t>(bits << unused) >> unused;
        return integer(out, static_cast<std::uint64_t>(value), value < 0);
      }
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8:
        return content(out, Type::Extension, (std::uint64_t{1} << (head - 0xd4)) + 1);
      case 0xd9:
      case 0xda:
      case 0xdb:
        return big_endian(std::size_t{1} << (head - 0xd9), bits) && content(out, Type::Text, bits);
      case 0xdc:
      case 0xdd:
        return big_endian(std::size_t{2} << (head - 0xdc), bits) && container(out, Type::Array, bits);
      case 0xde:
      case 0xdf:
        return big_endian(std::size_t{2} << (head - 0xde), bits) && container(out, Type::Map, bits);
      default:
        return false;
    }
  }

  const std::uint8_t* at_ = nullptr;
  const std::uint8_t* end_ = nullptr;
};

}  // namespace understudy::msgpack
