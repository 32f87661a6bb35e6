// TensorRT-LLM's executor in Python, pass by pass, for recordings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/trtllm/engine.hpp"
#include "exclusive_class.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

const char* level_name(std::size_t level, bool has_host) {
  return level == 0 ? "device" : level == 1 && has_host ? "host" : "disk";
}

template <typename... Parts>
nb::list row_of(const Parts&... parts) {
  nb::list out;
  (out.append(parts), ...);
  return out;
}

nb::list pages_of(const TrtRequest& request, std::size_t life_cycles) {
  nb::list out;
  for (std::size_t i = 0; i < life_cycles; ++i) {
    nb::list slots;
    for (std::uint32_t block = 0; block < request.cache->num_blocks(); ++block) {
      const TrtPage* const page = request.cache->page(block, i);
      slots.append(page == nullptr ? -1 : static_cast<std::int64_t>(page->slot));
    }
    out.append(slots);
  }
  return out;
}

nb::dict describe_event(const TrtEvent& event) {
  nb::dict out;
  out["id"] = event.id;
  out["group"] = event.group;
  out["window"] = event.window;
  switch (event.kind) {
    case TrtEvent::Kind::Created:
    case TrtEvent::Kind::Removed:
      out["kind"] = event.kind == TrtEvent::Kind::Created ? "created" : "removed";
      out["blocks"] = nb::cast(event.numbers);
      break;
    case TrtEvent::Kind::Stored: {
      out["kind"] = "stored";
      out["parent"] = nb::cast(event.parent);
      nb::list blocks;
      for (const TrtEvent::Block& block : event.blocks) {
        nb::list runs;
        block.tokens.each(0, block.tokens.size(), [&](TokenSpan run) { runs.append(row_of(run.first, run.count)); });
        blocks.append(row_of(block.hash, runs, block.level, 35, nb::none()));
      }
      out["blocks"] = blocks;
      break;
    }
    case TrtEvent::Kind::Updated:
      out["kind"] = "updated";
      out["block"] = event.numbers.front();
      out["level"] = row_of(event.from, event.to);
      out["priority"] = nb::none();
      break;
  }
  return out;
}

// Passes of an executor, each described as recordings do.
class TrtPasses {
 public:
  TrtPasses(const TrtSettings& settings, bool events) : executor_(settings, events) {}

  TrtExecutor& executor() noexcept { return executor_; }

  PyType<"understudy.core_types.TrtPass"> run() {
    const bool alive = executor_.schedule();
    nb::dict out;
    describe_batch(out, alive);
    if (alive) executor_.finish();
    describe_log(out);
    describe_state(out);
    return out;
  }

 private:
  void describe_batch(nb::dict& out, bool alive) {
    nb::list contexts;
    nb::list generation;
    nb::dict pages;
    const std::size_t life_cycles = executor_.store().num_life_cycles();
    const auto add = [&](const TrtRequest& request) { pages[nb::cast(request.id)] = pages_of(request, life_cycles); };
    if (alive) {
      for (const TrtBatch::Chunk& chunk : executor_.batch().contexts) {
        contexts.append(row_of(chunk.request->id, chunk.position, chunk.tokens));
        add(*chunk.request);
      }
      for (const TrtRequest* const request : executor_.batch().generation) {
        generation.append(request->id);
        add(*request);
      }
    }
    out["ctx"] = contexts;
    out["gen"] = generation;
    out["pages"] = pages;
  }

  void describe_log(nb::dict& out) {
    TrtLog& log = executor_.log();
    out["suspended"] = nb::cast(log.suspended);
    out["recompute"] = nb::cast(log.recomputed);
    out["sampled"] = nb::cast(log.sampled);
    out["answered"] = nb::cast(log.answered);
    out["finished"] = nb::cast(log.finished);
    nb::list events;
    if (log.processed && executor_.events() != nullptr) {
      for (const TrtEvent& event : executor_.events()->take()) events.append(describe_event(event));
    }
    out["events"] = events;
    nb::list copies;
    for (const TrtCopy& copy : std::exchange(executor_.store().copies(), {})) {
      const bool has_host = executor_.store().layout().has_host;
      const std::string way = std::string(level_name(copy.from, has_host)) + ">" + level_name(copy.to, has_host);
      copies.append(row_of(way, copy.pages, copy.page_bytes));
    }
    out["copies"] = copies;
    log.clear();
  }

