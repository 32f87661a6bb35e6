// How an engine names a request, and how those who hold blocks for it do.
#pragma once

#include <cstdint>

namespace understudy {

using RequestId = std::uint32_t;

}  // namespace understudy
