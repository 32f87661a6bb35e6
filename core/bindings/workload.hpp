// Reading the columns of an understudy.workload.Workload.
#pragma once

#include <nanobind/nanobind.h>

#include <any>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "column.hpp"
#include "replay/workload_columns.hpp"

namespace understudy {

namespace nb = nanobind;

// Reads columns of an understudy.workload.Workload by name, and keeps their arrays for as long as the run lasts.
class ColumnReader {
 public:
  explicit ColumnReader(nb::handle workload) : workload_(workload) {}

  // Read a column; with `rows`, require that length.
  template <typename T>
  void read(const char* name, std::span<const T>& column, std::optional<std::size_t> rows = std::nullopt) {
    read_of(workload_, name, column, rows);
  }
  // The same where the workload may do without.
  template <typename T>
  void read_if_there(const char* name, std::span<const T>& column, std::optional<std::size_t> rows = std::nullopt) {
    if (!workload_.attr(name).is_none()) read(name, column, rows);
  }
  // A column of another object, such as the workload's graph.
  template <typename T>
  void read_of(nb::handle owner, const char* name, std::span<const T>& column,
               std::optional<std::size_t> rows = std::nullopt) {
    Column<T> values;
    if (!nb::try_cast(nb::object(owner.attr(name)), values)) {
      throw Error(ErrorKind::InvalidArgument, name, " must be a column of the workload's own type");
    }
    if (rows && values.size() != *rows) {
      throw Error(ErrorKind::InvalidArgument, name, " has ", values.size(), " rows, expected ", *rows);
    }
    column = {values.data(), values.size()};
    arrays_.emplace_back(std::move(values));
  }

 private:
  nb::handle workload_;
  std::vector<std::any> arrays_;
};

// Throws InvalidArgument for columns that contradict each other. The spans are valid as long as `from` is.
WorkloadColumns read_workload(ColumnReader& from, nb::handle workload);

}  // namespace understudy
