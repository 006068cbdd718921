// The duration of a step on the virtual clock: a cost model is given the work of a step and answers
// in nanoseconds.
#pragma once

#include "cache_sim/model/model.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

/// count * each / unit, rounded down; count * each itself may not fit 64 bits.
constexpr std::int64_t scaled(std::int64_t count, std::int64_t each, std::int64_t unit) {
  return count / unit * each + count % unit * each / unit;
}

/// The cost model of a step. It uses integer arithmetic alone, so that all machines agree.
class StepCost {
 public:
  virtual ~StepCost() = default;
  virtual Nanoseconds of(const StepWork& work) const = 0;
};

class ConstantStepCost final : public StepCost {
 public:
  explicit ConstantStepCost(Nanoseconds step_time) : step_time_(step_time) {}
  Nanoseconds of(const StepWork&) const override { return step_time_; }

 private:
  Nanoseconds step_time_;
};

/// A step on a node of four H200 at the rates that servers sustain (about 40 % of the matrix peak,
/// 80 % of the memory rate): the longer one of computing and reading, plus the time to launch.
/// Every step reads all weights, which is nearly true for a batch on a mixture-of-experts model.
class ModelStepCost final : public StepCost {
 public:
  static constexpr std::int64_t kFlopsPerNanosecond = 1'600'000;
  static constexpr std::int64_t kBytesPerNanosecond = 16'000;
  static constexpr Nanoseconds kLaunch = 500'000;

  explicit ModelStepCost(const Model& model) : model_(model) {}
  Nanoseconds of(const StepWork& work) const override;

 private:
  Model model_;
};

}  // namespace lockstep::cache_sim
