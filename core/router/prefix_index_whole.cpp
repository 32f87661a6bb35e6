// The whole prefix index: dump, snapshot, restore, check.
#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>

#include "base/errors.hpp"
#include "router/prefix_index.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kMagic = 0x3158444E49585055;  // "UPXINDX1" in memory order

// Words, followed by a hash of them.
class WordWriter {
 public:
  void put(std::uint64_t word) { words_.push_back(word); }
  std::vector<std::uint8_t> finish() {
    put(xxh3_64(words_.data(), words_.size() * sizeof(std::uint64_t)));
    std::vector<std::uint8_t> bytes(words_.size() * sizeof(std::uint64_t));
    std::memcpy(bytes.data(), words_.data(), bytes.size());
    return bytes;
  }

 private:
  std::vector<std::uint64_t> words_;
};

class WordReader {
 public:
  explicit WordReader(std::span<const std::uint8_t> bytes) : words_(bytes.size() / sizeof(std::uint64_t)) {
    if (bytes.size() % sizeof(std::uint64_t) != 0 || words_.size() < 2) fail();
    std::memcpy(words_.data(), bytes.data(), bytes.size());
    const std::uint64_t sum = words_.back();
    words_.pop_back();
    if (xxh3_64(words_.data(), words_.size() * sizeof(std::uint64_t)) != sum) fail();
  }
  std::uint64_t take(std::uint64_t max = std::numeric_limits<std::uint64_t>::max()) {
    if (at_ == words_.size() || words_[at_] > max) fail();
    return words_[at_++];
  }
  // Reads a number of items of `words_each` words, which must all be there.
  std::size_t take_count(std::size_t words_each) {
    const std::uint64_t count = take();
    if (count > (words_.size() - at_) / words_each) fail();
    return static_cast<std::size_t>(count);
  }
  void require_end() const {
    if (at_ != words_.size()) fail();
  }
  [[noreturn]] static void fail() {
    throw Error(ErrorKind::InvalidArgument, "snapshot is damaged, cut short, or not of a prefix index");
  }

 private:
  std::vector<std::uint64_t> words_;
  std::size_t at_ = 0;
};

}  // namespace

std::vector<PrefixIndex::Row> PrefixIndex::dump() const {
  const std::shared_lock lock(mutex_);
  std::vector<Row> rows;
  table_.each([&](const HolderTable::Entry& entry) {
    for (const HolderSets::Chunk& chunk : sets_.chunks(entry.set())) {
      for (std::uint64_t bits = chunk.bits; bits != 0; bits &= bits - 1) {
        const auto member = chunk.word() * 64 + static_cast<Member>(std::countr_zero(bits));
        rows.push_back({*members_[member], static_cast<std::uint8_t>(chunk.tier() + 1), entry.hash()});
      }
    }
  });
  std::ranges::sort(rows);
  return rows;
}

std::vector<std::uint8_t> PrefixIndex::snapshot() const {
  const std::shared_lock lock(mutex_);
  WordWriter out;
  out.put(kMagic);
  out.put(members_.size());
  for (const auto& id : members_) {
    out.put(id ? 1 : 0);
    out.put(id ? id->worker : 0);
    out.put(id ? id->rank : 0);
  }
  std::vector<std::uint64_t> number(sets_.limit(), 0);  // by set: its number in the snapshot
  out.put(sets_.count());
  for (SetId id = 1, next = 0; id < sets_.limit(); ++id) {
    if (sets_.blocks(id) == 0) continue;
    number[id] = next++;
    out.put(sets_.chunks(id).size());
    for (const HolderSets::Chunk& chunk : sets_.chunks(id)) {
      out.put(chunk.key);
      out.put(chunk.bits);
    }
  }
  out.put(table_.size());
  table_.each([&](const HolderTable::Entry& entry) {
    out.put(entry.hash());
    out.put(number[entry.set()]);
  });
  out.put(copies_.size());
  for (const auto& [copy, more] : copies_) {
    out.put(copy.hash);
    out.put(copy.holder);
    out.put(more);
  }
  return out.finish();
}