  void describe_state(nb::dict& out) {
    nb::list active;
    for (const TrtRequest* const one : executor_.active()) {
      active.append(row_of(one->id, static_cast<int>(one->state), one->position, one->prompt));
    }
    out["active"] = active;
    out["waiting"] = executor_.waiting().size();
    nb::list caches;
    for (const TrtRequest* const one : executor_.with_caches()) {
      const TrtSequence& cache = *one->cache;
      caches.append(row_of(one->id, cache.active() ? "ACTIVE" : "SUSPENDED", cache.capacity(), cache.history(),
                           cache.committed()));
    }
    out["caches"] = caches;
    const TrtStore& store = executor_.store();
    nb::list levels;
    for (std::size_t level = 0; level < store.num_levels(); ++level) {
      nb::list groups;
      for (std::size_t group = 0; group < store.layout().num_groups(); ++group) {
        const std::size_t evictable = store.num_evictable(level, group);
        const TrtSlots& slots = store.slots(level, group);
        groups.append(row_of(slots.total(), slots.num_free() + evictable, evictable));
      }
      levels.append(groups);
    }
    out["pool"] = levels;
  }

  TrtExecutor executor_;
};

void bind_settings(nb::module_& m) {
  nb::class_<TrtSettings>(m, "TrtSettings",
                          "Settings of TensorRT-LLM's executor and KV cache manager V2, by its names.")
      .def(nb::init<>())
      .def_rw("max_batch_size", &TrtSettings::max_batch_size)
      .def_rw("max_num_tokens", &TrtSettings::max_num_tokens)
      .def_rw("max_seq_len", &TrtSettings::max_seq_len)
      .def_rw("tokens_per_block", &TrtSettings::tokens_per_block)
      .def_rw("enable_chunked_prefill", &TrtSettings::enable_chunked_prefill)
      .def_rw("overlap", &TrtSettings::overlap)
      .def_rw("enable_prefix_aware_scheduling", &TrtSettings::enable_prefix_aware_scheduling)
      .def_rw("enable_recompute_pause", &TrtSettings::enable_recompute_pause)
      .def_rw("enable_block_reuse", &TrtSettings::enable_block_reuse)
      .def_rw("enable_partial_reuse", &TrtSettings::enable_partial_reuse)
      .def_rw("max_util_for_resume", &TrtSettings::max_util_for_resume)
      .def_rw("enable_swa_scratch_reuse", &TrtSettings::enable_swa_scratch_reuse)
      .def_rw("batch_wait_timeout_iters", &TrtSettings::batch_wait_timeout_iters)
      .def_rw("batch_wait_max_tokens_ratio", &TrtSettings::batch_wait_max_tokens_ratio)
      .def_rw("num_layers", &TrtSettings::num_layers)
      .def_rw("layer_bytes_per_token", &TrtSettings::layer_bytes_per_token)
      .def_rw("max_attention_window", &TrtSettings::max_attention_window)
      .def_rw("max_tokens", &TrtSettings::max_tokens, nb::arg().none())
      .def_rw("max_gpu_total_bytes", &TrtSettings::max_gpu_total_bytes, nb::arg().none())
      .def_rw("host_cache_size", &TrtSettings::host_cache_size, nb::arg().none())
      .def_rw("disk_cache_size", &TrtSettings::disk_cache_size)
      .def_rw("avg_seq_len", &TrtSettings::avg_seq_len, nb::arg().none())
      .def_rw("pool_ratio", &TrtSettings::pool_ratio)
      .def(
          "set_names",
          [](TrtSettings& self, const std::string& reuse_policy, const std::string& waiting_queue_policy) {
            if (reuse_policy == "all_reusable") {
              self.reuse_policy = TrtReusePolicy::AllReusable;
            } else if (reuse_policy == "per_request") {
              self.reuse_policy = TrtReusePolicy::PerRequest;
            } else {
              throw Error(ErrorKind::ConfigError, "block_reuse_config.policy: '", reuse_policy,
                          "' is not modelled; choose all_reusable or per_request");
            }
            if (waiting_queue_policy != "fcfs" && waiting_queue_policy != "priority") {
              throw Error(ErrorKind::ConfigError, "waiting_queue_policy: must be fcfs or priority; got '",
                          waiting_queue_policy, "'");
            }
            self.waiting_queue_policy = waiting_queue_policy == "fcfs" ? TrtWaiting::Fcfs : TrtWaiting::Priority;
          },
          nb::kw_only(), "reuse_policy"_a, "waiting_queue_policy"_a)
      .def_prop_ro("chunk_unit", &TrtSettings::chunk_unit)
      .def(
          "plan_memory",
          [](const TrtSettings& self) {
            const TrtMemory memory = plan_trt_memory(self);
            return std::tuple(memory.layout.levels, memory.max_seq_len, memory.quotas[0], memory.layout.page_bytes);
          },
          "Pages by level and group of pools, the longest sequence that fits, bytes of the device before they are "
          "rounded, and bytes of a page by group.");
}

