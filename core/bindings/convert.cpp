#include "convert.hpp"

#include <cstring>
#include <utility>

namespace understudy {
namespace {

// A short repr for messages. Never raises: an int of 5,000 digits, for one, has no repr.
std::string describe(nb::handle value) {
  std::string text;
  try {
    text = nb::repr(value).c_str();
  } catch (nb::python_error&) {
    text = nb::type_name(value.type()).c_str();
  }
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

constexpr auto kFailed = static_cast<unsigned long long>(-1);  // the C API's return value on error

template <typename... Parts>
[[noreturn]] void reject(const std::string& name, const Parts&... parts) {
  throw Error(ErrorKind::InvalidArgument, name, " ", parts...);
}

// Convert a pending TypeError, ValueError or OverflowError into `reject`; other errors propagate.
template <typename... Parts>
[[noreturn]] void reject_pending(const std::string& name, nb::handle value, const Parts&... parts) {
  const bool bad_value = PyErr_ExceptionMatches(PyExc_TypeError) != 0 ||
                         PyErr_ExceptionMatches(PyExc_OverflowError) != 0 ||
                         PyErr_ExceptionMatches(PyExc_ValueError) != 0;
  if (!bad_value) throw nb::python_error();
  PyErr_Clear();
  reject(name, parts..., ", got ", describe(value));
}

nb::object read_index(nb::handle value, const std::string& name) {
  PyObject* index = PyNumber_Index(value.ptr());
  if (index == nullptr) reject_pending(name, value, "must be an int");
  return nb::steal(index);
}

nb::object read_tuple(nb::handle value, const std::string& name) {
  if (PySequence_Check(value.ptr()) == 0) reject(name, "must be a sequence, got ", describe(value));
  PyObject* items = PySequence_Tuple(value.ptr());
  if (items == nullptr) reject_pending(name, value, "must be a sequence");
  return nb::steal(items);
}

std::string at(const std::string& name, std::size_t index) { return name + "[" + std::to_string(index) + "]"; }

// Elements may be strided and unaligned.
template <typename From, typename To>
void copy_checked(const unsigned char* data, std::int64_t stride, std::vector<To>& out, const std::string& name) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    From value;
    std::memcpy(&value, data + static_cast<std::int64_t>(i) * stride * static_cast<std::int64_t>(sizeof(From)),
                sizeof value);
    if (!std::in_range<To>(value)) {
      reject(at(name, i), "must be 0 to ", std::numeric_limits<To>::max(), ", got ", value);
    }
    out[i] = static_cast<To>(value);
  }
}

template <typename To>
bool copy_array(const nb::ndarray<nb::ro, nb::device::cpu>& array, std::vector<To>& out, const std::string& name) {
  const auto* data = static_cast<const unsigned char*>(array.data());
  const auto try_type = [&]<typename From>(From) {
    if (array.dtype() != nb::dtype<From>()) return false;
    out.resize(array.shape(0));
    copy_checked<From>(data, array.stride(0), out, name);
    return true;
  };
  return try_type(std::int64_t{}) || try_type(std::uint64_t{}) || try_type(std::int32_t{}) ||
         try_type(std::uint32_t{}) || try_type(std::int16_t{}) || try_type(std::uint16_t{}) ||
         try_type(std::int8_t{}) || try_type(std::uint8_t{});
}

}  // namespace

void refuse_type(nb::handle value, const std::string& name, const std::string& type) {
  throw nb::type_error((name + " must be of type " + type + ", got " + describe(value)).c_str());
}

std::uint64_t read_uint(nb::handle value, const std::string& name, std::uint64_t max) {
  const nb::object index = read_index(value, name);
  const unsigned long long number = PyLong_AsUnsignedLongLong(index.ptr());
  if (number == kFailed && PyErr_Occurred() != nullptr) {
    reject_pending(name, value, "must be 0 to ", max);
  }
  if (number > max) reject(name, "must be 0 to ", max, ", got ", number);
  return number;
}

template <typename T>
IntArray<T>::IntArray(nb::handle value, const std::string& name) {
  if (nb::try_cast(value, array_, false)) {
    if (array_.ndim() != 1) reject(name, "must have one dimension, got ", array_.ndim());
    const auto* data = static_cast<const T*>(array_.data());
    const bool aligned = reinterpret_cast<std::uintptr_t>(data) % alignof(T) == 0;
    if (array_.dtype() == nb::dtype<T>() && aligned && (array_.stride(0) == 1 || array_.shape(0) <= 1)) {
      view_ = {data, array_.shape(0)};
      return;
    }
    if (!copy_array(array_, copy_, name)) {
      reject(name, "must hold integers (uint", 8 * sizeof(T), " is read without a copy)");
    }
  } else {
    const nb::object items = read_tuple(value, name);
    const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(items.ptr()));
    copy_.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      PyObject* item = PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
      unsigned long long number = kFailed;
      if (PyLong_CheckExact(item)) number = PyLong_AsUnsignedLongLong(item);
      if (number == kFailed || !std::in_range<T>(number)) {
        // Not a plain int, or out of range: the slow path names the element in its error.
        PyErr_Clear();
        number = read_uint(item, at(name, i), std::numeric_limits<T>::max());
      }
      copy_.push_back(static_cast<T>(number));
    }
  }
  view_ = copy_;
}

template class IntArray<std::uint32_t>;
template class IntArray<std::uint64_t>;

LineageHash read_lineage(nb::handle value, const std::string& name) {
  const nb::object index = read_index(value, name);
  const nb::object high = index >> nb::int_(64);
  const unsigned long long hi = PyLong_AsUnsignedLongLong(high.ptr());
  if (hi == kFailed && PyErr_Occurred() != nullptr) {
    reject_pending(name, value, "must be a lineage hash of 128 bits");
  }
  try {
    return LineageHash::from_raw(hi, PyLong_AsUnsignedLongLongMask(index.ptr()));
  } catch (const Error& error) {
    reject(name, "is ", error.what());
  }
}

WideInt lineage_to_int(const LineageHash& lineage) { return wide_to_int(lineage.hi, lineage.lo); }

WideInt wide_to_int(std::uint64_t hi, std::uint64_t lo) { return (nb::int_(hi) << nb::int_(64)) | nb::int_(lo); }

std::vector<MultimodalRun> read_runs(nb::handle value, const std::string& name) {
  const nb::object items = read_tuple(value, name);
  std::vector<MultimodalRun> runs;
  runs.reserve(nb::len(items));
  for (nb::handle item : items) {
    const std::string here = at(name, runs.size());
    const nb::object fields = read_tuple(item, here);
    if (nb::len(fields) != 3) reject(here, "must be (mm_hash, offset, length), got ", describe(item));
    runs.push_back({read_uint(fields[0], here + ".mm_hash"), read_uint(fields[1], here + ".offset"),
                    read_uint(fields[2], here + ".length")});
  }
  return runs;
}

}  // namespace understudy