void PrefixIndex::restore(std::span<const std::uint8_t> bytes, std::int64_t now_ns) {
  WordReader in(bytes);
  if (in.take() != kMagic) WordReader::fail();
  PrefixIndex made(decay_.limits(), counts_copies_);
  made.members_.resize(in.take_count(3));
  made.counts_.resize(made.members_.size());
  for (std::size_t number = 0; number < made.members_.size(); ++number) {
    const bool present = in.take(1) == 1;
    const std::uint64_t worker = in.take();
    const WorkerRank id{worker, static_cast<std::uint32_t>(in.take(std::numeric_limits<std::uint32_t>::max()))};
    if (!present) continue;
    made.members_[number] = id;
    if (!made.numbers_.try_emplace(id, static_cast<Member>(number)).second) WordReader::fail();
  }
  std::vector<std::vector<HolderSets::Chunk>> sets(in.take_count(3));
  for (std::vector<HolderSets::Chunk>& set : sets) {
    set.resize(in.take_count(2));
    for (HolderSets::Chunk& chunk : set) {
      chunk = {static_cast<std::uint32_t>(in.take(std::numeric_limits<std::uint32_t>::max())), in.take()};
      if (chunk.tier() >= kTiers || chunk.bits == 0 || chunk.word() * std::size_t{64} >= made.members_.size())
        in.fail();
      for (std::uint64_t bits = chunk.bits; bits != 0; bits &= bits - 1) {
        const std::size_t member = chunk.word() * std::size_t{64} + static_cast<std::size_t>(std::countr_zero(bits));
        if (member >= made.members_.size() || !made.members_[member]) WordReader::fail();
      }
    }
    if (set.empty() || !std::ranges::is_sorted(set, std::ranges::less_equal(), &HolderSets::Chunk::key)) in.fail();
  }
  Applied applied;
  for (std::size_t blocks = in.take_count(2); blocks > 0; --blocks) {
    const std::uint64_t hash = in.take();
    if (sets.empty()) WordReader::fail();
    for (const HolderSets::Chunk& chunk : sets[in.take(sets.size() - 1)]) {
      for (std::uint64_t bits = chunk.bits; bits != 0; bits &= bits - 1) {
        const auto member = chunk.word() * 64 + static_cast<Member>(std::countr_zero(bits));
        made.store_one(hash, made.table_.warm(hash), HolderSets::holder(member, chunk.tier()), now_ns, applied);
      }
    }
  }
  for (std::size_t copies = in.take_count(3); copies > 0; --copies) {
    const std::uint64_t hash = in.take();
    const auto holder = static_cast<Holder>(in.take(std::numeric_limits<Holder>::max()));
    const auto more = static_cast<std::uint32_t>(in.take(std::numeric_limits<std::uint32_t>::max()));
    const HolderTable::Entry entry = made.table_.find(hash);
    if (!entry || more == 0 || !made.sets_.contains(entry.set(), holder)) WordReader::fail();
    if (!counts_copies_) continue;
    if (!made.copies_.try_emplace({hash, holder}, more).second) WordReader::fail();
  }
  in.require_end();
  if (applied.repeated > 0) WordReader::fail();

  const std::lock_guard lock(mutex_);
  table_ = std::move(made.table_);
  sets_ = std::move(made.sets_);
  decay_ = std::move(made.decay_);
  copies_ = std::move(made.copies_);
  members_ = std::move(made.members_);
  numbers_ = std::move(made.numbers_);
  counts_ = std::move(made.counts_);
}

void PrefixIndex::check() const {
  const std::shared_lock lock(mutex_);
  std::vector<std::array<std::uint64_t, kTiers>> counts(members_.size());
  std::vector<std::uint64_t> blocks(sets_.limit(), 0);
  std::size_t entries = 0;
  const auto violated = [](const char* what) { throw Error(ErrorKind::InvariantViolated, "prefix index: ", what); };
  table_.each([&](const HolderTable::Entry& entry) {
    ++entries;
    ++blocks.at(entry.set());
    if (table_.find(entry.hash()) != entry) violated("a block is not found where it is stored");
    for (const HolderSets::Chunk& chunk : sets_.chunks(entry.set())) {
      for (std::uint64_t bits = chunk.bits; bits != 0; bits &= bits - 1) {
        const std::size_t member = chunk.word() * std::size_t{64} + static_cast<std::size_t>(std::countr_zero(bits));
        if (member >= members_.size() || !members_[member]) violated("a block is held by a worker that has left");
        ++counts[member][chunk.tier()];
      }
    }
  });
  table_.check();
  if (entries != table_.size()) violated("the number of blocks is wrong");
  if (counts != counts_) violated("the blocks of workers are miscounted");
  for (SetId id = 1; id < sets_.limit(); ++id) {
    if (blocks[id] != sets_.blocks(id)) violated("the blocks of a set are miscounted");
  }
  for (const auto& [copy, count] : copies_) {
    const HolderTable::Entry entry = table_.find(copy.hash);
    if (!entry || count == 0 || !sets_.contains(entry.set(), copy.holder))
      violated("copies of a block that is not held");
  }
}

}  // namespace understudy
