// How long a step takes on the virtual clock. A cost model sees what the step computes and answers
// in nanoseconds.
#pragma once

#include "cache_sim/model/model.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

/// The cost model of a step. Integer arithmetic alone.
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

/// A step on a node of four H200 at what servers sustain (about 40 % of the matrix peak, 80 % of
/// the memory rate): the longer of computing and reading, and what launching it takes. Every step
/// reads all weights, which a batch of a mixture-of-experts model nearly does.
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
