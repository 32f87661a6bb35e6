// Concatenates text. Not with streams: they depend on a locale and crash where a toolchain links their library twice.
#pragma once

#include <array>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

namespace understudy {

inline void append_part(std::string& text, std::string_view part) { text += part; }
inline void append_part(std::string& text, char part) { text += part; }

// Appends the shortest form that parses to the same number, in every locale.
template <typename Number>
  requires(std::integral<Number> || std::floating_point<Number>)
void append_part(std::string& text, Number part) {
  std::array<char, 64> digits;
  if constexpr (std::same_as<Number, bool>) {
    text += part ? '1' : '0';
  } else {
    const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), part);
    if (error == std::errc{}) text.append(digits.data(), end);
  }
}

// A number in base 16, without a prefix.
struct Hex {
  std::uint64_t value;
};
inline void append_part(std::string& text, Hex part) {
  std::array<char, 16> digits;
  text.append(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), part.value, 16).ptr);
}

template <typename... Parts>
void append_text(std::string& text, const Parts&... parts) {
  (append_part(text, parts), ...);
}

// text_of("block ", 7, " of ", 0.5) is "block 7 of 0.5".
template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::string text;
  append_text(text, parts...);
  return text;
}

}  // namespace understudy
