// Timing models in Python, and timing models written in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "engine/drafted_timing.hpp"
#include "engine/interpolated_timing.hpp"
#include "engine/op_table_timing.hpp"
#include "engine/physical_timing.hpp"
#include "engine/pipelined_timing.hpp"
#include "named.hpp"

namespace understudy {

namespace {

namespace nb = nanobind;
using namespace nb::literals;

// A user-defined model. The engine runs without the GIL.
class PythonModel {
 public:
  explicit PythonModel(nb::object model) : model_(std::move(model)), says_covers_(nb::hasattr(model_, "covers")) {}
  PythonModel(const PythonModel&) = delete;
  PythonModel& operator=(const PythonModel&) = delete;
  ~PythonModel() {
    if (Py_IsInitialized() == 0) {
      (void)model_.release();
      return;
    }
    nb::gil_scoped_acquire gil;
    model_.reset();
  }

  template <typename... Args>
  double ask(const char* method, const Args&... args) const {
    nb::gil_scoped_acquire gil;
    double ms = 0;
    if (!nb::try_cast(model_.attr(method)(args...), ms))
      throw Error(ErrorKind::InvalidArgument, "the timing model's ", method, " returned no number");
    return ms;
  }

  // A model without `covers` covers every step; one whose `covers` raises does not cover the step.
  bool covers(const StepLoad& load) const noexcept {
    if (!says_covers_) return true;
    nb::gil_scoped_acquire gil;
    try {
      return nb::cast<bool>(model_.attr("covers")(load));
    } catch (...) {
      PyErr_Clear();
      return false;
    }
  }

 private:
  nb::object model_;
  bool says_covers_;
};

// Calls the model for the whole step.
class PythonStepTiming final : public TimingModel {
 public:
  explicit PythonStepTiming(nb::object model) : model_(std::move(model)) {}
  double step_ms(const StepLoad& load, std::uint64_t, const Speedups& speedups) const override {
    return model_.ask("step_ms", load) / speedups.all;
  }
  double decode_step_ms(const DecodeLoad& load, std::uint64_t capacity, const Speedups& speedups) const override {
    return step_ms(StepLoad::of(load), capacity, speedups);
  }
  bool needs_sums_only() const noexcept override { return false; }
  bool covers(const StepLoad& load) const noexcept override { return model_.covers(load); }

 private:
  PythonModel model_;
};

// Calls the model for prompts and for decoding separately.
class PythonTiming final : public SplitTiming {
 public:
  explicit PythonTiming(nb::object model) : model_(std::move(model)) {}
  double prefill_ms(std::uint64_t requests, std::uint64_t mean_input, std::uint64_t mean_cached) const override {
    return model_.ask("prefill_ms", requests, mean_input, mean_cached);
  }
  double decode_ms(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                   std::uint64_t capacity_tokens) const override {
    return model_.ask("decode_ms", requests, context_tokens, mean_context, capacity_tokens);
  }

