// The toy engine in Python, compiled for tests only (CMake option UNDERSTUDY_TEST_ENGINES).
#include <nanobind/nanobind.h>

#include "bindings/bindings.hpp"
#include "bindings/fields.hpp"
#include "slow_loads.hpp"
#include "toy_engine.hpp"

namespace understudy {

namespace nb = nanobind;

void bind_test_engines(nb::module_& m) {
  nb::class_<ToyConfig, EngineConfig> toy(m, "ToyEngineConfig",
                                          "Settings of the toy engine, for tests of the interface.");
  Fields<ToyConfig>()
      .add("block_size", &ToyConfig::block_size)
      .add("num_gpu_blocks", &ToyConfig::num_gpu_blocks)
      .add("max_running", &ToyConfig::max_running)
      .add("queue_limit", &ToyConfig::queue_limit)
      .add("events", &ToyConfig::events)
      .bind(toy);
  m.def(
      "with_slow_loads",
      [](const VllmConfig& self, std::int64_t delay_ns) {
        VllmConfig config = self;
        config.connector = [delay_ns](const VllmConfig& of) -> std::unique_ptr<Connector> {
          return std::make_unique<SlowLoads>(of.block_size, delay_ns);
        };
        return config;
      },
      nb::arg("config"), nb::arg("delay_ns"),
      "A copy whose engines load every prompt, each within this time; for tests.");
}

}  // namespace understudy
