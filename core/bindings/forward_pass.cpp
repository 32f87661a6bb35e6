#include "engine/forward_pass.hpp"

#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace understudy {

void bind_forward_pass(nb::module_& m) {
  using Pass = ForwardPass;
  const auto count = [](LengthSpread Pass::* part) { return [part](const Pass& p) { return (p.*part).count(); }; };
  const auto sum = [](LengthSpread Pass::* part) { return [part](const Pass& p) { return (p.*part).sum(); }; };
  const auto variance = [](LengthSpread Pass::* part) {
    return [part](const Pass& p) { return (p.*part).variance(); };
  };
  nb::class_<Pass>(m, "ForwardPass", "What one step works on, and what waits; variances are those of a population.")
      .def_prop_ro("num_prefill_requests", count(&Pass::prefill_lengths), "Requests that compute prompt tokens.")
      .def_ro("sum_prefill_tokens", &Pass::prefill_tokens, "Tokens that these compute in this step.")
      .def_prop_ro("var_prefill_length", variance(&Pass::prefill_lengths), "Of their whole prompts.")
      .def_ro("sum_prefill_kv_tokens", &Pass::prefill_kv_tokens, "Tokens that they had before: hits, earlier chunks.")
      .def_prop_ro("num_decode_requests", count(&Pass::decode_kv_tokens), "The other requests of the step.")
      .def_prop_ro("sum_decode_kv_tokens", sum(&Pass::decode_kv_tokens), "Their contexts, this step's tokens included.")
      .def_prop_ro("var_decode_kv_tokens", variance(&Pass::decode_kv_tokens))
      .def_prop_ro("num_queued_prefill", count(&Pass::queued_prefill_lengths),
                   "Requests that never ran, parked or not.")
      .def_prop_ro("sum_queued_prefill_tokens", sum(&Pass::queued_prefill_lengths), "Their prompts.")
      .def_prop_ro("var_queued_prefill_length", variance(&Pass::queued_prefill_lengths))
      .def_prop_ro("num_queued_decode", count(&Pass::queued_decode_kv_tokens), "Requests that were preempted.")
      .def_prop_ro("sum_queued_decode_kv_tokens", sum(&Pass::queued_decode_kv_tokens), "Their prompts and outputs.")
      .def_prop_ro("var_queued_decode_kv_tokens", variance(&Pass::queued_decode_kv_tokens))
      .def_prop_ro(
          "wall_time_secs", [](const Pass& p) { return static_cast<double>(p.duration_ns) / 1e9; }, "Of the step.");
}

}  // namespace understudy
