// A column of a table as a numpy array: one dimension, contiguous, read in place.
#pragma once

#include <nanobind/ndarray.h>

#include <span>

namespace understudy {

template <typename T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <typename T>
std::span<const T> view(const Column<T>& column) {
  return {column.data(), column.size()};
}

}  // namespace understudy
