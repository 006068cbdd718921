// The fidelity of a run: what stands in the slots of a policy's pools. At `label` it is the label
// of the exact prefix; other fidelities keep numbers beside it.
//
// Config fields, for policies that tell their forwards (PolicyEntry::tells_forwards):
//   fidelity=NAME   (label)
//   model=NAME      of which model the numbers are; a fidelity has its own choice
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache_sim/model/block_memory.hpp"
#include "cache_sim/model/label_state.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/layer_state.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

inline constexpr std::string_view kFidelityField = "fidelity", kModelField = "model";

/// Rows that ran, for pages.
class RowTeller {
 public:
  virtual ~RowTeller() = default;
  /// From now on rows() is told.
  virtual void tell_rows() { tells_rows_ = true; }
  /// One sentence for each row that ran since the last call: its request, and whether its logits
  /// are right.
  virtual std::vector<std::string> rows() { return std::exchange(told_rows_, {}); }

 protected:
  bool tells_rows_ = false;
  std::vector<std::string> told_rows_;
};

/// The pools of one subject with numbers in their slots, beside its labels.
class NumberedPools : public LayerState, public RowTeller {
 public:
  /// The findings since the last call. A number that is wrong under a wrong label is told with the
  /// label's finding; under right labels it is a finding of its own. `completes` runs the rows that
  /// wait for their batch first; they run, too, where a label is wrong.
  virtual Findings drain(bool completes) = 0;
};

/// The same of a policy whose memory is blocks.
class NumberedBlocks : public BlockMemory, public RowTeller {
 public:
  /// Whether the policy keeps labels beside the numbers, so that a finding says both.
  virtual bool is_beside_labels() const { return true; }
  /// A sentence about the numbers that a block holds for the last tokens of a prefix, as it would
  /// be handed out to that group.
  virtual std::string said_of(BlockId block, std::uint32_t group, const Tokens& prefix) = 0;
  virtual Findings drain() = 0;
};

/// Between what a label says and what numbers say.
inline constexpr std::string_view kNumbersSay = ". Numbers: ";

/// The findings of labels and numbers about the same calls: a number that is wrong under a wrong
/// label is told with the label's finding.
Findings told_together(Findings labels, const Findings& numbers);

struct FidelityEntry {
  std::string_view name;
  std::string_view sentence;
  const std::vector<std::string_view>& (*models)() = nullptr;  ///< null: none
  bool keeps_rings = true;  ///< rows may have rings (ForwardRow::ring)
  /// Whether these fields and this policy fit; the error is a sentence that names the field.
  Result<void> (*check)(const PolicyEntry&, const Config&) = nullptr;
  /// Null: the slots hold labels alone.
  std::unique_ptr<NumberedPools> (*make)(const PolicyEntry&, const Config&, LabelState& labels,
                                         PolicyEntry::SlotCounts) = nullptr;
  /// The same for a policy whose memory is blocks.
  std::unique_ptr<NumberedBlocks> (*make_blocks)(const PolicyEntry&, const Config&) = nullptr;
};

/// Fidelities of the program `lockstep-torch` alone, which is built with LibTorch.
inline constexpr std::string_view kTorchFidelities[] = {"torch", "kernels"};
/// Whether this is that program.
bool has_torch();

/// Of a configuration that the policy's own check accepts. Errors: a fidelity that this program
/// does not have, a policy that does not tell its forwards, and what the fidelity itself refuses.
Result<void> check_fidelity(const PolicyEntry& policy, const Config& config);

/// Whether rows may have rings at the fidelity of this configuration.
bool keeps_rings(const Config& config);

/// The models that a policy with this configuration can have at that fidelity.
std::vector<std::string> models_of(const PolicyEntry& policy, Config config,
                                   std::string_view fidelity);

/// Null where the slots or blocks hold labels alone. Require a configuration that check_fidelity()
/// accepts.
std::unique_ptr<NumberedPools> numbered_pools(const PolicyEntry& policy, const Config& config,
                                              LabelState& labels, PolicyEntry::SlotCounts slots);
std::unique_ptr<NumberedBlocks> numbered_blocks(const PolicyEntry& policy, const Config& config);

}  // namespace lockstep::cache_sim
