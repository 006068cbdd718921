// The duration of a step from recorded times of kernels (reports/kernels/*.json). A part of a step
// that no recorded case covers takes the least time that the card allows, and counts as modelled.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/model/step_cost.hpp"

namespace lockstep::cache_sim {

/// The file that holds a kernel's times, and the entry of the card there.
struct KernelEvidence {
  std::string operation;
  std::string file;
  std::string gpu;
  std::string commit;
  std::string date;
  bool is_used = false;  ///< false: only other cards, all in `gpu`, so the kernel is modelled
};

/// Time of one part of many steps: a kernel in all layers, or what no kernel measures.
struct CostPart {
  std::string name;
  Nanoseconds measured = 0;
  Nanoseconds modelled = 0;
};

struct LayerKernel;

/// Times of one kernel in one layer, by the work of a call: rows (and their mean length), tokens,
/// or pairs of a query and a key.
class RecordedTimes {
 public:
  struct Case {
    std::int64_t x, y;
    Nanoseconds time;
  };
  struct Work {
    std::int64_t x = 0;
    std::int64_t y = 0;
    bool is_covered = true;  ///< false: no case has work of this form
  };
  struct Time {
    Nanoseconds time;
    bool is_measured;
  };

  RecordedTimes() = default;
  /// The cases form a grid: every x with every y. Times grow with x and with y.
  explicit RecordedTimes(std::vector<Case> cases);

  /// Linear between cases; a case itself gives its time. Below the smallest case the time is
  /// `limit`; above the largest one, and where the work is not covered, it is `limit`, and no less
  /// than that of the cases that the work exceeds. Both count as modelled.
  Time of(const Work& work, Nanoseconds limit) const;

 private:
  Nanoseconds at(std::int64_t x, std::int64_t y) const;

  std::vector<std::int64_t> x_, y_;
  std::vector<Nanoseconds> times_;  // [x][y]
};

/// The times that were recorded for the layers of a model on a card.
class MeasuredLayers {
 public:
  /// Reads the evidence of the model's kernels from a folder such as reports/kernels. `card` is a
  /// word of the field `gpu` of an entry: H200. Errors name the file and the field: an entry that
  /// lacks a field or a case, no entry of that card, a card that stands for two.
  static Result<MeasuredLayers> read(const Model& model, std::string_view card,
                                     const std::string& folder);

  struct Kernel {
    const LayerKernel* what;
    RecordedTimes times;  ///< of this card, or empty
    std::int64_t largest_work, largest_bytes;
    std::int64_t least_tokens, most_tokens;  ///< of the cases of a prompt's attention
  };

  std::string gpu;
  std::int64_t bytes_per_microsecond = 0;  ///< read rate of the card, by its first entry
  std::int64_t flops_per_nanosecond = 0;   ///< its products of matrices, by that entry
  std::vector<KernelEvidence> evidence;
  std::vector<Kernel> kernels;
};

/// A step on one card that holds the whole model, or on a pipeline of such cards whose links are
/// free. Layers of recurrence take recorded times. So does attention of MLA in a step that only
/// decodes or only prefills; the work of a step does not tell the rows of both apart. Weights and
/// other attention are modelled: FLOPs over the card's products, or bytes over its read rate. The
/// prompts of a step are timed as one row, and rows that decode by their mean length.
class MeasuredStepCost final : public StepCost {
 public:
  /// Adds the time of each step to `parts`, which outlive this.
  MeasuredStepCost(const Model& model, std::shared_ptr<const MeasuredLayers> layers,
                   std::vector<CostPart>& parts);
  Nanoseconds of(const StepWork& work) const override;

 private:
  Nanoseconds reading(std::int64_t bytes) const;
  Nanoseconds attention_limit(const StepWork& work) const;

  Model model_;
  std::shared_ptr<const MeasuredLayers> layers_;
  std::vector<CostPart>* parts_;
};

}  // namespace lockstep::cache_sim
