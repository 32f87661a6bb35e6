// Lowering of agents' traces in Python: columns in, columns out.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <utility>

#include "bindings.hpp"
#include "column.hpp"
#include "convert.hpp"
#include "traces/block_numbers.hpp"
#include "traces/delta_prompts.hpp"
#include "traces/weka_lowering.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

using Times = Column<std::int64_t>;
using Indices = Column<std::int32_t>;
using Lowered = Tuple<Array<std::int64_t>, Array<std::int32_t>, Array<std::int64_t>, Array<std::int64_t>,
                      Array<std::uint8_t>, Array<std::int64_t>, Array<std::uint8_t>, PyType<"int">>;

// Bytes of a Python object that has a buffer, such as bytes or msgspec.Raw.
class Bytes {
 public:
  explicit Bytes(nb::handle from) {
    if (PyObject_GetBuffer(from.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }

  std::string_view text() const { return {static_cast<const char*>(view_.buf), static_cast<std::size_t>(view_.len)}; }

 private:
  Py_buffer view_ = {};
};

PyType<"tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.uint64]] | None"> read_id_lists(
    PyArg<"collections.abc.Sequence[object]"> texts) {
  IdLists lists;
  for (const nb::handle text : nb::iter(texts)) {
    if (!read_id_list(Bytes(text).text(), lists)) return nb::none();
  }
  return nb::make_tuple(to_array(std::move(lists.counts)), to_array(std::move(lists.ids)));
}

void check_rows(std::size_t rows, std::size_t got, const char* name) {
  if (got != rows) throw Error(ErrorKind::InvalidArgument, name, " has ", got, " entries, expected ", rows);
}

void check_id_offsets(std::span<const std::int64_t> offsets, std::size_t rows, std::size_t ids) {
  check_rows(rows + 1, offsets.size(), "id_offsets");
  for (std::size_t i = 0; i < rows; ++i) {
    if (offsets[i] < 0 || offsets[i + 1] < offsets[i]) {
      throw Error(ErrorKind::InvalidArgument, "id_offsets must ascend from 0");
    }
  }
  if (static_cast<std::size_t>(offsets.back()) > ids) {
    throw Error(ErrorKind::InvalidArgument, "id_offsets end at ", offsets.back(), ", but there are ", ids, " ids");
  }
}

Lowered lower_trace(const Times& start_ns, const Times& end_ns, const Indices& model, const Times& output_tokens,
                    const Indices& scope, const Times& id_offsets, const Column<std::uint64_t>& ids, const Times& owner,
                    const Times& returned_ns) {
  const WekaTrace trace{view(start_ns),   view(end_ns), view(model), view(output_tokens), view(scope),
                        view(id_offsets), view(ids),    view(owner), view(returned_ns)};
  const std::size_t rows = trace.size();
  check_rows(rows, trace.end_ns.size(), "end_ns");
  check_rows(rows, trace.model.size(), "model");
  check_rows(rows, trace.output_tokens.size(), "output_tokens");
  check_rows(rows, trace.scope.size(), "scope");
  check_rows(trace.owner.size(), trace.returned_ns.size(), "returned_ns");
  check_id_offsets(trace.id_offsets, rows, trace.ids.size());
  for (const std::int32_t place : trace.scope) {
    if (place < 0 || static_cast<std::size_t>(place) > trace.owner.size()) {
      throw Error(ErrorKind::InvalidArgument, "scope ", place, " is none of ", trace.owner.size(), " sub-agents");
    }
  }
  for (const std::int64_t row : trace.owner) {
    if (row < -1 || row >= static_cast<std::int64_t>(rows) ||
        (row >= 0 && trace.scope[static_cast<std::size_t>(row)] != 0)) {
      throw Error(ErrorKind::InvalidArgument, "owner ", row, " is no request of the top level");
    }
  }
  LoweredTrace lowered;
  std::vector<std::int64_t> offsets{0};
  std::vector<std::int64_t> on;
  std::vector<std::uint8_t> trigger;
  std::vector<std::int64_t> delay_ns;
  std::vector<std::uint8_t> relation;
  {
    nb::gil_scoped_release release;
    lowered = lower_weka(trace);
    for (const std::vector<GraphEdge>& edges : lowered.edges) {
      for (const GraphEdge& edge : edges) {
        on.push_back(edge.row);
        trigger.push_back(static_cast<std::uint8_t>(edge.trigger));
        delay_ns.push_back(edge.delay_ns);
        relation.push_back(static_cast<std::uint8_t>(edge.relation));
      }
      offsets.push_back(static_cast<std::int64_t>(on.size()));
    }
  }
  return nb::make_tuple(to_array(std::move(lowered.order)), to_array(std::move(lowered.stream)),
                        to_array(std::move(offsets)), to_array(std::move(on)), to_array(std::move(trigger)),
                        to_array(std::move(delay_ns)), to_array(std::move(relation)), lowered.early_join);
}

Array<std::uint64_t> number_trace_blocks(const Times& order, const Times& id_offsets, const Column<std::uint64_t>& ids,
                                         const Times& prompt_tokens, Int block_size, Int first) {
  const LocalBlocks blocks{view(id_offsets), view(ids), view(prompt_tokens),
                           read_uint(block_size, "block_size", std::uint64_t{1} << 40)};
  const std::size_t rows = blocks.prompt_tokens.size();
  if (blocks.block_size == 0) throw Error(ErrorKind::InvalidArgument, "block_size must be at least 1");
  check_id_offsets(blocks.id_offsets, rows, blocks.ids.size());
  for (const std::int64_t row : view(order)) {
    if (row < 0 || row >= static_cast<std::int64_t>(rows)) {
      throw Error(ErrorKind::InvalidArgument, "order has row ", row, ", but there are ", rows);
    }
  }
  const std::uint64_t start = read_uint(first, "first", std::uint64_t{1} << 40);
  std::vector<std::uint64_t> numbers;
  {
    nb::gil_scoped_release release;
    numbers = number_blocks(blocks, view(order), start);
  }
  return to_array(std::move(numbers));
}

Tuple<Array<std::int64_t>, Array<std::int64_t>, Array<std::uint32_t>, PyType<"int">> expand(
    const Times& session_offsets, const Times& run_offsets, const Times& run_names, const Times& run_tokens,
    const Times& output_tokens, Int block_size, Int most_tokens) {
  const DeltaTurns turns{view(session_offsets), view(run_offsets), view(run_names), view(run_tokens),
                         view(output_tokens)};
  const std::size_t rows = turns.output_tokens.size();
  check_rows(turns.run_names.size(), turns.run_tokens.size(), "run_tokens");
  check_id_offsets(turns.run_offsets, rows, turns.run_names.size());
  if (turns.session_offsets.empty()) throw Error(ErrorKind::InvalidArgument, "session_offsets must begin with 0");
  check_id_offsets(turns.session_offsets, turns.session_offsets.size() - 1, rows);
  const auto negative = [](std::int64_t value) { return value < 0; };
  if (std::ranges::any_of(turns.run_names, negative) || std::ranges::any_of(turns.run_tokens, negative) ||
      std::ranges::any_of(turns.output_tokens, negative)) {
    throw Error(ErrorKind::InvalidArgument, "names and numbers of tokens must be at least 0");
  }
  const auto block = static_cast<std::uint32_t>(read_uint(block_size, "block_size", 1u << 30));
  if (block == 0) throw Error(ErrorKind::InvalidArgument, "block_size must be at least 1");
  const auto most = static_cast<std::int64_t>(read_uint(most_tokens, "most_tokens", std::uint64_t{1} << 40));
  DeltaPrompts made;
  {
    nb::gil_scoped_release release;
    made = expand_deltas(turns, block, most);
  }
  return nb::make_tuple(to_array(std::move(made.prompt_tokens)), to_array(std::move(made.hash_offsets)),
                        to_array(std::move(made.hash_ids)), made.too_long);
}

// Compares ids[starts[i], starts[i] + counts[i]) with those from others[i] on.
PyType<"int"> first_other_prefix(const Column<std::uint32_t>& ids, const Times& starts, const Times& others,
                                 const Times& counts) {
  check_rows(starts.size(), others.size(), "others");
  check_rows(starts.size(), counts.size(), "counts");
  const std::span<const std::uint32_t> all = view(ids);
  const auto end = static_cast<std::int64_t>(all.size());
  std::int64_t found = -1;
  for (std::size_t i = 0; i < starts.size() && found < 0; ++i) {
    const std::int64_t start = view(starts)[i];
    const std::int64_t other = view(others)[i];
    const std::int64_t count = view(counts)[i];
    if (start < 0 || other < 0 || count < 0 || start > end - count || other > end - count) {
      throw Error(ErrorKind::InvalidArgument, "row ", i, ": ", count, " ids from ", start, " or ", other,
                  " on are not among ", end);
    }
    const auto at = [&](std::int64_t from) {
      return all.subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(count));
    };
    if (!std::ranges::equal(at(start), at(other))) found = static_cast<std::int64_t>(i);
  }
  return nb::int_(found);
}

}  // namespace