 private:
  PythonModel model_;
};

StepTiming of_model(std::shared_ptr<const TimingModel> model) {
  StepTiming timing;
  timing.model = std::move(model);
  return timing;
}

using Chunk = std::pair<std::uint32_t, std::uint32_t>;

StepLoad make_load(const std::vector<Chunk>& chunks, std::uint64_t decodes, std::uint64_t context_tokens,
                   std::optional<std::uint64_t> windowed_context, std::uint64_t longest_context,
                   std::uint64_t rank_tokens, std::uint64_t drafts, std::uint64_t rank_width) {
  StepLoad load;
  load.mocker.prefill_requests = chunks.size();
  for (const auto& [tokens, history] : chunks) {
    load.chunks.push_back({tokens, history});
    load.tokens += tokens;
    load.mocker.prefill_input_tokens += std::uint64_t{tokens} + history;
    load.mocker.prefill_cached_tokens += history;
  }
  load.tokens += decodes + drafts;
  load.drafts = drafts;
  if (decodes > 0) {  // of contexts as long as their mean
    load.draft_pairs = drafts * context_tokens / decodes;
    load.window_pairs = drafts * windowed_context.value_or(context_tokens) / decodes;
  }
  load.requests = chunks.size() + decodes;
  load.decodes = load.mocker.decode_requests = decodes;
  load.context_tokens = load.mocker.decode_context_tokens = context_tokens;
  load.windowed_context = windowed_context.value_or(context_tokens);
  load.longest_context = longest_context;
  load.rank_tokens = rank_tokens;
  load.rank_width = rank_width;
  return load;
}

void bind_step_load(nb::module_& m) {
  nb::class_<StepLoad>(m, "StepLoad", "The load of a step, as input of timing models.")
      .def(
          "__init__",
          [](StepLoad* self, const std::vector<Chunk>& chunks, std::uint64_t decodes, std::uint64_t context_tokens,
             std::optional<std::uint64_t> windowed_context, std::uint64_t longest_context, std::uint64_t rank_tokens,
             std::uint64_t drafts, std::uint64_t rank_width) {
            new (self) StepLoad(make_load(chunks, decodes, context_tokens, windowed_context, longest_context,
                                          rank_tokens, drafts, rank_width));
          },
          nb::kw_only(), "chunks"_a = std::vector<Chunk>(), "decodes"_a = 0, "context_tokens"_a = 0,
          "windowed_context"_a = nb::none(), "longest_context"_a = 0, "rank_tokens"_a = 0, "drafts"_a = 0,
          "rank_width"_a = 0)
      .def_prop_ro(
          "chunks",
          [](const StepLoad& self) {
            std::vector<Chunk> chunks;
            for (const PrefillChunk& chunk : self.chunks) chunks.emplace_back(chunk.tokens, chunk.history);
            return chunks;
          },
          "(tokens, history) of each request that computes a prompt, or more than its next token.")
      .def_ro("tokens", &StepLoad::tokens, "Tokens computed in the step.")
      .def_ro("drafts", &StepLoad::drafts, "Draft tokens among them, which the step verifies.")
      .def_ro("requests", &StepLoad::requests, "Sequences of the batch.")
      .def_ro("decodes", &StepLoad::decodes, "Sequences that decode.")
      .def_ro("context_tokens", &StepLoad::context_tokens, "Sum of the lengths of decoding sequences.")
      .def_ro("longest_context", &StepLoad::longest_context, "Longest of these lengths.")
      .def_ro("rank_tokens", &StepLoad::rank_tokens,
              "Tokens of all data-parallel ranks that step together; 0: unknown.")
      .def_ro("rank_width", &StepLoad::rank_width, "Tokens to which these ranks are padded; 0: they are not.");
}

void bind_physical(nb::module_& m) {
  m.def(
      "physical_timing",
      [](const std::map<std::string, double>& numbers, std::vector<std::uint64_t> captures, std::uint64_t window,
         std::uint64_t floor_above_tokens, std::optional<std::uint64_t> tokens, std::optional<std::uint64_t> requests,
         std::optional<std::uint64_t> context_tokens, std::optional<std::uint64_t> prompt_tokens, std::uint64_t ranks) {
        StepCoefficients coefficients;
        coefficients.ranks = ranks;
        coefficients.captures = std::move(captures);
        coefficients.window = window;
        coefficients.floor_above = floor_above_tokens;
        for (const auto& [name, value] : numbers) coefficients.set(name, value);
        const TimingDomain all;
        const TimingDomain domain{tokens.value_or(all.tokens), requests.value_or(all.requests),
                                  context_tokens.value_or(all.context_tokens),
                                  prompt_tokens.value_or(all.prompt_tokens)};
        return of_model(std::make_shared<PhysicalTiming>(std::move(coefficients), domain));
      },
      "numbers"_a, nb::kw_only(), "captures"_a = std::vector<std::uint64_t>(), "window"_a = 0,
      "floor_above_tokens"_a = 0, "most_tokens"_a = nb::none(), "most_requests"_a = nb::none(),
      "most_context_tokens"_a = nb::none(), "most_prompt_tokens"_a = nb::none(), "ranks"_a = 1);
}

using Axes = std::vector<std::pair<std::string, std::vector<double>>>;
using Points = std::pair<Axes, std::vector<double>>;  // and a time for every combination, the last axis fastest

OpTable op_table(const char* name, const Points& points, bool extrapolate) {
  std::vector<OpTable::Axis> axes;
  for (const auto& [axis, at] : points.first) axes.push_back({axis, at});
  return {name, std::move(axes), points.second, extrapolate};
}

void bind_op_tables(nb::module_& m) {
  nb::class_<OpTable>(m, "OpTable", "A time by several numbers, linear in each between the points of a table.")
      .def(
          "__init__",
          [](OpTable* self, const char* name, const Points& points, bool extrapolate) {
            new (self) OpTable(op_table(name, points, extrapolate));
          },
          "name"_a, "points"_a, "extrapolate"_a)
      .def(
          "us", [](const OpTable& self, const std::vector<double>& values) { return self.us(std::span(values)); },
          "values"_a, "ConfigError outside of the points, unless the table extrapolates.");
  m.def(
      "op_table_timing",
      [](const OpTable& layer, const OpTable& once, const OpTable& head, const OpTable& prompts, const OpTable& decodes,
         const OpTable& mixed, const OpTable* experts, double layers, double skew, std::uint64_t ranks,
         std::tuple<double, double, double> comm_ms, std::vector<std::uint64_t> captures) {
        OpTableSet tables{layer, once, head, prompts, decodes, mixed, std::nullopt};
        if (experts != nullptr) tables.experts = *experts;
        tables.layers = layers;
        tables.skew = skew;
        tables.ranks = ranks;
        std::tie(tables.comm_ms, tables.comm_token_ms, tables.comm_rank_token_ms) = comm_ms;
        tables.captures = std::move(captures);
        return of_model(std::make_shared<OpTableTiming>(std::move(tables)));
      },
      nb::kw_only(), "layer"_a, "once"_a, "head"_a, "prompts"_a, "decodes"_a, "mixed"_a, "experts"_a.none(), "layers"_a,
      "skew"_a, "ranks"_a, "comm_ms"_a, "captures"_a);
}

}  // namespace

void bind_timing(nb::module_& m) {
  nb::class_<StepTiming>(m, "StepTiming", "A timing model with its speed-ups.")
      .def(
          "step_ms",
          [](const StepTiming& self, const StepLoad& load, std::uint64_t capacity_tokens) {
            return checked_ms(self.model->step_ms(load, capacity_tokens, self.speedups));
          },
          "load"_a, "capacity_tokens"_a = 0, "Milliseconds of one step, before rounding to nanoseconds.")
      .def(
          "covers", [](const StepTiming& self, const StepLoad& load) { return self.model->covers(load); }, "load"_a,
          "Whether the model's data covers the step.");
  bind_step_load(m);
  bind_physical(m);
  bind_op_tables(m);
  m.def(
      "drafted_timing",
      [](const StepTiming& target, const StepTiming& first, const StepTiming& further, std::uint32_t passes) {
        return of_model(std::make_shared<DraftedTiming>(target.model, first.model, further.model, passes));
      },
      "target"_a, "first"_a, "further"_a, "passes"_a);
  m.def(
      "pipelined_timing",
      [](const std::vector<StepTiming>& stages) {
        std::vector<std::shared_ptr<const TimingModel>> models;
        for (const StepTiming& stage : stages) models.push_back(stage.model);
        return of_model(std::make_shared<PipelinedTiming>(std::move(models)));
      },
      "stages"_a);
  m.def("polynomial_timing", [] { return of_model(std::make_shared<PolynomialTiming>()); });
  m.def(
      "constant_timing",
      [](double prefill_ms, double decode_ms) {
        return of_model(std::make_shared<ConstantTiming>(prefill_ms, decode_ms));
      },
      "prefill_ms"_a, "decode_ms"_a);
  m.def(
      "interpolated_timing",
      [](std::vector<double> isl, std::vector<double> ttft, std::vector<double> kv, std::vector<double> context,
         std::vector<double> itl) {
        return of_model(std::make_shared<InterpolatedTiming>(std::move(isl), std::move(ttft), std::move(kv),
                                                             std::move(context), std::move(itl)));
      },
      "prefill_isl"_a, "prefill_ttft_ms"_a, "decode_active_kv_tokens"_a, "decode_context_length"_a, "decode_itl"_a);
  m.def(
      "python_timing",
      [](PyType<"understudy.core_types.TimingModel | understudy.core_types.StepTimingModel"> model) {
        if (nb::hasattr(model, "step_ms")) {
          return of_model(std::make_shared<PythonStepTiming>(std::move(model)));
        }
        for (const char* method : {"prefill_ms", "decode_ms"}) {
          if (!nb::hasattr(model, method)) {
            throw Error(ErrorKind::ConfigError, "a timing model needs a method ", method,
                        ", beside it the other of prefill_ms and decode_ms; or step_ms alone");
          }
        }
        return of_model(std::make_shared<PythonTiming>(std::move(model)));
      },
      "model"_a);
}

}  // namespace understudy
