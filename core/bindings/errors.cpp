// C++ errors become the Python class of the same name.
#include "base/errors.hpp"

#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace understudy {
namespace {

const char* class_name(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::ConfigError:
      return "ConfigError";
    case ErrorKind::InvalidArgument:
      return "InvalidArgument";
    case ErrorKind::WrongState:
      return "WrongState";
    case ErrorKind::UnknownBlock:
      return "UnknownBlock";
    case ErrorKind::CapacityExhausted:
      return "CapacityExhausted";
    case ErrorKind::PolicyError:
      return "PolicyError";
    case ErrorKind::InvariantViolated:
      return "InvariantViolated";
  }
  return "UnderstudyError";
}

}  // namespace

void bind_errors(nanobind::module_&) {
  nanobind::register_exception_translator([](const std::exception_ptr& pending, void*) {
    try {
      std::rethrow_exception(pending);
    } catch (const Error& error) {
      // Looked up late: importing understudy must not depend on the order in which its modules load.
      PyObject* errors = PyImport_ImportModule("understudy.errors");
      if (errors == nullptr) return;
      PyObject* type = PyObject_GetAttrString(errors, class_name(error.kind()));
      if (type != nullptr) PyErr_SetString(type, error.what());
      Py_XDECREF(type);
      Py_DECREF(errors);
    }
  });
}

}  // namespace understudy
