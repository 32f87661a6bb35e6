// Workers that do not depend on each other: played one by one, or in threads.
#include <algorithm>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/kept_mappings.hpp"
#include "replay/fleet.hpp"

namespace understudy {

namespace {

constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();

struct Stopped {};  // thrown in a worker's thread when the run is over

}  // namespace

void Fleet::run_independent(unsigned threads, const Progress& progress) {
  std::vector<std::uint64_t> order(workload_.size());
  for (std::size_t row = 0; row < order.size(); ++row) order[row] = row;
  std::stable_sort(order.begin(), order.end(), [this](std::uint64_t a, std::uint64_t b) {
    return workload_.arrival_ns[a] < workload_.arrival_ns[b];
  });
  std::vector<std::vector<std::uint64_t>> rows(workers_.size());
  for (const std::uint64_t row : order) {
    arrival_ns_[row] = now_ns_ = workload_.arrival_ns[row];
    const std::optional<std::size_t> worker = route(row);
    if (!worker) {
      ++ended_;
      continue;
    }
    worker_of_[row] = static_cast<std::int32_t>(*worker);
    rows[*worker].push_back(row);
  }

  if (threads <= 1 || workers_.size() == 1) {
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      play_alone(i, rows[i], progress);
      collect(i);
    }
  } else {
    play_in_threads(threads, rows, progress);
  }
}

// The threads play; this one reports. Of several workers that fail, the first one's error counts, whoever was faster.
void Fleet::play_in_threads(unsigned threads, const std::vector<std::vector<std::uint64_t>>& rows,
                            const Progress& progress) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::exception_ptr> failures(workers_.size());
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> played(workers_.size(), false);
  std::size_t collected = 0;  // in the order of workers, whoever was faster
  std::size_t playing = std::min<std::size_t>(threads, workers_.size());
  const auto work = [&] {
    const KeptMappings kept;
    for (std::size_t i = next++; i < workers_.size() && !stop_; i = next++) {
      try {
        play_alone(i, rows[i], {});
        const std::lock_guard lock(mutex);
        played[i] = true;
        while (collected < workers_.size() && played[collected]) {
          const std::size_t index = collected++;
          try {
            collect(index);
          } catch (...) {
            failures[index] = std::current_exception();
          }
        }
      } catch (const Stopped&) {
      } catch (...) {
        failures[i] = std::current_exception();
      }
    }
    const std::lock_guard lock(mutex);
    --playing;
    changed.notify_one();
  };
  std::vector<std::jthread> pool;
  try {
    const std::size_t wanted = playing;
    try {
      while (pool.size() < wanted) pool.emplace_back(work);
    } catch (const std::system_error&) {  // the system gives no more: fewer do the same, or this one alone
      {
        const std::lock_guard lock(mutex);
        playing -= wanted - std::max<std::size_t>(pool.size(), 1);
      }
      if (pool.empty()) work();
    }
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, kReportAfter, [&] { return playing == 0; })) {
      lock.unlock();
      report(progress);
      lock.lock();
    }
  } catch (...) {
    stop_ = true;
    pool.clear();
    throw;
  }
  pool.clear();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void Fleet::play_alone(std::size_t index, const std::vector<std::uint64_t>& rows, const Progress& progress) {
  Worker& worker = workers_[index];
  if (!worker.engine) make_engine(index);
  std::size_t counted = 0;  // of the effects at hand
  TimedEvents told;         // its room
  const auto pause = [this, &progress, &counted](const StepEffects& effects) {
    ended_ += effects.finished.size() - counted;
    counted = effects.finished.size();
    if (stop_) throw Stopped();
    report(progress);
  };
  const auto advance = [&](std::int64_t until_ns) {
    counted = 0;
    const StepEffects& effects = worker.engine->advance_through(until_ns);
    ended_ += effects.finished.size() - counted;
    for (const RequestRecord& record : effects.finished) keep(worker, record);
    if (keeps_events_) keep_events(worker, told);
  };
  worker.engine->set_pause(pause);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i % kReportEvery == 0) {
      if (stop_) throw Stopped();
      report(progress);
    }
    const std::int64_t arrival_ns = workload_.arrival_ns[rows[i]];
    advance(arrival_ns);
    if (!worker.engine->in_step()) worker.engine->skip_to(arrival_ns);
    submit(index, rows[i], arrival_ns);
  }
  advance(kForever);
  require_progress(worker);
  worker.engine->finish_transfers();
  worker.engine->set_pause({});
}

}  // namespace understudy