void bind_trt_engine(nb::module_& m) {
  nb::class_<TrtConfig, EngineConfig>(m, "TrtEngineConfig", "Settings of a simulated TensorRT-LLM engine.")
      .def(
          "__init__",
          [](TrtConfig* self, const TrtSettings& settings, bool events, bool check, double host_gbps, double disk_gbps,
             std::size_t event_buffer_size, bool dies) {
            const TrtMemory memory = plan_trt_memory(settings);
            TrtConfig config;
            config.settings = settings;
            config.block_size = settings.tokens_per_block;
            config.num_gpu_blocks = 0;
            for (const std::uint32_t pages : memory.layout.levels[0]) config.num_gpu_blocks += pages;
            config.max_num_batched_tokens = settings.max_num_tokens;
            config.max_model_len = memory.max_seq_len;
            config.enable_prefix_caching = settings.enable_block_reuse;
            config.events = events;
            config.check = check;
            config.host_gbps = host_gbps;
            config.disk_gbps = disk_gbps;
            config.event_buffer_size = event_buffer_size;
            config.dies = dies;
            new (self) TrtConfig(config);
          },
          "settings"_a, nb::kw_only(), "events"_a = false, "check"_a = false, "host_gbps"_a = 50.0, "disk_gbps"_a = 5.0,
          "event_buffer_size"_a = 0, "dies"_a = false)
      .def_rw("dies", &TrtConfig::dies, "Raise where the real server ends, instead of standing still.");
  nb::class_<TrtIteration>(m, "TrtIteration", "A batch, as iteration statistics count it.")
      .def_ro("duration_ns", &TrtIteration::duration_ns)
      .def_ro("contexts", &TrtIteration::contexts)
      .def_ro("context_tokens", &TrtIteration::context_tokens)
      .def_ro("context_kv_tokens", &TrtIteration::context_kv_tokens)
      .def_ro("generation", &TrtIteration::generation)
      .def_ro("generation_kv_tokens", &TrtIteration::generation_kv_tokens)
      .def_ro("paused", &TrtIteration::paused);
  ExclusiveClass<TrtEngine, Engine>(
      m, "TrtEngine", "An engine with TensorRT-LLM's executor. A second caller at a time raises WrongState.")
      .def_prop_ro("iteration", &TrtEngine::iteration, "The batch of the last step that began.")
      .def(
          "take_cache_events", [](TrtEngine& self)->PyType<"list[understudy.core_types.TrtCacheEvent]"> {
            nb::list out;
            for (const TrtEvent& event : self.take_cache_events()) {
              nb::dict line = describe_event(event);
              if (event.kind == TrtEvent::Kind::Stored) {
                const TrtScope& scope = event.scope;
                line["scope"] = nb::make_tuple(scope.adapter > 0 ? nb::cast(scope.adapter) : nb::none(),
                                               scope.has_salt ? nb::cast(scope.salt) : nb::none());
              }
              out.append(line);
            }
            return out;
          },
          "TensorRT-LLM's own events since the last call.");
}

}  // namespace

void bind_trtllm(nb::module_& m) {
  bind_settings(m);
  bind_trt_engine(m);
  nb::class_<TrtPasses>(m, "TrtPasses", "TensorRT-LLM's executor loop without a clock.")
      .def(nb::init<const TrtSettings&, bool>(), "settings"_a, "events"_a = true)
      .def(
          "submit",
          [](TrtPasses& self, RequestId id, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& prompt,
             std::uint32_t max_new, std::uint64_t first_output, std::uint32_t eos_at, double priority,
             std::optional<std::uint64_t> salt, std::uint32_t adapter) {
            TrtArrival arrival;
            arrival.id = id;
            for (const auto& [first, count] : prompt) arrival.prompt.append({first, count});
            arrival.max_new = max_new;
            arrival.first_output = first_output;
            arrival.eos_at = eos_at;
            arrival.priority = priority;
            arrival.scope = {adapter, salt.has_value(), salt.value_or(0)};
            self.executor().submit(std::move(arrival));
          },
          "request"_a, "prompt"_a, "max_new"_a, "first_output"_a, nb::kw_only(), "eos_at"_a = 0, "priority"_a = 0.5,
          "salt"_a.none() = nb::none(), "adapter"_a = 0, "Receive a request; `prompt` has runs of consecutive tokens.")
      .def(
          "cancel", [](TrtPasses& self, RequestId id) { self.executor().cancel(id); }, "request"_a)
      .def("run", &TrtPasses::run, "Run a pass, and return what a recording has of it.")
      .def("check", [](TrtPasses& self) { self.executor().check(); })
      .def_prop_ro(
          "stuck", [](TrtPasses& self) { return self.executor().is_dead() ? self.executor().stuck() : 0; },
          "Requests of a scheduler that can never go on; 0: it can.")
      .def_prop_ro("idle", [](TrtPasses& self) { return self.executor().is_idle(); });
}

}  // namespace understudy
