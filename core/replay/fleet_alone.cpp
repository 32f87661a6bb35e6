// Independent workers: one after another, or in threads.
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

struct Stopped {};  // thrown in a thread to end it

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

// Runs workers in threads while this thread reports. If several fail, the error of the first worker is thrown.
void Fleet::play_in_threads(unsigned threads, const std::vector<std::vector<std::uint64_t>>& rows,
                            const Progress& progress) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::exception_ptr> failures(workers_.size());
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> played(workers_.size(), false);
  std::size_t collected = 0;  // in the order of workers
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
    } catch (const std::system_error&) {  // the system gives no more threads: fewer do the work
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
  std::size_t counted = 0;  // finished requests of the current effects that are counted already
  TimedEvents room;
  const std::function<void(const Effects&)> on_progress = [this, &progress, &counted](const Effects& effects) {
    ended_ += effects.finished.size() - counted;
    counted = effects.finished.size();
    if (stop_) throw Stopped();
    report(progress);
  };
  const auto take = [&](const Effects& effects) {
    ended_ += effects.finished.size() - counted;
    counted = 0;
    for (const RequestRecord& record : effects.finished) keep(record);
    if (keeps_events_) keep_events(index, room);
    worker.phase = effects.phase;
  };
  const AdvanceOptions options{.on_progress = &on_progress};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i % kReportEvery == 0) {
      if (stop_) throw Stopped();
      report(progress);
    }
    const std::int64_t arrival_ns = workload_.arrival_ns[rows[i]];
    take(worker.engine->advance(arrival_ns, options));
    take(submit(index, rows[i], arrival_ns));
  }
  take(worker.engine->advance(kForever, options));
  require_progress(index);
  worker.engine->finish_transfers();
}

}  // namespace understudy
