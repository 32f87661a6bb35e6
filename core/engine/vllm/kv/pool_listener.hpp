// Listener of a pool of blocks: names that blocks get and lose.
#pragma once

#include <cstdint>
#include <span>

#include "engine/vllm/kv/block_run.hpp"

namespace understudy {

class PoolListener {
 public:
  virtual ~PoolListener() = default;
  // One call of the pool begins, whose changes belong together.
  virtual void begin_call() = 0;
  // Blocks have got names that no other block has: those of positions from `position` on.
  virtual void stored(std::span<const SlotId> ids, std::span<const BlockName> names, std::uint32_t position) = 0;
  // A block has got a name that `earliest` has, and maybe others.
  virtual void copied(SlotId id, BlockName name, std::uint32_t position, SlotId earliest) = 0;
  // A block loses its name. `last`: no other block of the group has it.
  virtual void removed(SlotId id, BlockName name, std::uint8_t group, bool last) = 0;
};

}  // namespace understudy