void bind_traces(nb::module_& m) {
  m.def("read_id_lists", &read_id_lists, "texts"_a,
        "Return (numbers of ids, ids) of JSON lists of integers; None if any text is anything else.");
  m.def(
      "lower_weka", &lower_trace, "start_ns"_a, "end_ns"_a, "model"_a, "output_tokens"_a, "scope"_a, "id_offsets"_a,
      "ids"_a, "owner"_a, "returned_ns"_a,
      "Lower one Weka trace to a graph.\n\n"
      "Return (rows in order, stream of each row in its scope, offsets of the dependencies, rows waited for, triggers, "
      "delays in ns, relations, a blocking sub-agent that ends after the request it returned to began, or -1).");
  m.def("number_blocks", &number_trace_blocks, "order"_a, "id_offsets"_a, "ids"_a, "prompt_tokens"_a, "block_size"_a,
        "first"_a, "Number the blocks of the prompts of one trace from `first`, in row order.");
  m.def("first_other_prefix", &first_other_prefix, "ids"_a, "starts"_a, "others"_a, "counts"_a,
        "Return the first row whose `counts` ids from `starts` on differ from those from `others` on; -1: none.");
  m.def("expand_deltas", &expand, "session_offsets"_a, "run_offsets"_a, "run_names"_a, "run_tokens"_a,
        "output_tokens"_a, "block_size"_a, "most_tokens"_a,
        "Return (prompt tokens, hash offsets, hash ids, first session that is too long or -1) of turns that list what "
        "is new.");
}

}  // namespace understudy
