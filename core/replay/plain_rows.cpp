#include "replay/plain_rows.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kTimestampEnd = 1'000'000'000'000;
constexpr std::ptrdiff_t kMaxDigits = 18;

// Takes tokens from the front of a text; each call returns whether the token was present.
class RowCursor {
 public:
  explicit RowCursor(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  bool done() const noexcept { return at_ == end_; }

  bool take(char wanted) noexcept {
    skip_blanks();
    if (done() || *at_ != wanted) return false;
    ++at_;
    return true;
  }
  bool take(std::string_view wanted) noexcept {
    if (!std::string_view(at_, static_cast<std::size_t>(end_ - at_)).starts_with(wanted)) return false;
    at_ += wanted.size();
    return true;
  }
  bool take_number(std::uint64_t& value) noexcept {
    skip_blanks();
    const char* const first = at_;
    value = 0;
    for (; !done(); ++at_) {
      const unsigned digit = static_cast<unsigned char>(*at_) - unsigned{'0'};
      if (digit > 9) break;
      value = 10 * value + digit;
    }
    const std::ptrdiff_t digits = at_ - first;
    return digits == 1 || (digits > 1 && digits <= kMaxDigits && *first != '0');
  }

 private:
  void skip_blanks() noexcept {
    while (!done() && *at_ == ' ') ++at_;
  }

  const char* at_;
  const char* end_;
};

enum Key : unsigned { kNone = 0, kTimestamp = 1, kInputLength = 2, kOutputLength = 4, kHashIds = 8, kAllKeys = 15 };

// A key and its colon; kNone for any other.
Key take_key(RowCursor& text) noexcept {
  if (!text.take('"')) return kNone;
  const Key key = text.take("timestamp\"")       ? kTimestamp
                  : text.take("input_length\"")  ? kInputLength
                  : text.take("output_length\"") ? kOutputLength
                  : text.take("hash_ids\"")      ? kHashIds
                                                 : kNone;
  return text.take(':') ? key : kNone;
}

bool take_ids(RowCursor& text, PlainRows& rows) {
  if (!text.take('[')) return false;
  const std::size_t before = rows.hash_ids.size();
  do {
    std::uint64_t id = 0;
    if (!text.take_number(id)) return false;
    rows.hash_ids.push_back(id);
  } while (text.take(','));
  rows.hash_counts.push_back(static_cast<std::int64_t>(rows.hash_ids.size() - before));
  return text.take(']');
}

bool take_row(RowCursor& text, PlainRows& rows) {
  unsigned seen = 0;
  if (!text.take('{')) return false;
  do {
    const Key key = take_key(text);
    if (key == kNone || (seen & key) != 0) return false;
    seen |= key;
    if (key == kHashIds) {
      if (!take_ids(text, rows)) return false;
      continue;
    }
    std::uint64_t value = 0;
    if (!text.take_number(value)) return false;
    if (key == kTimestamp) {
      if (value >= kTimestampEnd) return false;
      rows.timestamp_ms.push_back(static_cast<double>(value));
    } else {
      if (key == kInputLength && value == 0) return false;
      (key == kInputLength ? rows.input_length : rows.output_length).push_back(static_cast<std::int64_t>(value));
    }
  } while (text.take(','));
  return seen == kAllKeys && text.take('}');
}

}  // namespace

std::optional<PlainRows> read_plain_rows(std::string_view lines) {
  PlainRows rows;
  rows.hash_ids.reserve(lines.size() / 8);  // roughly, for ids of five or six digits
  for (RowCursor text(lines); !text.done();) {
    if (!take_row(text, rows) || (!text.take('\n') && !text.done())) return std::nullopt;
  }
  return rows;
}

}  // namespace understudy
