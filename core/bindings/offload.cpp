// vLLM's native host offload in Python: its settings, and the log of each step.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/vllm/engine.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

template <typename Values>
nb::list list_of(const Values& values) {
  nb::list out;
  for (const auto& value : values) out.append(value);
  return out;
}

HostPolicy read_host_policy(const std::string& name) {
  if (name == "lru") return HostPolicy::Lru;
  if (name == "arc") return HostPolicy::Arc;
  throw Error(ErrorKind::ConfigError, "eviction_policy must be one of lru, arc; got '", name, "'");
}

nb::dict describe(const OffloadJob& job, const std::vector<std::uint64_t>& hashes) {
  nb::dict out;
  out["job"] = job.id;
  out["request"] = job.request;
  out["chunks"] = list_of(job.chunks);
  if (!job.groups.empty()) out["groups"] = list_of(job.groups);
  out["hashes"] = list_of(hashes);
  out["device"] = list_of(job.device);
  out["host"] = list_of(job.host);
  return out;
}

List<Tuple<Int, Int>> moved(const std::vector<OffloadSamples::Moved>& transfers) {
  nb::list out;
  for (const OffloadSamples::Moved& one : transfers) out.append(nb::make_tuple(one.bytes, one.ns));
  return out;
}

OffloadConnector& connector_of(VllmEngine& engine) {
  if (engine.offload() == nullptr) throw Error(ErrorKind::WrongState, "this engine does not offload as vLLM does");
  return *engine.offload();
}

}  // namespace

OffloadLine take_offload_line(VllmEngine& engine) {
  OffloadConnector& connector = connector_of(engine);
  const OffloadLog log = std::exchange(connector.log(), {});
  nb::dict line;
  nb::list lookups;
  for (const OffloadLog::Lookup& lookup : log.lookups) {
    nb::object hit = lookup.hit ? nb::object(nb::int_(*lookup.hit)) : nb::object(nb::none());
    lookups.append(nb::make_tuple(lookup.request, lookup.local, hit));
  }
  nb::list loads;
  for (const OffloadLog::Load& load : log.loads) {
    nb::dict job = describe(load.job, load.hashes);
    job["tokens"] = load.tokens;
    job["table"] = list_of(load.table);
    loads.append(job);
  }
  nb::list stores;
  for (const OffloadLog::Store& store : log.stores) stores.append(describe(store.job, store.hashes));
  nb::list blocks;
  for (const OffloadLog::Blocks& of : log.blocks) {
    blocks.append(nb::make_tuple(of.request, of.fresh, of.resumed, list_of(of.slots)));
  }
  const VllmHost& host = connector.host();
  nb::object oldest = nb::none();
  if (host.has_oldest()) {
    nb::list keys;
    for (const LineageHash& key : host.oldest(8)) keys.append(key.current());
    oldest = keys;
  }
  line["lookups"] = lookups;
  line["loading"] = list_of(engine.loading());
  line["loads"] = loads;
  line["stores"] = stores;
  line["refused"] = list_of(log.refused);
  line["flush"] = list_of(log.flush);
  line["blocks"] = blocks;
  line["done"] = list_of(log.done);
  nb::list evicted;
  for (const std::vector<std::uint64_t>& keys : log.evicted) evicted.append(list_of(keys));
  line["evicted"] = evicted;
  line["resident"] = host.resident();
  line["ready"] = host.ready();
  line["oldest"] = oldest;
  return line;
}

OffloadSamples take_offload_samples(VllmEngine& engine) { return std::exchange(connector_of(engine).samples(), {}); }

void bind_offload(nb::module_& m) {
  nb::class_<VllmOffload>(m, "VllmOffload", "vLLM's native host offload, as a setting of an engine.")
      .def(
          "__init__",
          [](VllmOffload* self, std::uint64_t host_chunks, std::uint32_t blocks_per_chunk,
             const std::string& eviction_policy, bool offload_prompt_only, std::uint32_t store_steps,
             std::uint32_t load_steps, const std::string& release, bool touches, bool arc_falls_back,
             bool stores_last_token, bool holders_first, bool spares_in_flight, bool ranks, bool offers_again, bool log,
             bool samples) {
            VllmOffload out;
            out.host_chunks = host_chunks;
            out.blocks_per_chunk = blocks_per_chunk;
            out.policy = read_host_policy(eviction_policy);
            out.prompt_only = offload_prompt_only;
            out.store_steps = store_steps;
            out.load_steps = load_steps;
            out.release = release;
            out.touches = touches;
            out.arc_falls_back = arc_falls_back;
            out.stores_last_token = stores_last_token;
            out.holders_first = holders_first;
            out.spares_in_flight = spares_in_flight;
            out.ranks = ranks;
            out.offers_again = offers_again;
            out.log = log;
            out.samples = samples;
            new (self) VllmOffload(std::move(out));
          },
          nb::kw_only(), "host_chunks"_a, "blocks_per_chunk"_a = 1, "eviction_policy"_a = "lru",
          "offload_prompt_only"_a = true, "store_steps"_a = 0, "load_steps"_a = 0, "release"_a = "", "touches"_a = true,
          "arc_falls_back"_a = false, "stores_last_token"_a = true, "holders_first"_a = false,
          "spares_in_flight"_a = false, "ranks"_a = false, "offers_again"_a = false, "log"_a = false,
          "samples"_a = false);

  nb::class_<OffloadSamples>(m, "OffloadSamples", "Single samples of vLLM's offload since the last call.")
      .def_prop_ro(
          "loads", [](const OffloadSamples& self) { return moved(self.loads); }, "(bytes, ns) of each.")
      .def_prop_ro(
          "stores", [](const OffloadSamples& self) { return moved(self.stores); }, "(bytes, ns) of each.")
      .def_ro("lookups", &OffloadSamples::lookups, "Lookups for requests without transfers.")
      .def_ro("deferred_ns", &OffloadSamples::deferred_ns, "From a first deferred lookup to its answer, or the end.")
      .def_ro("asked_chunks", &OffloadSamples::asked_chunks,
              "Chunks that each store needed, whether or not there was room.")
      .def_ro("refused_stores", &OffloadSamples::refused_stores);
}

}  // namespace understudy
