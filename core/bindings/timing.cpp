// Timing models in Python, and timing models written in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "engine/interpolated_timing.hpp"

namespace understudy {

namespace {

namespace nb = nanobind;
using namespace nb::literals;

// Asks an object with prefill_ms and decode_ms, once for each part of a step. The engine runs without the GIL.
class PythonTiming final : public TimingModel {
 public:
  explicit PythonTiming(nb::object model) : model_(std::move(model)) {}
  ~PythonTiming() override {
    if (Py_IsInitialized() == 0) {
      (void)model_.release();
      return;
    }
    nb::gil_scoped_acquire gil;
    model_.reset();
  }

  double prefill_ms(std::uint64_t requests, std::uint64_t mean_input, std::uint64_t mean_cached) const override {
    nb::gil_scoped_acquire gil;
    return number(model_.attr("prefill_ms")(requests, mean_input, mean_cached), "prefill_ms");
  }
  double decode_ms(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                   std::uint64_t capacity_tokens) const override {
    nb::gil_scoped_acquire gil;
    return number(model_.attr("decode_ms")(requests, context_tokens, mean_context, capacity_tokens), "decode_ms");
  }

 private:
  static double number(nb::handle answer, const char* method) {
    double ms = 0;
    if (!nb::try_cast(answer, ms))
      throw Error(ErrorKind::InvalidArgument, "the timing model's ", method, " returned no number");
    return ms;
  }

  nb::object model_;
};

StepTiming with_speedups(std::shared_ptr<const TimingModel> model, double speedup_ratio, double decode_speedup_ratio) {
  for (const double ratio : {speedup_ratio, decode_speedup_ratio}) {
    if (!(ratio > 0) || !std::isfinite(ratio)) {
      throw Error(ErrorKind::ConfigError, "speedup_ratio and decode_speedup_ratio must be finite and positive, got ",
                  ratio);
    }
  }
  StepTiming timing;
  timing.model = std::move(model);
  timing.speedup_ratio = speedup_ratio;
  timing.decode_speedup_ratio = decode_speedup_ratio;
  return timing;
}

}  // namespace

void bind_timing(nb::module_& m) {
  nb::class_<StepTiming>(m, "StepTiming", "A timing model with its speed-ups.")
      .def_rw("charges_first_token", &StepTiming::charges_first_token,
              "Whether a request whose prompt ends in a step is among those that decode in it.");
  m.def(
      "polynomial_timing",
      [](double speedup, double decode_speedup) {
        return with_speedups(std::make_shared<PolynomialTiming>(), speedup, decode_speedup);
      },
      "speedup_ratio"_a = 1.0, "decode_speedup_ratio"_a = 1.0);
  m.def(
      "constant_timing",
      [](double prefill_ms, double decode_ms, double speedup, double decode_speedup) {
        return with_speedups(std::make_shared<ConstantTiming>(prefill_ms, decode_ms), speedup, decode_speedup);
      },
      "prefill_ms"_a, "decode_ms"_a, "speedup_ratio"_a = 1.0, "decode_speedup_ratio"_a = 1.0);
  m.def(
      "interpolated_timing",
      [](std::vector<double> isl, std::vector<double> ttft, std::vector<double> kv, std::vector<double> context,
         std::vector<double> itl, double speedup, double decode_speedup) {
        return with_speedups(std::make_shared<InterpolatedTiming>(std::move(isl), std::move(ttft), std::move(kv),
                                                                  std::move(context), std::move(itl)),
                             speedup, decode_speedup);
      },
      "prefill_isl"_a, "prefill_ttft_ms"_a, "decode_active_kv_tokens"_a, "decode_context_length"_a, "decode_itl"_a,
      "speedup_ratio"_a = 1.0, "decode_speedup_ratio"_a = 1.0);
  m.def(
      "python_timing",
      [](nb::object model, double speedup, double decode_speedup) {
        for (const char* method : {"prefill_ms", "decode_ms"}) {
          if (!nb::hasattr(model, method)) {
            throw Error(ErrorKind::ConfigError, "a timing model needs a method ", method);
          }
        }
        return with_speedups(std::make_shared<PythonTiming>(std::move(model)), speedup, decode_speedup);
      },
      "model"_a, "speedup_ratio"_a = 1.0, "decode_speedup_ratio"_a = 1.0);
}

}  // namespace understudy
