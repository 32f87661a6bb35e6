// Faults on the way of KV events from workers to the router: lost, late, doubled and missed batches.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "events/event_log.hpp"
#include "replay/faults.hpp"

namespace understudy {

// Blocks that a stream of events names as stored and not removed: by `raw` rows with their copies, or by the
// consolidated stream.
class NamedBlocks {
 public:
  void apply(std::span<const EventRecord> records, bool raw = false);
  // Rows that make `other` equal to these: removals first, then stores in the order in which they happened.
  EventRecords difference_from(const NamedBlocks& other) const;
  void clear() { blocks_.clear(); }

 private:
  struct Key {
    Tier tier;
    std::uint64_t name;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return static_cast<std::size_t>(key.name) ^ (static_cast<std::size_t>(key.tier) << 60);
    }
  };
  struct Named {
    EventRecord first;  // the row that stored it
    std::uint64_t copies = 0;
    std::uint64_t sequence = 0;  // orders stores
  };

  std::unordered_map<Key, Named, Hash> blocks_;
  std::uint64_t sequence_ = 0;
};

// Decides for each batch (the events of one step) when the router receives it. Batches of a worker stay in order.
class EventFaults {
 public:
  // `first` and `last` of a fault's time; the plan's number of it draws what is lost.
  EventFaults(std::span<const Fault> faults, std::uint64_t seed);

  void add_worker();
  // Takes events of a worker, in order of time, and replaces them by those that the router receives by `now_ns`.
  void pass(std::size_t worker, std::int64_t now_ns, TimedEvents& events);
  // When the next batch that was held back is due; none: none is.
  std::optional<std::int64_t> next_due_ns(std::size_t worker) const noexcept {
    const std::deque<Late>& late = workers_[worker].late;
    return late.empty() ? std::nullopt : std::optional(late.front().due_ns);
  }
  std::size_t num_workers() const noexcept { return workers_.size(); }
  // Rows after which the router knows all that the worker has published.
  EventRecords reread(std::size_t worker);
  // Rows after which the router knows nothing of the worker.
  EventRecords forget(std::size_t worker);
  // The worker has crashed: what was under way is lost. Returns `forget`.
  EventRecords end(std::size_t worker);
  // Whether the router has received all that the worker has published.
  bool is_complete(std::size_t worker) const noexcept {
    return workers_[worker].late.empty() && !workers_[worker].gaps;
  }
  void mark_incomplete(std::size_t worker) noexcept { workers_[worker].gaps = true; }

 private:
  struct Late {
    std::int64_t due_ns = 0;
    EventRecords rows;
  };
  struct Worker {
    NamedBlocks published;
    NamedBlocks received;
    std::deque<Late> late;
    std::int64_t last_due_ns = 0;
    bool gaps = false;  // rows are missing that no later batch brings
  };

  bool loses(std::size_t fault, std::size_t worker, std::int64_t time_ns) const noexcept;

  std::vector<Fault> faults_;
  std::uint64_t seed_ = 0;
  std::vector<Worker> workers_;
};

}  // namespace understudy
