// vLLM's native host offload in Python: its settings, and the log of each step.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/vllm/lockstep.hpp"
#include "fields.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

template <typename Values>
nb::list list_of(const Values& values) {
  nb::list out;
  for (const auto& value : values) out.append(value);
  return out;
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
  OffloadConnector* const offload = VllmLockstep(engine).offload();
  if (offload == nullptr) throw Error(ErrorKind::WrongState, "this engine does not offload as vLLM does");
  return *offload;
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
  line["loading"] = list_of(VllmLockstep(engine).loading());
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
  nb::class_<VllmOffload> offload(m, "VllmOffload", "vLLM's native host offload, as a setting of an engine.");
  Fields<VllmOffload>()
      .add("host_chunks", &VllmOffload::host_chunks)
      .required()
      .add("blocks_per_chunk", &VllmOffload::blocks_per_chunk)
      .add_choice("eviction_policy", &VllmOffload::policy, {{"lru", HostPolicy::Lru}, {"arc", HostPolicy::Arc}})
      .add("offload_prompt_only", &VllmOffload::prompt_only)
      .add("store_steps", &VllmOffload::store_steps)
      .add("load_steps", &VllmOffload::load_steps)
      .add("release", &VllmOffload::release)
      .add("touches", &VllmOffload::touches)
      .add("arc_falls_back", &VllmOffload::arc_falls_back)
      .add("stores_last_token", &VllmOffload::stores_last_token)
      .add("holders_first", &VllmOffload::holders_first)
      .add("spares_in_flight", &VllmOffload::spares_in_flight)
      .add("ranks", &VllmOffload::ranks)
      .add("offers_again", &VllmOffload::offers_again)
      .add("log", &VllmOffload::log)
      .add("samples", &VllmOffload::samples)
      .bind(offload);

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
