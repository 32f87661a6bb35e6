// Why a step is simulated by itself, and not fast-forwarded with others.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace understudy {

enum class StepReason : std::uint8_t {
  Off,
  Raised,
  Pipeline,
  Idle,
  Budget,
  Timing,
  SeveralTokens,
  UserPolicy,
  NamesOnReceipt,
  Prompt,
  Admission,
  PromptInterval,
  Planned,
  Transfers,
  Offload,
  HandOff,
  GroupCopies,
  GroupsUnsettled,
  GroupsHaveRoom,
  Event,
};

inline constexpr std::array kStepReasons = {
    "fast-forward is off, or every step is reported",
    "the last schedule raised",
    "batches in the stages of a pipeline end at times of their own",
    "no request runs, or a step is open",
    "more requests run than a step has tokens",
    "the timing model reads more than sums over requests",
    "a step gives several tokens of a request",
    "a user-defined policy evicts blocks, and may raise",
    "tiers copy blocks that get their names with their tokens",
    "a running request computes its prompt",
    "the head of the queue may be admitted",
    "prompts are scheduled every few steps",
    "the planned batch is not the next token of every running request",
    "a transfer may change the next step",
    "vLLM's offload has chunks to look up, to store or to report",
    "a load begins, fails or is reported",
    "with several KV groups, blocks wait for copies of their content",
    "the tables of several KV groups have yet to settle behind a prompt",
    "with several KV groups, blocks came free for the head of the queue",
    "a request ends, or needs a block that only a schedule can find",
};

inline constexpr std::size_t kNumStepReasons = kStepReasons.size();
static_assert(kNumStepReasons == static_cast<std::size_t>(StepReason::Event) + 1);

}  // namespace understudy
