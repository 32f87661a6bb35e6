// Every step of a run as columns: the tokens of each request, and the decisions of each schedule.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "engine/step_view.hpp"

namespace understudy {

enum class StepEventKind : std::uint8_t { Placed = 0, Admitted = 1, Resumed = 2, Preempted = 3 };

// Steps are grouped by worker, in time order. Consecutive steps of a worker with equal decode batches share one batch,
// whose entries sum over these steps. Calls are made from one thread, in time order.
class StepTable {
 public:
  struct Columns {
    std::vector<std::int32_t> worker;
    std::vector<std::int64_t> begin_ns;
    std::vector<std::int64_t> end_ns;
    std::vector<std::int64_t> compute_ns;
    std::vector<std::int64_t> decodes_ns;
    std::vector<std::int64_t> batch;
    std::vector<std::int32_t> running;
    std::vector<std::int32_t> waiting;
    std::vector<std::int64_t> active_blocks;
    std::vector<std::uint8_t> stop;
    std::vector<std::int64_t> head;  // -1: none

    std::vector<std::int64_t> entry_batch;
    std::vector<std::int64_t> entry_request;
    std::vector<std::int32_t> entry_tokens;  // in each step
    std::vector<std::int32_t> entry_before;  // before the first step
    std::vector<std::uint8_t> entry_decodes;
    std::vector<std::int64_t> entry_own_ns;  // sum over steps of the time that the entry alone would take

    std::vector<std::int64_t> loading_step;  // row of the step
    std::vector<std::int64_t> loading_request;

    std::vector<std::int64_t> event_ns;
    std::vector<std::int32_t> event_worker;
    std::vector<std::uint8_t> event_kind;
    std::vector<std::int64_t> event_request;
    std::vector<std::int64_t> event_other;  // a preemption: the request that needed the room
    std::vector<std::int64_t> event_cached;
  };

  void place(RequestId request, std::size_t worker, std::int64_t now_ns);
  // A step of the engine has begun, or (`ended`) ended.
  void record(std::size_t worker, Engine& engine, bool ended, std::int64_t now_ns);
  // Requests of the worker have ended: the next step begins a batch of its own.
  void split(std::size_t worker);
  std::size_t num_steps() const noexcept { return num_steps_; }
  Columns take();

 private:
  struct Step {
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    std::int64_t compute_ns = 0;
    std::int64_t decodes_ns = 0;
    std::size_t batch = 0;  // of the worker
    std::uint32_t running = 0;
    std::uint32_t waiting = 0;
    std::uint64_t active_blocks = 0;
    AdmissionStop stop = AdmissionStop::None;
    RequestId head = StepView::kNoRequest;
  };
  struct Entry {
    RequestId request = 0;
    std::uint32_t tokens = 0;
    std::uint32_t before = 0;
    bool decodes = false;
    std::int64_t own_ns = 0;
  };
  struct Worker {
    StepView view;  // of the open step
    bool is_open = false;
    std::int64_t begin_ns = 0;
    bool extends = false;              // the next step may share the last batch
    std::uint32_t batch_steps = 0;     // steps of the last batch
    std::vector<std::size_t> batches;  // first entry of each
    std::vector<Entry> entries;
    std::vector<Step> steps;
    std::vector<std::pair<std::size_t, RequestId>> loading;  // step, request
  };

  Worker& at(std::size_t worker);
  void add_event(std::int64_t now_ns, std::size_t worker, StepEventKind kind, RequestId request);
  void close(Worker& worker, std::int64_t end_ns);
  static bool continues(const Worker& worker);

  std::vector<Worker> workers_;
  std::size_t num_steps_ = 0;
  Columns columns_;  // events only, until they are taken
};

}  // namespace understudy
