// The toy engine in Python, compiled for tests only (CMake option UNDERSTUDY_TEST_ENGINES).
#include <nanobind/nanobind.h>

#include "bindings/bindings.hpp"
#include "toy_engine.hpp"

namespace understudy {

namespace nb = nanobind;

void bind_test_engines(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<ToyConfig, EngineConfig>(m, "ToyEngineConfig", "Settings of the toy engine, for tests of the interface.")
      .def(
          "__init__",
          [](ToyConfig* self, std::uint32_t block_size, std::uint64_t num_gpu_blocks, std::uint32_t max_running,
             std::uint32_t queue_limit, bool events) {
            ToyConfig config;
            config.block_size = block_size;
            config.num_gpu_blocks = num_gpu_blocks;
            config.max_running = max_running;
            config.queue_limit = queue_limit;
            config.events = events;
            new (self) ToyConfig(config);
          },
          nb::kw_only(), "block_size"_a = 16, "num_gpu_blocks"_a = 4096, "max_running"_a = 4, "queue_limit"_a = 8,
          "events"_a = false);
}

}  // namespace understudy
